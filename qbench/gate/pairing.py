"""A run beside its baseline: the folders, their cells by what they are, and the documents of each pair of cells."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from qbench.errors import InputError, some
from qbench.gate.settings import GateSettings
from qbench.records.samples import (
    Floats,
    Ints,
    as_floats,
    gold_logprobs,
    metric_columns,
    one_array,
    padded_lists,
    rows_of_tasks,
)
from qbench.records.schema import CellRef
from qbench.records.store import RECORD, Results, StoredRecord, read_results

GOLD_LOGPROB = "gold_logprob"  # the log-softmax of the right answer over the choices: a metric of ours

Key = tuple[str, str, str]


class CheckError(InputError):
    """A run and a baseline that cannot be compared, in a sentence."""


@dataclass(frozen=True)
class PairedDocuments:
    """The documents of one task in two records, in one order."""

    task: str
    ids: Ints  # [documents] as the second record counts them
    group: Ints  # [documents] which are the same document, where one occurs more than once
    values: dict[str, tuple[Floats, Floats]]  # by column that both have: before and after
    lost: tuple[str, ...] = ()  # columns that only the first record has
    gained: tuple[str, ...] = ()  # columns that only the second record has
    other_answers: int = 0  # documents whose choices or right answers are not the same


@dataclass(frozen=True)
class OtherDocuments:
    """A task whose documents are not the same in two records."""

    task: str
    before: int
    after: int
    common: int


@dataclass(frozen=True)
class Joined:
    """The cells of a run beside those of its baseline."""

    pairs: tuple[tuple[StoredRecord, StoredRecord], ...]  # before, after: both done
    failed: tuple[tuple[StoredRecord, StoredRecord], ...]  # before, after: failed in the run
    missing: tuple[CellRef, ...]  # planned for the run, or in a baseline of as many cells


def read_baseline(folder: Path, run: Path) -> Results:
    """The baseline's records; if there is no such folder, the error has the name of a similar one."""
    if not folder.exists() and (meant := similar_folder(folder, run)):
        raise CheckError(f"There is no folder {folder}. Did you mean {meant}?")
    return read_results(folder)


def similar_folder(folder: Path, run: Path) -> Path | None:
    """The folder of records beside this one whose name is nearest to its name; not the run itself."""
    if not folder.parent.is_dir():
        return None
    shown = [found for found in sorted(folder.parent.iterdir()) if not found.name.startswith(".")]
    beside = [found for found in shown if holds_records(found) and found.resolve() != run.resolve()]
    near = difflib.get_close_matches(folder.name, [found.name for found in beside], n=1)
    return folder.with_name(near[0]) if near else None


def holds_records(folder: Path) -> bool:
    """Whether there is a record of a cell."""
    return any(folder.glob(f"*/{RECORD}"))


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
            f"{baseline.folder} is a baseline of another recipe: it has {_some(extra)}, which is not part of the plan "
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


def check_documents(cell: CellRef, other: OtherDocuments, same_task: bool) -> str:
    """A sentence for a failed check if some documents changed; an error if the runs are of other documents.

    same_task: both runs planned the same documents, so that a part of them was removed and not left out by --limit.
    """
    where = f"{cell.name}, {other.task}"
    if not other.common:
        raise CheckError(f"{where}: the run and the baseline have no document in common; they cannot be compared.")
    if not same_task and other.before != other.after and other.common == min(other.before, other.after):
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
        raise CheckError(f"{baseline.folder} is not a whole baseline: it lacks {lacking or 'all records'}.")
    if failed := [key for key, stored in before.items() if stored.record.state == "failed"]:
        raise CheckError(
            f"{baseline.folder} is not a baseline: {_some(failed)} failed in it. Accept a run that is done."
        )


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


def pair_documents(before: StoredRecord, after: StoredRecord) -> Iterator[PairedDocuments | OtherDocuments]:
    """The documents of each task, paired by content."""
    tables = [before.table, after.table]
    codes = _codes(tables)
    values = [metric_columns(table) | {GOLD_LOGPROB: gold_logprobs(table)} for table in tables]
    answers = [[padded_lists(table[name]) for name in ("gold", "characters")] for table in tables]
    rows = [rows_of_tasks(table) for table in tables]
    ids = as_floats(tables[1]["doc_id"]).astype(np.int64)
    none = np.empty(0, dtype=np.int64)
    lost, gained = (tuple(sorted(set(values[i]) - set(values[1 - i]))) for i in (0, 1))
    for task in dict.fromkeys([*rows[0], *rows[1]]):
        order = [_by_content(own.get(task, none), code) for own, code in zip(rows, codes, strict=True)]
        contents = [code[own] for own, code in zip(order, codes, strict=True)]
        if not np.array_equal(contents[0], contents[1]):
            yield OtherDocuments(task, len(contents[0]), len(contents[1]), _common(*contents))
            continue
        group = np.cumsum(np.diff(contents[0], prepend=contents[0][:1]) != 0)
        both = {name: (values[0][name][order[0]], values[1][name][order[1]]) for name in values[0] if name in values[1]}
        others = np.logical_or.reduce([_differ(a[order[0]], b[order[1]]) for a, b in zip(*answers, strict=True)])
        yield PairedDocuments(task, ids[order[1]], group, both, lost, gained, int(others.sum()))


def _by_content(rows: Ints, codes: Ints) -> Ints:
    """The rows in the order of what stands for their contents."""
    return rows[np.argsort(codes[rows], kind="stable")]


def _differ(before: Floats, after: Floats) -> np.ndarray:
    """Which rows of two padded arrays are not the same."""
    width = max(before.shape[1], after.shape[1])
    wide = [np.pad(a, ((0, 0), (0, width - a.shape[1])), constant_values=np.nan) for a in (before, after)]
    return ~((wide[0] == wide[1]) | (np.isnan(wide[0]) & np.isnan(wide[1]))).all(axis=1)


def _codes(tables: list[pa.Table]) -> list[Ints]:
    """For each table, one number per row that stands for the document's content."""
    hashes = [table["doc_hash"] for table in tables]
    if hashes[0].equals(hashes[1]):
        return [_encoded(one_array(hashes[0]))] * 2
    both = pa.concat_arrays([one_array(column) for column in hashes])
    return np.split(_encoded(both), [len(tables[0])])


def _common(before: Ints, after: Ints) -> int:
    """How many documents two runs share; one that occurs twice in both counts twice."""
    size = 1 + max(before.max(initial=0), after.max(initial=0))
    return int(np.minimum(np.bincount(before, minlength=size), np.bincount(after, minlength=size)).sum())


def _encoded(strings: pa.Array) -> Ints:
    return np.asarray(np.from_dlpack(strings.dictionary_encode().indices), dtype=np.int64)
