"""A run joined with its baseline: the folders and their cells."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qbench.errors import InputError, closest, some
from qbench.gate.settings import GateSettings
from qbench.numbers import counted
from qbench.records.paired import OtherDocuments, Pair, draws_of_cells
from qbench.records.schema import CellRef
from qbench.records.store import Results, StoredRecord, holds_records, read_results

Key = tuple[str, str, str, int | None]


class CheckError(InputError):
    """Why a run and a baseline cannot be compared, in a sentence."""


class NoBaselineError(CheckError):
    """There is no baseline yet; the sentence says how to make one."""


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


def join(run: Results, baseline: Results, settings: GateSettings) -> Joined:
    """Pair the records of two folders. It is an error if the tasks of all pairs differ."""
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
    _check_tasks(run, baseline, pairs)
    return Joined(
        tuple(pairs),
        tuple(pair for pair in both if pair[1].record.state == "failed"),
        tuple(before[key].record.cell for key in absent),
        tuple(new),
        tuple(before[key].record.cell for key in dropped),
    )


def check_other_documents(cell: CellRef, other: OtherDocuments, pair: Pair) -> None:
    """Raise an error if a run and its baseline were made on different documents, rather than some were lost."""
    if other.between_draws:
        return
    where = f"{cell.name}, {other.task}"
    if not other.common:
        raise CheckError(f"{where}: the run and the baseline have no document in common; they cannot be compared.")
    then, now = (stored.record.identity.what.tasks.get(other.task) for stored in pair)
    planned_alike = then is not None and then == now  # then missing documents were not left out by --limit
    if not planned_alike and other.before != other.after and other.common == min(other.before, other.after):
        raise CheckError(
            f"{where}: the run has {other.after} documents and the baseline {other.before}, of which "
            f"{other.common} are the same: one was run with --limit. Run both with the same documents."
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


def _check_tasks(run: Results, baseline: Results, pairs: Sequence[Pair]) -> None:
    """An error if no pair has documents, or the same tasks: then they are runs of different recipes."""
    for stored in (own for pair in pairs for own in pair):
        if not stored.has_samples:
            raise CheckError(f"{stored.folder} has no per-document results (samples.parquet), which the gate needs.")
    tasks = [[{metric.task for metric in stored.record.metrics} for stored in pair] for pair in pairs]
    if tasks and all(then != now for then, now in tasks):
        then, now = tasks[0]
        task = sorted(then ^ now)[0]
        has, lacks = (baseline, run) if task in then else (run, baseline)
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
