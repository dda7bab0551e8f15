"""What is tested on a pair of records: one hypothesis per task and metric, in losses of documents."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from qbench.gate.pairing import GOLD_LOGPROB, Floats, Ints, PairedDocuments
from qbench.gate.settings import GateSettings, MetricKind
from qbench.gate.sign_flip import interval, ratio
from qbench.records.kept import shared
from qbench.records.metrics import Better, facts_of, is_nats
from qbench.records.samples import AGGREGATIONS, WEIGHT, Aggregation
from qbench.records.schema import CellRef, MetricValue
from qbench.uncertainty import ChanceSource, Estimate, of_two_samples

UNITS: dict[MetricKind, str] = {"accuracy": " points", "perplexity": "%", "gold_logprob": " nats", "kl": " nats"}


@dataclass(frozen=True)
class Hypothesis:
    """'This metric of this cell got worse', with the evidence for and against it."""

    cell: CellRef
    task: str
    metric: str
    kind: MetricKind
    aggregation: Aggregation
    tolerance: float  # in the kind's unit
    alpha: float
    before: float  # the metric in the baseline
    after: float
    losses: Floats  # [distinct documents] how much worse each got; summed over calibration draws
    weights: Floats  # [distinct documents] Σ losses is divided by Σ weights; summed over draws too
    documents: "Documents"
    draws: int = 1  # of calibration
    calibration: ChanceSource | None = None  # how the mean loss varies with the draws; None with one or the same

    @property
    def name(self) -> str:
        """The hypothesis in one line, for people."""
        return f"{self.cell.name} {self.task} {self.metric}"

    @property
    def loss(self) -> float:
        """How much worse it got: points of an accuracy, percent of a perplexity, nats of a log-probability or KL."""
        return in_unit(self.kind, ratio(self.losses, self.weights))

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% confidence interval of the loss, of this hypothesis alone."""
        low, high = interval(self.losses, self.weights, self.calibration)
        return in_unit(self.kind, low), in_unit(self.kind, high)

    def with_calibration(self, p: float, sign: int = 1) -> float:
        """A one-sided p that includes the spread over calibration draws, from the p of the documents' losses.

        From documents alone, p corresponds to a loss of z standard errors; the spread over draws is added as in
        qbench.uncertainty. sign: -1 for the p of a gain.
        """
        from scipy.special import ndtri

        loss = sign * ratio(self.losses, self.weights)
        if self.calibration is None or self.calibration.variance == 0 or loss <= 0 or p >= 0.5:
            return p
        documents = ChanceSource((loss / ndtri(p)) ** 2, math.inf)
        return Estimate(loss, (documents, self.calibration)).p / 2


MOST_CHANGED = 10


@dataclass(frozen=True)
class Documents:
    """How many documents a hypothesis is about, and those that lost most: id, value before and value after."""

    count: int
    most_changed: tuple[tuple[int, float, float], ...]

    @classmethod
    def of(cls, ids: Ints, before: Floats, after: Floats, losses: Floats) -> "Documents":
        """From all documents; before, after: the means over draws of calibration."""
        first = np.argsort(-losses, kind="stable")[:MOST_CHANGED]
        changed = [(int(ids[i]), float(before[i]), float(after[i])) for i in first if losses[i] > 0]
        return cls(len(ids), tuple(changed))


def in_unit(kind: MetricKind, mean_loss: float) -> float:
    """A mean loss of documents in the unit of reports and tolerances."""
    if kind == "perplexity":
        if mean_loss == math.inf:
            return mean_loss
        return 100 * math.expm1(min(mean_loss, 700.0))  # beyond 700 nats, e to the power of it is infinite
    return 100 * mean_loss if kind == "accuracy" else mean_loss


def mean_loss(kind: MetricKind, amount: float) -> float:
    """The inverse of in_unit: an amount in the unit of its kind as a mean loss of documents."""
    if kind == "perplexity":
        return math.log1p(amount / 100)
    return amount / 100 if kind == "accuracy" else amount


def hypotheses(
    cell: CellRef, paired: PairedDocuments, metrics: tuple[MetricValue, ...], settings: GateSettings
) -> Iterator[Hypothesis]:
    """The hypotheses of one task; metrics: the baseline's, so a run cannot drop one or reverse its direction.

    Perplexity per word, perplexity per byte and bits per byte are one hypothesis: the first is tested.
    """
    seen: list[tuple[Floats, Floats]] = []
    for metric in metrics:
        kind = kind_of(metric)
        if kind is None or not _in_both(paired, metric.metric):
            continue
        both = paired.values[metric.metric]
        if kind == "perplexity" and any(_equal(both, other) for other in seen):
            continue
        if kind == "perplexity":
            seen.append(both)
        aggregation = AGGREGATIONS[metric.aggregation]
        yield _hypothesis(cell, paired, metric.metric, kind, aggregation, better_end(metric) == "lower", settings)
    if _in_both(paired, GOLD_LOGPROB):
        yield _hypothesis(cell, paired, GOLD_LOGPROB, "gold_logprob", AGGREGATIONS["mean"], False, settings)


def kind_of(metric: MetricValue) -> MetricKind | None:
    """How a metric is tested; None if it is not a mean over documents, or has no better direction."""
    aggregation = AGGREGATIONS.get(metric.aggregation)
    if aggregation is None:
        return None
    if aggregation.factor < 0:  # of log-likelihoods
        return "perplexity"
    if is_nats(metric.metric):
        return "kl"
    return "accuracy" if better_end(metric) else None


def better_end(metric: MetricValue) -> Better | None:
    """Whether higher or lower is better: as the record says, or as known for the metric."""
    facts = facts_of(metric.metric)
    return metric.better or (facts.better if facts else None)


def _equal(columns: tuple[Floats, Floats], other: tuple[Floats, Floats]) -> bool:
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(columns, other, strict=True))


def _in_both(paired: PairedDocuments, metric: str) -> bool:
    before, after = paired.values.get(metric, (np.empty(0), np.empty(0)))
    return bool((np.isfinite(before) & np.isfinite(after)).any())


def _hypothesis(
    cell: CellRef,
    paired: PairedDocuments,
    metric: str,
    kind: MetricKind,
    aggregation: Aggregation,
    lower_is_better: bool,
    settings: GateSettings,
) -> Hypothesis:
    before, after = paired.by_draw[metric]  # [draws, documents]
    both = (np.isfinite(before) & np.isfinite(after)).all(axis=0)  # new NaNs are a separate failure
    before, after = before[:, both], after[:, both]
    weights = paired.values[metric + WEIGHT][1][both] if metric + WEIGHT in paired.values else np.ones(both.sum())
    # A perplexity's values are log-likelihoods: higher is better.
    sign = -1 if lower_is_better and kind != "perplexity" else 1
    calibration = _over_draws(before / weights.sum(), after / weights.sum(), paired.same_calibration)
    draws, losses = len(after), sign * (before - after).sum(axis=0)  # a sum: integers stay integers
    before, after = before.mean(axis=0), after.mean(axis=0)
    group = paired.group if both.all() else np.unique(paired.group[both], return_inverse=True)[1]
    return Hypothesis(
        cell=cell,
        task=paired.task,
        metric=metric,
        kind=kind,
        aggregation=aggregation,
        tolerance=settings.tolerance(kind, paired.task, metric),
        alpha=settings.level(paired.task, metric),
        before=aggregation.value(before, weights),
        after=aggregation.value(after, weights),
        losses=np.bincount(group, losses).astype(np.float64),
        weights=shared(draws * np.bincount(group, weights).astype(np.float64)),
        documents=Documents.of(paired.ids[both], before, after, losses),
        draws=draws,
        calibration=calibration,
    )


def _over_draws(before: Floats, after: Floats, same: bool) -> ChanceSource | None:
    """How much a mean loss varies with the draws of calibration; None with one draw.

    before, after: [draws, documents], which add up to each draw's mean. same: run and baseline have the same
    calibration draws. Then calibration is not a source of chance, and documents alone decide.
    """
    if len(after) < 2 or same:
        return None
    return of_two_samples(before.sum(axis=1).tolist(), after.sum(axis=1).tolist())
