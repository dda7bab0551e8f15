"""Rows for programs: CSV and JSON, one row per number pair, unrounded, with all metrics."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from qbench.report.delta import Damage, DamageRow, DeltaRow, Difference, ReportData, notes_of
from qbench.report.results import Score

DataRow = Mapping[str, Any]  # all rows of a kind have the same columns, with None where there is no value


def delta_rows(report: ReportData) -> list[DataRow]:
    """The twins and Δ."""
    return [_delta(row) for row in report.deltas]


def baseline_rows(report: ReportData) -> list[DataRow]:
    """The same of the unquantized models alone."""
    return [_delta(row) for row in report.deltas if row.quantization.is_unquantized]


def damage_rows(report: ReportData) -> list[DataRow]:
    """What quantization cost each of the twins, and the difference."""
    return [_damage(row) for row in report.damages]


def to_csv(rows: Sequence[DataRow]) -> str:
    """Rows as CSV; empty where there is no value."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _plain(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def to_json(rows: Sequence[DataRow]) -> str:
    """Rows as a JSON list of objects."""
    return json.dumps(rows, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _delta(row: DeltaRow) -> DataRow:
    softmax = row.softmax if isinstance(row.softmax, Score) else None
    softpick = row.softpick if isinstance(row.softpick, Score) else None
    documents = {score.documents for score in (softmax, softpick) if score}
    return {
        **_about(row),
        "softmax": softmax and softmax.value,
        "softpick": softpick and softpick.value,
        "delta": row.delta and row.delta.value,
        **_interval(row.delta),
        "softmax_stderr": softmax and softmax.stderr,
        "softpick_stderr": softpick and softpick.stderr,
        "documents": documents.pop() if len(documents) == 1 else None,
        "note": " ".join(notes_of((row.softmax, row.softpick, row.delta))),
    }


def _damage(row: DamageRow) -> DataRow:
    return {
        **_about(row),
        **_own("softmax", row.softmax),
        **_own("softpick", row.softpick),
        "difference": row.difference and row.difference.value,
        **_interval(row.difference),
        "note": " ".join(notes_of((row.softmax.score, row.softpick.score, row.difference))),
    }


def _own(attention: str, damage: Damage) -> DataRow:
    score = damage.score if isinstance(damage.score, Difference) else None
    interval = _interval(score)
    return {
        f"{attention}_damage": score and score.value,
        f"{attention}_low": interval["low"],
        f"{attention}_high": interval["high"],
        f"{attention}_right_to_wrong": damage.flips and damage.flips.right_to_wrong,
        f"{attention}_wrong_to_right": damage.flips and damage.flips.wrong_to_right,
    }


def _about(row: DeltaRow | DamageRow) -> DataRow:
    measure = row.measure
    return {**row.quantization.key, "task": measure.task, "metric": measure.metric, "better": measure.better}


def _interval(difference: Difference | None) -> DataRow:
    found = difference.interval if difference else None
    return {
        "low": found and found.low,
        "high": found and found.high,
        "significant": found and found.excludes_zero,
    }


def _plain(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value
