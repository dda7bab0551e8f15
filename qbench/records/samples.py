"""The file of per-document results, samples.parquet: its columns, how it is written and checked; and the aggregations.

qbench.records.documents reads it.

One row per document, in the order of tasks and documents. A metric's column holds the document's value: 0 or 1 for acc,
the log-likelihood for perplexities, the sum over tokens for KL; `<metric>.weight` holds its divisor, the words, bytes
or tokens of a page.
"""

import contextlib
import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from qbench.errors import InputError, one_line
from qbench.files import write_atomically
from qbench.records.limits import MAX_LOGLIKELIHOOD

if TYPE_CHECKING:
    import pandas as pd

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

WEIGHT = ".weight"
FIELDS = pa.schema(
    [
        ("task", pa.string()),
        ("doc_id", pa.int32()),
        ("doc_hash", pa.string()),  # of the document's content: two runs are paired by it
        ("gold", pa.list_(pa.int32())),  # which choices are right; null if the task has none
        ("target", pa.string()),  # the right text, for tasks without choices; null for whole pages
        ("response", pa.string()),  # what was generated; null for tasks that score
        ("loglikelihoods", pa.list_(pa.float64())),  # one per choice, or of the target, or of the page
        ("is_greedy", pa.list_(pa.bool_())),
        ("characters", pa.list_(pa.int32())),  # of each choice (what acc_norm divides by), of the target or the page
        ("bytes", pa.list_(pa.int32())),  # the same in UTF-8: what acc_bytes divides by
        ("tokens", pa.list_(pa.int32())),  # scored tokens of each; null if the model does not report them
    ]
)
NEVER_NULL = ("task", "doc_id", "doc_hash")
LENGTHS = ("characters", "bytes", "tokens")

MAX_COLUMNS, MAX_VALUES = 1000, 2 * 10**8  # of a file; ours have 20 columns, and a few values per document in each

# What verdicts and tables need; reading the whole file takes several times as long.
NEEDED = (*NEVER_NULL, "gold", "loglikelihoods", "characters", "tokens")


class SamplesError(InputError):
    """Why a samples.parquet cannot be read, in a sentence."""


MAX_EXPONENT = 700.0  # beyond it, e to the power of it is infinite


@dataclass(frozen=True)
class Aggregation:
    """How the values of documents become one number: a function of Σ values / Σ weights."""

    factor: float = 1.0  # multiplies the ratio
    exponential: bool = False  # then e to the power of it
    weighted: bool = False  # weights are words, bytes or tokens, and not 1

    def value(self, values: Floats, weights: Floats) -> float:
        """The aggregated number."""
        ratio = self.factor * float(values.sum() / weights.sum())
        return math.exp(min(ratio, MAX_EXPONENT)) if self.exponential else ratio


# By lm-eval's names, and weighted_mean of ours. Only lm-eval can compute the others (F1, Matthews correlation, …).
AGGREGATIONS = {
    "mean": Aggregation(),
    "perplexity": Aggregation(-1.0, exponential=True),
    "weighted_perplexity": Aggregation(-1.0, exponential=True, weighted=True),
    "bits_per_byte": Aggregation(-1 / math.log(2), weighted=True),
    "weighted_mean": Aggregation(weighted=True),
}
GROUP = "group"  # of imported scores: lm-eval computed it from those of several tasks, so it has no documents


def to_frame(rows: Sequence[Mapping[str, Any]]) -> "pd.DataFrame":
    """Rows with the fields above and any metrics as a frame, with the same types as a frame read from a file."""
    return _table(rows).to_pandas()


def write_samples(samples: "pd.DataFrame", file: str | os.PathLike[str]) -> None:
    """Write a frame of samples as parquet: whole or not at all, and the same bytes for the same samples."""
    table = pa.Table.from_pandas(samples, schema=_schema(samples.columns), preserve_index=False)
    write_atomically(Path(file), _as_parquet(table))


def to_parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """The file that write_samples would write for these rows; without pandas."""
    return _as_parquet(_table(rows))


def _as_parquet(table: pa.Table) -> bytes:
    content = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(None), content, **_encoding(table.schema))
    return content.getvalue()


def read_columns(content: bytes, where: object, names: Sequence[str] = ()) -> pa.Table:
    """These columns of a samples.parquet, in one chunk each; by default those that name documents, and all metrics.

    where: its path, for errors.
    """
    with parquet_errors(where, SamplesError):
        file = open_parquet(content, where, SamplesError)
        schema = file.schema_arrow
        _check_columns(schema, where)
        metrics = [name for name in schema.names if name not in FIELDS.names]
        table = file.read(list(names) or [*NEVER_NULL, *metrics], use_threads=False).combine_chunks()
        table.validate(full=True)
    _check_values(table, where)
    return table


@contextlib.contextmanager
def parquet_errors(where: object, error: type[InputError]) -> Iterator[None]:
    """What pyarrow raises for a damaged file, as a sentence."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError) as problem:
        if isinstance(problem, InputError):
            raise
        raise error(f"{where} is not a Parquet file ({one_line(problem)}); run the cell again.") from None


def open_parquet(content: bytes, where: object, error: type[InputError]) -> pq.ParquetFile:
    """A Parquet file; an error if it has more values than any of ours: a few bytes can stand for billions."""
    file = pq.ParquetFile(pa.BufferReader(content))
    about = file.metadata
    groups = [about.row_group(n) for n in range(about.num_row_groups)]
    values = sum(group.column(n).num_values for group in groups for n in range(group.num_columns))
    if about.num_columns > MAX_COLUMNS or values > MAX_VALUES:
        raise error(
            f"{where} has {about.num_columns:,} columns and {values:,} values; at most {MAX_COLUMNS:,} columns "
            f"and {MAX_VALUES:,} values are read."
        )
    return file


def _check_columns(schema: pa.Schema, where: object) -> None:
    if twice := [name for name in schema.names if schema.names.count(name) > 1]:
        raise SamplesError(f"{where} has the column {twice[0]} more than once; run the cell again.")
    for name in NEEDED:
        if name not in schema.names:
            raise SamplesError(f"{where} lacks the column {name}; run the cell again.")
    for field in schema:
        wanted = FIELDS.field(field.name).type if field.name in FIELDS.names else pa.float64()
        if field.type != wanted:
            raise SamplesError(f"{where}: the column {field.name} has type {field.type}; it must be {wanted}.")


def _check_values(table: pa.Table, where: object) -> None:
    """An error for values that nothing measures: they would pair documents wrongly, or overflow in sums."""
    for name in table.column_names:
        if name in NEVER_NULL and (nulls := table[name].null_count):
            raise SamplesError(f"{where}: the column {name} has {nulls:,} nulls; it must have none.")
    scores = {name: as_floats(table[name]) for name in table.column_names if name not in FIELDS.names}
    if "loglikelihoods" in table.column_names:
        scores["loglikelihoods"] = lists(table["loglikelihoods"])[0]
    for name, column in scores.items():
        finite = column[np.isfinite(column)]
        largest = finite[np.abs(finite).argmax()] if len(finite) else 0.0
        if abs(largest) > MAX_LOGLIKELIHOOD:
            raise SamplesError(f"{where}: the column {name} has {largest:g}; no score is that large.")
        if name.endswith(WEIGHT) and not (finite > 0).all():
            raise SamplesError(f"{where}: the column {name} has {finite.min():g}; a divisor must be above 0.")


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array."""
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def as_floats(column: pa.ChunkedArray | pa.Array) -> Floats:
    """A column of numbers as float64, NaN for null.

    Read from its buffers: pyarrow's conversions import pandas, which takes longer than a check.
    """
    array = one_array(column) if isinstance(column, pa.ChunkedArray) else column
    valid, content = array.buffers()
    if not len(array):
        return np.empty(0)
    numbers = np.frombuffer(content, array.type.to_pandas_dtype())[array.offset : array.offset + len(array)]
    numbers = numbers.astype(np.float64)
    if valid is not None and array.null_count:
        bits = np.unpackbits(np.frombuffer(valid, np.uint8), bitorder="little")
        numbers[bits[array.offset : array.offset + len(array)] == 0] = np.nan
    return numbers


def lists(column: pa.ChunkedArray) -> tuple[Floats, Ints]:
    """The values of a column of lists, concatenated, and how many there are in each row."""
    array = one_array(column)
    return as_floats(array.flatten()), np.diff(np.from_dlpack(array.offsets)).astype(np.int64)


def padded_lists(column: pa.ChunkedArray) -> Floats:
    """A column of lists as [documents, longest], padded with NaN."""
    flat, lengths = lists(column)
    padded = np.full((len(lengths), lengths.max(initial=0)), np.nan)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = flat
    return padded


def _schema(columns: "Sequence[str] | pd.Index") -> pa.Schema:
    metrics = [column for column in columns if column not in FIELDS.names]
    return pa.schema([*FIELDS, *((metric, pa.float64()) for metric in metrics)])


def _encoding(schema: pa.Schema) -> dict[str, Any]:
    """Lossless and small, since baselines are committed: a third less than with parquet's defaults.

    Scores are sums of float32: if the bytes of a float are split, the low ones are mostly zeros and compress away.
    """
    split = [field.name for field in schema if pa.types.is_floating(field.type)] + ["loglikelihoods.list.element"]
    return {
        "compression": "zstd",
        "compression_level": 19,
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT") | {"doc_id": "DELTA_BINARY_PACKED"},
        "use_dictionary": ["task", "target", *(f"{name}.list.element" for name in ("gold", *LENGTHS))],
        "write_statistics": False,
        "store_schema": False,
    }


def _table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    columns = dict.fromkeys(column for row in rows for column in row)
    return pa.Table.from_pylist(list(rows), schema=_schema(list(columns)))
