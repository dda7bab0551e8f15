"""What the documents of recorded cells say about the weights that were measured: the evidence for suspicious.py.

Imports neither torch nor pandas: the gate runs it.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from qbench.records.audit import UNQUANTIZED, Audit
from qbench.records.integrity import altered
from qbench.records.kept import Kept
from qbench.records.metrics import KL, METRICS
from qbench.records.samples import WEIGHT, Floats, lists, metric_columns, padded_lists, rows_of_tasks
from qbench.records.schema import CellRef
from qbench.records.store import StoredRecord

# Metrics whose per-document values are log-likelihoods.
LOG_LIKELIHOODS = tuple(name for name, facts in METRICS.items() if facts.unit in ("perplexity", "bits"))
# Log-likelihoods nearer to 0 coincide by chance: for a sure answer all models give -0.0 or -1.2e-7.
INFORMATIVE = 0.01
# At least this many documents must have informative values.
MIN_DOCUMENTS = 8
# Documents per task used to find the pairs to compare. If half of all documents are equal, one of these is.
PROBES = 32
MIN_DOCUMENTS_MOVED = 16
ANSWERS = ("acc", "acc_norm", "exact_match")
MIN_NATS = -math.log(100)  # per decision: a perplexity of 100


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


@dataclass(frozen=True)
class MeasuredCell:
    """A finished cell with its measurements."""

    cell: CellRef
    checkpoint: str  # the fingerprint of the unquantized model
    weight_error: float | None  # ‖ŵ - w‖ / ‖w‖ by its audit; None without one
    tasks: Mapping[str, TaskScores]
    stored: StoredRecord | None = None
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
            self.compared[id(unquantized)] = _comparison(common_documents(self, unquantized))
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
    def source(self) -> tuple[str, str]:
        """The checkpoint and how it runs: equal for two variants of a family that are one checkpoint."""
        return self.checkpoint, self.stored.record.identity.what.attention if self.stored else self.cell.attention

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
        unquantized = unquantized_cells(self.cells)
        for cell in self.cells:
            if cell.is_quantized and (found := unquantized.get(cell.model)):
                yield cell, found


def measured_cells(records: Sequence[StoredRecord]) -> list[MeasuredCell]:
    return [
        MeasuredCell(
            stored.record.cell,
            stored.record.identity.what.checkpoint,
            stored.record.audit.relative_error if stored.record.audit else None,
            _StoredTasks(stored),
            stored,
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


@np.errstate(invalid="ignore")  # -inf - -inf is NaN; such documents are ignored
def read_once(evidence: Evidence, records: Collection[StoredRecord] | None = None) -> None:
    """Compute what the rules need from each cell's documents while these are in memory: the results are small.

    records: only of these cells.
    """
    unquantized = [unquantized_cells(evidence.cells), unquantized_cells(evidence.references)]
    chosen = None if records is None else {id(stored) for stored in records}
    for cells, against in ((evidence.cells, unquantized), (evidence.references, unquantized[1:])):
        wanted = [cell for cell in cells if chosen is None or id(cell.stored) in chosen]
        for cell in sorted(wanted, key=lambda own: own.model):
            _ = cell.probes, cell.following
            for models in against if cell.is_quantized else ():
                if cell.model in models:
                    cell.compare(models[cell.model])


KEPT_SCORES = Kept(most=2**24)  # bytes


class _StoredTasks(Mapping[str, TaskScores]):
    """The documents of a record's tasks. They are read again if too many others were read in the meantime."""

    def __init__(self, stored: StoredRecord) -> None:
        self.stored = stored

    def _read(self) -> dict[str, TaskScores]:
        key = (self.stored.parquet, self.stored.record.samples_sha256)
        return KEPT_SCORES.get(key, self._scores, lambda tasks: sum(own.nbytes for own in tasks.values()))

    def _scores(self) -> dict[str, TaskScores]:
        _ = altered(self.stored), not_right_or_wrong(self.stored)  # while its table is in memory
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


def not_right_or_wrong(stored: StoredRecord) -> list[str]:
    """The columns with values other than 0 and 1; computed once."""
    if "not right or wrong" not in stored.found:
        columns = metric_columns(stored.table).items()
        stored.found["not right or wrong"] = [
            name for name, own in columns if not (np.isnan(own) | (own == 0) | (own == 1)).all()
        ]
    return stored.found["not right or wrong"]


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


def _moves(before: Floats, after: Floats) -> Floats:
    """How far the values of each document moved, relative to the effect of noise in the logits."""
    informative = _informative(before) & np.isfinite(after)
    size = np.where(informative, np.abs(before), 1.0)
    moves = np.where(informative, np.abs(after - before) / np.minimum(size, np.sqrt(size)), 0.0)
    counts = informative.sum(axis=1)
    return moves.sum(axis=1)[counts > 0] / counts[counts > 0]


def _gain(after: TaskScores, before: TaskScores) -> tuple[Floats, str]:
    """How much each document improved, and the unit.

    The unit is answers if there are any: noise makes a model less certain, so it gains nats where it was certain and
    wrong. Otherwise it is nats per word or target, if the model knows the text: noise also gives nats to one that does
    not.
    """
    for name in ANSWERS:
        if name in after.metrics and np.isfinite(after.metrics[name]).any():
            gain = after.metrics[name] - before.metrics.get(name, np.nan)
            return gain[np.isfinite(gain)], "right answers per document"
    gain = after.decisions - before.decisions
    known = np.nanmean(before.decisions) > MIN_NATS if np.isfinite(before.decisions).any() else False
    return gain[np.isfinite(gain)] if known else np.empty(0), "nats per decision"


def unquantized_cells(cells: Sequence[MeasuredCell]) -> dict[tuple[str, str], MeasuredCell]:
    return {cell.model: cell for cell in cells if not cell.is_quantized}


def common_documents(a: MeasuredCell, b: MeasuredCell) -> dict[str, tuple[TaskScores, TaskScores]]:
    """The documents that two cells share, task by task and in one order."""
    return {task: _paired(scores, b.tasks[task]) for task, scores in a.tasks.items() if task in b.tasks}


def _paired(a: TaskScores, b: TaskScores) -> tuple[TaskScores, TaskScores]:
    if not np.array_equal(a.hashes, b.hashes):
        _, of_a, of_b = np.intersect1d(a.hashes, b.hashes, return_indices=True)
        a, b = a.take(of_a), b.take(of_b)
    choices = min(a.values.shape[1], b.values.shape[1])
    return replace(a, values=a.values[:, :choices]), replace(b, values=b.values[:, :choices])


def equal_documents(a: Floats, b: Floats) -> tuple[int, int]:
    """How many documents have only equal values, and how many have informative ones."""
    informative = _informative(a) & _informative(b)
    counted = informative.any(axis=1)
    equal = ((a == b) | ~informative).all(axis=1)
    return int((equal & counted).sum()), int(counted.sum())


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


def _informative(values: Floats) -> np.ndarray:
    return np.isfinite(values) & (np.abs(values) > INFORMATIVE)
