"""A cell in a run and in its baseline: their documents side by side, over the draws of calibration."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from qbench.records.documents import Keys, TaskDocuments, pairing
from qbench.records.samples import WEIGHT, Floats, Ints
from qbench.records.store import StoredRecord

GOLD_LOGPROB = "gold_logprob"  # the log-softmax of the right answer over the choices: a metric of ours

Pair = tuple[StoredRecord, StoredRecord]  # before, after


@dataclass(frozen=True)
class PairedDocuments:
    """The documents of one task in two records, or in those of several calibration draws, in the same order."""

    task: str
    ids: Ints  # [documents] as the second record counts them
    group: Ints  # [documents] equal for the same document, if it occurs more than once
    by_draw: dict[str, tuple[Floats, Floats]]  # [draws, documents] by column that both have: before and after
    same_calibration: bool  # before and after, in each draw: their draws are paired
    lost: tuple[str, ...] = ()  # columns that only the first record has
    gained: tuple[str, ...] = ()  # columns that only the second record has
    other_answers: int = 0  # documents whose choices or right answers differ

    @cached_property
    def values(self) -> dict[str, tuple[Floats, Floats]]:
        """[documents] by column: the means over draws, before and after."""
        with np.errstate(invalid="ignore"):
            return {name: (before.mean(axis=0), after.mean(axis=0)) for name, (before, after) in self.by_draw.items()}


@dataclass(frozen=True)
class OtherDocuments:
    """A task whose documents differ between two records."""

    task: str
    before: int
    after: int
    common: int
    between_draws: bool = False  # between calibration draws of the run, not between the run and its baseline


def draws_of_cells(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Pairs of records by the cell of the second, without its calibration draw."""
    cells: dict[tuple[str, str, str], list[Pair]] = {}
    for pair in pairs:
        cell = pair[1].record.cell
        cells.setdefault((cell.family, cell.attention, cell.label), []).append(pair)
    return list(cells.values())


def pair_documents(*pairs: Pair) -> Iterator[PairedDocuments | OtherDocuments]:
    """The documents of each task; pairs: one per calibration draw of a cell."""
    cells = [stored.documents for own in pairs for stored in own]
    names = [set.intersection(*(set(own.columns) for own in side)) for side in (cells[::2], cells[1::2])]
    lost, gained = (tuple(sorted(names[i] - names[1 - i])) for i in (0, 1))
    same_calibration = all(_calibration(one) == _calibration(two) for one, two in pairs)
    for task in dict.fromkeys(task for own in cells for task in own):
        paired = pairing([own.keys_of(task) for own in cells])
        if not paired.complete:
            yield _other_documents(task, [own.keys_of(task) for own in cells])
            continue
        own = paired.of([cell[task] for cell in cells])
        if own[0].keys.repeats:  # repetitions of a document next to each other
            together = np.argsort(own[0].keys.distinct, kind="stable")
            own = [documents.take(together) for documents in own]
        both = list(map(_columns, own))
        yield PairedDocuments(
            task=task,
            ids=own[1].keys.ids,
            group=own[1].keys.distinct,
            by_draw={
                name: (_stacked(name, both[::2]), _stacked(name, both[1::2]))
                for name in dict.fromkeys(name for columns in both for name in columns)
                if name == GOLD_LOGPROB or name in names[0] & names[1]
            },
            same_calibration=same_calibration,
            lost=lost,
            gained=gained,
            other_answers=int(np.logical_or.reduce([*map(_other_answers, own[::2], own[1::2])]).sum()),
        )


def _columns(own: TaskDocuments) -> dict[str, Floats]:
    """The values and weights of a task, by their names in samples.parquet; and GOLD_LOGPROB."""
    metrics = {name: values.values for name, values in own.metrics.items()}
    weights = {name + WEIGHT: values.weights for name, values in own.metrics.items()}
    return metrics | weights | {GOLD_LOGPROB: own.answers.logprobs}


def _stacked(name: str, columns: Sequence[dict[str, Floats]]) -> Floats:
    """[draws, documents]; NaN for a draw without the column."""
    count = len(columns[0][GOLD_LOGPROB])
    return np.stack([own.get(name, np.full(count, np.nan)) for own in columns])


def _calibration(stored: StoredRecord) -> str | None:
    return stored.record.identity.what.calibration


def _other_documents(task: str, keys: Sequence[Keys]) -> OtherDocuments:
    """How the documents differ between a run and its baseline, or between two draws of the run."""
    both = [(False, one, two) for one, two in zip(keys[::2], keys[1::2], strict=True)]
    for between_draws, one, two in [*both, *((True, keys[1], own) for own in keys[3::2])]:
        if not (found := pairing([one, two])).complete:
            return OtherDocuments(task, len(one), len(two), found.count, between_draws)
    raise AssertionError("the documents do not differ")


def _other_answers(before: TaskDocuments, after: TaskDocuments) -> np.ndarray:
    """Which documents have different choices or right answers."""
    then, now = before.answers, after.answers
    return differ(then.gold, now.gold) | differ(then.characters, now.characters)


def differ(before: Floats, after: Floats) -> np.ndarray:
    """Which rows of two padded arrays differ."""
    width = max(before.shape[1], after.shape[1])
    wide = [np.pad(a, ((0, 0), (0, width - a.shape[1])), constant_values=np.nan) for a in (before, after)]
    return ~((wide[0] == wide[1]) | (np.isnan(wide[0]) & np.isnan(wide[1]))).all(axis=1)
