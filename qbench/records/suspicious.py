"""Records that cannot be those of the model that their name says. Imports neither torch nor pandas: the gate runs it.

Two kinds of proof. The audit says what was done to the weights. The log-likelihoods of the documents say which weights
were measured: equal to the last bit for equal weights, and as far from the unquantized model's as the weights are.
All limits were set on the 20 quantized cells of results/mini (5 tasks with 400 documents each), with a wide margin.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from qbench.records.audit import Audit, failures
from qbench.records.samples import WEIGHT, Floats, as_floats, gold_logprobs, lists, rows_of_tasks
from qbench.records.schema import CellRef, Record
from qbench.records.store import SAMPLES, StoredRecord, StoreError

UNQUANTIZED = "none-16"
COLUMNS = ("task", "doc_hash", "gold", "loglikelihoods", "characters")

# Log-likelihoods nearer to 0 coincide by chance: of a sure answer all models say -0.0 or -1.2e-7.
INFORMATIVE = 0.01
# So many documents must have such values.
MIN_DOCUMENTS = 8
# Share of a task's documents that are equal to the last bit. Between two honest cells of mini it is 0 in 1,154 of 1,155
# comparisons, and 0.6% (1 of 158 documents) in the other; it is 1 for the same weights.
MAX_EQUAL = 0.5
# How far log-likelihoods L move for each unit of the audit's relative weight error: the median document's mean of
# |ΔL| / min(|L|, √|L|). The divisor is what noise in the logits does to L: it scales 1 - p of a sure token, and adds up
# as a random walk over the unsure ones. In mini the ratio is at least 0.56 (gptq-8, wikitext), and of the
# same size at 8 bits (0.56 to 7.6) and at 4 (0.82 to 7.0), so that it holds for small damage too; 2 bits: 2.7 to 119.
# The limit is 1/22 of the smallest.
MIN_MOVE = 0.025
MIN_DOCUMENTS_MOVED = 16
# Nats per decision by which a quantized cell may be surely better than the unquantized model. The most in mini is
# 0.0086 (bnb-4, wikitext, t = 8.4), in results/paper 0.0089 (gptq-8, lambada); 0.041 with t = 1.3 is chance.
MAX_GAIN = 0.05
SURE_T = 5.0
# Damage that can be said to be gone: nats per decision in a task. A run may have 1/16 of it, the noise of two bits
# (6 dB each). A cell of mini with one bit more has 1/2.6 to 1/9.5 of the damage, with two bits more 1/17 to 1/53.
LARGE_DAMAGE = 0.1
MAX_RECOVERY = 16.0


@dataclass(frozen=True)
class Suspicion:
    """Why the numbers of a cell cannot be its own."""

    cell: CellRef
    found_by: Literal["audit", "records"]
    message: str

    def __str__(self) -> str:
        return f"{self.cell.name}: {self.message}"


@dataclass(frozen=True)
class TaskScores:
    """The documents of one task."""

    hashes: np.ndarray  # [documents] of their contents
    values: Floats  # [documents, choices] log-likelihoods, NaN beyond a document's own
    decisions: Floats  # [documents] nats: of the right choice, of the target, or of a page per word

    def take(self, rows: np.ndarray) -> "TaskScores":
        """Those documents, in that order."""
        return TaskScores(self.hashes[rows], self.values[rows], self.decisions[rows])


@dataclass(frozen=True)
class MeasuredCell:
    """A cell that is done, with what was measured on it."""

    cell: CellRef
    weight_error: float | None  # ‖ŵ - w‖ / ‖w‖ by its audit; None without one
    tasks: Mapping[str, TaskScores]

    @property
    def model(self) -> tuple[str, str]:
        """The model that is quantized, in any run."""
        return self.cell.family, self.cell.attention

    @property
    def is_quantized(self) -> bool:
        """Whether its name says that it is."""
        return self.cell.label != UNQUANTIZED


@dataclass(frozen=True)
class Evidence:
    """The cells to judge, and those of a baseline."""

    cells: Sequence[MeasuredCell]
    references: Sequence[MeasuredCell] = ()

    def with_unquantized(self) -> Iterator[tuple[MeasuredCell, MeasuredCell]]:
        """Each quantized cell with the unquantized model of the same run."""
        unquantized = _unquantized(self.cells)
        for cell in self.cells:
            if cell.is_quantized and (found := unquantized.get(cell.model)):
                yield cell, found


Rule = Callable[[Evidence], Iterator[Suspicion]]


def suspicious_records(records: Sequence[StoredRecord], references: Sequence[StoredRecord] = ()) -> list[Suspicion]:
    """What is wrong with the current records of a folder; references: those of the baseline that a run is checked
    against."""
    done = [stored for stored in records if stored.record.state == "done"]
    unproved = [found for stored in done if (found := _unproved(stored.record))]
    with np.errstate(invalid="ignore"):  # -inf - -inf is NaN, and such documents do not count
        return unproved + suspicious_scores(Evidence(_measured(records), _measured(references)))


def suspicious_scores(evidence: Evidence) -> list[Suspicion]:
    """The cells whose documents contradict their name; one reason for each, the plainest."""
    found: dict[CellRef, Suspicion] = {}
    rules: list[Rule] = [_same_weights, _too_near, _too_good, _recovered]
    for rule in rules:
        for suspicion in rule(evidence):
            found.setdefault(suspicion.cell, suspicion)
    return list(found.values())


def audit_failures(record: Record, audit: Audit) -> list[str]:
    """Why the audit does not prove what the cell's name says: it may be another's."""
    cell = record.cell
    if audit.label != cell.label:
        return [f"it is an audit of {audit.label}."]
    if (audit.method, audit.bits) != (cell.method, cell.bits):
        return [f"it is an audit of {audit.method} at {audit.bits} bits; the cell is {cell.method} at {cell.bits}."]
    return failures(audit)


def _unproved(record: Record) -> Suspicion | None:
    if record.cell.label == UNQUANTIZED:
        return None
    if record.audit is None:
        return Suspicion(record.cell, "audit", "it has no audit: that it was quantized is not proved.")
    if reasons := audit_failures(record, record.audit):
        return Suspicion(record.cell, "audit", f"it has scores, but did not pass its audit: {reasons[0]}")
    return None


def _same_weights(evidence: Evidence) -> Iterator[Suspicion]:
    """Two cells of one family whose documents are equal to the last bit; the narrower one is accused.

    A cell that is equal to a narrower one of the baseline is not: there it is the baseline that is wrong.
    """
    cells = sorted(evidence.cells, key=lambda c: c.cell.bits)
    pairs = [(narrow, wide, "") for narrow, wide in combinations(cells, 2)]
    pairs += [(cell, other, " of the baseline") for cell in cells for other in evidence.references]
    for cell, other, where in pairs:
        if cell.cell.family != other.cell.family or cell.cell.name == other.cell.name:
            continue
        if cell.cell.bits <= other.cell.bits and (found := _equal_task(cell, other)):
            what = f"are equal to the last bit to those of {other.cell.name}{where}: the same weights were measured."
            yield Suspicion(cell.cell, "records", f"{found} {what}")


def _equal_task(cell: MeasuredCell, other: MeasuredCell) -> str:
    """The first task in which two cells are equal, in words; empty if there is none."""
    for task, (a, b) in _common(cell, other).items():
        equal, informative = _equal_documents(a.values, b.values)
        if informative >= MIN_DOCUMENTS and equal > MAX_EQUAL * informative:
            return f"in {task} the log-likelihoods of {equal} of {informative} documents"
    return ""


def _too_near(evidence: Evidence) -> Iterator[Suspicion]:
    """Quantized cells that are nearer to the unquantized model, the run's or the baseline's, than their weights are."""
    unquantized = [_unquantized(evidence.cells), _unquantized(evidence.references)]
    pairs = [(c, found[c.model]) for c in evidence.cells if c.is_quantized for found in unquantized if c.model in found]
    for cell, model in pairs:
        error = cell.weight_error
        for task, (after, before) in _common(cell, model).items():
            moves = _moves(before.values, after.values)
            if not error or len(moves) < MIN_DOCUMENTS_MOVED:
                continue
            if (move := float(np.median(moves)) / error) < MIN_MOVE:
                message = (
                    f"in {task} its log-likelihoods are too near the unquantized model's: they moved by {move:.1g} per "
                    f"unit of the audit's relative weight error ({error:.2g}); honest cells move by 0.5 and more."
                )
                yield Suspicion(cell.cell, "records", message)


def _too_good(evidence: Evidence) -> Iterator[Suspicion]:
    """Quantized cells that are better than the unquantized model."""
    for cell, unquantized in evidence.with_unquantized():
        for task, damage in _damages(cell, unquantized).items():
            if -damage.mean > MAX_GAIN and -damage.mean > SURE_T * damage.error:
                message = (
                    f"in {task} it is better than the unquantized model by {-damage.mean:.3f} nats per decision "
                    f"(standard error {damage.error:.3f}); honest cells gain 0.01 at most."
                )
                yield Suspicion(cell.cell, "records", message)


def _recovered(evidence: Evidence) -> Iterator[Suspicion]:
    """Cells that have next to nothing left of the damage that the same cell has in the baseline."""
    damages = {
        cell.cell.name: _damages(cell, unquantized)
        for cell, unquantized in Evidence(evidence.references).with_unquantized()
    }
    for cell, unquantized in evidence.with_unquantized():
        then, now = damages.get(cell.cell.name, {}), _damages(cell, unquantized)
        large = [t for t, d in then.items() if t in now and d.mean > max(LARGE_DAMAGE, SURE_T * d.error)]
        before, after = sum(then[task].mean for task in large), sum(now[task].mean for task in large)
        error = math.sqrt(sum(now[task].error ** 2 for task in large))
        if large and after + 2 * error < before / MAX_RECOVERY:
            message = (
                f"quantization costs it {after:.3f} nats per decision (sum over {', '.join(large)}); it costs the same "
                f"cell of the baseline {before:.3f}. One bit more would leave at least 1/{MAX_RECOVERY:.0f} of that."
            )
            yield Suspicion(cell.cell, "records", message)


@dataclass(frozen=True)
class _Damage:
    """What quantization costs, in nats per decision."""

    mean: float
    error: float  # standard error, of paired documents


def _damages(cell: MeasuredCell, unquantized: MeasuredCell) -> dict[str, _Damage]:
    """The damage in each task with enough documents in common."""
    found = {}
    for task, (after, before) in _common(cell, unquantized).items():
        lost = before.decisions - after.decisions
        lost = lost[np.isfinite(lost)]
        if len(lost) >= MIN_DOCUMENTS:
            found[task] = _Damage(float(lost.mean()), float(lost.std(ddof=1)) / math.sqrt(len(lost)))
    return found


def _unquantized(cells: Sequence[MeasuredCell]) -> dict[tuple[str, str], MeasuredCell]:
    return {cell.model: cell for cell in cells if not cell.is_quantized}


def _common(a: MeasuredCell, b: MeasuredCell) -> dict[str, tuple[TaskScores, TaskScores]]:
    """The documents that two cells share, task by task and in one order."""
    return {task: _paired(scores, b.tasks[task]) for task, scores in a.tasks.items() if task in b.tasks}


def _paired(a: TaskScores, b: TaskScores) -> tuple[TaskScores, TaskScores]:
    if not np.array_equal(a.hashes, b.hashes):
        _, of_a, of_b = np.intersect1d(a.hashes, b.hashes, return_indices=True)
        a, b = a.take(of_a), b.take(of_b)
    choices = min(a.values.shape[1], b.values.shape[1])
    return replace(a, values=a.values[:, :choices]), replace(b, values=b.values[:, :choices])


def _equal_documents(a: Floats, b: Floats) -> tuple[int, int]:
    """How many documents have only equal values, of how many that have informative ones."""
    informative = _informative(a) & _informative(b)
    counted = informative.any(axis=1)
    equal = ((a == b) | ~informative).all(axis=1)
    return int((equal & counted).sum()), int(counted.sum())


def _moves(before: Floats, after: Floats) -> Floats:
    """How far the values of each document moved, in units of what noise in the logits does to them."""
    informative = _informative(before) & np.isfinite(after)
    size = np.where(informative, np.abs(before), 1.0)
    moves = np.where(informative, np.abs(after - before) / np.minimum(size, np.sqrt(size)), 0.0)
    counts = informative.sum(axis=1)
    return moves.sum(axis=1)[counts > 0] / counts[counts > 0]


def _informative(values: Floats) -> np.ndarray:
    return np.isfinite(values) & (np.abs(values) > INFORMATIVE)


def _measured(records: Sequence[StoredRecord]) -> list[MeasuredCell]:
    return [
        MeasuredCell(stored.record.cell, _weight_error(stored.record.audit), _read(stored))
        for stored in records
        if stored.record.state == "done" and stored.has_samples
    ]


def _weight_error(audit: Audit | None) -> float | None:
    return math.sqrt(audit.error_energy / audit.source_energy) if audit and audit.source_energy else None


def _read(stored: StoredRecord) -> dict[str, TaskScores]:
    """The documents of each task of a record; only the columns that the rules need."""
    file = pq.ParquetFile(pa.BufferReader(stored.samples_content()))
    names = file.schema_arrow.names
    if absent := set(COLUMNS) - set(names):
        raise StoreError(f"{stored.folder / SAMPLES} lacks the column {sorted(absent)[0]}; run the cell again.")
    weights = [name for name in names if name.endswith(WEIGHT)]
    return task_scores(file.read([*COLUMNS, *weights], use_threads=False))


def task_scores(table: pa.Table) -> dict[str, TaskScores]:
    """The documents of each task in a table of samples."""
    hashes = np.array(table["doc_hash"].to_pylist(), dtype=np.str_)
    every = TaskScores(hashes, _padded(table), _decisions(table))
    return {task: every.take(rows) for task, rows in rows_of_tasks(table).items()}


def _padded(table: pa.Table) -> Floats:
    """Log-likelihoods as [documents, choices], NaN beyond a document's own."""
    flat, lengths = lists(table["loglikelihoods"])
    padded = np.full((len(lengths), lengths.max(initial=0)), np.nan)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = flat
    return padded


def _decisions(table: pa.Table) -> Floats:
    """Nats of each document's decision; of pages per word, which is the smallest of their weights."""
    flat, lengths = lists(table["loglikelihoods"])
    alone = lengths == 1
    weights = [as_floats(table[name]) for name in table.column_names if name.endswith(WEIGHT)]
    words = np.nan_to_num(np.fmin.reduce(weights), nan=1.0) if weights else np.ones(len(lengths))
    decisions = gold_logprobs(table)
    single = flat[(np.cumsum(lengths) - lengths)[alone]] / words[alone]
    decisions[alone] = np.where(np.isnan(decisions[alone]), single, decisions[alone])
    return decisions
