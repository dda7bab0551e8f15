"""The per-document results of a record, as arrays. Only the columns that tables need are read: all take ten times as
long."""

import hashlib
from dataclasses import dataclass
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from qbench.evaluate.samples import FIELDS, WEIGHT
from qbench.store import RECORD, SAMPLES, StoredRecord, StoreError

KEY = ("task", "doc_id", "doc_hash")


@dataclass(frozen=True)
class Values:
    """A metric's value of each document, and what its sum is divided by the sum of."""

    values: np.ndarray  # [documents]
    weights: np.ndarray  # [documents]; 0 where the document has no value


@dataclass(frozen=True)
class TaskDocuments:
    """The documents of one task in the order of their ids."""

    fingerprint: str  # of all ids and contents: equal where two cells saw the same documents
    count: int
    metrics: dict[str, Values]
    chance: float | None  # the accuracy of guessing, in percent; None where there is nothing to choose from


def read_documents(stored: StoredRecord) -> dict[str, TaskDocuments]:
    """The documents of each task of a record."""
    file = stored.folder / SAMPLES
    try:
        content = file.read_bytes()
    except OSError as error:
        raise StoreError(f"{file}: the samples of {stored.record.cell.name} cannot be read ({error}).") from None
    if hashlib.sha256(content).hexdigest() != stored.record.samples_sha256:
        raise StoreError(f"{file} is not what {RECORD} beside it was written with; run the cell again.")
    source = pq.ParquetFile(pa.BufferReader(content))
    metrics = [name for name in source.schema_arrow.names if name not in FIELDS.names]
    table = source.read(columns=[*KEY, "gold", "loglikelihoods", *metrics])
    tasks = table.column("task").combine_chunks().dictionary_encode()
    return {
        name: _task(table.filter(pc.equal(table.column("task"), name)), metrics)
        for name in tasks.dictionary.to_pylist()
    }


def _task(table: pa.Table, metrics: list[str]) -> TaskDocuments:
    table = table.sort_by([("doc_id", "ascending"), ("doc_hash", "ascending")])
    identity = hashlib.sha256()
    for name in KEY:
        identity.update(repr(table.column(name).to_pylist()).encode())
    found = {}
    for name in metrics:
        if name.endswith(WEIGHT) or table.column(name).null_count == len(table):
            continue
        values = _numbers(table, name)
        weights = _numbers(table, name + WEIGHT) if name + WEIGHT in metrics else _ones(len(table))
        if (unknown := np.isnan(values)).any():
            values, weights = np.where(unknown, 0.0, values), np.where(unknown, 0.0, weights)
        found[name] = Values(values, weights)
    return TaskDocuments(identity.hexdigest(), len(table), found, _chance(table))


@cache
def _ones(count: int) -> np.ndarray:
    """One array for all, so that their sums over resamples are computed once."""
    return np.ones(count)


def _numbers(table: pa.Table, name: str) -> np.ndarray:
    # A column holds nothing (null) or NaN where the metric is another task's.
    return table.column(name).cast(pa.float64()).fill_null(float("nan")).to_numpy()


def _chance(table: pa.Table) -> float | None:
    asked = table.filter(pc.is_valid(table.column("gold")))
    choices = pc.list_value_length(asked.column("loglikelihoods")).to_numpy()
    return 100 * float(np.mean(1 / choices)) if len(choices) and choices.min() > 1 else None
