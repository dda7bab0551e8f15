"""What a recipe has: checkpoints × quantizations × tasks, and how to run them, typed. Imports no torch."""

from collections.abc import Iterable
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from qbench.evaluate.facts import is_task_path
from qbench.evaluate.passkey import PasskeySettings
from qbench.gate.settings import PARTS as GATE_PARTS
from qbench.gate.settings import GateSettings
from qbench.gpus import has_cuda
from qbench.quantizers.axes import AXES
from qbench.quantizers.calibration import NAMED, Calibration
from qbench.quantizers.options import quantizers
from qbench.recipe.messages import must
from qbench.recipe.variants import default_reference
from qbench.recipe.yaml import Field as Where
from qbench.recipe.yaml import RecipeFile
from qbench.records.limits import Bits
from qbench.records.metrics import PASSKEY

CALIBRATION = Calibration.model_validate({"source": "wikitext2"})  # what most papers on quantization use
PASSKEY_FIELDS = tuple(field.name for field in fields(PasskeySettings))  # of the settings of a task


class _RecipePart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class CheckpointSource(_RecipePart):
    """A model on disk or on the Hub; a string alone is its path."""

    path: str = Field(min_length=1)  # a folder, relative to the recipe, or owner/name on the Hub
    revision: str | None = None  # a branch, tag or commit on the Hub
    tokenizer: str | None = None  # if it is not in the model's folder
    steps: dict[int, "CheckpointSource"] = {}  # the same model at steps of its training, for `qbench analyze`

    @model_validator(mode="before")
    @classmethod
    def _text_is_a_path(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"path": value}
        if not isinstance(value, dict):
            raise must(f"be a folder, a Hub id, or a mapping with the fields {', '.join(cls.model_fields)}")
        return value


class QuantizationEntry(_RecipePart):
    """A method at one or several widths; options for all of them, and for single widths.

    Several methods may share an entry (`methods: [bnb, gptq]`): a width that one of them lacks is skipped for it.
    What it changes besides the weights is given under the name of its axis: `mask_heads: {epsilon: 1.0e-6}`.
    """

    method: str = ""
    methods: tuple[str, ...] = ()
    bits: tuple[Bits, ...] = ()
    options: dict[str, Any] = {}
    options_by_bits: dict[int, dict[str, Any]] = {}
    axes: dict[str, Any] = {}  # options by the name of the axis

    @model_validator(mode="before")
    @classmethod
    def _axes_by_their_names(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        axes = {name: value[name] for name in AXES if value.get(name) is not None}
        rest = {name: own for name, own in value.items() if name not in AXES}
        options = {name for own in quantizers().values() for kind in own.widths.values() for name in kind.model_fields}
        if strays := [name for name in rest if name in options - cls.model_fields.keys()]:
            raise must(f"have {strays[0]} under `options`: `options: {{{strays[0]}: {rest[strays[0]]}}}`")
        return rest | ({"axes": axes} if axes else {})

    @model_validator(mode="after")
    def _one_method_or_several(self) -> "QuantizationEntry":
        if bool(self.method) == bool(self.methods):
            raise must("have either a `method` or a list of `methods`")
        return self

    @property
    def by_method(self) -> "list[QuantizationEntry]":
        """One entry per method."""
        if self.method:
            return [self]
        return [self.model_copy(update={"method": method, "methods": ()}) for method in self.methods]

    def arguments(self, bits: int) -> dict[str, Any]:
        """The options and axes of one width, as `quantization` takes them."""
        return self.options | self.options_by_bits.get(bits, {}) | self.axes

    @property
    def widths(self) -> tuple[int, ...]:
        """The bits; the unquantized baseline has one width, which need not be given."""
        return self.bits or ((16,) if self.method == "none" else ())

    @field_validator("bits", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        if not isinstance(value, list | int):
            raise must("be a whole number, or a list of them")
        return tuple(value) if isinstance(value, list) else (value,)

    @field_validator("methods", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class TaskSettings(_RecipePart):
    """How one task is run; defaults: the recipe's, then lm-eval's."""

    num_fewshot: int | None = Field(None, ge=0)
    limit: int | None = Field(None, ge=1)
    data: str | dict[str, str] | None = None  # a .jsonl file, or one per split
    # For passkey only; None: the default in PasskeySettings.
    lengths: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(None, min_length=1)
    trials: int | None = Field(None, ge=1)
    seed: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_no_setting(cls, value: Any) -> Any:
        return {} if value is None else value

    @field_validator("lengths", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, int) else value


class HeadPlace(_RecipePart):
    """A head of a model."""

    layer: int = Field(ge=0)  # from 0
    head: int = Field(ge=0)


class AnalysisSettings(_RecipePart):
    """What `qbench analyze` measures, and on which texts."""

    source: str | None = Field(None, min_length=1)  # as for calibration; by default the calibration's
    field: str = "text"  # of a line in a .jsonl file, or of a row in a dataset
    split: str = "train"  # this and the next two are for datasets on the Hub
    subset: str | None = None
    revision: str | None = None
    samples: int = Field(100, ge=1)  # the first texts of the source
    length: int = Field(2048, ge=2)  # tokens; longer texts are cut
    lengths: tuple[Annotated[int, Field(ge=2)], ...] | None = None  # of the sweep; by default 16, 32, …
    cells: Literal["unquantized", "all"] = "unquantized"  # all: the recipe's quantizations too
    maps: tuple[HeadPlace, ...] | None = None  # to draw; by default the heads that differ most between models
    text: str | None = Field(None, min_length=1)  # that maps are drawn for; by default the first of the source
    sensitivity: tuple[QuantizationEntry, ...] = ()  # of each linear layer alone, to these

    @field_validator("lengths", "maps", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("sensitivity", mode="before")
    @classmethod
    def _names_are_entries(cls, value: Any) -> Any:
        return tuple(_named_quantization(own) for own in value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _source_is_known(self) -> "AnalysisSettings":
        try:
            self.texts(CALIBRATION)
        except ValidationError as error:
            raise ValueError(error.errors()[0]["ctx"]["error"]) from None
        return self

    def texts(self, calibration: Calibration) -> Calibration:
        """Where the texts come from: the calibration's source, unless this names one."""
        own: dict[str, Any] = {"samples": self.samples, "length": self.length}
        if self.source:
            place = self.model_dump(include={"source", "field", "split", "subset", "revision"})
            return Calibration(**place, **own)
        return calibration.model_copy(update={**own, "seed": 0, "seeds": 1})


def _named_quantization(value: Any) -> Any:
    """hqq-3 as a mapping; other values unchanged."""
    if not isinstance(value, str):
        return value
    method, _, bits = value.rpartition("-")
    if not method or not bits.isdecimal():
        raise must("list names such as hqq-3, or mappings as in `quantizations`")
    return {"method": method, "bits": int(bits)}


class Recipe(_RecipePart):
    """What a person writes: the matrix, and how to run it. The defaults here are the only ones."""

    description: str = ""
    checkpoints: dict[str, dict[str, CheckpointSource]] = Field(min_length=1)  # family: {variant: …}
    tokenizer: str | None = None  # instead of the checkpoints' tokenizers
    # The variant that the others of a family are compared with.
    reference: str = Field(default_factory=lambda fields: default_reference(fields["checkpoints"].values()))
    replicates: tuple[str, ...] = ()  # families that are the same pair, trained with several seeds
    quantizations: tuple[QuantizationEntry, ...] = Field(min_length=1)
    tasks: dict[str, TaskSettings] = Field(min_length=1)
    task_folders: tuple[str, ...] = ()  # folders with task files (.yaml)
    trust_task_code: bool = False  # run the functions that task files outside lm-eval's package name (`!function`)
    data: dict[str, str | dict[str, str]] = {}  # local files instead of a task's dataset
    num_fewshot: int | None = Field(None, ge=0)
    limit: int | None = Field(None, ge=1)  # only the first documents of each task
    calibration: Calibration = CALIBRATION  # for the methods that need it, such as gptq
    analysis: AnalysisSettings = Field(default_factory=lambda: AnalysisSettings.model_validate({}))
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"  # auto: bfloat16 on CUDA, float32 on CPU
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_length: int | None = Field(None, ge=2)  # by default what the checkpoint's config says
    seed: int = 1234  # of the few-shot examples; calibration has its own
    execution: Literal["dense", "packed"] = "dense"
    batch_tokens: int | None = Field(None, ge=1)  # by default a constant per device, the same for all cells
    workers: int | None = Field(None, ge=1)  # cells at once; by default one per GPU, or as many as the CPU can take
    threads: int | None = Field(None, ge=1)  # of each worker on the CPU; by default an equal share of the cores
    timeout_minutes: float = Field(720, gt=0)  # a cell that takes longer has hung
    output: str | None = None  # by default results/runs/<recipe>
    gate: GateSettings = GateSettings()  # when `qbench check` fails

    _file: RecipeFile = PrivateAttr()

    @field_validator("checkpoints", mode="before")
    @classmethod
    def _families(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise must("be a mapping with one field per family: `340M: {softmax: FOLDER, softpick: FOLDER}`")
        return value

    @field_validator("tasks", mode="before")
    @classmethod
    def _list_of_names(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return value
        if not (isinstance(value, list) and value and all(isinstance(name, str) for name in value)):
            raise must(
                "be a list of at least one name, or a mapping from each task to its settings: `piqa: {limit: 100}`"
            )
        if twice := [name for name in value if value.count(name) > 1]:
            raise must(f"name each task once; {twice[0]} is listed twice")
        return {name: {} for name in value}

    @field_validator("quantizations", "task_folders", "replicates", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("calibration", mode="before")
    @classmethod
    def _source_has_a_default(cls, value: Any) -> Any:
        return {"source": CALIBRATION.source} | (value or {}) if isinstance(value, dict | None) else value

    @property
    def file(self) -> Path:
        """The recipe's file."""
        return self._file.file

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return self.file.stem

    def locate(self, text: str) -> str:
        """A path in the recipe, made relative to the working folder if it exists; else the text unchanged: a Hub id."""
        path = self.file.parent / text
        return str(path) if path.exists() else text

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
        """The recipe as plain data with its defaults, for records and reports; without what no number depends on."""
        return self.model_dump(mode="json", exclude={"output", "trust_task_code"})

    def task_names(self) -> list[str]:
        """The tasks as load_tasks takes them: all except generated ones."""
        return [self.locate(name) if is_task_path(name) else name for name in self._loaded_tasks]

    @property
    def passkey(self) -> PasskeySettings | None:
        """The settings of the passkey tasks; None if the recipe has none."""
        if PASSKEY not in self.tasks:
            return None
        return PasskeySettings(**self.tasks[PASSKEY].model_dump(include=set(PASSKEY_FIELDS), exclude_none=True))

    @property
    def _loaded_tasks(self) -> dict[str, TaskSettings]:
        return {name: task for name, task in self.tasks.items() if name != PASSKEY}

    def task_data(self) -> dict[str, Any]:
        """Local data files by task, relative to the working folder."""
        given = self.data | {name: task.data for name, task in self.tasks.items() if task.data}
        here = self.file.parent
        return {
            name: {split: str(here / file) for split, file in files.items()}
            if isinstance(files, dict)
            else str(here / files)
            for name, files in given.items()
        }

    def shots(self) -> int | dict[str, int] | None:
        """Few-shot counts as load_tasks takes them."""
        own = {name: task.num_fewshot for name, task in self.tasks.items() if task.num_fewshot is not None}
        if not own:
            return self.num_fewshot
        return own if self.num_fewshot is None else dict.fromkeys(self._loaded_tasks, self.num_fewshot) | own

    def limits(self, tasks: Iterable[str] | None = None) -> dict[str, int | None]:
        """How many documents of each task; None for all. tasks: the names that groups and files expand to."""
        names = list(self.tasks if tasks is None else tasks)
        for name, task in self.tasks.items():
            if task.limit and name not in names:
                raise self._file.error(
                    ("tasks", name, "limit"),
                    f"a limit must be for a single task; this is a group of {', '.join(names)}.",
                )
        return {name: (self.tasks[name].limit if name in self.tasks else None) or self.limit for name in names}

    def calibration_source(self) -> Calibration:
        """The calibration, with its path relative to the working folder."""
        return self._located(self.calibration)

    def analysis_source(self) -> Calibration:
        """Where the texts of an analysis come from, with the path relative to the working folder."""
        return self._located(self.analysis.texts(self.calibration))

    def _located(self, source: Calibration) -> Calibration:
        if source.source in NAMED:
            return source
        return source.model_copy(update={"source": self.locate(source.source)})


def fields_at(field: Where) -> list[str]:
    """The names that are allowed at a field."""
    items: dict[Where, type[BaseModel]] = {
        ("analysis", "maps"): HeadPlace,
        ("analysis", "sensitivity"): QuantizationEntry,
        **{("gate", name): part for name, part in GATE_PARTS.items()},
    }
    if field[:2] in items:
        return list(items[field[:2]].model_fields)
    parts: dict[Any, type[BaseModel]] = {
        "analysis": AnalysisSettings,
        "checkpoints": CheckpointSource,
        "calibration": Calibration,
        "gate": GateSettings,
    }
    if field[:1] == ("quantizations",):
        return [name for name in QuantizationEntry.model_fields if name != "axes"] + list(AXES)
    if field[:1] == ("tasks",):
        return [name for name in TaskSettings.model_fields if (name in PASSKEY_FIELDS) == (field[1:2] == (PASSKEY,))]
    return list((parts[field[0]] if field else Recipe).model_fields) + ([] if field else ["extends"])
