"""What a record is made of, typed."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from qbench.files import not_too_deep
from qbench.identity import Identity, WithoutUnused
from qbench.records.analysis_facts import AnalysisFacts, LinearDamage, MapsFacts
from qbench.records.audit import Audit
from qbench.records.limits import Bits, Count, Finite

SCHEMA_VERSION: Literal[2] = 2

# What may be measured instead of scores. Each has its own record and its own settings.
Measured = Literal["analysis", "maps", "sensitivity"]
FailureKind = Literal["error", "audit", "out-of-memory", "killed", "crashed", "timeout"]


JsonFields = Annotated[dict[str, Any], AfterValidator(not_too_deep)]


class _RecordPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class CellRef(_RecordPart, WithoutUnused):
    """A cell as readers see it: one checkpoint and one quantization. Records of two runs are joined by this."""

    family: str  # such as 340M: joins a softmax checkpoint and its twins
    attention: str  # the variant: softmax, softpick, base, …; the attention kind is in the record's identity
    checkpoint: str  # as the recipe names it
    method: str
    bits: Bits  # 16 for method none
    label: str  # the quantization's full name, such as hqq-3-g64
    draw: Annotated[int, Field(ge=1)] | None = None  # of calibration, if there are several
    step: Annotated[int, Field(ge=0)] | None = None  # of training, if it is not the final model
    measured: Measured | None = None  # None: scores
    unnamed: Literal[True] | None = None  # not described by the user: family is the model's name, the rest is unknown

    @property
    def name(self) -> str:
        """The cell in one word, for people: 340M-softpick-hqq-3-g64, or …-gptq-3-g128-draw-2, or …-none-16-analysis."""
        if self.unnamed:
            return self.family
        parts = [self.family, self.attention, self.label]
        parts += [f"draw-{self.draw}"] if self.draw else []
        parts += [f"step-{self.step}"] if self.step is not None else []
        return "-".join(parts + ([self.measured] if self.measured else []))

    @property
    def of_all_draws(self) -> "CellRef":
        """The cell without its calibration draw."""
        return self.model_copy(update={"draw": None})


class MetricValue(_RecordPart):
    """One number of one task, by lm-eval's names; accuracies are shares, not percent."""

    task: str
    metric: str
    value: Finite
    stderr: Finite | None
    better: Literal["higher", "lower"] | None
    aggregation: str  # how documents' values become one: a name in qbench.records.samples.AGGREGATIONS
    documents: Count


class Divergence(_RecordPart):
    """How far a model's predictions are from the unquantized model's, over the tokens of one task.

    The mean is the metric kl; these have no intervals. Changes are quantized − unquantized, both of the right token,
    the one in the text.
    """

    task: str
    documents: int
    tokens: int
    median: float  # of KL(unquantized ‖ quantized) of a token, in nats
    p99: float  # its percentiles
    p999: float
    same_top: float  # share of tokens at which both models find the same token likeliest
    rms_change: float  # root mean square of the change of the right token's probability
    nats_before: float  # log-perplexity per token of the unquantized model
    log_ratio: float  # ln(perplexity / unquantized perplexity), per token
    correlation: float | None  # of the right token's log-probabilities; None if one of them is constant


class QuantizerFacts(_RecordPart):
    """What reports need to know about the method that quantized a cell: they never import one."""

    title: str  # as papers write it: GPTQ
    calibrated: bool  # whether its numbers depend on calibration text


class Cost(_RecordPart):
    """The cost of a cell."""

    seconds: dict[str, Finite]  # by phase: load, quantize, evaluate
    tokens: Count | None = None  # forwarded while evaluating
    tokens_per_second: Finite | None = None
    peak_host_bytes: Count | None = None
    peak_device_bytes: Count | None = None
    # The token budget of a batch, and its value after each time memory ran out; None without batches.
    batch_tokens: tuple[int, ...] | None = None
    weight_bytes: Count | None = None  # of the model as it would be saved: packed layers, and the rest in its dtype


class Provenance(_RecordPart):
    """Everything needed to reproduce the numbers."""

    recipe: str  # the file's name
    resolved_recipe: JsonFields
    packages: dict[str, str]
    git_commit: str | None  # with a + if the working tree has changes
    machine: JsonFields  # cpu, cores, threads, memory, gpu, driver, python, platform
    precision: dict[str, str | bool] | None = None  # torch's settings for matrix products on CUDA
    started: str  # ISO 8601, UTC
    finished: str


class Failure(_RecordPart):
    """Why a cell has no numbers."""

    kind: FailureKind
    reason: str
    phase: str | None = None
    log_tail: str = ""


class ImportedTask(_RecordPart):
    """What decides the numbers of a task that another program evaluated. Hashes are of all documents in any order."""

    file: str  # with its per-document results
    version: str
    num_fewshot: Annotated[int, Field(ge=0)]
    documents: str
    prompts: str
    targets: str
    generation: str  # of the settings for generated text; empty for tasks that score


class Imported(_RecordPart):
    """Where numbers come from that another program measured: it audits no model, and we know no cost."""

    program: Literal["lm-eval"]
    files: tuple[str, ...]  # with its scores
    tasks: dict[str, ImportedTask]


class Record(_RecordPart):
    """What a cell produced: numbers and their proof, or the reason why there are none."""

    schema_version: Literal[2] = SCHEMA_VERSION
    state: Literal["done", "failed"]
    cell: CellRef
    key: str
    identity: Identity
    quantizer: QuantizerFacts | None = None  # None: imported
    attention_title: str | None = None  # of the identity's kind, as papers write it; None: imported
    metrics: tuple[MetricValue, ...] = ()
    divergences: tuple[Divergence, ...] = ()  # one per task that scores whole pages
    audit: Audit | None = None
    cost: Cost | None = None
    provenance: Provenance
    failure: Failure | None = None
    samples_sha256: str | None = None  # of the Parquet file next to it
    imported: Imported | None = None  # None: measured by qbench
    # Instead of metrics, depending on what was measured:
    analysis: AnalysisFacts | None = None
    maps: MapsFacts | None = None
    sensitivity: tuple[LinearDamage, ...] | None = None


class PlannedCell(_RecordPart):
    """A cell as a run planned it."""

    cell: CellRef
    key: str | None  # of the record that counts; None if it is not known yet, or the method lacks the width
    not_offered: bool = False


class RunPlan(_RecordPart):
    """The content of run.json and analysis.json: the planned matrix, which shows what is missing."""

    schema_version: Literal[2] = SCHEMA_VERSION
    recipe: str
    resolved_recipe: JsonFields
    cells: tuple[PlannedCell, ...]
