"""Whether a record agrees with its own samples and identity. No verdict and no table rests on one that does not."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from qbench.records.samples import AGGREGATIONS, WEIGHT, as_floats
from qbench.records.schema import MetricValue, Record
from qbench.records.store import RECORD, StoredRecord

# Sums of the same float64 values in another order.
ROUNDING = 1e-9


def altered(stored: StoredRecord) -> list[str]:
    """What a record says that does not follow from its samples and its identity, one sentence each."""
    record = stored.record
    found = []
    if record.key != record.identity.key:
        found.append(f"{RECORD}: the key is not the hash of the identity beside it.")
    for field in ("attention", "method", "bits"):
        own, hashed = getattr(record.cell, field), getattr(record.identity.what, field)
        if own != hashed:
            found.append(f"{RECORD}: the cell's {field} is {own}, but its identity says {hashed}.")
    if stored.has_samples:
        found += _other_values(record, stored.samples_content())
    return found


def _other_values(record: Record, content: bytes) -> list[str]:
    """Metrics whose value is not what the documents amount to."""
    source = pq.ParquetFile(pa.BufferReader(content))
    names = {metric.metric for metric in record.metrics}
    columns = [name for name in source.schema_arrow.names if name.removesuffix(WEIGHT) in names]
    table = source.read(["task", *columns], use_threads=False)
    tasks = table["task"].combine_chunks().dictionary_encode()
    codes, known = np.from_dlpack(tasks.indices), tasks.dictionary.to_pylist()
    values = {name: as_floats(table[name]) for name in columns}
    found = []
    for metric in record.metrics:
        rows = codes == (known.index(metric.task) if metric.task in known else -1)
        if reason := _differs(metric, {name: column[rows] for name, column in values.items()}):
            found.append(f"{metric.task} {metric.metric} {reason}")
    return found


def _differs(metric: MetricValue, columns: dict[str, np.ndarray]) -> str:
    """Why a metric's value is not that of its task's documents; empty if it is, or if only lm-eval can compute it."""
    if metric.aggregation not in AGGREGATIONS:
        return ""
    values = columns.get(metric.metric, np.empty(0))
    there = ~np.isnan(values)
    if not there.any():
        return f"is {metric.value:.6g} in {RECORD}; the samples have no value of it."
    if metric.documents != there.sum():
        return f"is said to be of {metric.documents} documents; the samples have {there.sum()}."
    weights = columns.get(metric.metric + WEIGHT, np.ones(len(values)))
    again = AGGREGATIONS[metric.aggregation](values[there], weights[there])
    if math.isclose(again, metric.value, rel_tol=ROUNDING, abs_tol=ROUNDING):
        return ""
    return f"is {metric.value:.6g} in {RECORD}; its samples amount to {again:.6g}."
