"""Rows of tables: the twins side by side (Δ), and what quantization cost each of them (damage)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qbench.numbers import DECIMALS, needed_decimals, score
from qbench.report.evidence import DocumentEvidence, Flips, NoInterval, gather
from qbench.report.metrics import Measure
from qbench.report.results import NOTHING, TWINS, CellResult, FamilyQuantization, Gap, ResultSet, Score
from qbench.report.sources import read_result_set

if TYPE_CHECKING:
    from qbench.report.bootstrap import Interval

Tone = Literal["better", "worse", "same"]


@dataclass(frozen=True)
class Difference:
    """A difference of scores, computed on unrounded values."""

    value: float
    interval: "Interval | None" = None
    notes: tuple[str, ...] = ()

    @property
    def decimals(self) -> int:
        """As tables show it: two, or as many as show that it is not zero if its interval says so."""
        return needed_decimals(self.value) if self.significant else DECIMALS

    @property
    def interval_decimals(self) -> int:
        """The same of the ends of the interval, of which neither is zero if it excludes zero."""
        if self.interval is None or not self.interval.excludes_zero:
            return DECIMALS
        return max(needed_decimals(self.interval.low), needed_decimals(self.interval.high))

    def tone(self, measure: Measure) -> Tone | None:
        """Whether it is for the better, as far as its decimals show; None if the metric has no known direction."""
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

    quantization: FamilyQuantization
    measure: Measure
    softmax: Score | Gap
    softpick: Score | Gap
    delta: Difference | None  # None if one of the two is not there

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

    quantization: FamilyQuantization
    measure: Measure
    softmax: Damage
    softpick: Damage
    difference: Difference | None

    def of(self, attention: str) -> Damage:
        """What it cost one of the twins."""
        return {"softmax": self.softmax, "softpick": self.softpick}[attention]


@dataclass(frozen=True)
class ReportData:
    """Results with the evidence behind them; rows are made when they are asked for."""

    results: ResultSet
    evidence: DocumentEvidence

    @cached_property
    def deltas(self) -> list[DeltaRow]:
        """One row per quantization, task and metric."""
        return [self._delta(q, m) for q in self.results.quantizations() for m in self.results.measures_of(q.family)]

    @cached_property
    def damages(self) -> list[DamageRow]:
        """The same without the unquantized models."""
        quantized = [q for q in self.results.quantizations() if not q.is_unquantized]
        return [self._damage(q, m) for q in quantized for m in self.results.measures_of(q.family)]

    def _delta(self, quantization: FamilyQuantization, measure: Measure) -> DeltaRow:
        softmax, softpick = (self.results.twin(quantization, attention) for attention in TWINS)
        first, second = self._with_chance(softmax, measure), self._with_chance(softpick, measure)
        if isinstance(first, Gap) or isinstance(second, Gap):
            return DeltaRow(quantization, measure, first, second, None)
        # Published differences were computed before rounding, and are nearer to the truth than ours of rounded scores.
        published = self.results.published_delta(quantization, measure)
        value = second.value - first.value if published is None else published
        delta = self._difference(value, measure, (1, softpick), (-1, softmax))
        return DeltaRow(quantization, measure, first, second, delta)

    def _damage(self, quantization: FamilyQuantization, measure: Measure) -> DamageRow:
        softmax, softpick = (self.results.twin(quantization, attention) for attention in TWINS)
        first, second = self._own_damage(softmax, measure), self._own_damage(softpick, measure)
        difference = None
        if isinstance(first.score, Difference) and isinstance(second.score, Difference):
            value = second.score.value - first.score.value
            unquantized = (-1, self.results.unquantized(softpick)), (1, self.results.unquantized(softmax))
            difference = self._difference(value, measure, (1, softpick), (-1, softmax), *unquantized)
        return DamageRow(quantization, measure, first, second, difference)

    def _own_damage(self, result: CellResult, measure: Measure) -> Damage:
        unquantized = self.results.unquantized(result)
        after = self._with_chance(result, measure, "The quantized score is not above chance")
        before = unquantized.score(measure)
        if isinstance(after, Gap):
            return Damage(after)
        if isinstance(before, Gap):
            return Damage(Gap(NOTHING, before.reason))
        damage = self._difference(after.value - before.value, measure, (1, result), (-1, unquantized))
        damage = replace(damage, notes=(*after.notes, *damage.notes))
        return Damage(damage, self.evidence.flips(measure, result, unquantized))

    def _difference(self, value: float, measure: Measure, *terms: tuple[int, CellResult]) -> Difference:
        interval = self.evidence.interval(measure, *terms)
        notes = []
        if isinstance(interval, NoInterval) and not interval.expected:
            notes.append(interval.reason)
        if measure.better is None:
            notes.append(f"Whether higher or lower {measure.metric} is better is not known.")
        return Difference(value, None if isinstance(interval, NoInterval) else interval, tuple(notes))

    def _with_chance(self, result: CellResult, measure: Measure, what: str = "Not above chance") -> Score | Gap:
        found = result.score(measure)
        if isinstance(found, Gap):
            return found
        chance = self.evidence.chance(measure, result)
        if chance is None or found.value > chance:
            return found
        return replace(found, notes=(*found.notes, f"{what}, which is {score(chance)}."))


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
