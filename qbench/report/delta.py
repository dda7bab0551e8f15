"""Rows of tables: kinds of attention next to the reference (Δ), and what quantization cost each of them (damage)."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qbench.numbers import DECIMALS, needed_decimals, score
from qbench.records.metrics import is_nats, is_perplexity
from qbench.report.draws import over_draws
from qbench.report.evidence import DocumentEvidence, Flips, NoInterval, common_draws, gather, one_draw
from qbench.report.headline import Headline, headlines
from qbench.report.metrics import Measure
from qbench.report.results import NOTHING, CellResult, FamilyQuantization, Gap, ResultSet, Score
from qbench.report.sources import read_result_set

if TYPE_CHECKING:
    from qbench.records.findings.finding import Finding
    from qbench.report.analyses import AnalysisSet
    from qbench.report.bootstrap import Interval

ONE_DRAW = (
    "One calibration draw: the interval covers documents only, and another draw may move the number by more; "
    "`calibration: {seeds: 5}` measures how much."
)
Tone = Literal["better", "worse", "same"]


@dataclass(frozen=True)
class Difference:
    """A difference of scores, computed on unrounded values. Tables show the damage of a perplexity as the log of the
    ratio in percent: in units, the interval of a model that fell apart says nothing."""

    value: float
    interval: "Interval | None" = None
    notes: tuple[str, ...] = ()
    log_ratio: float | None = None  # of perplexities; None if the difference is shown in units

    @property
    def shown(self) -> float:
        """The value as tables show it."""
        return self.value if self.log_ratio is None else 100 * self.log_ratio

    @property
    def shown_interval(self) -> tuple[float, float] | None:
        """The ends of the interval as tables show them."""
        if self.interval is None:
            return None
        if self.log_ratio is None:
            return self.interval.low, self.interval.high
        low, high = self.interval.tested or (self.interval.low, self.interval.high)
        return 100 * low, 100 * high

    @property
    def decimals(self) -> int:
        """Decimals in tables: two, or more if needed to show that it is not zero (if its interval excludes zero)."""
        return needed_decimals(self.shown) if self.significant else DECIMALS

    @property
    def interval_decimals(self) -> int:
        """The same for the ends of the interval: neither is shown as zero if it excludes zero."""
        if self.shown_interval is None or not self.significant:
            return DECIMALS
        return max(map(needed_decimals, self.shown_interval))

    def tone(self, measure: Measure) -> Tone | None:
        """Whether it is an improvement, as far as its decimals show; None if the metric has no known direction."""
        if round(self.shown, self.decimals) == 0:
            return "same"
        if measure.better is None:
            return None
        return "better" if (self.shown > 0) == (measure.better == "higher") else "worse"

    @property
    def significant(self) -> bool:
        """Whether there is an interval that can be judged, and it excludes zero."""
        if self.interval is None or self.log_ratio is None or self.interval.estimate is None:
            return self.interval is not None and self.interval.excludes_zero
        low, high = self.interval.tested or (0.0, 0.0)
        return low > 0 or high < 0

    @property
    def p(self) -> float | None:
        """The two-sided p of no difference; None without an interval, or with one draw of calibration."""
        return self.interval.p if self.interval else None


@dataclass(frozen=True)
class DeltaRow:
    """The scores of all kinds of attention of a family, and each one's − the reference's."""

    quantization: FamilyQuantization
    measure: Measure
    scores: Mapping[str, Score | Gap]  # by kind, the reference first
    deltas: Mapping[str, Difference | None]  # by kind other than the reference; None if one of the two is not there


@dataclass(frozen=True)
class Damage:
    """Quantized − unquantized of one model."""

    score: Difference | Gap
    flips: Flips | None = None
    recovery: float | None = None  # what is left of the unquantized score, in percent; None if there is no such ratio


def recovery(measure: Measure, before: float, after: float) -> float | None:
    """100 × quantized / unquantized, or the reverse if lower is better; None for KL, which has no such ratio."""
    if measure.better is None or is_nats(measure.metric):
        return None
    part, whole = (before, after) if measure.better == "lower" else (after, before)
    return 100 * part / whole if whole else None


@dataclass(frozen=True)
class DamageRow:
    """What quantization cost each kind of attention in a family, and each damage − the reference's."""

    quantization: FamilyQuantization
    measure: Measure
    damages: Mapping[str, Damage]  # by kind, the reference first
    differences: Mapping[str, Difference | None]  # by kind other than the reference


@dataclass(frozen=True)
class ReportData:
    """Results with the evidence behind them; rows are computed on first use."""

    results: ResultSet
    evidence: DocumentEvidence

    @cached_property
    def deltas(self) -> list[DeltaRow]:
        """One row per quantization, task and metric."""
        return [self._delta(q, m) for q in self.results.quantizations() for m in self.results.measures_of(q.family)]

    @cached_property
    def damages(self) -> list[DamageRow]:
        """The same for quantized models only."""
        quantized = [q for q in self.results.quantizations() if not q.is_unquantized]
        return [self._damage(q, m) for q in quantized for m in self.results.measures_of(q.family)]

    @cached_property
    def analyses(self) -> "AnalysisSet":
        """What `qbench analyze` found, or what was published; read on first use."""
        from qbench.report.analyses import analysis_set  # needs numpy and pyarrow

        return analysis_set(self.results)

    @cached_property
    def findings(self) -> "list[Finding]":
        """All that cannot be right in the records, or in the published numbers."""
        if self.results.review and self.results.records:
            from qbench.records.findings.run import misplaced  # published numbers need neither numpy nor pyarrow

            elsewhere = misplaced(self.results.records)
            return elsewhere + self.results.review.findings(elsewhere)
        from qbench.report.published_rules import published_findings

        return published_findings(self)

    @cached_property
    def headlines(self) -> list[Headline]:
        """The answer: one per family, attention and bit width."""
        return headlines(self.results, self.evidence)

    def _delta(self, quantization: FamilyQuantization, measure: Measure) -> DeltaRow:
        twins = self._twins(quantization)
        scores = {attention: self._with_chance(twin, measure) for attention, twin in twins.items()}
        reference, *others = twins

        def delta(attention: str) -> Difference | None:
            first, second = scores[reference], scores[attention]
            if isinstance(first, Gap) or isinstance(second, Gap):
                return None
            # Published differences were computed before rounding: they are more accurate than ours of rounded scores.
            published = self.results.published_delta(quantization, attention, measure)
            found = self._difference(measure, (1, twins[attention]), (-1, twins[reference]))
            return found if published is None else replace(found, value=published)

        return DeltaRow(quantization, measure, scores, {attention: delta(attention) for attention in others})

    def _damage(self, quantization: FamilyQuantization, measure: Measure) -> DamageRow:
        twins = self._twins(quantization)
        damages = {attention: self._own_damage(twin, measure) for attention, twin in twins.items()}
        reference, *others = twins

        def difference(attention: str) -> Difference | None:
            first, second = damages[reference].score, damages[attention].score
            if isinstance(first, Gap) or isinstance(second, Gap):
                return None
            minuend, subtrahend = twins[attention], twins[reference]
            unquantized = (-1, self.results.unquantized(minuend)), (1, self.results.unquantized(subtrahend))
            terms = (1, minuend), (-1, subtrahend), *unquantized
            return self._difference(measure, *terms, is_damage=True)

        return DamageRow(quantization, measure, damages, {attention: difference(attention) for attention in others})

    def calibration_draws(self, quantization: FamilyQuantization, kinds: Iterable[str]) -> int | None:
        """How many calibration draws these kinds are compared on; None if the method is not calibrated."""
        results = [self.results.twin(quantization, attention) for attention in kinds]
        if not any(result.calibration_draws for result in results):
            return None
        return 1 if one_draw(*results) else len(common_draws(*results))

    def _twins(self, quantization: FamilyQuantization) -> dict[str, CellResult]:
        """The cells of a quantization by kind of attention, the reference first."""
        kinds = self.results.compared_kinds(quantization.family)
        return {attention: self.results.twin(quantization, attention) for attention in kinds}

    def _own_damage(self, result: CellResult, measure: Measure) -> Damage:
        unquantized = self.results.unquantized(result)
        after = self._with_chance(result, measure, "The quantized score is not above chance")
        before = unquantized.score(measure)
        if isinstance(after, Gap):
            return Damage(after)
        if isinstance(before, Gap):
            return Damage(Gap(NOTHING, before.reason))
        damage = self._difference(measure, (1, result), (-1, unquantized), is_damage=True)
        damage = replace(damage, notes=(*after.notes, *damage.notes))
        flips = self.evidence.flips(measure, result, unquantized)
        return Damage(damage, flips, recovery(measure, before.value, after.value))

    def _difference(self, measure: Measure, *terms: tuple[int, CellResult], is_damage: bool = False) -> Difference:
        """The signed sum of the scores that exist, over the calibration draws that all of them have."""
        results = [result for _, result in terms]
        interval, draws = self.evidence.interval(measure, *terms), common_draws(*results)
        scores = [over_draws(result, draws).score(measure) for result in results]
        there = [
            (sign, found.value) for (sign, _), found in zip(terms, scores, strict=True) if isinstance(found, Score)
        ]
        value = sum(sign * found for sign, found in there)
        log_ratio = None
        if is_damage and is_perplexity(measure.metric):
            log_ratio = sum(sign * math.log(found) for sign, found in there)
        notes = []
        if len(draws) < max(len([part for part in result.draws if part.scores]) for result in results):
            notes.append(f"Only the calibration draws that all models have: {', '.join(map(str, draws)) or 'none'}.")
        if one_draw(*results) and not isinstance(interval, NoInterval):
            notes.append(ONE_DRAW)
        if isinstance(interval, NoInterval) and not interval.expected:
            notes.append(interval.reason)
        if measure.better is None:
            notes.append(f"It is not known whether higher or lower {measure.metric} is better.")
        return Difference(value, None if isinstance(interval, NoInterval) else interval, tuple(notes), log_ratio)

    def _with_chance(self, result: CellResult, measure: Measure, what: str = "Not above chance") -> Score | Gap:
        found = result.score(measure)
        if isinstance(found, Gap):
            return found
        chance = self.evidence.chance(measure, result)
        if chance is None or found.value > chance:
            return found
        return replace(found, notes=(*found.notes, f"{what} ({score(chance)})."))


def read_report(source: Path | str) -> ReportData:
    """Read results, and their per-document results if there are any."""
    results = read_result_set(source)
    return ReportData(results, gather(results))


def notes_of(parts: Iterable[Score | Gap | Difference | None]) -> list[str]:
    """All notes on the parts of a row."""
    found: list[str] = []
    for part in parts:
        if isinstance(part, Gap):
            found.append(part.reason)
        elif part:
            found += part.notes
    return list(dict.fromkeys(found))
