"""Cells: one checkpoint × one quantization (× one calibration draw). Imports no torch, so a plan takes a second."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qbench.attention.kinds import ATTENTIONS, attentions, declaring_module
from qbench.checkpoint.fingerprint import NotFetchedError, checkpoint_fingerprint, local_file, tokenizer_fingerprint
from qbench.checkpoint.layout import CONFIG, config_attention, read_json
from qbench.errors import InputError
from qbench.evaluate.batches import BATCH_TOKENS
from qbench.evaluate.facts import TaskSummary, is_task_path, task_facts
from qbench.files import as_path
from qbench.identity import Identity, What, code_hash, json_hash, package_code_hash, package_versions
from qbench.quantizers.axes import parts_of
from qbench.quantizers.calibration import Calibration
from qbench.quantizers.options import NotOffered, Quantization, offers, quantization
from qbench.recipe.check import check_recipe
from qbench.recipe.messages import as_sentence
from qbench.recipe.passkey import with_passkey_lengths
from qbench.recipe.schema import CheckpointSource, QuantizationEntry, Recipe, fields_at
from qbench.recipe.variants import required_attention
from qbench.recipe.yaml import RecipeError, RecipeFile, read_recipe_file
from qbench.records.schema import CellRef

SENSITIVITY_TEXTS = 16  # a sensitivity analysis runs its texts once per linear layer


@dataclass(frozen=True)
class Cell:
    """One checkpoint × one quantization with one draw of calibration, on all of the recipe's tasks."""

    recipe: Recipe
    ref: CellRef
    source: CheckpointSource
    quantization: Quantization | NotOffered
    heads: tuple[tuple[int, int], ...] = ()  # (layer, head) of the maps to draw

    @property
    def location(self) -> str:
        """The checkpoint's folder, or its id on the Hub."""
        return self.recipe.locate(self.source.path)

    @property
    def variant(self) -> str:
        """Which model of its family it is; records and CSV call this its attention."""
        return self.ref.attention

    @property
    def config(self) -> Path | None:
        """The checkpoint's config.json; None if it is not on this machine."""
        return local_file(self.location, CONFIG, self.source.revision)

    @property
    def required_attention(self) -> str | None:
        """The attention kind that the checkpoint must have by the variant's name; None if that is not a kind's."""
        return required_attention(self.variant)

    @property
    def attention(self) -> str | None:
        """The attention kind, by the variant's name or else by the config; None if that is not on this machine."""
        if self.required_attention or (file := self.config) is None:
            return self.required_attention
        return config_attention(read_json(file), file).name

    @property
    def tokenizer(self) -> str:
        """The folder or Hub id of the tokenizer: the checkpoint's, unless the recipe names another one."""
        own = self.source.tokenizer or self.recipe.tokenizer
        return self.recipe.locate(own) if own else self.location

    @property
    def batch_tokens(self) -> int:
        """The token budget of a batch: the recipe's, or a constant per device, so all cells have the same."""
        if self.recipe.batch_tokens or self.recipe.resolved_device == "cuda":
            return self.recipe.batch_tokens or BATCH_TOKENS["cuda"]
        return self._fixed_batch_tokens or BATCH_TOKENS["cpu"]

    @property
    def _fixed_batch_tokens(self) -> int | None:
        """The CPU budget for a quantization whose scores depend on what else is in a batch; None if they do not."""
        return self.quantization.options.fixed_batch_tokens if isinstance(self.quantization, Quantization) else None

    @property
    def calibration(self) -> Calibration | None:
        """Where the text to calibrate with comes from; None if the quantization needs none."""
        return self.recipe.calibration_source() if _is_calibrated(self.quantization) else None

    @property
    def texts(self) -> dict[str, Calibration]:
        """The texts that it reads besides its tasks, by the recipe's field that names them."""
        found = {"analysis": self.recipe.analysis_source()} if self.ref.measured else {}
        return found | ({"calibration": self.calibration} if self.calibration else {})

    @property
    def _depends_on_batches(self) -> bool:
        """Whether the budget changes numbers: on CUDA it does, as a product's rounding depends on its shape.

        On a CPU in float32 it moves them by rounding far below the last digit that is reported.
        """
        return self.recipe.resolved_device == "cuda" or self._fixed_batch_tokens is not None

    def packages(self, attention: str) -> dict[str, str]:
        """The versions of the packages that compute this cell; attention: the checkpoint's kind."""
        own = self.quantization.packages() if isinstance(self.quantization, Quantization) else {}
        return model_packages(attention) | own

    def identity(self) -> Identity:
        """Everything that can change the numbers; NotFetchedError if some of it is not on this machine."""
        recipe, quantized = self.recipe, self.quantization
        assert isinstance(quantized, Quantization)
        calibration = self.calibration
        checkpoint, attention = checkpoint_fingerprint(self.location, self.source.revision), self.attention
        assert attention  # a checkpoint with a fingerprint has its config here
        what = What(
            checkpoint=checkpoint,
            tokenizer=tokenizer_fingerprint(self.tokenizer, self.tokenizer_revision),
            attention=attention,
            **quantized.identity(),
            calibration=calibration.content_hash(self.ref.draw) if calibration else None,
            dtype=recipe.resolved_dtype,
            execution=recipe.execution,
            device=recipe.resolved_device,
            **(self._analyzed() if self.ref.measured else self._scored()),
        )
        return Identity(what=what, code=self.code(), packages=self.packages(attention))

    def code(self) -> str:
        """A hash of our code that computes this cell."""
        return code_hash(analyzes=self.ref.measured is not None)

    def _scored(self) -> dict[str, Any]:
        """The part of the identity that decides scores."""
        return {
            "tasks": {name: facts.identity for name, facts in recipe_tasks(self.recipe).items()},
            "max_length": self.recipe.max_length,
            "seed": self.recipe.seed,
            "batch_tokens": self.batch_tokens if self._depends_on_batches else None,
        }

    def _analyzed(self) -> dict[str, Any]:
        """The part of the identity that decides what is measured instead of scores."""
        return {
            "tasks": {},
            "max_length": self.recipe.max_length if self.calibration else None,  # it cuts calibration text
            "seed": 0,
            "batch_tokens": None,
            "analysis": {"measured": self.ref.measured, **self.analysis_settings()},
        }

    def analysis_settings(self) -> dict[str, Any]:
        """The settings of an analysis that decide its numbers, with a hash of the texts."""
        settings = self.recipe.analysis
        if self.ref.measured == "maps":
            text = {"text": settings.text} if settings.text else {"texts": self._texts_hash()}
            return {"heads": [list(place) for place in self.heads], **text}
        if self.ref.measured == "sensitivity":
            return {"texts": self.sensitivity_source().content_hash()}
        lengths = sorted(set(settings.lengths)) if settings.lengths is not None else None
        return {"texts": self._texts_hash(), "lengths": lengths}

    def sensitivity_source(self) -> Calibration:
        """The first few texts of the analysis."""
        source = self.recipe.analysis_source()
        return source.model_copy(update={"samples": min(source.samples, SENSITIVITY_TEXTS)})

    def _texts_hash(self) -> str:
        return self.recipe.analysis_source().content_hash()

    @property
    def tokenizer_revision(self) -> str | None:
        """The tokenizer's revision: the checkpoint's, if the tokenizer comes with the checkpoint."""
        return self.source.revision if self.tokenizer == self.location else None


def model_packages(attention: str) -> dict[str, str]:
    """The versions of the packages that compute an unquantized model with this attention."""
    return package_versions() | _attention_code(attention)


def _attention_code(attention: str) -> dict[str, str]:
    """What computes a kind besides our code: its function, and the package that declares it."""
    kind = attentions()[attention]
    modules = [kind.function.partition(":")[0] if kind.function else None, declaring_module(attention)]
    found = {module.split(".")[0]: package_code_hash(module) for module in modules if module}
    if attention not in ATTENTIONS:
        found[f"{attention} attention"] = json_hash(kind.declaration())[:12]
    return found


def load_recipe(file: Path | str, **changes: Any) -> Recipe:
    """Read and check a recipe; changes: fields given on the command line, which override the recipe's."""
    read = read_recipe_file(as_path(file, "a recipe, a YAML file", RecipeError))
    content = read.content | {name: value for name, value in changes.items() if value is not None}
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        raise as_sentence(replace(read, content=content), error, fields_at) from None
    recipe._file = read
    recipe = recipe.model_copy(update={"data": _data_for_tasks(recipe, read)})
    if changes.get("limit"):  # a limit on the command line overrides those of all tasks
        tasks = {name: task.model_copy(update={"limit": None}) for name, task in recipe.tasks.items()}
        analysis = recipe.analysis.model_copy(update={"samples": min(recipe.analysis.samples, changes["limit"])})
        recipe = recipe.model_copy(update={"tasks": tasks, "analysis": analysis})
    check_recipe(recipe, read)
    return with_passkey_lengths(recipe)


def _data_for_tasks(recipe: Recipe, read: RecipeFile) -> dict[str, Any]:
    """The data, without an extended recipe's data for tasks that this recipe leaves out."""
    if any(map(is_task_path, recipe.tasks)):  # which tasks these are is not known yet
        return recipe.data
    own = {name for name in recipe.data if read.lines[("data", name)][0] == read.file}
    return {name: files for name, files in recipe.data.items() if name in recipe.tasks or name in own}


def cells(recipe: Recipe) -> list[Cell]:
    """Every cell, ordered by family, quantization and draw, variants next to each other."""
    found = []
    for family, variants in recipe.checkpoints.items():
        for quantized in _quantizations(recipe.quantizations):
            for draw, (variant, source) in product(_draws(recipe, quantized), variants.items()):
                found.append(_cell(recipe, family, variant, source, quantized, draw=draw))
    return found


def analysis_cells(recipe: Recipe) -> list[Cell]:
    """What `qbench analyze` measures before heads are chosen: every model, its steps of training, its sensitivities."""
    whole = cells(recipe) if recipe.analysis.cells == "all" else _unquantized(recipe)
    whole = [cell for cell in whole if cell.ref.draw in (None, 1)]  # one draw of calibration is enough to look at
    found = [replace(cell, ref=cell.ref.model_copy(update={"measured": "analysis"})) for cell in whole]
    for family, variants in recipe.checkpoints.items():
        for variant, source in variants.items():
            for step, own in sorted(source.steps.items()):
                tokenizer = own.tokenizer or source.tokenizer or recipe.tokenizer or source.path
                own = own.model_copy(update={"tokenizer": tokenizer})
                found.append(_cell(recipe, family, variant, own, UNCHANGED, measured="analysis", step=step))
        for quantized in _quantizations(recipe.analysis.sensitivity):
            for variant, source in variants.items():
                draw = _draws(recipe, quantized)[0]
                found.append(_cell(recipe, family, variant, source, quantized, measured="sensitivity", draw=draw))
    return found


def map_cells(recipe: Recipe, heads: Mapping[str, Sequence[tuple[int, int]]]) -> list[Cell]:
    """The maps to draw of every unquantized model; heads: by family."""
    found = [cell for cell in _unquantized(recipe) if heads.get(cell.ref.family)]
    return [
        replace(cell, ref=cell.ref.model_copy(update={"measured": "maps"}), heads=tuple(heads[cell.ref.family]))
        for cell in found
    ]


UNCHANGED = quantization("none", 16)


def _unquantized(recipe: Recipe) -> list[Cell]:
    """The unquantized models, whether or not the recipe lists the unquantized baseline."""
    return [
        _cell(recipe, family, variant, source, UNCHANGED)
        for family, variants in recipe.checkpoints.items()
        for variant, source in variants.items()
    ]


def _cell(
    recipe: Recipe,
    family: str,
    variant: str,
    source: CheckpointSource,
    quantized: Quantization | NotOffered,
    **others: Any,
) -> Cell:
    ref = CellRef(
        family=family,
        attention=variant,
        checkpoint=source.path,
        method=quantized.method,
        bits=quantized.bits,
        label=quantized.label,
        **others,
    )
    return Cell(recipe, ref, source, quantized)


def _draws(recipe: Recipe, quantized: Quantization | NotOffered) -> tuple[int | None, ...]:
    """The calibration draws, one cell per draw; the same for all models."""
    return recipe.calibration.draws if _is_calibrated(quantized) else (None,)


def _is_calibrated(quantized: Quantization | NotOffered) -> bool:
    return isinstance(quantized, Quantization) and quantized.is_calibrated


def recipe_texts(recipe: Recipe, wanted: Sequence[Cell]) -> dict[str, Calibration]:
    """The texts that these cells need, and a calibration text that the recipe names, by the field that names it."""
    found = {use: text for cell in wanted for use, text in cell.texts.items()}
    if "calibration" in recipe.model_fields_set and "analysis" not in found:
        found["calibration"] = recipe.calibration_source()
    return found


def recipe_tasks(recipe: Recipe) -> dict[str, TaskSummary]:
    """Facts of the recipe's tasks: fingerprints and sizes; NotFetchedError if a dataset is not on this machine."""
    generated = recipe.passkey.summaries(recipe.limit) if recipe.passkey else {}
    if not recipe.task_names():
        return generated
    try:
        loaded = task_facts(
            recipe.task_names(),
            data=recipe.task_data(),
            folders=[recipe.locate(folder) for folder in recipe.task_folders],
            num_fewshot=recipe.shots(),
            limits=recipe.limits,
            seed=recipe.seed,
            trust_code=recipe.trust_task_code,
        )
        return loaded | generated
    except (NotFetchedError, RecipeError):
        raise
    except InputError as error:  # an unknown task, or data that do not fit it
        raise recipe._file.error(("tasks",), str(error)) from error


def _quantizations(entries: Sequence[QuantizationEntry]) -> Iterator[Quantization | NotOffered]:
    for entry in chain.from_iterable(entry.by_method for entry in entries):
        for bits in entry.widths:
            if offers(entry.method, bits):
                yield quantization(entry.method, bits, **entry.arguments(bits))
            else:
                yield NotOffered(entry.method, bits, parts_of(entry.axes))
