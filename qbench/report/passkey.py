"""Passkey by length: the curve of each model under each quantization, as a table, as rows and for the plot."""

import math
from dataclasses import dataclass
from itertools import groupby

from qbench.records.metrics import passkey_length
from qbench.report.attentions import kind_title
from qbench.report.delta import ReportData
from qbench.report.results import FamilyQuantization, Gap, Score
from qbench.report.tables import Column, Field, Table, quantization_name, score_field
from qbench.report.tidy import DataRow

Z95 = 1.96
READ_PASSKEY = "Accuracy in percent: how often the model finds the key hidden in that many tokens."


@dataclass(frozen=True)
class LengthScore:
    """The accuracy at one length, in percent."""

    length: int  # in tokens
    score: Score | Gap

    @property
    def interval(self) -> tuple[float, float] | None:
        """Wilson's 95% interval, which is not empty at 0% and 100%; None without a score."""
        if isinstance(self.score, Gap) or not self.score.documents:
            return None
        share, n, z2 = self.score.value / 100, self.score.documents, Z95**2
        centre, spread = share + z2 / (2 * n), Z95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
        low, high = (100 * (centre + sign * spread) / (1 + z2 / n) for sign in (-1, 1))
        return max(low, 0.0), min(high, 100.0)


@dataclass(frozen=True)
class LengthCurve:
    """One model's accuracies by length."""

    quantization: FamilyQuantization
    attention: str
    points: tuple[LengthScore, ...]


def passkey_curves(report: ReportData) -> list[LengthCurve]:
    """One curve per quantization and kind of attention, family by family; none without passkey tasks."""
    found = []
    for about, rows in groupby(report.deltas, lambda row: row.quantization):
        by_length = {length: row for row in rows if (length := passkey_length(row.measure.task)) is not None}
        for attention in report.results.kinds_of(about.family) if by_length else ():
            points = tuple(LengthScore(length, by_length[length].scores[attention]) for length in sorted(by_length))
            found.append(LengthCurve(about, attention, points))
    return found


def has_passkey(report: ReportData) -> bool:
    """Whether the results have passkey tasks."""
    return any(passkey_length(measure.task) is not None for measure in report.results.measures)


def passkey_tables(report: ReportData) -> list[Table]:
    """One table per family in the form of the paper's: one line per model, one column per length."""
    found = []
    for family, group in groupby(passkey_curves(report), lambda curve: curve.quantization.family):
        curves = list(group)
        lengths = [point.length for point in curves[0].points]
        heads = [Column(title, "l") for title in ("Method", "Quantization", "Attention")]
        table = Table(
            name=f"passkey-{family}",
            title=f"{family}: passkey",
            caption=f"Passkey accuracy of the {family} models by length.",
            reading=[READ_PASSKEY],
            columns=[*heads, *(Column(f"{length:,}", group="Tokens") for length in lengths)],
            heads=2,
        )
        for curve in curves:
            about = curve.quantization
            names = [about.method_title, quantization_name(about), kind_title(curve.attention)]
            table.rows.append([*map(Field, names), *(score_field(table, point.score) for point in curve.points)])
        found.append(table)
    return found


def passkey_rows(report: ReportData) -> list[DataRow]:
    """One row per model and length."""
    return [
        {
            **curve.quantization.key,
            "attention": curve.attention,
            "length": point.length,
            "accuracy": point.score.value if isinstance(point.score, Score) else None,
            "low": point.interval[0] if point.interval else None,
            "high": point.interval[1] if point.interval else None,
            "trials": point.score.documents if isinstance(point.score, Score) else None,
            "note": point.score.reason if isinstance(point.score, Gap) else "",
        }
        for curve in passkey_curves(report)
        for point in curve.points
    ]
