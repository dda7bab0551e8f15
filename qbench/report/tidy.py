"""Rows for programs: CSV and JSON, one row a number pair, unrounded, with all metrics."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from qbench.report.delta import Damage, DamageRow, DeltaRow, Difference, Report, notes_of
from qbench.report.outcomes import Score
from qbench.report.tables import Kind

Record = Mapping[str, Any]


def rows(report: Report, kind: Kind) -> list[Record]:
    """The rows of a kind; each has the same columns, with None where there is no value."""
    if kind == "damage":
        return [_damage(row) for row in report.damages]
    return [_delta(row) for row in report.deltas if kind == "delta" or row.quantized.is_baseline]


def to_csv(rows: Sequence[Record]) -> str:
    """Rows as CSV; empty where there is no value."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _plain(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def to_json(rows: Sequence[Record]) -> str:
    """Rows as a JSON list of objects."""
    return json.dumps(rows, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _delta(row: DeltaRow) -> Record:
    scores = [side if isinstance(side, Score) else None for side in (row.softmax, row.softpick)]
    documents = {score.documents for score in scores if score}
    return {
        **_about(row),
        "softmax": scores[0] and scores[0].value,
        "softpick": scores[1] and scores[1].value,
        "delta": row.delta and row.delta.value,
        **_interval(row.delta),
        "softmax_stderr": scores[0] and scores[0].stderr,
        "softpick_stderr": scores[1] and scores[1].stderr,
        "documents": documents.pop() if len(documents) == 1 else None,
        "note": " ".join(notes_of((row.softmax, row.softpick, row.delta))),
    }


def _damage(row: DamageRow) -> Record:
    return {
        **_about(row),
        **_own("softmax", row.softmax),
        **_own("softpick", row.softpick),
        "difference": row.difference and row.difference.value,
        **_interval(row.difference),
        "note": " ".join(notes_of((row.softmax.score, row.softpick.score, row.difference))),
    }


def _own(attention: str, damage: Damage) -> Record:
    score = damage.score if isinstance(damage.score, Difference) else None
    return {
        f"{attention}_damage": score and score.value,
        **{f"{attention}_{name}": value for name, value in _interval(score).items() if name != "significant"},
        f"{attention}_right_to_wrong": damage.flips and damage.flips.right_to_wrong,
        f"{attention}_wrong_to_right": damage.flips and damage.flips.wrong_to_right,
    }


def _about(row: DeltaRow | DamageRow) -> Record:
    about, measure = row.quantized, row.measure
    return {**vars(about), "task": measure.task, "metric": measure.metric, "better": measure.better}


def _interval(difference: Difference | None) -> Record:
    found = difference.interval if difference else None
    return {
        "low": found and found.low,
        "high": found and found.high,
        "significant": found and found.excludes_zero,
    }


def _plain(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value
