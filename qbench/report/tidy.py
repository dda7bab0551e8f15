"""Rows for programs: CSV and JSON, one row per number pair, unrounded, with all metrics.

A pair is a kind of attention and the reference. If the kinds are softmax and softpick, the columns have their names;
otherwise each row names its kind.
"""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from qbench.output import escaped
from qbench.report.attentions import TWINS
from qbench.report.delta import Damage, DamageRow, DeltaRow, Difference, ReportData, notes_of
from qbench.report.results import Score

DataRow = Mapping[str, Any]  # all rows of a kind have the same columns; None if there is no value
Columns = Mapping[str, str]  # the kind of attention by the name of its column
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # spreadsheets run text that begins so
R = TypeVar("R", DeltaRow, DamageRow)


def delta_rows(report: ReportData) -> list[DataRow]:
    """The scores of each kind of attention and of the reference, and Δ."""
    return _pairs(report, report.deltas, _delta)


def baseline_rows(report: ReportData) -> list[DataRow]:
    """The same for the unquantized models only."""
    return _pairs(report, [row for row in report.deltas if row.quantization.is_unquantized], _delta)


def damage_rows(report: ReportData) -> list[DataRow]:
    """What quantization cost each kind of attention and the reference, and the difference."""
    return _pairs(report, report.damages, _damage)


def to_csv(rows: Sequence[DataRow]) -> str:
    """Rows as CSV; empty if there is no value."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _plain(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def to_json(rows: Sequence[DataRow]) -> str:
    """Rows as a JSON list of objects."""
    return json.dumps(rows, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _pairs(report: ReportData, rows: Sequence[R], numbers: Callable[[R, str, Columns], DataRow]) -> list[DataRow]:
    """One row per kind other than the reference."""
    are_twins = report.results.all_kinds == list(TWINS)
    found: list[DataRow] = []
    for row in rows:
        reference, *others = row.scores if isinstance(row, DeltaRow) else row.damages
        for attention in others:
            if are_twins:
                columns = {reference: reference, attention: attention}
                own = numbers(row, attention, columns)
            else:
                columns = {"value": attention, "reference": reference}
                own = {"attention": attention, **numbers(row, attention, columns), "reference_attention": reference}
            draws = report.calibration_draws(row.quantization, (attention, reference))
            found.append({**_about(row), **own, "draws": draws})
    return found


def _delta(row: DeltaRow, attention: str, columns: Columns) -> DataRow:
    sides = {column: row.scores[kind] for column, kind in columns.items()}
    scores = {column: side if isinstance(side, Score) else None for column, side in sides.items()}
    documents = {score.documents for score in scores.values() if score}
    delta = row.deltas[attention]
    return {
        **{column: score and score.value for column, score in scores.items()},
        "delta": delta and delta.value,
        **_interval(delta),
        **{f"{column}_stderr": score and score.stderr for column, score in scores.items()},
        "documents": documents.pop() if len(documents) == 1 else None,
        "note": " ".join(notes_of((*sides.values(), delta))),
    }


def _damage(row: DamageRow, attention: str, columns: Columns) -> DataRow:
    sides = {column: row.damages[kind] for column, kind in columns.items()}
    own = [_own(column, damage) for column, damage in sides.items()]
    difference = row.differences[attention]
    return {
        **own[0],
        **own[1],
        "difference": difference and difference.value,
        **_interval(difference),
        "note": " ".join(notes_of((*(damage.score for damage in sides.values()), difference))),
    }


def _own(column: str, damage: Damage) -> DataRow:
    score = damage.score if isinstance(damage.score, Difference) else None
    interval = _interval(score)
    return {
        f"{column}_damage": score and score.value,
        f"{column}_recovery": damage.recovery,
        f"{column}_low": interval["low"],
        f"{column}_high": interval["high"],
        f"{column}_significant": interval["significant"],
        f"{column}_right_to_wrong": damage.flips and damage.flips.right_to_wrong,
        f"{column}_wrong_to_right": damage.flips and damage.flips.wrong_to_right,
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
    if isinstance(value, str):  # an apostrophe: as spreadsheets write text that looks like a formula
        return ("'" if value.startswith(FORMULA) else "") + escaped(value)
    return str(value).lower() if isinstance(value, bool) else value
