"""A run paired with its baseline: the folders, their cells, and the documents of each pair of cells."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from qbench.errors import InputError, closest, some
from qbench.gate.settings import GateSettings
from qbench.numbers import counted
from qbench.records.documents import Keys, TaskDocuments, pairing
from qbench.records.samples import WEIGHT, Floats, Ints
from qbench.records.schema import CellRef
from qbench.records.store import RECORD, Results, StoredRecord, read_results

GOLD_LOGPROB = "gold_logprob"  # the log-softmax of the right answer over the choices: a metric of ours

Key = tuple[str, str, str, int | None]
Pair = tuple[StoredRecord, StoredRecord]  # before, after


class CheckError(InputError):
    """Why a run and a baseline cannot be compared, in a sentence."""


class NoBaselineError(CheckError):
    """There is no baseline yet; the sentence says how to make one."""


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


@dataclass(frozen=True)
class Joined:
    """The cells of a run paired with those of its baseline."""

    pairs: tuple[Pair, ...]  # both done
    failed: tuple[Pair, ...]  # failed in the run
    missing: tuple[CellRef, ...]  # planned for the run, or in a baseline that must match it
    new: tuple[CellRef, ...] = ()  # of the run's recipe, and not in the baseline
    dropped: tuple[CellRef, ...] = ()  # of the baseline, and no longer in the run's recipe

    @property
    def by_cell(self) -> list[list[Pair]]:
        """The pairs of each cell: one, or one per draw of calibration."""
        return draws_of_cells(self.pairs)


def read_baseline(folder: Path, run: Path) -> Results:
    """The baseline's records; if there are none, the error suggests a similar name, or says how to make them."""
    if not folder.exists() and (meant := similar_folder(folder, run)):
        raise CheckError(f"{folder} does not exist. Did you mean {meant}?")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        command = shlex.join(["qbench", "accept", str(run), "--baseline", str(folder), "--reason", "first baseline"])
        what = "contains no records" if folder.exists() else "does not exist"
        raise NoBaselineError(f"{folder} {what}, so there is no baseline. To make this run the baseline: {command}")
    return read_results(folder)


def similar_folder(folder: Path, run: Path) -> Path | None:
    """The sibling folder of records with the most similar name; not the run itself."""
    if not folder.parent.is_dir():
        return None
    shown = [found for found in sorted(folder.parent.iterdir()) if not found.name.startswith(".")]
    beside = [found for found in shown if holds_records(found) and found.resolve() != run.resolve()]
    near = closest(folder.name, [found.name for found in beside])
    return folder.with_name(near) if near else None


def holds_records(folder: Path) -> bool:
    """Whether the folder has a record of a cell."""
    return any(folder.glob(f"*/{RECORD}"))


def draws_of_cells(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Pairs of records by the cell of the second, without its calibration draw."""
    cells: dict[tuple[str, str, str], list[Pair]] = {}
    for pair in pairs:
        cell = pair[1].record.cell
        cells.setdefault((cell.family, cell.attention, cell.label), []).append(pair)
    return list(cells.values())


def join(run: Results, baseline: Results, settings: GateSettings) -> Joined:
    """Pair the records of two folders. It is an error if the tasks of a pair differ."""
    before, after = _by_cell(baseline), _by_cell(run)
    _check_baseline(baseline, run, before)
    if not after:
        raise CheckError(f"{run.folder} has no record of any planned cell; finish the run, then check it.")
    planned = dict.fromkeys([*after, *(_key(cell.cell) for cell in (*run.missing, *run.not_offered))])
    _check_draws(run, baseline, list(planned), list(before), settings)
    wanted = [*(stored.record.cell for stored in run.current), *(cell.cell for cell in run.missing)]
    new = [cell for cell in wanted if _key(cell) not in before]
    if not any(key in before for key in after):
        raise CheckError(
            f"{run.folder} and {baseline.folder} have no cell in common: the run has {_some(list(after))}, and "
            f"the baseline {_some(list(before))}. Give a run and a baseline of the same recipe; if the run's cells are "
            "intended, update the baseline with `qbench accept`. For lm-eval's output, compare folders with one model "
            "each."
        )
    extra = [key for key in before if key not in planned]
    dropped = extra if run.plan is not None and not settings.baseline_may_hold_more else []
    absent = [
        key
        for key in before
        if key not in after and key not in dropped and (key in planned or not settings.baseline_may_hold_more)
    ]
    both = [(before[key], stored) for key, stored in after.items() if key in before]
    pairs = [pair for pair in both if pair[1].record.state == "done"]
    for then, now in pairs:
        _check_tasks(then, now)
    return Joined(
        tuple(pairs),
        tuple(pair for pair in both if pair[1].record.state == "failed"),
        tuple(before[key].record.cell for key in absent),
        tuple(new),
        tuple(before[key].record.cell for key in dropped),
    )


def check_documents(cell: CellRef, other: OtherDocuments, same_task: bool) -> str:
    """A sentence for a failed check if some documents changed; raises if the runs were made on different documents.

    same_task: both runs planned the same documents, so missing ones were removed, not left out by --limit.
    """
    where = f"{cell.name}, {other.task}"
    if other.between_draws:
        return (
            f"{other.task}: the calibration draws did not see the same documents: {other.before} in one, {other.after} "
            f"in another, {other.common} in both. Its scores were not compared."
        )
    if not other.common:
        raise CheckError(f"{where}: the run and the baseline have no document in common; they cannot be compared.")
    if not same_task and other.before != other.after and other.common == min(other.before, other.after):
        raise CheckError(
            f"{where}: the run has {other.after} documents and the baseline {other.before}, of which "
            f"{other.common} are the same: one was run with --limit. Run both with the same documents."
        )
    return (
        f"{other.task}: the documents differ from the baseline's: {other.after} in the run, {other.before} in the "
        f"baseline, {other.common} in both. Its scores were not compared."
    )


def _check_draws(
    run: Results, baseline: Results, planned: Sequence[Key], before: Sequence[Key], settings: GateSettings
) -> None:
    """An error if a cell's calibration draws differ from the baseline's, unless the baseline may hold more of them."""
    for cell in dict.fromkeys(key[:3] for key in planned):
        then, now = ({key[3] for key in keys if key[:3] == cell} for keys in (before, planned))
        if not then or now == then or (settings.baseline_may_hold_more and now < then):
            continue
        raise CheckError(
            f"{'-'.join(cell)} has {counted(len(now), 'calibration draw')} in {run.folder} and "
            f"{counted(len(then), 'draw')} in the baseline {baseline.folder}; both must have the same draws. "
            f"Set calibration.seeds in the recipe to {len(then)}, or update the baseline with `qbench accept`."
        )


def _check_baseline(baseline: Results, run: Results, before: dict[Key, StoredRecord]) -> None:
    if baseline.folder.resolve() == run.folder.resolve():
        raise CheckError(f"{run.folder} is the baseline itself; compare the run with another folder.")
    if not before or baseline.missing:
        lacking = _some([_key(cell.cell) for cell in baseline.missing])
        raise CheckError(f"{baseline.folder} is an incomplete baseline: it lacks {lacking or 'all records'}.")
    if failed := [key for key, stored in before.items() if stored.record.state == "failed"]:
        raise CheckError(
            f"{baseline.folder} is not a valid baseline: {_some(failed)} failed in it. Accept a finished run."
        )


def _check_tasks(before: StoredRecord, after: StoredRecord) -> None:
    for stored in (before, after):
        if not stored.has_samples:
            raise CheckError(f"{stored.folder} has no per-document results (samples.parquet), which the gate needs.")
    then, now = ({m.task for m in stored.record.metrics} for stored in (before, after))
    if then != now:
        task = sorted(then ^ now)[0]
        has, lacks = (before, after) if task in then else (after, before)
        raise CheckError(
            f"The task {task} is in {has.folder} but not in {lacks.folder}: they are runs of different recipes. "
            "Run the same tasks, or update the baseline with `qbench accept`."
        )


def _by_cell(results: Results) -> dict[Key, StoredRecord]:
    return {_key(stored.record.cell): stored for stored in results.current}


def _key(cell: CellRef) -> Key:
    # The checkpoint's name may be a local path; family and attention identify it.
    return cell.family, cell.attention, cell.label, cell.draw


def _some(keys: list[Key]) -> str:
    return some(["-".join(key[:3]) + (f"-draw-{key[3]}" if key[3] else "") for key in keys])


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
        own = [cell[task].take(rows) for cell, rows in zip(cells, paired.rows, strict=True)]
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
    return _differ(then.gold, now.gold) | _differ(then.characters, now.characters)


def _differ(before: Floats, after: Floats) -> np.ndarray:
    """Which rows of two padded arrays differ."""
    width = max(before.shape[1], after.shape[1])
    wide = [np.pad(a, ((0, 0), (0, width - a.shape[1])), constant_values=np.nan) for a in (before, after)]
    return ~((wide[0] == wide[1]) | (np.isnan(wide[0]) & np.isnan(wide[1]))).all(axis=1)
