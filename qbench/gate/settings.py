"""Settings of the gate: how sure it must be, and which losses do not matter. This is a recipe's field `gate`."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MetricKind = Literal["accuracy", "perplexity", "gold_logprob", "kl"]

Alpha = Annotated[float, Field(gt=0, lt=1)]
Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Ratio = Annotated[float, Field(gt=1)]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Tolerances(_Settings):
    """The losses that may pass, by kind of metric."""

    accuracy: Tolerance = 0.5  # points: 0.5 is from 61.0% to 60.5%
    perplexity: Tolerance = 1.0  # percent: 1 is from 20.0 to 20.2
    gold_logprob: Tolerance = 0.02  # nats per document
    kl: Tolerance = 0.005  # nats per token


class Override(_Settings):
    """Overrides for one metric of one task; None keeps the default."""

    tolerance: Tolerance | None = None
    alpha: Alpha | None = None


class GateSettings(_Settings):
    """When a run fails against its baseline."""

    alpha: Alpha = 0.01  # how often a table in which nothing got worse may fail
    tolerances: Tolerances = Tolerances()
    overrides: dict[str, dict[str, Override]] = {}  # task: {metric: …}; a choice task's log-softmax is gold_logprob
    baseline_may_hold_more: bool = False  # the run may have only part of the baseline's cells
    slope_drift: Tolerance = 0.01  # largest change of a layer's weight scale before its audit counts as changed
    error_drift: Tolerance = 0.01  # the same for a layer's relative weight error, as a share of it
    slower_ratio: Ratio = 1.5  # of the seconds a cell takes, on the same machine
    larger_ratio: Ratio = 1.05  # of the bytes its weights take

    def tolerance(self, kind: MetricKind, task: str, metric: str) -> float:
        """The loss that may pass, in the unit of its kind."""
        own = self._override(task, metric).tolerance
        return float(getattr(self.tolerances, kind)) if own is None else own

    def level(self, task: str, metric: str) -> float:
        """The level that the adjusted p of this metric is compared with."""
        own = self._override(task, metric).alpha
        return self.alpha if own is None else own

    def _override(self, task: str, metric: str) -> Override:
        return self.overrides.get(task, {}).get(metric, Override())
