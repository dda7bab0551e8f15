"""Cells: one checkpoint × one quantization each (× one calibration draw). Imports no torch: a plan takes a second."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qbench.attention.kinds import ATTENTIONS, attentions, declaring_module
from qbench.checkpoint.fingerprint import NotFetchedError, checkpoint_fingerprint, tokenizer_fingerprint
from qbench.errors import InputError
from qbench.evaluate.facts import TaskSummary, is_task_path, task_facts
from qbench.identity import Identity, What, code_hash, json_hash, package_code_hash, package_versions
from qbench.quantizers.calibration import Calibration
from qbench.quantizers.options import NotOffered, Quantization, offers, quantization
from qbench.recipe.check import check_recipe
from qbench.recipe.messages import as_sentence
from qbench.recipe.schema import CheckpointSource, Recipe, fields_at
from qbench.recipe.yaml import RecipeError, RecipeFile, read_recipe_file
from qbench.records.schema import CellRef


@dataclass(frozen=True)
class Cell:
    """One checkpoint × one quantization with one draw of calibration, on all of the recipe's tasks."""

    recipe: Recipe
    ref: CellRef
    source: CheckpointSource
    quantization: Quantization | NotOffered

    @property
    def location(self) -> str:
        """The checkpoint's folder, or its id on the Hub."""
        return self.recipe.locate(self.source.path)

    @property
    def tokenizer(self) -> str:
        """The folder or Hub id of the tokenizer: the checkpoint's own, unless the recipe names another."""
        own = self.source.tokenizer or self.recipe.tokenizer
        return self.recipe.locate(own) if own else self.location

    @property
    def batch_tokens(self) -> int | None:
        """The token budget of a batch; None: by free memory."""
        return self.recipe.batch_tokens or self._fixed_batch_tokens

    @property
    def _fixed_batch_tokens(self) -> int | None:
        """The budget of a quantization whose scores depend on what else is in a batch; None if they do not."""
        return self.quantization.options.fixed_batch_tokens if isinstance(self.quantization, Quantization) else None

    @property
    def calibration(self) -> Calibration | None:
        """Where the text to calibrate with comes from; None if the quantization needs none."""
        return self.recipe.calibration_source() if _is_calibrated(self.quantization) else None

    def packages(self) -> dict[str, str]:
        """The versions of the packages that compute this cell."""
        own = self.quantization.packages() if isinstance(self.quantization, Quantization) else {}
        return package_versions() | own | _attention_code(self.ref.attention)

    def identity(self) -> Identity:
        """Everything that can change the numbers; NotFetchedError if a part of it is not on this machine."""
        recipe, quantized = self.recipe, self.quantization
        assert isinstance(quantized, Quantization)
        calibration = self.calibration
        what = What(
            checkpoint=checkpoint_fingerprint(self.location, self.source.revision),
            tokenizer=tokenizer_fingerprint(self.tokenizer, self.tokenizer_revision),
            attention=self.ref.attention,
            **quantized.identity(),
            calibration=calibration.content_hash(self.ref.draw) if calibration else None,
            tasks={name: facts.identity for name, facts in recipe_tasks(recipe).items()},
            dtype=recipe.resolved_dtype,
            execution=recipe.execution,
            device=recipe.resolved_device,
            max_length=recipe.max_length,
            seed=recipe.seed,
            batch_tokens=self.batch_tokens if self._fixed_batch_tokens else None,
        )
        return Identity(what=what, code=code_hash(), packages=self.packages())

    @property
    def tokenizer_revision(self) -> str | None:
        """The revision that belongs to the tokenizer: the checkpoint's, if it is the checkpoint's own."""
        return self.source.revision if self.tokenizer == self.location else None


def _attention_code(attention: str) -> dict[str, str]:
    """What computes a kind besides our own code: its function, and what another package declares."""
    kind = attentions()[attention]
    modules = [kind.function.partition(":")[0] if kind.function else None, declaring_module(attention)]
    found = {module.split(".")[0]: package_code_hash(module) for module in modules if module}
    if attention not in ATTENTIONS:
        found[f"{attention} attention"] = json_hash(kind.declaration())[:12]
    return found


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
    """The data, without that of an extended recipe for tasks that this one leaves out."""
    if any(map(is_task_path, recipe.tasks)):  # which tasks these are is not known yet
        return recipe.data
    own = {name for name in recipe.data if read.lines[("data", name)][0] == read.file}
    return {name: files for name, files in recipe.data.items() if name in recipe.tasks or name in own}


def cells(recipe: Recipe) -> list[Cell]:
    """Every cell, family by family, quantization by quantization and draw by draw, twins side by side."""
    found = []
    for family, twins in recipe.checkpoints.items():
        for quantized in _quantizations(recipe):
            for draw, (attention, source) in product(_draws(recipe, quantized), twins.items()):
                ref = CellRef(
                    family=family,
                    attention=attention,
                    checkpoint=source.path,
                    method=quantized.method,
                    bits=quantized.bits,
                    label=quantized.label,
                    draw=draw,
                )
                found.append(Cell(recipe, ref, source, quantized))
    return found


def _draws(recipe: Recipe, quantized: Quantization | NotOffered) -> tuple[int | None, ...]:
    """The draws of calibration that there is one cell of each for; the same for all models."""
    return recipe.calibration.draws if recipe.calibration and _is_calibrated(quantized) else (None,)


def _is_calibrated(quantized: Quantization | NotOffered) -> bool:
    return isinstance(quantized, Quantization) and quantized.quantizer.calibrated


def recipe_tasks(recipe: Recipe) -> dict[str, TaskSummary]:
    """Facts of the recipe's tasks: fingerprints and sizes; NotFetchedError if a dataset is not on this machine."""
    try:
        return task_facts(
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


def _quantizations(recipe: Recipe) -> Iterator[Quantization | NotOffered]:
    for entry in recipe.quantizations:
        for bits in entry.widths:
            options = entry.options | entry.options_by_bits.get(bits, {})
            if offers(entry.method, bits):
                yield quantization(entry.method, bits, **options)
            else:
                yield NotOffered(entry.method, bits)
