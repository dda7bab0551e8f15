"""Whether a record agrees with its samples and its identity. If not, no verdict and no table uses it."""

import math
from collections import Counter

import numpy as np

from qbench.attention.kinds import ATTENTIONS
from qbench.records.audit import names_weights
from qbench.records.metrics import facts_of
from qbench.records.samples import AGGREGATIONS, GROUP, WEIGHT, Floats, metric_columns, rows_of_tasks
from qbench.records.schema import MetricValue, Record
from qbench.records.store import RECORD, StoredRecord

# Sums of the same float64 values in another order.
ROUNDING = 1e-9


def altered(stored: StoredRecord) -> list[str]:
    """What a record says that does not follow from its samples and its identity, one sentence each; computed once."""
    if "altered" not in stored.found:
        stored.found["altered"] = _altered(stored)
    return stored.found["altered"]


def _altered(stored: StoredRecord) -> list[str]:
    record = stored.record
    found = _other_identity(record)
    if record.cell.measured:
        return found + _other_analysis(stored)
    if record.state == "done" and not stored.has_samples:
        found.append(f"{RECORD} has scores, but no samples.parquet to prove them.")
    twice = [name for name, count in Counter((m.task, m.metric) for m in record.metrics).items() if count > 1]
    found += [f"{task} {metric} is in {RECORD} more than once." for task, metric in twice]
    return found + (_other_values(stored) if stored.has_samples else [])


def _other_identity(record: Record) -> list[str]:
    cell, what = record.cell, record.identity.what
    found = []
    if record.key != record.identity.key:
        found.append(f"{RECORD}: the key is not the hash of its identity.")
    # A variant named as one of our kinds has it; other names (base, qat, another package's kind) say nothing about it.
    for field in ("attention", "method", "bits") if cell.attention in ATTENTIONS else ("method", "bits"):
        own, hashed = getattr(cell, field), getattr(what, field)
        if own != hashed:
            found.append(f"{RECORD}: the cell's {field} is {own}, but its identity says {hashed}.")
    if not names_weights(cell.label, cell.method, cell.bits):
        found.append(f"{RECORD}: the label {cell.label} is not one of {cell.method} at {cell.bits} bits.")
    if not cell.label.endswith(ending := "".join(f"-{part}" for part in what.parts or {})):
        found.append(f"{RECORD}: the label is {cell.label}, but by its identity it must end in {ending}.")
    return found


def _other_analysis(stored: StoredRecord) -> list[str]:
    """Why an analysis does not match its identity or its Parquet file."""
    record, measured = stored.record, stored.record.cell.measured
    said = (record.identity.what.analysis or {}).get("measured")
    found = [] if said == measured else [f"{RECORD} is about {measured}, but its identity says {said}."]
    if record.state == "done" and getattr(record, str(measured)) is None:
        found.append(f"{RECORD} has no {measured}.")
    elif record.state == "done" and measured != "sensitivity" and not stored.has_samples:
        found.append(f"{RECORD} has no {stored.parquet.name} next to it to prove it.")
    elif record.analysis and stored.has_samples:
        sums = stored.analysis().sums
        if int(sums.tokens.sum()) != record.analysis.tokens:
            found.append(f"{RECORD} has {record.analysis.tokens} tokens, but {stored.parquet.name} does not.")
    return found


def _other_values(stored: StoredRecord) -> list[str]:
    """Metrics whose value or standard error does not follow from the documents."""
    columns, rows = metric_columns(stored.table), rows_of_tasks(stored.table)
    none = np.empty(0, dtype=np.int64)
    where = RECORD if stored.content is None else "lm-eval's results"  # which are in memory
    found = []
    for metric in stored.record.metrics:
        imported = stored.record.imported is not None
        if imported and metric.aggregation == GROUP and metric.task not in rows:
            continue
        own = {name: column[rows.get(metric.task, none)] for name, column in columns.items()}
        if reason := _differs(metric, own, where, any_aggregation=imported):
            found.append(f"{metric.task} {metric.metric} {reason}")
    return found


def _differs(metric: MetricValue, columns: dict[str, Floats], where: str, any_aggregation: bool) -> str:
    """Why a metric does not follow from its documents; empty if it does, or if only lm-eval can compute it.

    where: the score is. any_aggregation: the task's file may have chosen another one than lm-eval's for a metric.
    """
    facts = facts_of(metric.metric)
    if facts and not any_aggregation and metric.aggregation != facts.aggregation:
        return f"has the aggregation {metric.aggregation}; lm-eval uses {facts.aggregation}."
    if metric.aggregation not in AGGREGATIONS:
        return ""
    values = columns.get(metric.metric, np.empty(0))
    there = ~np.isnan(values)
    if not there.any():
        return f"is {metric.value:.6g} in {where}; the samples have no value for it."
    values, count = values[there], int(there.sum())
    if metric.documents != count:
        return f"has {metric.documents} documents in {where}; the samples have {count}."
    weights = columns[metric.metric + WEIGHT][there] if metric.metric + WEIGHT in columns else np.ones(count)
    again = AGGREGATIONS[metric.aggregation].value(values, weights)
    if not math.isclose(again, metric.value, rel_tol=ROUNDING, abs_tol=ROUNDING):
        return f"is {metric.value:.6g} in {where}; its samples give {again:.6g}."
    if metric.aggregation == "mean" and metric.stderr is not None and count > 1:
        error = float(values.std(ddof=1)) / math.sqrt(count)
        if not math.isclose(error, metric.stderr, rel_tol=1e-6, abs_tol=ROUNDING):
            return f"has a standard error of {metric.stderr:.6g} in {where}; its samples give {error:.6g}."
    return ""
