"""What is tested on a pair of records: one hypothesis per task and metric, in losses of documents."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from qbench.gate.settings import GateSettings, MetricKind, Tolerances
from qbench.gate.sign_flip import interval, ratio, smallest_p, upper_end
from qbench.records.kept import shared
from qbench.records.metrics import Better, facts_of, is_nats
from qbench.records.paired import GOLD_LOGPROB, PairedDocuments
from qbench.records.samples import AGGREGATIONS, WEIGHT, Aggregation, Floats, Ints
from qbench.records.schema import CellRef, MetricValue
from qbench.uncertainty import ChanceSource, Estimate, of_two_samples


@dataclass(frozen=True)
class Hypothesis:
    """'This metric of this cell got worse', with the evidence for and against it."""

    cell: CellRef
    task: str
    metric: str
    kind: MetricKind
    aggregation: Aggregation
    tolerance: float  # in the kind's unit
    threshold: float  # the tolerance as a mean loss, the same if before and after are swapped
    alpha: float
    before: float  # the metric in the baseline
    after: float
    losses: Floats  # [distinct documents] how much worse each got; summed over calibration draws
    weights: Floats  # [distinct documents] Σ losses is divided by Σ weights; summed over draws too
    groups: Ints  # [distinct documents] equal for the same document in another metric of the task
    documents: "Documents"
    draws: int = 1  # of calibration
    by_draw: tuple[Floats, Floats] | None = None  # [draws] means before and after, if the draws differ; high is bad
    margin: float | None = None  # the loss that must be excluded at 95%, in the kind's unit
    limit: float | None = None  # of damage (gate.max_damage): the mean loss that `losses` are counted from
    damages: Floats | None = None  # [distinct documents] with a limit: the losses themselves
    parts: tuple[tuple[str, float], ...] = ()  # of a pooled loss: names and losses in units of their tolerances
    lost_answers: float = 0.0  # of a pooled loss: what one document adds if all its answers are lost
    only_answers: bool = False  # of a pooled loss: whether it has nothing but accuracies

    @property
    def name(self) -> str:
        """The hypothesis in one line, for people."""
        return f"{self.cell.name} {self.task} {self.what}"

    @property
    def what(self) -> str:
        """The metric, and whether it is compared with the unquantized model instead of the baseline."""
        return self.metric if self.limit is None else f"{self.metric} (damage)"

    @property
    def is_score(self) -> bool:
        """Whether it compares one score with the baseline's. Pooled losses and limits of damage do not."""
        return not self.parts and self.limit is None

    @property
    def loss(self) -> float:
        """How much worse it got: points of an accuracy, percent of a perplexity, nats of a log-probability or KL."""
        return self._in_unit(ratio(self.losses, self.weights))

    def _in_unit(self, mean_loss: float) -> float:
        return in_unit(self.kind, mean_loss + (self.limit or 0.0))

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% confidence interval of the loss, of this hypothesis alone."""
        low, high = interval(self.losses, self.weights, self.calibration)
        return self._in_unit(low), self._in_unit(high)

    @cached_property
    def upper(self) -> float:
        """The loss is not above this at 95%: the upper end of the one-sided interval, of this hypothesis alone."""
        losses = self.losses if self.damages is None else self.damages
        return in_unit(
            self.kind, upper_end(losses, self.weights, self._largest, self.calibration, at_least=self.lost_answers)
        )

    @property
    def _largest(self) -> float | None:
        """The most that a document can lose: a whole answer; None if there is no such limit."""
        if self.kind == "accuracy":
            return float(self.weights.mean())
        return self.lost_answers if self.only_answers else None

    @property
    def changed_documents(self) -> int:
        """How many distinct documents changed; gains and losses of several calibration draws may cancel out."""
        return int(np.count_nonzero(self.losses if self.damages is None else self.damages))

    @property
    def is_unchanged(self) -> bool:
        """Whether no document changed, although one may lose any amount: then nothing shows how large a loss may be."""
        return self.changed_documents == 0 and self._largest is None and math.isfinite(self.upper)

    @property
    def is_bounded(self) -> bool:
        """Whether the documents limit the loss."""
        return math.isfinite(self.upper) and not self.is_unchanged

    @property
    def upper_in_tolerances(self) -> float:
        """The same in units of the tolerance; of the default one if that is 0."""
        return self.upper / (self.tolerance or in_unit(self.kind, self.unit))

    @property
    def unit(self) -> float:
        """The mean loss that counts as one tolerance; the default one if the tolerance is 0."""
        return self.threshold or _threshold(self.kind, getattr(Tolerances(), self.kind), (0.0, 0.0), Tolerances())

    @property
    def misses_margin(self) -> bool:
        """Whether a loss above the required margin cannot be excluded."""
        return self.margin is not None and not self.upper <= self.margin

    @property
    def documents_needed(self) -> int | None:
        """How many documents exclude a loss above the margin with a probability of POWER, if nothing got worse.

        From the spread of these documents; None without a margin or a spread, or if more documents would not help.
        """
        if not self.margin or len(self.losses) < 2 or self.calibration:
            return None
        margin, unit = mean_loss(self.kind, self.margin), float(self.weights.mean())
        residuals = self.losses - ratio(self.losses, self.weights) * self.weights
        variance = float(np.mean(residuals**2)) / unit**2
        # One more document has lost the most, as in upper_end: n documents reach (1 + z)·most / n + (z + z')·σ / √n.
        most = max(float(np.abs(self.losses).max()), self._largest or self.lost_answers) / unit
        z, z_power = (NormalDist().inv_cdf(share) for share in (0.95, POWER))
        spread = (z + z_power) * math.sqrt(variance)
        root = (spread + math.sqrt(spread**2 + 4 * margin * (1 + z) * most)) / (2 * margin)  # √n
        needed = math.ceil(root**2)
        return needed if needed > len(self.losses) else None

    @property
    def smallest_p(self) -> float:
        """The smallest p with which it could fail, given the sizes of its losses; 1 if it cannot fail."""
        return smallest_p(self.losses) if self.can_fail else 1.0

    @property
    def can_fail(self) -> bool:
        """Whether the loss would be above the tolerance if all changed documents had got worse. Ignores their signs."""
        threshold = self.threshold - (self.limit or 0.0)
        return float(np.abs(self.losses).sum()) > threshold * float(self.weights.sum())

    @cached_property
    def calibration(self) -> ChanceSource | None:
        """How the mean loss varies with calibration draws; None with one draw, or with equal draws on both sides."""
        return of_two_samples(*(side.tolist() for side in self.by_draw)) if self.by_draw else None

    def with_calibration(self, p: float, sign: int = 1) -> float:
        """A one-sided p that includes the spread over calibration draws, from the p of the documents' losses.

        From documents alone, p corresponds to a loss of z standard errors; the spread over draws is added as in
        qbench.uncertainty. sign: -1 for the p of a gain.
        """
        if self.calibration is None or self.calibration.variance == 0 or p >= 0.5:
            return p
        loss = sign * ratio(self.losses, self.weights)
        if loss <= 0:
            return p
        documents = ChanceSource((loss / NormalDist().inv_cdf(p)) ** 2 if p > 0 else 0.0, math.inf)
        return Estimate(loss, (documents, self.calibration)).p / 2


POWER = 0.8
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
    draws, losses = len(after), sign * (before - after).sum(axis=0)  # a sum: integers stay integers
    # With the same draws on both sides, calibration is not a source of chance, and documents alone decide.
    means = [-sign * side.sum(axis=1) / weights.sum() for side in (before, after)]  # [draws]
    before, after = before.mean(axis=0), after.mean(axis=0)
    group = paired.group[both]
    groups = np.unique(group)
    group = group if both.all() else np.searchsorted(groups, group)
    values = aggregation.value(before, weights), aggregation.value(after, weights)
    tolerance, margin = settings.tolerance(kind, paired.task, metric), settings.margin(kind, paired.task, metric)
    return Hypothesis(
        cell=cell,
        task=paired.task,
        metric=metric,
        kind=kind,
        aggregation=aggregation,
        tolerance=in_unit_of_losses(kind, tolerance, values[0], settings.tolerances),
        threshold=_threshold(kind, tolerance, values, settings.tolerances),
        alpha=settings.level(paired.task, metric),
        before=values[0],
        after=values[1],
        losses=np.bincount(group, losses).astype(np.float64),
        weights=shared(draws * np.bincount(group, weights).astype(np.float64)),
        groups=shared(groups),
        documents=Documents.of(paired.ids[both], before, after, losses),
        draws=draws,
        by_draw=None if draws < 2 or paired.same_calibration else (means[0], means[1]),
        margin=None if margin is None else in_unit_of_losses(kind, margin, values[0], settings.tolerances),
    )


def in_unit_of_losses(kind: MetricKind, amount: float, before: float, tolerances: Tolerances) -> float:
    """A setting in the unit of losses: KL's is in percent of the baseline's, but not below its floor."""
    return max(amount / 100 * before, tolerances.kl_floor) if kind == "kl" else amount


def _threshold(kind: MetricKind, amount: float, values: tuple[float, float], tolerances: Tolerances) -> float:
    """A tolerance as a mean loss that does not depend on which side is the baseline: otherwise it depends on signs.

    For a percentage x of the baseline, after > (1 + x)·before is the same as
    after − before > x·(before + after) / (2 + x), and the sum of both sides stays if documents are swapped.
    """
    if kind != "kl":
        return mean_loss(kind, amount)
    return max(amount / 100 * sum(values) / (2 + amount / 100), tolerances.kl_floor)
