"""Two folders of records joined cell by cell, by what the cells are; what cannot be joined is wrong input."""

from dataclasses import dataclass

from qbench.errors import InputError, some
from qbench.gate.pairing import OtherDocuments
from qbench.gate.settings import GateSettings
from qbench.records.schema import CellRef
from qbench.records.store import Results, StoredRecord

Key = tuple[str, str, str]


class CheckError(InputError):
    """A run and a baseline that cannot be held against each other, in a sentence."""


@dataclass(frozen=True)
class Joined:
    """The cells of a run beside those of its baseline."""

    pairs: tuple[tuple[StoredRecord, StoredRecord], ...]  # before, after: both done
    failed: tuple[tuple[StoredRecord, StoredRecord], ...]  # before, after: failed in the run
    missing: tuple[CellRef, ...]  # planned for the run, or in a baseline of as many cells


def join(run: Results, baseline: Results, settings: GateSettings) -> Joined:
    """Pair the records of two folders. The tasks of each pair are the same, or it is an error."""
    before, after = _by_cell(baseline), _by_cell(run)
    _check_baseline(baseline, run, before)
    if not after:
        raise CheckError(f"{run.folder} holds no record of its plan's cells; finish the run, then check it.")
    planned = dict.fromkeys([*after, *(_key(cell.cell) for cell in (*run.missing, *run.not_offered))])
    if unknown := [key for key in (*after, *(_key(cell.cell) for cell in run.missing)) if key not in before]:
        raise CheckError(
            f"{baseline.folder} is a baseline of another recipe: it has no {_some(unknown)}. "
            f"It has {_some(list(before))}. `qbench accept` renews it."
        )
    extra = [key for key in before if key not in planned]
    if extra and run.plan is not None and not settings.baseline_may_hold_more:
        raise CheckError(
            f"{baseline.folder} is a baseline of another recipe: it has {_some(extra)}, which is no part of the plan "
            f"of {run.folder}. If that is meant, set gate.baseline_may_hold_more in the recipe."
        )
    absent = [key for key in before if key not in after and (key in planned or not settings.baseline_may_hold_more)]
    both = [(before[key], stored) for key, stored in after.items()]
    pairs = [pair for pair in both if pair[1].record.state == "done"]
    for then, now in pairs:
        _check_tasks(then, now)
    return Joined(
        tuple(pairs),
        tuple(pair for pair in both if pair[1].record.state == "failed"),
        tuple(before[key].record.cell for key in absent),
    )


def check_documents(cell: CellRef, other: OtherDocuments) -> str:
    """A sentence for a failed check where some documents changed; an error where the runs are of other documents."""
    where = f"{cell.name}, {other.task}"
    if not other.common:
        raise CheckError(f"{where}: the run and the baseline have no document in common; they cannot be compared.")
    if other.before != other.after and other.common == min(other.before, other.after):
        raise CheckError(
            f"{where}: the run has {other.after} documents and the baseline {other.before}, of which "
            f"{other.common} are the same: one was run with --limit. Run both with the same documents."
        )
    return (
        f"{other.task}: the documents are not those of the baseline: {other.after} in the run, {other.before} in the "
        f"baseline, {other.common} in both. Its scores were not compared."
    )


def _check_baseline(baseline: Results, run: Results, before: dict[Key, StoredRecord]) -> None:
    if baseline.folder.resolve() == run.folder.resolve():
        raise CheckError(f"{run.folder} is the baseline itself; a run is checked against another folder.")
    if not before or baseline.missing:
        lacking = _some([_key(cell.cell) for cell in baseline.missing])
        raise CheckError(f"{baseline.folder} is no whole baseline: it lacks {lacking or 'all records'}.")
    if failed := [key for key, stored in before.items() if stored.record.state == "failed"]:
        raise CheckError(f"{baseline.folder} is no baseline: {_some(failed)} failed in it. Accept a run that is done.")


def _check_tasks(before: StoredRecord, after: StoredRecord) -> None:
    for stored in (before, after):
        if not stored.has_samples:
            raise CheckError(f"{stored.folder} has no per-document results (samples.parquet), which the gate compares.")
    then, now = ({m.task for m in stored.record.metrics} for stored in (before, after))
    if then != now:
        task = sorted(then ^ now)[0]
        has, lacks = (before, after) if task in then else (after, before)
        raise CheckError(
            f"The task {task} is in {has.folder} and not in {lacks.folder}: they are runs of different recipes. "
            "Run the same tasks, or renew the baseline with `qbench accept`."
        )


def _by_cell(results: Results) -> dict[Key, StoredRecord]:
    return {_key(stored.record.cell): stored for stored in results.current}


def _key(cell: CellRef) -> Key:
    # The checkpoint's own name may be a path of the machine; family and attention say which one it is.
    return cell.family, cell.attention, cell.label


def _some(keys: list[Key]) -> str:
    return some(["-".join(key) for key in keys])
