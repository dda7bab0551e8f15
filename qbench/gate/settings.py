"""Settings of the gate: how sure it must be, and which losses do not matter. This is a recipe's field `gate`."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo
from pydantic_core import PydanticCustomError

MetricKind = Literal["accuracy", "perplexity", "gold_logprob", "kl", "pooled"]

# Of losses in reports; pooled: the mean of a cell's losses, each in units of its tolerance.
UNITS: dict[MetricKind, str] = {
    "accuracy": " points",
    "perplexity": "%",
    "gold_logprob": " nats",
    "kl": " nats",
    "pooled": "×",
}
# Of settings, if they differ from those of losses.
SETTING_UNITS: dict[str, str] = {str(kind): unit for kind, unit in UNITS.items()} | {
    "kl": "%",
    "kl_floor": " nats",
    "pooled": " tolerances",
}


def _without_unit(value: Any, info: ValidationInfo) -> Any:
    """A number with its unit as a number: 1% of a perplexity, 0.5 points of an accuracy."""
    if not isinstance(value, str | bool):
        return value
    unit = SETTING_UNITS.get(str(info.field_name), "").strip()
    found = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:e-?\d+)?) *(\D+)", str(value).strip())
    if found and unit and found[2] in (unit, unit.removesuffix("s")):
        return float(found[1])
    written = f"2{unit}" if unit == "%" else f"2 {unit}"
    example = f"a number of {'percent' if unit == '%' else unit}" if unit else "a number in the unit of its metric"
    raise PydanticCustomError("must", "{what}", {"what": f"be {example}, such as 2{f' or {written}' if unit else ''}"})


Alpha = Annotated[float, Field(gt=0, lt=1)]
Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_without_unit)]
Ratio = Annotated[float, Field(gt=1)]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Tolerances(_Settings):
    """The losses that may pass, by kind of metric."""

    accuracy: Tolerance = 0.5  # points: 0.5 is from 61.0% to 60.5%
    perplexity: Tolerance = 1.0  # percent: 1 is from 20.0 to 20.2
    gold_logprob: Tolerance = 0.02  # nats per document
    kl: Tolerance = 5.0  # percent of the baseline's KL: on mini 0.00003 nats per token at 8 bits, 0.7 at 2
    kl_floor: Tolerance = 0.001  # nats per token, about 0.1% of a perplexity: KL may always grow by this much
    pooled: Tolerance = 1.0  # tolerances: the mean of a cell's losses, each in units of its tolerance


class Margins(_Settings):
    """By kind of metric, the loss that a run must exclude at 95%; None requires nothing."""

    accuracy: Tolerance | None = None
    perplexity: Tolerance | None = None
    gold_logprob: Tolerance | None = None
    kl: Tolerance | None = None
    pooled: Tolerance | None = None


class Limits(_Settings):
    """By kind of metric, the largest damage to a quantized model that may pass; None limits nothing."""

    accuracy: Tolerance | None = None  # points below the unquantized model
    perplexity: Tolerance | None = None  # percent above it
    gold_logprob: Tolerance | None = None  # nats per document


EVERY = "*"  # in max_damage: every quantization that has no limits of its own


class Override(_Settings):
    """Overrides for one metric of one task; None keeps the default."""

    tolerance: Tolerance | None = None
    alpha: Alpha | None = None
    noninferiority: Tolerance | None = None


class GateSettings(_Settings):
    """When a run fails against its baseline."""

    alpha: Alpha = 0.01  # how often a table in which nothing got worse may fail
    tolerances: Tolerances = Tolerances()
    noninferiority: Margins = Margins()
    max_damage: dict[str, Limits] = {}  # by label, or EVERY: compared with the unquantized model of the same run
    min_documents: int = Field(default=0, ge=0, strict=True)  # that a task must have
    overrides: dict[str, dict[str, Override]] = {}  # task: {metric: …}; a choice task's log-softmax is gold_logprob
    baseline_may_hold_more: bool = False  # the run may have only part of the baseline's cells
    slope_drift: Tolerance = 0.01  # largest change of a layer's weight scale before its audit counts as changed
    error_drift: Tolerance = 0.01  # the same for a layer's relative weight error, as a share of it
    slower_ratio: Ratio = 1.5  # of the seconds a cell takes, on the same machine
    larger_ratio: Ratio = 1.05  # of the bytes its weights take

    def tolerance(self, kind: MetricKind, task: str, metric: str) -> float:
        """The loss that may pass, in the unit of its setting."""
        own = self._override(task, metric).tolerance
        return float(getattr(self.tolerances, kind)) if own is None else own

    def margin(self, kind: MetricKind, task: str, metric: str) -> float | None:
        """The loss that must be excluded, in the unit of its setting; None if none must."""
        own = self._override(task, metric).noninferiority
        margin: float | None = getattr(self.noninferiority, kind)
        return margin if own is None else own

    def level(self, task: str, metric: str) -> float:
        """The level that the adjusted p of this metric is compared with."""
        own = self._override(task, metric).alpha
        return self.alpha if own is None else own

    def _override(self, task: str, metric: str) -> Override:
        return self.overrides.get(task, {}).get(metric, Override())


# By field of GateSettings: what a mapping there, or each of the innermost ones, may have.
PARTS: dict[str, type[BaseModel]] = {
    "tolerances": Tolerances,
    "noninferiority": Margins,
    "max_damage": Limits,
    "overrides": Override,
}
