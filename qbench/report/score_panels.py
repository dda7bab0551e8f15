"""What plots of scores show: one panel per metric and family, one line per method and kind of attention."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from qbench.records.metrics import is_nats, is_perplexity, is_share, passkey_length
from qbench.report.delta import DamageRow, DeltaRow, ReportData
from qbench.report.drawing import Z95
from qbench.report.metrics import Measure, in_tables
from qbench.report.results import NOT_OFFERED, FamilyQuantization, Gap, Score

LEAST_PERPLEXITY = 1.0  # of a model that is always right
R = TypeVar("R", DeltaRow, DamageRow)


class Series(NamedTuple):
    """A line of a panel."""

    attention: str
    method: str  # its title, with the setting if a width has several: BNB nf4


class Point(NamedTuple):
    """A value at a width, with the ends of its error bar."""

    bits: float  # nominal or measured, exactly
    value: float
    low: float
    high: float


@dataclass
class Panel:
    """One metric of one family: the points of each line, levels to compare with, and widths without a score."""

    levels: Mapping[str, float] = field(default_factory=dict)  # by attention
    points: dict[Series, list[Point]] = field(default_factory=lambda: defaultdict(list))
    gaps: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # by attention
    chance: float | None = None

    def add_gap(self, attention: str, bits: int, gap: Gap) -> None:
        """Remember a width that should have a score, unless the method does not offer it."""
        if gap.text != NOT_OFFERED:
            self.gaps[attention].append(bits)


Panels = dict[tuple[Measure, str], Panel]  # by metric and family


def score_panels(report: ReportData, families: Sequence[str]) -> Panels:
    """Scores of quantized models against nominal bits, with the unquantized ones as levels."""
    panels: Panels = {}
    plain = _weights_only(report, families)
    rows = _plotted(row for row in report.deltas if row.quantization in plain)
    names, levels = _line_names(report, rows), _levels(rows)
    for row in (row for row in rows if not row.quantization.is_unquantized):
        panel = _panel(panels, row, levels)
        for attention in report.results.kinds_of(row.quantization.family):
            score = row.scores[attention]
            if isinstance(score, Gap):
                panel.add_gap(attention, row.quantization.bits, score)
            else:
                point = Point(row.quantization.bits, score.value, *score_ends(score, row.measure))
                panel.points[Series(attention, names[row.quantization])].append(point)
    return panels


def damage_panels(report: ReportData, families: Sequence[str]) -> Panels:
    """Damages, with zero as the level."""
    panels: Panels = {}
    plain = _weights_only(report, families)
    rows = _plotted(row for row in report.damages if row.quantization in plain)
    names = _line_names(report, rows)
    for row in rows:
        panel = panels.setdefault((row.measure, row.quantization.family), Panel(levels={"none": 0.0}))
        for attention in report.results.kinds_of(row.quantization.family):
            damage = row.damages[attention].score
            if isinstance(damage, Gap):
                panel.add_gap(attention, row.quantization.bits, damage)
            else:
                ends = damage.shown_interval or (damage.shown, damage.shown)
                point = Point(row.quantization.bits, damage.shown, *ends)
                panel.points[Series(attention, names[row.quantization])].append(point)
    return panels


def storage_panels(report: ReportData, families: Sequence[str]) -> Panels:
    """Scores against the bits per weight that the audits measured; cells without an audit are left out."""
    panels: Panels = {}
    plain = _weights_only(report, families)
    rows = _plotted(row for row in report.deltas if row.quantization in plain)
    names, levels = _line_names(report, rows), _levels(rows)
    for row in (row for row in rows if not row.quantization.is_unquantized):
        for attention, score in _scores(row).items():
            result = report.results.twin(row.quantization, attention)
            stored = result.parts[0].stored  # draws take the same bits
            audit = stored.record.audit if stored else None
            if audit and audit.weights:
                bits = 8 * (audit.code_bytes + audit.metadata_bytes) / audit.weights
                panel = _panel(panels, row, levels)
                panel.chance = report.evidence.chance(row.measure, result)
                point = Point(bits, score.value, *score_ends(score, row.measure))
                panel.points[Series(attention, names[row.quantization])].append(point)
    return panels


def _weights_only(report: ReportData, families: Sequence[str]) -> set[FamilyQuantization]:
    """Quantizations of weights alone: others have no bit width at which to draw them."""
    return {about for family in families for about in report.results.weights_only(family)}


def _panel(panels: Panels, row: DeltaRow, levels: Panels) -> Panel:
    key = row.measure, row.quantization.family
    return panels.setdefault(key, Panel(levels=levels[key].levels if key in levels else {}))


def _levels(rows: Sequence[DeltaRow]) -> Panels:
    """The unquantized scores."""
    return {
        (row.measure, row.quantization.family): Panel({name: score.value for name, score in _scores(row).items()})
        for row in rows
        if row.quantization.is_unquantized
    }


def _line_names(report: ReportData, rows: Sequence[DeltaRow] | Sequence[DamageRow]) -> dict[FamilyQuantization, str]:
    """What the line of each quantization is called: its method, with the setting if a width has several."""
    every = dict.fromkeys(row.quantization for row in rows)
    found = {}
    for about in every:
        own = [other for other in every if (other.family, other.method) == (about.family, about.method)]
        setting = about.label.removeprefix(f"{about.method}-{about.bits}").lstrip("-")
        several = len({other.bits for other in own}) < len(own)
        found[about] = f"{report.results.method_titles[about.method]} {setting if several else ''}".strip()
    return found


def score_ends(score: Score, measure: Measure) -> tuple[float, float]:
    """The ends of a score's error bar; the score itself if its standard error is unknown."""
    value, stderr = score.value, score.stderr or 0.0
    if is_perplexity(measure.metric):
        # The interval of ln(perplexity), which is a mean: its standard error is that of a log-normal value. The plain
        # value ± error would go below 1, which no perplexity does, or below 0.
        factor = math.exp(Z95 * math.sqrt(math.log1p((stderr / value) ** 2)))
        return max(value / factor, min(value, LEAST_PERPLEXITY)), value * factor
    error = Z95 * stderr
    return value - error, min(value + error, 100 if is_share(measure.metric) else math.inf)


def _scores(row: DeltaRow) -> dict[str, Score]:
    """The ones that exist, by kind of attention."""
    return {attention: score for attention, score in row.scores.items() if isinstance(score, Score)}


def _plotted(rows: Iterable[R]) -> list[R]:
    """One accuracy per task, the normalized one if there is one, and its perplexity.

    Passkey and KL have their own figures.
    """
    rows = [row for row in rows if passkey_length(row.measure.task) is None and not is_nats(row.measure.metric)]
    chosen: dict[tuple[str, bool], Measure] = {}
    for measure in in_tables(dict.fromkeys(row.measure for row in rows)):
        chosen.setdefault((measure.task, is_perplexity(measure.metric)), measure)
    return [row for row in rows if row.measure in chosen.values() and row.measure.metric]
