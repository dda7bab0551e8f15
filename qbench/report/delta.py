"""Rows of tables: the twins side by side (Δ), and what quantization cost each of them (damage)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qbench.report.evidence import Evidence, Flips, gather
from qbench.report.metrics import Measure
from qbench.report.outcomes import TWINS, Gap, Outcome, Outcomes, Quantized, Score, read_outcomes

if TYPE_CHECKING:
    from qbench.report.bootstrap import Interval

Tone = Literal["better", "worse", "same"]
DECIMALS, MOST_DECIMALS = 2, 6


@dataclass(frozen=True)
class Difference:
    """A difference of scores, computed on unrounded values."""

    value: float
    interval: "Interval | None" = None
    notes: tuple[str, ...] = ()

    @property
    def decimals(self) -> int:
        """As tables show it: two, or as many as show that it is not zero where its interval says so."""
        return _decimals(self.value) if self.significant else DECIMALS

    @property
    def interval_decimals(self) -> int:
        """The same of the ends of the interval, of which neither is zero if it excludes zero."""
        if self.interval is None or not self.interval.excludes_zero:
            return DECIMALS
        return max(_decimals(self.interval.low), _decimals(self.interval.high))

    def tone(self, measure: Measure) -> Tone | None:
        """Whether it is for the better, as far as its decimals show; None where the metric has no known direction."""
        if round(self.value, self.decimals) == 0:
            return "same"
        if measure.better is None:
            return None
        return "better" if (self.value > 0) == (measure.better == "higher") else "worse"

    @property
    def significant(self) -> bool:
        """Whether there is an interval, and it excludes zero."""
        return self.interval is not None and self.interval.excludes_zero


@dataclass(frozen=True)
class DeltaRow:
    """A number pair: the twins, and softpick − softmax."""

    quantized: Quantized
    measure: Measure
    softmax: Score | Gap
    softpick: Score | Gap
    delta: Difference | None  # None where one of the two is not there

    def of(self, attention: str) -> Score | Gap:
        """The score of one of the twins."""
        return {"softmax": self.softmax, "softpick": self.softpick}[attention]


@dataclass(frozen=True)
class Damage:
    """Quantized − unquantized of one model."""

    score: Difference | Gap
    flips: Flips | None = None


@dataclass(frozen=True)
class DamageRow:
    """What quantization cost each of the twins, and softpick's damage − softmax's."""

    quantized: Quantized
    measure: Measure
    softmax: Damage
    softpick: Damage
    difference: Difference | None

    def of(self, attention: str) -> Damage:
        """What it cost one of the twins."""
        return {"softmax": self.softmax, "softpick": self.softpick}[attention]


@dataclass(frozen=True)
class Report:
    """Results with the evidence behind them; rows are made when they are asked for."""

    outcomes: Outcomes
    evidence: Evidence

    @cached_property
    def deltas(self) -> list[DeltaRow]:
        """A row a quantization, task and metric."""
        return [self._delta(q, m) for q in self.outcomes.quantizations() for m in self.outcomes.measures_of(q.family)]

    @cached_property
    def damages(self) -> list[DamageRow]:
        """The same without the baselines."""
        return [
            self._damage(q, m)
            for q in self.outcomes.quantizations()
            if not q.is_baseline
            for m in self.outcomes.measures_of(q.family)
        ]

    def _delta(self, quantized: Quantized, measure: Measure) -> DeltaRow:
        softmax, softpick = (self.outcomes.twin(quantized, attention) for attention in TWINS)
        first, second = self._with_chance(softmax, measure), self._with_chance(softpick, measure)
        if isinstance(first, Gap) or isinstance(second, Gap):
            return DeltaRow(quantized, measure, first, second, None)
        # Published differences were computed before rounding, and are nearer to the truth than ours of rounded scores.
        published = self.outcomes.published_delta(quantized, measure)
        value = second.value - first.value if published is None else published
        delta = self._difference(value, measure, (1, softpick), (-1, softmax))
        return DeltaRow(quantized, measure, first, second, delta)

    def _damage(self, quantized: Quantized, measure: Measure) -> DamageRow:
        softmax, softpick = (self.outcomes.twin(quantized, attention) for attention in TWINS)
        first, second = self._own_damage(softmax, measure), self._own_damage(softpick, measure)
        difference = None
        if isinstance(first.score, Difference) and isinstance(second.score, Difference):
            value = second.score.value - first.score.value
            unquantized = (-1, self.outcomes.baseline(softpick)), (1, self.outcomes.baseline(softmax))
            difference = self._difference(value, measure, (1, softpick), (-1, softmax), *unquantized)
        return DamageRow(quantized, measure, first, second, difference)

    def _own_damage(self, outcome: Outcome, measure: Measure) -> Damage:
        baseline = self.outcomes.baseline(outcome)
        score = self._with_chance(outcome, measure, "The quantized score is not above chance")
        before = baseline.score(measure)
        if isinstance(score, Gap):
            return Damage(score)
        if isinstance(before, Gap):
            return Damage(Gap("–", before.reason))
        damage = self._difference(score.value - before.value, measure, (1, outcome), (-1, baseline))
        damage = replace(damage, notes=(*score.notes, *damage.notes))
        return Damage(damage, self.evidence.flips(measure, outcome, baseline))

    def _difference(self, value: float, measure: Measure, *terms: tuple[int, Outcome]) -> Difference:
        why_none = self.evidence.why_none(measure, *(outcome for _, outcome in terms))
        interval = self.evidence.interval(measure, *terms)
        direction = () if measure.better else (f"Whether higher or lower {measure.metric} is better is not known.",)
        return Difference(value, interval, (*((why_none,) if why_none else ()), *direction))

    def _with_chance(self, outcome: Outcome, measure: Measure, what: str = "Not above chance") -> Score | Gap:
        score = outcome.score(measure)
        if isinstance(score, Gap):
            return score
        chance = self.evidence.chance(measure, outcome)
        if chance is None or score.value > chance:
            return score
        return replace(score, notes=(*score.notes, f"{what}, which is {chance:.2f}."))


def _decimals(value: float) -> int:
    """Two, or as many as it takes for the value not to be rounded to zero."""
    return next((n for n in range(DECIMALS, MOST_DECIMALS) if round(value, n)), MOST_DECIMALS)


def read_report(source: Path | str) -> Report:
    """Read results, and their per-document results where there are any."""
    outcomes = read_outcomes(source)
    return Report(outcomes, gather(outcomes))


def notes_of(parts: Iterable[Score | Gap | Difference | None]) -> list[str]:
    """All that is to be said of the parts of a row."""
    found: list[str] = []
    for part in parts:
        found += [part.reason] if isinstance(part, Gap) else part.notes if part else ()
    return list(dict.fromkeys(found))
