"""The answer in a sentence per bit width: did a kind of attention lose less than the reference?

H = mean over tasks and quantizations of [(ℓ_q − ℓ_0) of the attention − (ℓ_q − ℓ_0) of the reference], where ℓ is in
nats per decision: the log-probability of the right choice among the choices, the target's log-likelihood, or the
log-likelihood per word. H > 0: the attention lost less. docs/statistics.md says what the interval includes.
"""

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING

from qbench.records.metrics import TASKS, is_share
from qbench.report.evidence import DocumentEvidence, common_draws, one_draw
from qbench.report.metrics import Measure, first_of_each_task
from qbench.report.results import UNQUANTIZED_METHOD, CellResult, FamilyQuantization, ResultSet, Score
from qbench.uncertainty import ChanceSource, Estimate, of_draws

if TYPE_CHECKING:
    import numpy as np

    from qbench.records.documents import Keys

ALPHA = 0.05  # of all sentences of a page together
OTHER_DOCUMENTS = "the cells did not all see the same documents"


@dataclass(frozen=True)
class Scales:
    """The headline on other scales; None if the results do not allow it."""

    points: float | None = None  # of accuracy, in percent
    logits: float | None = None  # of accuracy
    ratio: float | None = None  # damage in nats ÷ the reference's


@dataclass(frozen=True)
class Headline:
    """How much less an attention lost than the reference at one bit width."""

    families: tuple[str, ...]  # several if the recipe declares them replicates of one pair
    attention: str
    reference: str
    bits: int
    unit: str  # nats, or points if there are no per-document results
    estimate: Estimate
    scales: Scales = Scales()
    draws: int | None = None  # of calibration; None if no quantization is calibrated
    judged: bool = True  # False with one calibration draw, which says nothing about others
    adjusted_p: float = 1.0  # Holm's, over the whole page
    level: tuple[float, float] | None = None  # mean accuracies of the two unquantized models, the reference's first
    notes: tuple[str, ...] = ()

    @property
    def value(self) -> float:
        """H."""
        return self.estimate.value

    @property
    def interval(self) -> tuple[float, float]:
        """95%, not adjusted."""
        reach = self.estimate.half_width()
        return self.value - reach, self.value + reach

    @property
    def claims(self) -> bool:
        """Whether it claims that one of the two lost less."""
        return self.judged and self.adjusted_p <= ALPHA

    @property
    def depends_on_scale(self) -> bool:
        """Whether another scale has the other sign."""
        others = [found for found in (self.scales.points, self.scales.logits) if found is not None]
        return any(found * self.value < 0 for found in others)


def headlines(results: ResultSet, evidence: DocumentEvidence) -> list[Headline]:
    """One per family (or set of replicates), attention and bit width, with p adjusted over all of them."""
    report, groups = _Data(results, evidence), list(_groups(results))
    return adjusted(_in_nats(report, groups) if evidence.documents else _in_points(report, groups))


@dataclass(frozen=True)
class _Data:
    results: ResultSet
    evidence: DocumentEvidence


@dataclass(frozen=True)
class _Group:
    """What a headline averages over: the quantizations of one width, in families that are replicates."""

    families: tuple[str, ...]
    attention: str
    reference: str
    bits: int
    quantizations: tuple[tuple[FamilyQuantization, ...], ...]  # by family


def _groups(results: ResultSet) -> Iterator[_Group]:
    for families in _replicates(results):
        kinds = [results.kinds_of(family) for family in families]
        reference, *others = kinds[0]
        if reference != results.reference:  # the families have none
            continue
        by_family = [
            [q for q in results.quantizations() if q.family == family and _counts(results, q)] for family in families
        ]
        for bits in sorted({q.bits for own in by_family for q in own}):
            chosen = tuple(tuple(q for q in own if q.bits == bits) for own in by_family)
            for attention in (kind for kind in others if all(kind in own for own in kinds)):
                yield _Group(families, attention, reference, bits, chosen)


def _counts(results: ResultSet, quantization: FamilyQuantization) -> bool:
    """Whether weights are quantized, and nothing else."""
    cells = [results.twin(quantization, kind) for kind in results.kinds_of(quantization.family)]
    return quantization.method != UNQUANTIZED_METHOD and not any(cell.has_axes for cell in cells)


def _replicates(results: ResultSet) -> list[tuple[str, ...]]:
    """The families; those that the recipe declares as replicates form one group."""
    declared = [tuple(recipe.get("replicates") or ()) for recipe in results.recipes().values()]
    joined = next((own for own in declared if own and set(own) <= set(results.families)), ())
    apart: list[tuple[str, ...]] = [(family,) for family in results.families if family not in joined]
    return [joined, *apart] if joined else apart


def _in_nats(report: _Data, groups: Sequence[_Group]) -> list[Headline]:
    pooled = [pool for group in groups if (pool := _pool(report, group))]
    variances = _document_variances(pooled)
    return [_headline(report, pool, variance) for pool, variance in zip(pooled, variances, strict=True)]


@dataclass(frozen=True)
class _Pool:
    """The documents behind a headline: the gain of each, by family and calibration draw."""

    group: _Group
    weights: Mapping[str, "np.ndarray"]  # by task: [documents]
    gains: Mapping[str, "np.ndarray"]  # by task: [families, draws, documents], summed over quantizations
    losses: tuple[float, float]  # ℓ_0 − ℓ_q of the reference and of the attention
    quantizations: int
    cells: Sequence[CellResult] = field(repr=False)
    notes: tuple[str, ...] = ()  # which tasks and quantizations are left out, and why

    @property
    def pairs(self) -> int:
        """The number of (task, quantization) pairs that H is a mean over."""
        return len(self.gains) * self.quantizations

    def by_draw(self) -> "np.ndarray":
        """H of each family and draw: [families, draws]."""
        parts = [gains.sum(-1) / self.weights[task].sum() for task, gains in self.gains.items()]
        return sum(parts) / self.pairs


def _pool(report: _Data, group: _Group) -> _Pool | None:
    """The documents that all cells of a group saw; None if there are none."""
    import numpy as np

    quads = _quads(report.results, group)
    cells = [result for own in quads.values() for quad in own for result in quad]
    draws = common_draws(*cells) if cells else []
    if not draws:
        return None
    gains, weights, losses, without = {}, {}, [], {}
    for task in dict.fromkeys(measure.task for measure in report.results.measures):
        found = [[_gains(report, task, quad, draws) for quad in own] for own in quads.values()]
        usable = [[part for part in own if isinstance(part, _Gains)] for own in found]
        flat = [part for own in usable for part in own]
        if reason := next((part for own in found for part in own if isinstance(part, str)), None):
            without[task] = reason
        elif any(part.keys is not flat[0].keys for part in flat):
            without[task] = OTHER_DOCUMENTS
        else:
            weights[task] = flat[0].weights
            gains[task] = np.array([sum(part.gains for part in own) for own in zip(*usable, strict=True)])
            losses.append(np.mean([part.losses for part in flat], axis=0))
    if not gains:
        return None
    lacking = {q.label for own in group.quantizations for q in own} - quads.keys()
    without |= dict.fromkeys(sorted(lacking), "not all models have scores for it")
    reference, attention = np.mean(losses, axis=0).tolist()
    notes = tuple(f"The headline leaves out {name}: {reason}." for name, reason in without.items())
    return _Pool(group, weights, gains, (reference, attention), len(quads), cells, notes)


def _quads(results: ResultSet, group: _Group) -> dict[str, list[tuple[CellResult, ...]]]:
    """By label, for each family: the attention and the reference, quantized and not; only labels that have all four."""
    found: dict[str, list[tuple[CellResult, ...]]] = {}
    for own in group.quantizations:
        for q in own:
            found.setdefault(q.label, []).append(_quad(results, group, q))
    families = len(group.families)
    return {
        label: own
        for label, own in found.items()
        if len(own) == families and all(result.scores for quad in own for result in quad)
    }


def _quad(results: ResultSet, group: _Group, q: FamilyQuantization) -> tuple[CellResult, ...]:
    """The attention and the reference, quantized and not."""
    pair = [results.twin(q, kind) for kind in (group.attention, group.reference)]
    return (*pair, *(results.unquantized(result) for result in pair))


@dataclass(frozen=True)
class _Gains:
    gains: "np.ndarray"  # [draws, documents]: how much less the attention lost, times the document's weight
    weights: "np.ndarray"  # [documents]
    losses: tuple[float, float]  # of the reference and of the attention, per decision
    keys: "Keys"  # of the documents


def _gains(report: _Data, task: str, quad: Sequence[CellResult], draws: Sequence[int | None]) -> _Gains | str:
    """What the documents of a task say; or why it cannot be used."""
    import numpy as np

    documents = report.evidence.documents
    by_draw = [[documents.get(result.of_draw(draw).cell, {}).get(task) for result in quad] for draw in draws]
    seen = [own for row in by_draw for own in row if own]
    if len(seen) < len(draws) * len(quad) or not all(own.has_decisions for own in seen):
        return "not all cells have log-likelihoods for it"
    keys = seen[0].keys
    if any(own.keys is not keys for own in seen):
        return OTHER_DOCUMENTS
    values = [own.distinct(own.decisions) for own in seen]
    weights = values[0].weights
    stacked = np.array([own.values for own in values]).reshape(len(draws), len(quad), -1)  # of a_q, r_q, a_0, r_0
    changes = stacked[:, :2] - stacked[:, 2:]  # [draws, (attention, reference), documents]: ℓ_q − ℓ_0
    attention, reference = -changes.mean(0).sum(-1) / weights.sum()
    return _Gains(changes[:, 0] - changes[:, 1], weights, (float(reference), float(attention)), keys)


def _document_variances(pools: Sequence[_Pool]) -> list[ChanceSource]:
    """How much each headline would vary with other documents: a bootstrap within each task, using the same draws for
    all headlines."""
    import numpy as np

    from qbench.records.resampling import RESAMPLES, resampled_sums

    totals = np.zeros((len(pools), RESAMPLES))
    for task in dict.fromkeys(task for pool in pools for task in pool.gains):
        having = [n for n, pool in enumerate(pools) if task in pool.gains]
        for count in {len(pools[n].weights[task]) for n in having}:
            own = [n for n in having if len(pools[n].weights[task]) == count]
            gains = [pools[n].gains[task].mean((0, 1)) / pools[n].pairs for n in own]
            columns = np.stack([*gains, *(pools[n].weights[task] for n in own)], axis=1)
            sums = resampled_sums(columns, stream=zlib.crc32(task.encode())).T
            totals[own] += sums[: len(own)] / sums[len(own) :]
    found = []
    for pool, draws in zip(pools, totals, strict=True):
        count = min(len(weights) for weights in pool.weights.values())
        found.append(ChanceSource(float(np.var(draws)) * count / max(count - 1, 1), max(count - 1, 1)))
    return found


def _headline(report: _Data, pool: _Pool, over_documents: ChanceSource) -> Headline:
    group, by_draw = pool.group, pool.by_draw()
    sources = [over_documents]
    if by_draw.shape[1] > 1:
        sources.append(of_draws(by_draw.mean(0).tolist()))
    if by_draw.shape[0] > 1:
        sources.append(of_draws(by_draw.mean(1).tolist()))
    calibrated = any(result.calibration_draws for result in pool.cells)
    reference, attention = pool.losses
    scales = _accuracy_scales(report, group)
    return Headline(
        families=group.families,
        attention=group.attention,
        reference=group.reference,
        bits=group.bits,
        unit="nats",
        estimate=Estimate(float(by_draw.mean()), tuple(sources)),
        scales=replace(scales, ratio=attention / reference if reference > 0 else None),
        draws=by_draw.shape[1] if calibrated else None,
        judged=not one_draw(*pool.cells),
        level=_level(report, group),
        notes=pool.notes,
    )


def _accuracies(
    report: _Data, group: _Group
) -> Iterator[tuple[Measure, FamilyQuantization, tuple[Score, Score, Score, Score]]]:
    """The four accuracies of each task and quantization: of the attention and the reference, quantized and not."""
    for own in group.quantizations:
        for q in own:
            quad = _quad(report.results, group, q)
            for measure in first_of_each_task(report.results.measures_of(q.family)):
                scores = [result.score(measure) for result in quad]
                if is_share(measure.metric) and all(isinstance(score, Score) for score in scores):
                    yield measure, q, tuple(scores)  # type: ignore[misc]


def _accuracy_scales(report: _Data, group: _Group) -> Scales:
    points, logits = [], []
    for measure, _, scores in _accuracies(report, group):
        quantized, reference, before, reference_before = (score.value for score in scores)
        points.append((quantized - before) - (reference - reference_before))
        on_logits = [_logit(score, _count(measure, score)) for score in scores]
        logits.append((on_logits[0] - on_logits[2]) - (on_logits[1] - on_logits[3]))
    return Scales(fmean(points), fmean(logits)) if points else Scales()


def _level(report: _Data, group: _Group) -> tuple[float, float] | None:
    """Mean accuracies of the two unquantized models, the reference's first."""
    found = [(scores[3].value, scores[2].value) for _, _, scores in _accuracies(report, group)]
    return (fmean(own[0] for own in found), fmean(own[1] for own in found)) if found else None


def _logit(score: Score, count: int) -> float:
    """The logit of an accuracy in percent, with half a document added to each side: 100% has no logit."""
    right = (score.value / 100 * count + 0.5) / (count + 1)
    return math.log(right / (1 - right))


def _count(measure: Measure, score: Score) -> int:
    known = TASKS.get(measure.task)
    return score.documents or (known.documents if known else 1000)


def _in_points(report: _Data, groups: Sequence[_Group]) -> list[Headline]:
    """For published numbers: accuracies only, and an upper bound on their variance.

    Four accuracies on the same documents vary together, so the variance of their difference is at most the sum of
    theirs; quantizations of one task vary together too, so their standard errors are averaged.
    """
    found = []
    for group in groups:
        errors: dict[str, list[float]] = {}
        for measure, _, scores in _accuracies(report, group):
            variances = [_share_variance(score, _count(measure, score)) for score in scores]
            errors.setdefault(measure.task, []).append(math.sqrt(sum(variances)))
        pairs = sum(map(len, errors.values()))
        if not pairs:
            continue
        scales = _accuracy_scales(report, group)
        assert scales.points is not None
        variance = sum(sum(own) ** 2 for own in errors.values()) / pairs**2
        estimate = Estimate(scales.points, (ChanceSource(variance, math.inf),))
        level = _level(report, group)
        about = (group.families, group.attention, group.reference, group.bits)
        found.append(Headline(*about, "points", estimate, replace(scales, points=None), level=level))
    return found


def _share_variance(score: Score, count: int) -> float:
    share = score.value / 100
    return 100**2 * share * (1 - share) / count


def adjusted(found: Sequence[Headline]) -> list[Headline]:
    """The headlines with Holm's p over those that are judged."""
    judged = sorted((line.estimate.p, n) for n, line in enumerate(found) if line.judged)
    adjusted, largest = {}, 0.0
    for place, (p, n) in enumerate(judged):
        largest = max(largest, min(1.0, p * (len(judged) - place)))
        adjusted[n] = largest
    return [replace(line, adjusted_p=adjusted.get(n, 1.0)) for n, line in enumerate(found)]
