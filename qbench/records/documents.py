"""The documents of cells as typed columns: the one reader of samples.parquet, and the one place that pairs documents.

A document is known by its key, the hash of its content. Two cells are paired task by task: the nth document with a key,
in the order of ids, is the nth with that key in the other cell. So the order of documents and their ids do not matter.
If one cell has a document that the other lacks, or has it less often, the sets differ: nothing is then compared, but
findings still look at what both have. Repetitions of a document are not independent: statistics add up their values and
weights, and count them as one document (`TaskDocuments.distinct`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from qbench.records.kept import Kept, shared
from qbench.records.metrics import Better, facts_of
from qbench.records.samples import NEVER_NULL, WEIGHT, Floats, Ints, as_floats, one_array, padded_lists, read_columns

if TYPE_CHECKING:
    from qbench.records.schema import MetricValue

ANSWERS = ("gold", "loglikelihoods", "characters", "tokens")  # the columns of Answers
SAMPLE = 32  # documents of a task, to find cells with equal ones: if half of all are equal, one of these is
# In bytes: all of a small folder, and the latest cells of a large one. The summary of 500 cells with 10,000 documents
# each takes 10.5 s of CPU time; if nothing is kept, 52 s.
KEPT: Kept = Kept(most=2**24)


@dataclass(frozen=True, eq=False)
class Keys:
    """Which documents a task has, in the order of their ids. Cells with the same ones share this object."""

    ids: Ints
    contents: NDArray[np.bytes_]  # hashes

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def distinct(self) -> Ints:
        """[documents] the number of each content in the order of first appearance; equal for repetitions."""
        _, first, number = np.unique(self.contents, return_index=True, return_inverse=True)
        place = np.empty(len(first), dtype=np.int64)
        place[np.argsort(first)] = np.arange(len(first))
        return place[number]

    @property
    def repeats(self) -> bool:
        """Whether a content occurs twice."""
        return bool(len(self)) and int(self.distinct.max()) + 1 < len(self)

    @cached_property
    def repetition(self) -> Ints:
        """[documents] how many documents before it have the same content."""
        order = np.argsort(self.distinct, kind="stable")
        starts = np.flatnonzero(np.diff(self.distinct[order], prepend=-1))
        found = np.empty(len(self), dtype=np.int64)
        found[order] = np.arange(len(self)) - starts[self.distinct[order]]
        return found

    @cached_property
    def sample(self) -> Ints:
        """The rows of a few documents: those whose hashes come first, the same in every cell that has them."""
        return np.argsort(self.contents)[:SAMPLE]

    def take(self, rows: Ints) -> "Keys":
        """The documents of these rows, in this order."""
        return Keys(self.ids[rows], self.contents[rows])


@dataclass(frozen=True)
class Pairing:
    """The documents that several cells share."""

    rows: tuple[Ints, ...]  # of each cell, in the order of the first
    complete: bool  # no cell has a document that another lacks
    aligned: bool = False  # the rows are all rows in their order

    @property
    def count(self) -> int:
        """How many documents they share."""
        return len(self.rows[0])

    def of(self, sides: "Sequence[TaskDocuments]") -> "list[TaskDocuments]":
        """These documents of each cell."""
        if self.aligned:
            return list(sides)
        return [own.take(rows) for own, rows in zip(sides, self.rows, strict=True)]


def pairing(sides: Sequence[Keys]) -> Pairing:
    """Pair the documents of a task in several cells."""
    first = sides[0]
    if all(own is first or np.array_equal(own.contents, first.contents) for own in sides):
        return Pairing((np.arange(len(first)),) * len(sides), complete=True, aligned=True)
    number = np.unique(np.concatenate([own.contents for own in sides]), return_inverse=True)[1]
    most = 1 + max(int(own.repetition.max(initial=0)) for own in sides)
    ends = np.cumsum([len(own) for own in sides])[:-1]
    codes = [own * most + side.repetition for own, side in zip(np.split(number, ends), sides, strict=True)]
    common = reduce(np.intersect1d, codes)
    wanted = codes[0][np.isin(codes[0], common)]
    orders = [np.argsort(own) for own in codes]
    rows = tuple(order[np.searchsorted(own, wanted, sorter=order)] for own, order in zip(codes, orders, strict=True))
    return Pairing(rows, all(len(own) == len(common) for own in codes))


@dataclass(frozen=True)
class Values:
    """A metric of the documents of a task; the score is its aggregation of Σ values / Σ weights."""

    values: Floats  # [documents]; NaN if a document has none
    weights: Floats  # [documents]; words, bytes or tokens of pages, else 1
    better: Better | None = None
    aggregation: str = ""  # by lm-eval's names; empty if the record has no such score

    @property
    def known(self) -> "Values":
        """The same with 0 / 0 for documents without a value."""
        unknown = np.isnan(self.values)
        if not unknown.any():
            return self
        return self.of(np.where(unknown, 0.0, self.values), np.where(unknown, 0.0, self.weights))

    def of(self, values: Floats, weights: Floats) -> "Values":
        """The same metric of other documents."""
        return Values(values, weights, self.better, self.aggregation)

    def take(self, rows: Ints) -> "Values":
        """Those of these documents, in this order."""
        return self.of(self.values[rows], self.weights[rows])


@dataclass(frozen=True)
class Answers:
    """What a model said about each choice of a document, its target or its page; padded with NaN."""

    gold: Floats  # [documents, right choices]
    loglikelihoods: Floats  # [documents, choices]
    characters: Floats  # [documents, choices]
    tokens: Floats  # [documents, choices] that were scored; NaN if the model does not report them

    @cached_property
    def choices(self) -> Ints:
        """[documents] how many there are to choose from; 0 if nothing, or if none is right."""
        given, scored = ((~np.isnan(own)).sum(axis=1) for own in (self.characters, self.loglikelihoods))
        has = (given >= 2) & ~np.isnan(self.gold).all(axis=1) & (scored >= given)
        return np.where(has, given, 0)

    @property
    def nbytes(self) -> int:
        """Its size in memory."""
        return sum(own.nbytes for own in (self.gold, self.loglikelihoods, self.characters, self.tokens))

    def take(self, rows: Ints) -> "Answers":
        """Those of these documents, in this order."""
        return Answers(self.gold[rows], self.loglikelihoods[rows], self.characters[rows], self.tokens[rows])

    @cached_property
    def logprobs(self) -> Floats:
        """[documents] log-softmax of the right choice over the choices, the mean if several are right; else NaN.

        Log-likelihoods beyond the choices (acc_mutual_info's unconditional ones) do not count.
        """
        width = max(int(self.choices.max(initial=0)), 1)
        among = np.arange(width) < self.choices[:, None]
        scores = np.full(among.shape, -np.inf)
        scores[among] = self.loglikelihoods[:, :width][among[:, : self.loglikelihoods.shape[1]]]
        right = (self.gold >= 0) & (self.gold < self.choices[:, None])  # NaN is not
        places = np.where(right, self.gold, 0).astype(np.int64)
        with np.errstate(invalid="ignore"):  # -inf - -inf, and 0 / 0 without choices
            found = np.take_along_axis(scores, places, axis=1) - np.logaddexp.reduce(scores, axis=1)[:, None]
            return np.where(right, found, 0.0).sum(axis=1) / right.sum(axis=1)


@dataclass(frozen=True, eq=False)
class TaskDocuments:
    """The documents of one task in one cell."""

    task: str
    keys: Keys
    metrics: Mapping[str, Values]  # those of which a document has a value
    read_answers: Callable[[], Answers] = field(repr=False)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def answers(self) -> Answers:
        """What the metrics are made of; read again if other cells were read since."""
        return self.read_answers()

    @property
    def pages(self) -> list[Values]:
        """The metrics of whole pages, whose weights are words or bytes; empty for other documents."""
        return [own for name, own in self.metrics.items() if is_log_likelihood(name) and (own.weights != 1).any()]

    @cached_property
    def decisions(self) -> Values:
        """What is right, in nats: the right choice among the choices, the target, or a page, whose weight is its words.

        NaN for a document that has nothing of this.
        """
        if pages := self.pages:
            return min(pages, key=lambda own: np.nansum(own.weights))
        answers = self.answers
        values = answers.logprobs.copy()
        if answers.loglikelihoods.shape[1]:  # not if all tasks of the file generate text
            alone = ((~np.isnan(answers.loglikelihoods)).sum(axis=1) == 1) & np.isnan(answers.gold).all(axis=1)
            values[alone] = answers.loglikelihoods[alone, 0]
        return Values(shared(values), _ones(len(self)))

    @property
    def has_decisions(self) -> bool:
        """Whether all documents have a decision."""
        return bool(np.isfinite(self.decisions.values).all())

    @cached_property
    def chance(self) -> float | None:
        """The accuracy of guessing, in percent; None if there is nothing to choose from."""
        choices = self.answers.choices
        return 100 * float(np.mean(1 / choices)) if len(choices) and np.all(choices > 1) else None

    def take(self, rows: Ints) -> "TaskDocuments":
        """The documents of these rows, in this order."""
        metrics = {name: own.take(rows) for name, own in self.metrics.items()}
        return TaskDocuments(self.task, self.keys.take(rows), metrics, lambda: self.answers.take(rows))

    def distinct(self, values: Values) -> Values:
        """The known values with repetitions of a document summed up."""
        known = values.known
        if not self.keys.repeats:
            return known
        sums = [np.bincount(self.keys.distinct, own).astype(np.float64) for own in (known.values, known.weights)]
        return known.of(sums[0], sums[1])


def is_log_likelihood(metric: str) -> bool:
    """Whether documents' values of a metric are log-likelihoods."""
    facts = facts_of(metric)
    return facts is not None and facts.unit in ("perplexity", "bits")


NO_KEYS = Keys(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bytes_))


class Documents(Mapping[str, TaskDocuments]):
    """The documents of one cell by task: keys and metrics; answers are read when they are asked for."""

    __hash__, __eq__ = object.__hash__, object.__eq__

    def __init__(self, read: Callable[[], bytes], where: object, metrics: "Sequence[MetricValue]") -> None:
        """read: gives the content of samples.parquet; where: its path, for errors; metrics: the record's."""
        scores = {(m.task, m.metric): m for m in metrics}
        table = read_columns(read(), where)
        ids, contents = as_floats(table["doc_id"]).astype(np.int64), _bytes(table["doc_hash"])
        columns = {name: as_floats(table[name]) for name in table.column_names if name not in NEVER_NULL}
        self.columns = tuple(columns)  # of metrics and of their weights, whether or not they have values
        rows = dict(_rows(table["task"], ids))
        answers = _AnswersOfFile(read, where, rows)
        self._tasks = {
            task: _task(task, own, _keys(ids[own], contents[own]), columns, scores, answers)
            for task, own in rows.items()
        }

    def __getitem__(self, task: str) -> TaskDocuments:
        return self._tasks[task]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def nbytes(self) -> int:
        """About how much memory it takes; cells with equal columns share them."""
        return sum(8 * len(own) * (1 + len(own.metrics)) for own in self._tasks.values())

    def keys_of(self, task: str) -> Keys:
        """Which documents a task has; none if the cell does not have the task."""
        return self[task].keys if task in self else NO_KEYS


def _task(
    task: str,
    rows: Ints,
    keys: Keys,
    columns: Mapping[str, Floats],
    scores: Mapping[tuple[str, str], "MetricValue"],
    answers: "_AnswersOfFile",
) -> TaskDocuments:
    metrics = {}
    for name, column in columns.items():
        values = column[rows]
        if name.endswith(WEIGHT) or np.isnan(values).all():
            continue
        weights = shared(columns[name + WEIGHT][rows]) if name + WEIGHT in columns else _ones(len(rows))
        score = scores.get((task, name))
        known = (score.better, score.aggregation) if score else (None, "")
        metrics[name] = Values(shared(values), weights, *known)
    return TaskDocuments(task, keys, metrics, lambda: answers.get(task))


class _ByTask(dict[str, Answers]):
    """The answers of a file by task; a class of its own, so that it can be referred to weakly."""


@dataclass(frozen=True, eq=False)
class _AnswersOfFile:
    """The answers of all tasks of a file; read again if other cells were read since."""

    read: Callable[[], bytes]
    where: object
    rows: Mapping[str, Ints]

    def get(self, task: str) -> Answers:
        """Those of one task."""
        return KEPT.get(self, self._get, lambda found: sum(own.nbytes for own in found.values()))[task]

    def _get(self) -> _ByTask:
        table = read_columns(self.read(), self.where, ANSWERS)
        columns = [padded_lists(table[name]) for name in ANSWERS]
        return _ByTask({task: Answers(*(column[rows] for column in columns)) for task, rows in self.rows.items()})


def _rows(tasks: pa.ChunkedArray, ids: Ints) -> Iterator[tuple[str, Ints]]:
    """The rows of each task, in the order of ids."""
    encoded = one_array(tasks).dictionary_encode()
    codes = np.from_dlpack(encoded.indices)
    for code, name in enumerate(encoded.dictionary.to_pylist()):
        rows = np.flatnonzero(codes == code)
        yield name, rows[np.argsort(ids[rows], kind="stable")]


def _bytes(column: pa.ChunkedArray) -> NDArray[np.bytes_]:
    """A column of strings; without copies of Python strings if all have one length."""
    array = one_array(column)
    offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]
    lengths = np.diff(offsets)
    if not len(lengths) or not lengths[0] or (lengths != lengths[0]).any():
        return np.array([text.encode() for text in array.to_pylist()], dtype=np.bytes_)
    content = np.frombuffer(array.buffers()[2], np.uint8)[offsets[0] : offsets[-1]]
    return content.view(f"S{lengths[0]}")


_KEYS: "WeakValueDictionary[tuple[bytes, bytes], Keys]" = WeakValueDictionary()


def _keys(ids: Ints, contents: NDArray[np.bytes_]) -> Keys:
    """The same object for the same documents: cells of a folder share them, and what is computed of them.

    Without it, the summary of 500 cells takes 15.6 s instead of 10.5 s, and 577 MB instead of 408 MB.
    """
    return _KEYS.setdefault((ids.tobytes(), contents.tobytes()), Keys(ids, contents))


def _ones(count: int) -> Floats:
    return shared(np.ones(count))
