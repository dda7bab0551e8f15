"""The plan: every cell of a recipe with the state of its record. Does not import torch, so a plan takes a second."""

import contextlib
import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from qbench.checkpoint.fingerprint import IncompleteError, NotCachedError, NotFetchedError
from qbench.checkpoint.layout import CheckpointError
from qbench.errors import some
from qbench.evaluate.facts import TaskSummary
from qbench.files import shown_path
from qbench.identity import Identity, TaskIdentity
from qbench.quantizers.calibration import Calibration
from qbench.quantizers.options import NotOffered
from qbench.recipe.cells import UNCHANGED, Cell, analysis_cells, cells, map_cells, recipe_tasks
from qbench.recipe.check import did_you_mean_folder
from qbench.recipe.schema import Recipe
from qbench.recipe.yaml import RecipeError
from qbench.records.audit import UNQUANTIZED
from qbench.records.findings.record import altered
from qbench.records.schema import PlannedCell, Record, RunPlan
from qbench.records.store import RECORD, StoredRecord, StoreError, cell_folder, read_record
from qbench.report.remarks import calibration_text
from qbench.runner.heads import heads_to_draw
from qbench.runner.obstacles import doubt, missing_text, obstacle

MAX_NAMES = 10  # of cells, in an error


@dataclass(frozen=True)
class PlanEntry:
    """A cell, its identity, and its record if it has one."""

    cell: Cell
    identity: Identity | None  # None if the method lacks the width, or files are missing
    record: Record | None
    state: Literal["done", "stale", "failed", "to do", "cannot run", "not fetched", "not offered"]
    note: str = ""  # why it has this state
    doubt: str = ""  # why the checkpoint's scores may mislead

    @property
    def notes(self) -> list[str]:
        """The notes on this cell, one sentence each."""
        return [note for note in (self.note, self.doubt) if note]

    @property
    def key(self) -> str | None:
        """The key of the cell's valid record."""
        if self.record:
            return self.record.key
        return self.identity.key if self.identity else None


@dataclass(frozen=True)
class Plan:
    """The whole matrix with the state of each cell, and the records that belong to no cell of it."""

    recipe: Recipe
    out: Path
    entries: tuple[PlanEntry, ...]
    superseded: tuple[StoredRecord, ...]
    tasks: dict[str, TaskSummary]  # empty if one is not fetched

    @property
    def analyzes(self) -> bool:
        """Whether this is a plan of `qbench analyze`."""
        return any(entry.cell.ref.measured for entry in self.entries)

    def to_run_plan(self) -> RunPlan:
        """The content of run.json."""
        cells = [
            PlannedCell(
                cell=entry.cell.ref,
                key=entry.key,
                not_offered=entry.state == "not offered",
            )
            for entry in self.entries
        ]
        return RunPlan(recipe=self.recipe.file.name, resolved_recipe=self.recipe.content(), cells=tuple(cells))


def make_plan(recipe: Recipe, out: Path | None = None, *, reuse_stale: bool = False) -> Plan:
    """The state of every cell. reuse_stale: records made with other code or packages count as done."""
    try:
        tasks = recipe_tasks(recipe)
    except NotFetchedError:
        tasks = {}
    return _plan(recipe, out or recipe.out(), cells(recipe), tasks, reuse_stale)


def make_analysis_plan(recipe: Recipe, out: Path | None = None, *, reuse_stale: bool = False) -> Plan:
    """The same for `qbench analyze`. It has maps once their heads are known, which may need two variants' analyses."""
    plan = _plan(recipe, out or recipe.out(), analysis_cells(recipe), {}, reuse_stale)
    records = [entry.record for entry in plan.entries if entry.record and entry.record.analysis]
    analyses = [StoredRecord(record, cell_folder(plan.out, record.cell, record.key)) for record in records]
    maps = map_cells(recipe, heads_to_draw(recipe, analyses))
    return _plan(recipe, plan.out, [*(entry.cell for entry in plan.entries), *maps], {}, reuse_stale) if maps else plan


def _plan(recipe: Recipe, out: Path, wanted: Sequence[Cell], tasks: dict[str, TaskSummary], reuse_stale: bool) -> Plan:
    """Plan cells that are all scored or all analyzed; records of the other kind are ignored."""
    analyzes = any(cell.ref.measured for cell in wanted)
    stored = [found for found in stored_records(out) if bool(found.record.cell.measured) == analyzes]
    entries = tuple(_with_obstacles(_entry(cell, stored, reuse_stale)) for cell in wanted)
    current = {(entry.cell.ref.name, entry.key) for entry in entries}
    superseded = tuple(found for found in stored if (found.record.cell.name, found.record.key) not in current)
    return Plan(recipe, out, entries, superseded, tasks)


def _with_obstacles(entry: PlanEntry) -> PlanEntry:
    """The entry with what config.json says against the cell, and whether its calibration text is missing."""
    if entry.state == "cannot run":
        return entry
    reused = entry.state == "stale" and entry.record is not None
    to_run = entry.state in ("to do", "failed", "stale") and not reused
    if to_run and (why := obstacle(entry.cell)):
        return replace(entry, state="cannot run", note=why, record=None)
    if (to_run or entry.state == "not fetched") and (why := missing_text(entry.cell)):
        return replace(entry, state="not fetched", note=why, record=None)
    return replace(entry, doubt=doubt(entry.cell))


def cannot_be_analyzed(recipe: Recipe) -> dict[str, list[str]]:
    """The sensitivities of models that can run that cannot be measured, by why; a plan of scores does not have them."""
    found: dict[str, list[str]] = {}
    for cell in analysis_cells(recipe):
        can_load = not obstacle(replace(cell, quantization=UNCHANGED))
        if cell.ref.measured == "sensitivity" and can_load and (why := obstacle(cell)):
            found.setdefault(why, []).append(cell.ref.name)
    return found


def choose(entries: Sequence[PlanEntry], only: str | None) -> list[PlanEntry]:
    """The entries whose names match a pattern such as '*softpick*hqq*', or contain a string without wildcards."""
    if only is None:
        return list(entries)
    pattern = only if any(c in only for c in "*?[") else f"*{only}*"
    chosen = [entry for entry in entries if fnmatch.fnmatch(entry.cell.ref.name, pattern)]
    if not chosen:
        names = [entry.cell.ref.name for entry in entries]
        listed = len(names) > MAX_NAMES and not entries[0].cell.ref.measured  # a plan has no analyses
        more = " `qbench plan` lists all cells." if listed else ""
        raise RecipeError(f"No cell matches {only}; the cells are {some(names, MAX_NAMES)}.{more}")
    return chosen


def stored_records(out: Path) -> list[StoredRecord]:
    """The intact records in a folder; damaged and altered ones count as missing."""
    found = []
    for file in sorted(out.glob(f"*/{RECORD}")):
        with contextlib.suppress(StoreError):
            stored = StoredRecord(read_record(file), file.parent)
            if not altered(stored):
                found.append(stored)
    return found


def ignored(plan: Plan) -> str:
    """One line that says how many records in the folder are ignored, and why; empty if none are."""
    identities = {entry.cell.ref.name: entry.identity for entry in plan.entries}
    reasons = Counter(_why_ignored(stored.record, identities) for stored in plan.superseded)
    return f"ignored records: {', '.join(f'{n} {why}' for why, n in reasons.most_common())}" if reasons else ""


def settings(plan: Plan) -> list[str]:
    """What cells run on and are calibrated on, a line each: a recipe need not say it."""
    recipe, calibrated = plan.recipe, any(entry.cell.calibration for entry in plan.entries)
    return settings_lines(recipe.resolved_device, recipe.resolved_dtype, recipe.calibration if calibrated else None)


def settings_lines(device: str, dtype: str, calibration: Calibration | None) -> list[str]:
    """The same for one device and text, which `qbench quantize` prints too."""
    text = [calibration_text(calibration.model_dump(), calibration.seeds)] if calibration else []
    return [f"device: {device}, {dtype}", *(f"calibration text: {own}" for own in text)]


def no_baseline(plan: Plan) -> str:
    """A warning if no cell is unquantized; empty if one is."""
    if plan.analyzes or any(entry.cell.ref.label == UNQUANTIZED for entry in plan.entries):
        return ""
    return "warning: the recipe has no `method: none`; summary, headline and damage tables need unquantized cells"


def _why_ignored(record: Record, identities: Mapping[str, Identity | None]) -> str:
    if record.cell.name not in identities:
        return "of cells that are not in the recipe"
    now = identities[record.cell.name]
    if now is None:
        return "of cells that are not fetched or not offered"
    then = record.identity.what
    other = [part for part in sorted(type(then).model_fields) if getattr(then, part) != getattr(now.what, part)]
    if not other:
        return "with different code or packages"
    named = [f"tasks{_other_tasks(then.tasks, now.what.tasks)}" if part == "tasks" else part for part in other]
    return f"with different {', '.join(named)}"


def _other_tasks(then: Mapping[str, TaskIdentity], now: Mapping[str, TaskIdentity]) -> str:
    """Which tasks differ, unless all do."""
    names = sorted(then.keys() | now.keys())
    other = [name for name in names if then.get(name) != now.get(name)]
    return f" ({', '.join(other)})" if len(other) < len(names) else ""


def _entry(cell: Cell, stored: list[StoredRecord], reuse_stale: bool) -> PlanEntry:
    if isinstance(cell.quantization, NotOffered):
        return PlanEntry(cell, None, None, "not offered", str(cell.quantization))
    try:
        identity = cell.identity()
    except (IncompleteError, CheckpointError) as error:
        return PlanEntry(cell, None, None, "cannot run", str(error))
    except NotFetchedError as error:
        return PlanEntry(cell, None, None, "not fetched", f"{error}{_where_looked(error, cell.recipe)}")
    # By name: the checkpoint's path may be written differently, and two families may share a checkpoint.
    named = [s.record for s in stored if s.record.cell.name == cell.ref.name]
    own = [record for record in named if record.identity.what_key == identity.what_key]
    exact = next((record for record in own if record.key == identity.key), None)
    if exact:
        if exact.failure:
            return PlanEntry(cell, identity, exact, "failed", exact.failure.reason)
        return PlanEntry(cell, identity, exact, "done")
    stale = max((r for r in own if r.state == "done"), key=lambda r: r.provenance.finished, default=None)
    if stale is None:
        return PlanEntry(cell, identity, None, "to do")
    return PlanEntry(cell, identity, stale if reuse_stale else None, "stale", _what_changed(stale.identity, identity))


def _where_looked(error: NotFetchedError, recipe: Recipe) -> str:
    if not isinstance(error, NotCachedError):
        return ""
    looked = shown_path(recipe.file.parent / error.name)
    near = did_you_mean_folder(error.name, recipe)
    return f" Paths are relative to the recipe's folder, and {looked} does not exist.{near}"


def _what_changed(old: Identity, new: Identity) -> str:
    names = sorted(old.packages.keys() | new.packages.keys())
    moved = [
        f"{name} {old.packages.get(name)} → {new.packages.get(name)}"
        for name in names
        if old.packages.get(name) != new.packages.get(name)
    ]
    return "computed with " + ", ".join((["different qbench code"] if old.code != new.code else []) + moved)
