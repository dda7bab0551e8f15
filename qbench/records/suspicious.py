"""Records that cannot belong to the model they name. Imports neither torch nor pandas: the gate runs it.

Two kinds of proof. The audit says what was done to the weights. The log-likelihoods of the documents say which weights
were measured: identical to the last bit for equal weights, and as far from the unquantized model's as the weights are.
All limits were set on the 20 quantized cells of results/mini (5 tasks with 400 documents each), with a wide margin.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from qbench.numbers import significant
from qbench.records.audit import UNQUANTIZED, Audit, failures
from qbench.records.impossible import ClaimedScore, impossible_scores
from qbench.records.integrity import altered
from qbench.records.kept import Kept
from qbench.records.metrics import KL, METRICS
from qbench.records.samples import WEIGHT, Floats, lists, metric_columns, padded_lists, rows_of_tasks
from qbench.records.schema import CellRef, Record
from qbench.records.store import StoredRecord

# Metrics whose per-document values are log-likelihoods.
LOG_LIKELIHOODS = tuple(name for name, facts in METRICS.items() if facts.unit in ("perplexity", "bits"))

# Log-likelihoods nearer to 0 coincide by chance: for a sure answer all models give -0.0 or -1.2e-7.
INFORMATIVE = 0.01
# At least this many documents must have informative values.
MIN_DOCUMENTS = 8
# Share of a task's documents that are equal to the last bit. Between two honest cells of mini it is 0 in 1,154 of 1,155
# comparisons, and 0.6% (1 of 158 documents) in the other; it is 1 for the same weights.
MAX_EQUAL = 0.5
# Documents per task used to find the pairs to compare. If half of all documents are equal, one of these is.
PROBES = 32
# How far log-likelihoods L move per unit of the audit's relative weight error: the median over documents of the mean of
# |ΔL| / min(|L|, √|L|). The divisor is what noise in the logits does to L: it scales 1 - p of a sure token, and adds up
# as a random walk over the unsure ones. In mini the ratio is at least 0.56 (gptq-8, wikitext), and of the
# same size at 8 bits (0.56 to 7.6) and at 4 (0.82 to 7.0): it holds for small damage too; 2 bits: 2.7 to 119.
# The limit is 1/22 of the smallest.
MIN_MOVE = 0.025
MIN_DOCUMENTS_MOVED = 16
# The largest significant gain of a quantized cell over the unquantized model that may pass: right answers per document,
# or nats per decision. The most in mini is 0.010 (gptq-4, lambada, t = 0.9) and 0.0086 (bnb-4, wikitext, t = 8.4), in
# results/paper 0.008 (bnb-4, sciq) and 0.0089 (gptq-8, lambada).
MAX_GAIN = 0.05
ANSWERS = ("acc", "acc_norm", "exact_match")
MIN_NATS = -math.log(100)  # per decision: a perplexity of 100
SURE_T = 5.0
# Damage large enough to notice that it is gone: nats per decision in a task. A run may have 1/16 of it, two bits' noise
# (6 dB each). A cell of mini with one bit more has 1/2.6 to 1/9.5 of the damage, with two bits more 1/17 to 1/53.
LARGE_DAMAGE = 0.1
MAX_RECOVERY = 16.0


@dataclass(frozen=True)
class Suspicion:
    """Why the numbers of a cell cannot be those of its model."""

    cell: CellRef
    found_by: Literal["audit", "records"]
    message: str

    def __str__(self) -> str:
        return f"{self.cell.name}: {self.message}"


@dataclass(frozen=True)
class TaskScores:
    """The documents of one task."""

    hashes: np.ndarray  # [documents] of their contents
    values: Floats  # [documents, choices] log-likelihoods, padded with NaN
    decisions: Floats  # [documents] nats: of the right choice, of the target, or of a page per word
    gold: Floats  # [documents, right choices] padded with NaN
    lengths: Floats  # [documents, choices] characters
    metrics: Mapping[str, Floats]  # [documents] by column

    @property
    def nbytes(self) -> int:
        """Its size in memory."""
        arrays = (self.hashes, self.values, self.decisions, self.gold, self.lengths, *self.metrics.values())
        return sum(own.nbytes for own in arrays)

    def take(self, rows: np.ndarray) -> "TaskScores":
        """The documents of these rows, in this order."""
        metrics = {name: column[rows] for name, column in self.metrics.items()}
        return TaskScores(
            self.hashes[rows], self.values[rows], self.decisions[rows], self.gold[rows], self.lengths[rows], metrics
        )


@dataclass(frozen=True)
class MeasuredCell:
    """A finished cell with its measurements."""

    cell: CellRef
    checkpoint: str  # the fingerprint of the unquantized model
    weight_error: float | None  # ‖ŵ - w‖ / ‖w‖ by its audit; None without one
    tasks: Mapping[str, TaskScores]
    same_as: str = ""  # the label of a cell that this one may equal, such as one without masked heads
    compared: dict[int, "_Comparison"] = field(default_factory=dict, compare=False, repr=False)  # by id of the other

    @cached_property
    def probes(self) -> "frozenset[tuple[str, str, str, bytes]]":
        """Family, task, document and log-likelihoods of a few documents: those whose hashes come first."""
        found = set()
        for task, scores in self.tasks.items():
            rows = np.argsort(scores.hashes)[:PROBES]
            for row in rows[_informative(scores.values[rows]).any(axis=1)]:
                values = scores.values[row]
                own = values[~np.isnan(values)]  # cells may be padded to different widths
                found.add((self.cell.family, task, str(scores.hashes[row]), own.tobytes()))
        return frozenset(found)

    @cached_property
    def following(self) -> "dict[tuple[str, str], int]":
        """By task and metric: in how many documents it does not follow from the log-likelihoods."""
        return _following(self.tasks)

    def compare(self, unquantized: "MeasuredCell") -> "_Comparison":
        """This cell next to the unquantized model; computed once."""
        if id(unquantized) not in self.compared:
            self.compared[id(unquantized)] = _comparison(_common(self, unquantized))
        return self.compared[id(unquantized)]

    @property
    def base(self) -> str:
        """Its label without the parts that may change nothing."""
        return self.same_as or self.cell.label

    @property
    def model(self) -> tuple[str, str]:
        """The model that is quantized, in any run."""
        return self.cell.family, self.cell.attention

    @property
    def is_quantized(self) -> bool:
        """Whether its name says that it is quantized."""
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
    """What is wrong with the current records of a folder; references: the records of the run's baseline."""
    done = [stored for stored in records if stored.record.state == "done"]
    with np.errstate(invalid="ignore"):  # -inf - -inf is NaN, and such documents do not count
        scores = suspicious_scores(Evidence(_measured(records), _measured(references)))
    unproved = [found for stored in done if (found := _unproved(stored.record))]
    unproved += [found for stored in done for found in _impossible(stored)]
    return unproved + scores


def suspicious_scores(evidence: Evidence) -> list[Suspicion]:
    """The cells whose documents contradict their name, with the plainest reason for each.

    A cell that is accused is not used as evidence against others.
    """
    _read_once(evidence)
    found: dict[CellRef, Suspicion] = {}
    rules: list[Rule] = [_same_weights, _too_near, _too_good, _recovered, _not_its_log_likelihoods]
    for rule in rules:
        for suspicion in rule(evidence):
            found.setdefault(suspicion.cell, suspicion)
        evidence = replace(evidence, cells=[cell for cell in evidence.cells if cell.cell not in found])
    return list(found.values())


def _read_once(evidence: Evidence) -> None:
    """Compute what the rules need of each cell's documents while they are in memory: it is small, and they are not."""
    unquantized = [_unquantized(evidence.cells), _unquantized(evidence.references)]
    for cells, against in ((evidence.cells, unquantized), (evidence.references, unquantized[1:])):
        for cell in sorted(cells, key=lambda own: own.model):
            _ = cell.probes, cell.following
            for models in against if cell.is_quantized else ():
                if cell.model in models:
                    cell.compare(models[cell.model])


def audit_failures(record: Record, audit: Audit) -> list[str]:
    """Why the audit does not prove what the cell's name says: it may belong to another cell."""
    cell = record.cell
    if audit.label != cell.label:
        return [f"it is an audit of {audit.label}."]
    if (audit.method, audit.bits) != (cell.method, cell.bits):
        return [f"it is an audit of {audit.method} at {audit.bits} bits; the cell is {cell.method} at {cell.bits}."]
    if (wanted := sorted(record.identity.what.parts or {})) != (audited := sorted(part.label for part in audit.parts)):
        return [f"it has {wanted} besides its weights, but the audit covers {audited}."]
    return failures(audit)


def _unproved(record: Record) -> Suspicion | None:
    if record.cell.label == UNQUANTIZED:
        return None
    if record.audit is None:
        return Suspicion(record.cell, "audit", "it has no audit, so nothing proves that it was quantized.")
    if reasons := audit_failures(record, record.audit):
        return Suspicion(record.cell, "audit", f"it has scores, but did not pass its audit: {reasons[0]}")
    return None


def _impossible(stored: StoredRecord) -> Iterator[Suspicion]:
    """Scores that no model can have, whatever its weights."""
    others = _not_right_or_wrong(stored) if stored.has_samples else []
    claims = []
    for m in stored.record.metrics:
        documents = None if m.metric in others else m.documents
        claims.append(ClaimedScore(m.task, m.metric, m.value, m.better, documents))
    for found in impossible_scores(claims):
        message = f"{found.score.task} {found.score.metric}: {found.why}"
        yield Suspicion(stored.record.cell, "records", message)


def _not_right_or_wrong(stored: StoredRecord) -> list[str]:
    """The columns with values other than 0 and 1; computed once."""
    if "not right or wrong" not in stored.found:
        columns = metric_columns(stored.table).items()
        stored.found["not right or wrong"] = [
            name for name, own in columns if not (np.isnan(own) | (own == 0) | (own == 1)).all()
        ]
    return stored.found["not right or wrong"]


def _same_weights(evidence: Evidence) -> Iterator[Suspicion]:
    """Two cells of one family whose documents are equal to the last bit: one of them was not measured.

    The one that differs from the baseline is accused; if that does not decide, the narrower one. A cell that equals a
    narrower cell of the baseline is not accused: there the baseline is wrong.
    """
    for cell, other in _sharing_a_document(evidence.cells, evidence.cells):
        narrow, wide = sorted((cell, other), key=lambda c: c.cell.bits)
        if found := _equal_task(narrow, wide):
            forged, real = (wide, narrow) if _as_in(evidence.references, narrow, found.task) else (narrow, wide)
            yield Suspicion(forged.cell, "records", _measured_twice(found, real.cell.name))
    for cell, other in _sharing_a_document(evidence.cells, evidence.references):
        if cell.cell.bits <= other.cell.bits and (found := _equal_task(cell, other)):
            yield Suspicion(cell.cell, "records", _measured_twice(found, f"the baseline's {other.cell.name}"))


def _sharing_a_document(
    cells: Sequence[MeasuredCell], others: Sequence[MeasuredCell]
) -> list[tuple[MeasuredCell, MeasuredCell]]:
    """The pairs of different cells of one family with equal log-likelihoods in one of a few documents.

    Comparing a hundred cells with each other in all documents takes many seconds, and hardly any pair shares one.
    """
    known: dict[Any, list[int]] = {}
    for i, other in enumerate(others):
        for probe in other.probes:
            known.setdefault(probe, []).append(i)
    pairs = {(i, j) for i, cell in enumerate(cells) for probe in cell.probes for j in known.get(probe, ())}
    if others is cells:
        pairs = {(i, j) for i, j in pairs if i < j}
    found = [(cells[i], others[j]) for i, j in sorted(pairs)]
    return [(a, b) for a, b in found if a.cell.name != b.cell.name and not (a.model == b.model and a.base == b.base)]


@dataclass(frozen=True)
class _EqualTask:
    """A task in which two cells have the same log-likelihoods."""

    task: str
    equal: int
    informative: int  # of so many documents


def _measured_twice(found: _EqualTask, other: str) -> str:
    return (
        f"in {found.task} the log-likelihoods of {found.equal} of {found.informative} documents are equal to the last "
        f"bit to those of {other}: the same weights were measured."
    )


def _as_in(references: Sequence[MeasuredCell], cell: MeasuredCell, task: str) -> bool:
    """Whether the same cell of the baseline has the same log-likelihoods in the task."""
    own = [other for other in references if other.cell.name == cell.cell.name]
    return any(found.task == task for other in own for found in _equal_tasks(cell, other))


def _equal_task(cell: MeasuredCell, other: MeasuredCell) -> _EqualTask | None:
    """The first task in which two cells are equal; None if there is none."""
    return next(_equal_tasks(cell, other), None)


def _equal_tasks(cell: MeasuredCell, other: MeasuredCell) -> Iterator[_EqualTask]:
    for task, (a, b) in _common(cell, other).items():
        equal, informative = _equal_documents(a.values, b.values)
        if informative >= MIN_DOCUMENTS and equal > MAX_EQUAL * informative:
            yield _EqualTask(task, equal, informative)


def _not_its_log_likelihoods(evidence: Evidence) -> Iterator[Suspicion]:
    """Metrics that do not follow from their log-likelihoods, although they do in most cells.

    A task may define acc differently from lm-eval; then few cells agree, if any, and none is accused.
    """
    every = (*evidence.cells, *evidence.references)
    agreeing = Counter(key for cell in every for key, off in cell.following.items() if not off)
    differing = Counter(key for cell in every for key, off in cell.following.items() if off)
    for cell in evidence.cells:
        for (task, metric), off in cell.following.items():
            if off and agreeing[task, metric] > differing[task, metric]:
                message = f"in {task} {metric} does not follow from the log-likelihoods of {off} documents."
                yield Suspicion(cell.cell, "records", message)


def _following(tasks: Mapping[str, TaskScores]) -> dict[tuple[str, str], int]:
    """By task and metric: how many documents' values do not follow from their log-likelihoods."""
    found = {}
    for task, scores in tasks.items():
        for metric, expected in _expected(scores).items():
            given = scores.metrics[metric]
            counted = ~np.isnan(given)
            if counted.sum() >= MIN_DOCUMENTS:
                found[task, metric] = int((counted & (given != expected)).sum())  # NaN differs
    return found


def _expected(scores: TaskScores) -> dict[str, Floats]:
    """lm-eval's metrics computed from the log-likelihoods of the choices, of the target or of the page."""
    if not scores.values.shape[1]:
        return {}
    has_choices = ~np.isnan(scores.gold).all(axis=1) if scores.gold.shape[1] else np.zeros(len(scores.values), bool)
    found: dict[str, Floats] = {}
    if has_choices.all():
        width = min(scores.values.shape[1], scores.lengths.shape[1])
        values, lengths = scores.values[:, :width], scores.lengths[:, :width]
        # lm-eval takes the first of equal ones; padding is never chosen.
        within = np.where(np.isnan(lengths), -np.inf, np.nan_to_num(values, nan=-np.inf))
        by_length = np.where(np.isnan(lengths), -np.inf, within / np.where(lengths > 0, lengths, 1.0))
        for name, ranked in (("acc", within), ("acc_norm", by_length)):
            found[name] = (ranked.argmax(1)[:, None] == scores.gold).any(1).astype(np.float64)
    elif not has_choices.any():
        found = dict.fromkeys(LOG_LIKELIHOODS, scores.values[:, 0])
    return {name: column for name, column in found.items() if name in scores.metrics}


def _too_near(evidence: Evidence) -> Iterator[Suspicion]:
    """Quantized cells that are nearer to the unquantized model, the run's or the baseline's, than their weights are."""
    unquantized = [_unquantized(evidence.cells), _unquantized(evidence.references)]
    pairs = [(c, found[c.model]) for c in evidence.cells if c.is_quantized for found in unquantized if c.model in found]
    for cell, model in pairs:
        error = cell.weight_error
        for task, moved in cell.compare(model).moves.items():
            if error and (move := moved / error) < MIN_MOVE:
                message = (
                    f"in {task} its log-likelihoods are too close to the unquantized model's: they moved by {move:.1g} "
                    f"per unit of the audit's relative weight error ({error:.2g}); honest cells move by at least 0.5."
                )
                yield Suspicion(cell.cell, "records", message)


def _too_good(evidence: Evidence) -> Iterator[Suspicion]:
    """Quantized cells that are significantly better than the unquantized model."""
    for cell, unquantized in evidence.with_unquantized():
        for task, gain in cell.compare(unquantized).gains.items():
            mean, error = gain.mean, gain.error
            if mean > MAX_GAIN and mean > SURE_T * error:
                message = (
                    f"in {task} it is better than the unquantized model by {significant(mean)} {gain.unit} (standard "
                    f"error {significant(error)}); honest cells gain at most a fifth of the limit, {MAX_GAIN:g}."
                )
                yield Suspicion(cell.cell, "records", message)


def _gain(after: TaskScores, before: TaskScores) -> tuple[Floats, str]:
    """How much each document improved, and the unit.

    In answers if there are any: noise makes a model less sure, and so it gains nats where it is surely wrong.
    Otherwise in nats per word or target, if the model knows the text: one that does not gains nats from noise too.
    """
    for name in ANSWERS:
        if name in after.metrics and np.isfinite(after.metrics[name]).any():
            gain = after.metrics[name] - before.metrics.get(name, np.nan)
            return gain[np.isfinite(gain)], "right answers per document"
    gain = after.decisions - before.decisions
    known = np.nanmean(before.decisions) > MIN_NATS if np.isfinite(before.decisions).any() else False
    return gain[np.isfinite(gain)] if known else np.empty(0), "nats per decision"


def _recovered(evidence: Evidence) -> Iterator[Suspicion]:
    """Cells that have almost none of the damage that the same cell has in the baseline."""
    damages = {
        (cell.cell.name, cell.checkpoint): cell.compare(unquantized).damages
        for cell, unquantized in Evidence(evidence.references).with_unquantized()
    }
    for cell, unquantized in evidence.with_unquantized():
        then, now = damages.get((cell.cell.name, cell.checkpoint), {}), cell.compare(unquantized).damages
        large = [t for t, d in then.items() if t in now and d.mean > max(LARGE_DAMAGE, SURE_T * d.error)]
        before, after = sum(then[task].mean for task in large), sum(now[task].mean for task in large)
        error = math.sqrt(sum(now[task].error ** 2 for task in large))
        if large and after + 2 * error < before / MAX_RECOVERY:
            message = (
                f"quantization costs it {after:.3f} nats per decision (sum over {', '.join(large)}), but {before:.3f} "
                f"in the baseline. One bit more would leave at least 1/{MAX_RECOVERY:.0f} of that."
            )
            yield Suspicion(cell.cell, "records", message)


@dataclass(frozen=True)
class _Mean:
    """A mean over documents: what quantization costs or gains."""

    mean: float
    error: float  # standard error, of paired documents
    unit: str = "nats per decision"


@dataclass(frozen=True)
class _Comparison:
    """A quantized cell next to the unquantized model, by task; only tasks with enough documents in common."""

    moves: Mapping[str, float]  # the median of how far log-likelihoods moved
    gains: Mapping[str, _Mean]
    damages: Mapping[str, _Mean]


def _comparison(common: Mapping[str, tuple[TaskScores, TaskScores]]) -> _Comparison:
    moves, gains, damages = {}, {}, {}
    for task, (after, before) in common.items():
        moved = _moves(before.values, after.values)
        if len(moved) >= MIN_DOCUMENTS_MOVED:
            moves[task] = float(np.median(moved))
        gain, unit = _gain(after, before)
        if len(gain) >= MIN_DOCUMENTS:
            gains[task] = _mean(gain, unit)
        lost = before.decisions - after.decisions
        lost = lost[np.isfinite(lost)]
        if len(lost) >= MIN_DOCUMENTS:
            damages[task] = _mean(lost)
    return _Comparison(moves, gains, damages)


def _mean(values: Floats, unit: str = "nats per decision") -> _Mean:
    return _Mean(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values)), unit)


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
    """How many documents have only equal values, and how many have informative ones."""
    informative = _informative(a) & _informative(b)
    counted = informative.any(axis=1)
    equal = ((a == b) | ~informative).all(axis=1)
    return int((equal & counted).sum()), int(counted.sum())


def _moves(before: Floats, after: Floats) -> Floats:
    """How far the values of each document moved, relative to the effect of noise in the logits."""
    informative = _informative(before) & np.isfinite(after)
    size = np.where(informative, np.abs(before), 1.0)
    moves = np.where(informative, np.abs(after - before) / np.minimum(size, np.sqrt(size)), 0.0)
    counts = informative.sum(axis=1)
    return moves.sum(axis=1)[counts > 0] / counts[counts > 0]


def _informative(values: Floats) -> np.ndarray:
    return np.isfinite(values) & (np.abs(values) > INFORMATIVE)


def _measured(records: Sequence[StoredRecord]) -> list[MeasuredCell]:
    return [
        MeasuredCell(
            stored.record.cell,
            stored.record.identity.what.checkpoint,
            stored.record.audit.relative_error if stored.record.audit else None,
            _StoredTasks(stored),
            _same_as(stored.record.audit),
        )
        for stored in records
        if stored.record.state == "done" and stored.has_samples
    ]


def _same_as(audit: Audit | None) -> str:
    """The label of an audit without the parts that may change nothing, such as masked heads; empty without one."""
    if audit is None:
        return ""
    return "-".join([audit.weight_label, *(part.label for part in audit.parts if not part.may_change_nothing)])


KEPT_SCORES = Kept(most=2**25)  # bytes


class _StoredTasks(Mapping[str, TaskScores]):
    """The documents of a record's tasks; read again if too many others were read since."""

    def __init__(self, stored: StoredRecord) -> None:
        self.stored = stored

    def _read(self) -> dict[str, TaskScores]:
        key = (self.stored.parquet, self.stored.record.samples_sha256)
        return KEPT_SCORES.get(key, self._scores, lambda tasks: sum(own.nbytes for own in tasks.values()))

    def _scores(self) -> dict[str, TaskScores]:
        _ = altered(self.stored), _not_right_or_wrong(self.stored)  # while its table is in memory
        return task_scores(self.stored)

    def __getitem__(self, task: str) -> TaskScores:
        return self._read()[task]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


def task_scores(stored: StoredRecord) -> dict[str, TaskScores]:
    """The documents of each task in a record's samples."""
    table = stored.table
    hashes = np.array(table["doc_hash"].to_pylist(), dtype=np.str_)
    columns = metric_columns(table)
    values, lengths = padded_lists(table["loglikelihoods"]), padded_lists(table["characters"])
    decisions, gold = _decisions(stored, columns), padded_lists(table["gold"])
    return {
        task: TaskScores(
            hashes[rows],
            values[rows],
            decisions[rows],
            gold[rows],
            lengths[rows],
            {name: column[rows] for name, column in columns.items()},
        )
        for task, rows in rows_of_tasks(table).items()
    }


def _decisions(stored: StoredRecord, columns: Mapping[str, Floats]) -> Floats:
    """Nats of each document's decision; for pages per word, the smallest of their weights."""
    flat, lengths = lists(stored.table["loglikelihoods"])
    alone = lengths == 1
    weights = [column for name, column in columns.items() if name.endswith(WEIGHT) and name != KL + WEIGHT]
    words = np.nan_to_num(np.fmin.reduce(weights), nan=1.0) if weights else np.ones(len(lengths))
    decisions = stored.gold_logprobs.copy()
    single = flat[(np.cumsum(lengths) - lengths)[alone]] / words[alone]
    decisions[alone] = np.where(np.isnan(decisions[alone]), single, decisions[alone])
    return decisions
