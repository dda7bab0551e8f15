"""Recipe: checkpoints × quantizations × tasks, and how to run them; Cell: one checkpoint × one quantization; plan().

Imports no torch: a plan takes a second.
"""

import contextlib
import fnmatch
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from qbench import fingerprints
from qbench.errors import InputError
from qbench.fingerprints import NotCachedError, NotFetchedError
from qbench.integrity import altered
from qbench.quantize.options import NotOffered, Quantization, offered, quantization
from qbench.recipe_check import check_recipe, did_you_mean_folder
from qbench.recipe_errors import as_sentence
from qbench.recipe_file import RecipeError, RecipeFile, is_task_path, read_recipe_file
from qbench.recipe_schema import CheckpointSource, Recipe, fields_at
from qbench.store import (
    RECORD,
    CellRef,
    Identity,
    PlannedCell,
    Record,
    RunPlan,
    StoredRecord,
    StoreError,
    read_record,
)

# LLM.int8's scores depend on what else is in a batch, so its budget is fixed: the recipe's, or this one.
INT8_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Cell:
    """One checkpoint × one quantization, on all of the recipe's tasks."""

    recipe: Recipe
    ref: CellRef
    source: CheckpointSource
    quantization: Quantization | NotOffered

    @property
    def location(self) -> str:
        """The checkpoint's folder, or its id on the hub."""
        return self.recipe.locate(self.source.path)

    @property
    def tokenizer(self) -> str:
        """The folder or hub id of the tokenizer: the checkpoint's own, unless the recipe names another."""
        own = self.source.tokenizer or self.recipe.tokenizer
        return self.recipe.locate(own) if own else self.location

    @property
    def batch_tokens(self) -> int | None:
        """The token budget of a batch; None: by free memory."""
        pools = (self.ref.method, self.ref.bits) == ("bnb", 8)
        return self.recipe.batch_tokens or (INT8_BATCH_TOKENS if pools else None)

    def identity(self) -> Identity:
        """All that can change the numbers; NotFetchedError where a part of it is not on this machine."""
        recipe, quantized = self.recipe, self.quantization
        assert isinstance(quantized, Quantization)
        calibration = recipe.calibration_source() if self.ref.method == "gptq" else None
        tasks = recipe_tasks(recipe)
        what = {
            "checkpoint": fingerprints.checkpoint_fingerprint(self.location, self.source.revision),
            "tokenizer": fingerprints.tokenizer_fingerprint(self.tokenizer, self.tokenizer_revision),
            "attention": self.ref.attention,
            "method": quantized.method,
            "bits": quantized.bits,
            "options": quantized.options.model_dump(),
            "calibration": calibration and calibration.content_hash(),
            "tasks": {name: [facts["fingerprint"], facts["num_fewshot"]] for name, facts in tasks.items()},
            "dtype": recipe.resolved_dtype,
            "execution": recipe.execution,
            "device": recipe.resolved_device,
            "max_length": recipe.max_length,
            "seed": recipe.seed,
            # LLM.int8 alone pools outliers over a batch, whose rows are those of all tasks.
            "batch_tokens": self.batch_tokens if (quantized.method, quantized.bits) == ("bnb", 8) else None,
        }
        return Identity(what=what, code=fingerprints.code_hash(), packages=fingerprints.package_versions())

    @property
    def tokenizer_revision(self) -> str | None:
        """The revision that belongs to the tokenizer: the checkpoint's, where it is the checkpoint's own."""
        return self.source.revision if self.tokenizer == self.location else None


@dataclass(frozen=True)
class PlanEntry:
    """A cell, its identity, and the record that it has, if any."""

    cell: Cell
    identity: Identity | None  # None where the method lacks the width, or something is not fetched
    record: Record | None
    state: Literal["done", "stale", "failed", "to do", "not fetched", "not offered"]
    note: str = ""

    @property
    def key(self) -> str | None:
        """The key of the record that counts."""
        if self.record:
            return self.record.key
        return self.identity.key if self.identity else None


@dataclass(frozen=True)
class Plan:
    """The whole matrix with the state of each cell, and records that belong to no cell of it."""

    recipe: Recipe
    out: Path
    entries: tuple[PlanEntry, ...]
    superseded: tuple[StoredRecord, ...]
    tasks: dict[str, dict[str, Any]]  # of each task: documents, requests, characters; empty where not fetched

    def run_plan(self) -> RunPlan:
        """What run.json says."""
        cells = [
            PlannedCell(
                cell=entry.cell.ref,
                key=entry.key,
                not_offered=entry.state == "not offered",
            )
            for entry in self.entries
        ]
        return RunPlan(recipe=self.recipe.file.name, resolved_recipe=self.recipe.content(), cells=tuple(cells))


def load_recipe(file: Path | str, **changes: Any) -> Recipe:
    """Read and check a recipe; changes: fields given on the command line, which win."""
    read = read_recipe_file(Path(file))
    content = read.content | {name: value for name, value in changes.items() if value is not None}
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        raise as_sentence(read, error, fields_at) from None
    recipe._file = read
    recipe = recipe.model_copy(update={"data": _data_for_tasks(recipe, read)})
    if changes.get("limit"):  # a limit on the command line is for all tasks, whatever the recipe says
        tasks = {name: task.model_copy(update={"limit": None}) for name, task in recipe.tasks.items()}
        recipe = recipe.model_copy(update={"tasks": tasks})
    check_recipe(recipe, read)
    return recipe


def _data_for_tasks(recipe: Recipe, read: RecipeFile) -> dict[str, Any]:
    """The data, without what an extended recipe has for tasks that this one leaves out."""
    if any(map(is_task_path, recipe.tasks)):  # which tasks these are is not known yet
        return recipe.data
    own = {name for name in recipe.data if read.lines[("data", name)][0] == read.file}
    return {name: files for name, files in recipe.data.items() if name in recipe.tasks or name in own}


def cells(recipe: Recipe) -> list[Cell]:
    """Every cell, family by family and quantization by quantization, twins side by side."""
    found = []
    for family, twins in recipe.checkpoints.items():
        for quantized in _quantizations(recipe):
            for attention, source in twins.items():
                ref = CellRef(
                    family=family,
                    attention=attention,
                    checkpoint=source.path,
                    method=quantized.method,
                    bits=quantized.bits,
                    label=quantized.label,
                )
                found.append(Cell(recipe, ref, source, quantized))
    return found


def plan(recipe: Recipe, out: Path | None = None, *, reuse_stale: bool = False) -> Plan:
    """The state of every cell in the folder; reuse_stale: records of older code or packages count as done."""
    out = out or recipe.out()
    stored = stored_records(out)
    try:
        tasks = recipe_tasks(recipe)
    except NotFetchedError:
        tasks = {}
    entries = tuple(_entry(cell, stored, reuse_stale) for cell in cells(recipe))
    current = {(entry.cell.ref.name, entry.key) for entry in entries}
    superseded = tuple(found for found in stored if (found.record.cell.name, found.record.key) not in current)
    return Plan(recipe, out, entries, superseded, tasks)


def choose(entries: Sequence[PlanEntry], only: str | None) -> list[PlanEntry]:
    """The entries whose names match a pattern such as '*softpick*hqq*'; a plain text may stand anywhere in the name."""
    if only is None:
        return list(entries)
    pattern = only if any(c in only for c in "*?[") else f"*{only}*"
    chosen = [entry for entry in entries if fnmatch.fnmatch(entry.cell.ref.name, pattern)]
    if not chosen:
        names = ", ".join(entry.cell.ref.name for entry in entries)
        raise RecipeError(f"--only {only} matches no cell; the cells are {names}.")
    return chosen


def stored_records(out: Path) -> list[StoredRecord]:
    """The records in a folder that are whole; what is damaged or altered is as good as not there."""
    found = []
    for file in sorted(out.glob(f"*/{RECORD}")):
        with contextlib.suppress(StoreError):
            stored = StoredRecord(read_record(file), file.parent)
            if not altered(stored):
                found.append(stored)
    return found


def ignored(planned: Plan) -> str:
    """How many records in the folder do not count, and why, on one line; empty where all of them do."""
    identities = {entry.cell.ref.name: entry.identity for entry in planned.entries}
    reasons = Counter(_why_ignored(stored.record, identities) for stored in planned.superseded)
    return f"ignored records: {', '.join(f'{n} {why}' for why, n in reasons.most_common())}" if reasons else ""


def _why_ignored(record: Record, identities: Mapping[str, Identity | None]) -> str:
    if record.cell.name not in identities:
        return "of cells that the recipe does not have"
    now = identities[record.cell.name]
    if now is None:
        return "of cells that are not fetched or not offered"
    then, parts = record.identity.what, sorted(record.identity.what.keys() | now.what.keys())
    other = [part for part in parts if then.get(part) != now.what.get(part)]
    if not other:
        return "of other code or packages"
    named = [f"tasks{_other_tasks(then['tasks'], now.what['tasks'])}" if part == "tasks" else part for part in other]
    return f"of another state of {', '.join(named)} than the recipe's"


def _other_tasks(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Which tasks are not the same, unless none is."""
    names = sorted(then.keys() | now.keys())
    other = [name for name in names if then.get(name) != now.get(name)]
    return f" ({', '.join(other)})" if len(other) < len(names) else ""


def recipe_tasks(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Facts of the recipe's tasks: fingerprints and sizes; NotFetchedError where a dataset is not on this machine."""
    try:
        return fingerprints.task_facts(
            recipe.task_names(),
            data=recipe.task_data(),
            folders=[recipe.locate(folder) for folder in recipe.task_folders],
            num_fewshot=recipe.shots(),
            limits=recipe.limits,
            seed=recipe.seed,
        )
    except (NotFetchedError, RecipeError):
        raise
    except InputError as error:  # a task that is not known, or whose data do not fit
        raise recipe._file.error(("tasks",), str(error)) from error


def _entry(cell: Cell, stored: list[StoredRecord], reuse_stale: bool) -> PlanEntry:
    if isinstance(cell.quantization, NotOffered):
        return PlanEntry(cell, None, None, "not offered", str(cell.quantization))
    try:
        identity = cell.identity()
    except NotFetchedError as error:
        return PlanEntry(cell, None, None, "not fetched", f"{error}{_where_looked(error, cell.recipe)}")
    # By the name: the checkpoint may be spelt in another way, and two families may have the same one.
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
    looked = recipe.file.parent / error.name
    near = did_you_mean_folder(error.name, recipe)
    return f" Paths are relative to the recipe's folder, and there is no folder {looked}.{near}"


def _what_changed(old: Identity, new: Identity) -> str:
    names = sorted(old.packages.keys() | new.packages.keys())
    moved = [
        f"{name} {old.packages.get(name)} → {new.packages.get(name)}"
        for name in names
        if old.packages.get(name) != new.packages.get(name)
    ]
    return "computed with " + ", ".join((["other code of qbench"] if old.code != new.code else []) + moved)


def _quantizations(recipe: Recipe) -> Iterator[Quantization | NotOffered]:
    for entry in recipe.quantizations:
        for bits in entry.widths:
            options = entry.options | entry.options_by_bits.get(bits, {})
            yield offered(entry.method, bits) or quantization(entry.method, bits, **options)
