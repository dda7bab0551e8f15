"""Recipe: checkpoints × quantizations × tasks, and how to run them; Cell: one checkpoint × one quantization; plan().

Imports no torch: a plan takes a second.
"""

import fnmatch
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator

from qbench import fingerprints
from qbench.errors import InputError, did_you_mean
from qbench.fingerprints import NotFetchedError
from qbench.quantize.calibration import Calibration
from qbench.quantize.options import NotOffered, Quantization, QuantizeError, offered, quantization
from qbench.recipe_file import Field as Where
from qbench.recipe_file import RecipeError, RecipeFile, is_path, read_recipe_file
from qbench.store import CellRef, Identity, PlannedCell, Record, RunPlan, StoredRecord

ATTENTION = ("softmax", "softpick")
# LLM.int8's scores depend on what else is in a batch, so its budget is fixed: the recipe's, or this one.
INT8_BATCH_TOKENS = 4096


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class CheckpointSource(_Part):
    """A model on disk or on the hub; a text alone is its path."""

    path: str = Field(min_length=1)  # a folder, relative to the recipe, or owner/name on the hub
    revision: str | None = None  # a branch, tag or commit on the hub
    tokenizer: str | None = None  # where it is not beside the model


class QuantizationEntry(_Part):
    """A method at one or several widths; options for all of them, and for single widths."""

    method: str
    bits: tuple[int, ...] = ()
    options: dict[str, Any] = {}
    options_by_bits: dict[int, dict[str, Any]] = {}

    @field_validator("bits", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, int) else value


class TaskSettings(_Part):
    """How one task is run; what is not given here is the recipe's, or lm-eval's own."""

    num_fewshot: int | None = Field(None, ge=0)
    limit: int | None = Field(None, ge=1)
    data: str | dict[str, str] | None = None  # a .jsonl file, or one a split


class Recipe(_Part):
    """What a person writes: the matrix, and how to run it. The defaults here are the only ones."""

    description: str = ""
    checkpoints: dict[str, dict[str, CheckpointSource]]  # family: {softmax: …, softpick: …}
    tokenizer: str | None = None  # for checkpoints that have none of their own
    quantizations: tuple[QuantizationEntry, ...] = Field(min_length=1)
    tasks: dict[str, TaskSettings] = Field(min_length=1)
    task_folders: tuple[str, ...] = ()  # folders with task files (.yaml)
    data: dict[str, str | dict[str, str]] = {}  # local files in place of a task's dataset
    num_fewshot: int | None = Field(None, ge=0)
    limit: int | None = Field(None, ge=1)  # the first documents of each task alone
    calibration: Calibration | None = None  # gptq needs it
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"  # auto: bfloat16 on CUDA, float32 on CPU
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_length: int | None = Field(None, ge=2)  # by default what the checkpoint's config says
    seed: int = 1234  # of the few-shot examples; calibration has its own
    execution: Literal["dense", "packed"] = "dense"
    batch_tokens: int | None = Field(None, ge=1)  # by default as many as memory allows
    workers: int | None = Field(
        None, ge=1
    )  # cells at once; by default one a GPU, or as many as the CPU and memory take
    threads: int | None = Field(None, ge=1)  # of each worker on the CPU; by default the cores shared out
    timeout_minutes: float = Field(720, gt=0)  # a cell that takes longer has hung
    output: str | None = None  # by default results/runs/<recipe>
    gate: dict[str, Any] = {}

    _file: RecipeFile = PrivateAttr()

    @field_validator("checkpoints", mode="before")
    @classmethod
    def _text_is_a_path(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            family: {kind: {"path": v} if isinstance(v, str) else v for kind, v in twins.items()}
            if isinstance(twins, dict)
            else twins
            for family, twins in value.items()
        }

    @field_validator("tasks", mode="before")
    @classmethod
    def _list_of_names(cls, value: Any) -> Any:
        if isinstance(value, list):
            return {name: {} for name in value}
        return {k: v or {} for k, v in value.items()} if isinstance(value, dict) else value

    @field_validator("quantizations", "task_folders", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @property
    def file(self) -> Path:
        """The recipe's file."""
        return self._file.file

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return self.file.stem

    def locate(self, text: str) -> str:
        """A path in the recipe as one from here, where there is such a thing; else the text as it is: a hub id."""
        path = self.file.parent / text
        return str(path) if is_path(text) and path.exists() else text

    @cached_property
    def resolved_device(self) -> str:
        """cpu or cuda."""
        return ("cuda" if has_cuda() else "cpu") if self.device == "auto" else self.device

    @property
    def resolved_dtype(self) -> str:
        """The dtype of weights and activations."""
        by_device = "bfloat16" if self.resolved_device == "cuda" else "float32"
        return by_device if self.dtype == "auto" else self.dtype

    def out(self) -> Path:
        """The folder for the records."""
        return self.file.parent / self.output if self.output else Path("results", "runs", self.name)

    def content(self) -> dict[str, Any]:
        """All of it as plain data, defaults too, for records and reports."""
        return self.model_dump(mode="json")

    def task_names(self) -> list[str]:
        """The tasks as load_tasks takes them."""
        return [self.locate(name) for name in self.tasks]

    def task_data(self) -> dict[str, Any]:
        """Local data files by task, from here."""
        given = self.data | {name: task.data for name, task in self.tasks.items() if task.data}
        return {
            name: {split: self._file_path(name, f) for split, f in files.items()}
            if isinstance(files, dict)
            else self._file_path(name, files)
            for name, files in given.items()
        }

    def _file_path(self, task: str, file: str) -> str:
        path = self.file.parent / file
        if not path.is_file():
            raise self._file.error(("data", task), f"there is no file {path}.")
        return str(path)

    def shots(self) -> int | dict[str, int] | None:
        """Few-shot counts as load_tasks takes them."""
        own = {name: task.num_fewshot for name, task in self.tasks.items() if task.num_fewshot is not None}
        if not own:
            return self.num_fewshot
        return own if self.num_fewshot is None else dict.fromkeys(self.tasks, self.num_fewshot) | own

    def limits(self) -> dict[str, int | None]:
        """How many documents of each task; None for all."""
        return {name: task.limit or self.limit for name, task in self.tasks.items()}

    def calibration_source(self) -> Calibration | None:
        """The calibration with its path from here."""
        found = self.calibration
        return found and found.model_copy(update={"source": self.locate(found.source)})


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
        recipe = Recipe(**content)
    except ValidationError as error:
        raise _as_sentence(read, error) from None
    except TypeError:
        raise RecipeError(f"{file}: the fields of a recipe must be names.") from None
    recipe._file = read
    if changes.get("limit"):  # a limit on the command line is for all tasks, whatever the recipe says
        tasks = {name: task.model_copy(update={"limit": None}) for name, task in recipe.tasks.items()}
        recipe = recipe.model_copy(update={"tasks": tasks})
    _check(recipe)
    return recipe


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
    current = {entry.key for entry in entries}
    superseded = tuple(found for found in stored if found.record.key not in current)
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
    """The records in a folder that can be read; what is damaged is as good as not there."""
    from qbench.store import RECORD, StoreError, read_record

    found = []
    for file in sorted(out.glob(f"*/{RECORD}")):
        try:
            found.append(StoredRecord(read_record(file), file.parent))
        except StoreError:
            continue
    return found


def recipe_tasks(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Facts of the recipe's tasks: fingerprints and sizes; NotFetchedError where a dataset is not on this machine."""
    return fingerprints.task_facts(
        recipe.task_names(),
        data=recipe.task_data(),
        folders=[recipe.locate(folder) for folder in recipe.task_folders],
        num_fewshot=recipe.shots(),
        limit=recipe.limits(),
        seed=recipe.seed,
    )


def has_cuda() -> bool:
    """Whether there is an NVIDIA GPU, without importing torch; CUDA_VISIBLE_DEVICES hides what it does not name."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return Path("/dev/nvidiactl").exists() and visible not in ("", "-1")


def _entry(cell: Cell, stored: list[StoredRecord], reuse_stale: bool) -> PlanEntry:
    if isinstance(cell.quantization, NotOffered):
        return PlanEntry(cell, None, None, "not offered", str(cell.quantization))
    try:
        identity = cell.identity()
    except NotFetchedError as error:
        return PlanEntry(cell, None, None, "not fetched", str(error))
    own = [s.record for s in stored if s.record.identity.what_key == identity.what_key and s.record.cell == cell.ref]
    exact = next((record for record in own if record.key == identity.key), None)
    if exact:
        if exact.failure:
            return PlanEntry(cell, identity, exact, "failed", exact.failure.reason)
        return PlanEntry(cell, identity, exact, "done")
    stale = max((r for r in own if r.state == "done"), key=lambda r: r.provenance.finished, default=None)
    if stale is None:
        return PlanEntry(cell, identity, None, "to do")
    return PlanEntry(cell, identity, stale if reuse_stale else None, "stale", _what_changed(stale.identity, identity))


def _what_changed(old: Identity, new: Identity) -> str:
    names = sorted(old.packages.keys() | new.packages.keys())
    moved = [
        f"{name} {old.packages.get(name)} → {new.packages.get(name)}"
        for name in names
        if old.packages.get(name) != new.packages.get(name)
    ]
    return "computed with " + ", ".join((["other code of qbench"] if old.code != new.code else []) + moved)


def _quantizations(recipe: Recipe) -> Iterator[Quantization | NotOffered]:
    for index, entry in enumerate(recipe.quantizations):
        for bits in _widths(entry):
            options = entry.options | entry.options_by_bits.get(bits, {})
            try:
                yield offered(entry.method, bits) or quantization(entry.method, bits, **options)
            except QuantizeError as error:
                raise recipe._file.error(("quantizations", index), str(error)) from None


def _widths(entry: QuantizationEntry) -> tuple[int, ...]:
    return entry.bits or ((16,) if entry.method == "none" else ())


def _check(recipe: Recipe) -> None:
    """What the types alone do not say."""
    file = recipe._file
    for family, twins in recipe.checkpoints.items():
        if not twins:
            raise file.error(("checkpoints", family), "it has no checkpoint; it must have softmax and softpick.")
        for attention in twins:
            if attention not in ATTENTION:
                raise file.error(
                    ("checkpoints", family, attention),
                    f"an attention must be one of {', '.join(ATTENTION)}.{did_you_mean(attention, ATTENTION)}",
                )
    if not recipe.checkpoints:
        raise file.error(("checkpoints",), "is empty; there must be a family with a softmax and a softpick checkpoint.")
    labels: dict[str, int] = {}
    for index, entry in enumerate(recipe.quantizations):
        where: Where = ("quantizations", index)
        if not _widths(entry):
            raise file.error(where, f"bits are missing; give {entry.method} a list such as [4, 8].")
        for bits in entry.options_by_bits:
            if bits not in _widths(entry):
                raise file.error((*where, "options_by_bits", bits), f"{bits} is not among the bits {list(entry.bits)}.")
    for quantized in _quantizations(recipe):
        if isinstance(quantized, Quantization):
            if quantized.label in labels:
                raise file.error(("quantizations",), f"{quantized.label} is there twice; each must be there once.")
            labels[quantized.label] = 1
            if quantized.method == "gptq" and recipe.calibration is None:
                raise file.error((), "gptq needs calibration: give `calibration: {source: …}`.")
    for name in recipe.data:
        if name not in recipe.tasks and not any(is_path(task) for task in recipe.tasks):
            raise file.error(("data", name), f"it is not among the tasks.{did_you_mean(name, recipe.tasks)}")
    source = recipe.calibration
    if source and source.is_file and not Path(recipe.locate(source.source)).is_file():
        raise file.error(("calibration", "source"), f"there is no file {file.file.parent / source.source}.")


def _as_sentence(read: RecipeFile, error: ValidationError) -> InputError:
    first = error.errors()[0]
    field: Where = tuple(first["loc"])
    value = first.get("input")
    if first["type"] == "extra_forbidden":
        allowed = _fields_at(field[:-1])
        return read.error(field, f"unknown; allowed are {', '.join(allowed)}.{did_you_mean(str(field[-1]), allowed)}")
    if first["type"] == "missing":
        known = read.content if len(field) == 1 else ()
        return read.error(field, f"is missing.{did_you_mean(str(field[-1]), known)}")
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return read.error(field, f"is {value!r}; it {message}." if message.startswith("should") else f"{message}.")


def _fields_at(field: Where) -> list[str]:
    """The names that the model at a field has."""
    models: dict[str, type[BaseModel]] = {
        "checkpoints": CheckpointSource,
        "quantizations": QuantizationEntry,
        "tasks": TaskSettings,
        "calibration": Calibration,
    }
    model = models[str(field[0])] if field else Recipe
    return list(model.model_fields)
