"""Per-document results as a tidy frame and a parquet file. Imports neither torch nor lm-eval: reports read them too.

One row a document, in the order of tasks and documents. A metric's column holds the document's own value: 0 or 1 for
acc, the log-likelihood for perplexities; `<metric>.weight` holds what it is divided by, the words or bytes of a page.
"""

import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from qbench.files import write_atomically

if TYPE_CHECKING:
    import pandas as pd

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

WEIGHT = ".weight"
FIELDS = pa.schema(
    [
        ("task", pa.string()),
        ("doc_id", pa.int32()),
        ("doc_hash", pa.string()),  # the document's content, so that two runs are paired on the same documents
        ("gold", pa.list_(pa.int32())),  # which choices are right; null where the task has none
        ("target", pa.string()),  # the right text, for tasks without choices; null for whole pages
        ("response", pa.string()),  # what was generated; null for tasks that score
        ("loglikelihoods", pa.list_(pa.float64())),  # one a choice, or of the target, or of the page
        ("is_greedy", pa.list_(pa.bool_())),
        ("characters", pa.list_(pa.int32())),  # of each choice (what acc_norm divides by), of the target or the page
        ("bytes", pa.list_(pa.int32())),  # the same in UTF-8: what acc_bytes divides by
        ("tokens", pa.list_(pa.int32())),  # scored tokens of each; null where the model does not tell
    ]
)
LENGTHS = ("characters", "bytes", "tokens")

# lm-eval's aggregations of (values, weights), by its names.
AGGREGATIONS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "mean": lambda values, _: float(values.mean()),
    "perplexity": lambda values, _: math.exp(-values.mean()),
    "weighted_perplexity": lambda values, weights: math.exp(-values.sum() / weights.sum()),
    "bits_per_byte": lambda values, weights: float(-values.sum() / weights.sum() / math.log(2)),
}


def to_frame(rows: Sequence[Mapping[str, Any]]) -> "pd.DataFrame":
    """Rows with the fields above and any metrics as a frame, of the same types as a file that is read."""
    return _table(rows).to_pandas()


def write_samples(samples: "pd.DataFrame", file: str | os.PathLike[str]) -> None:
    """Write a frame of samples as parquet: whole or not at all, and the same bytes for the same samples."""
    file = Path(file)
    table = pa.Table.from_pandas(samples, schema=_schema(samples.columns), preserve_index=False)
    content = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(None), content, **_encoding(table.schema))
    write_atomically(file, content.getvalue())


def read_samples(file: str | os.PathLike[str] | io.BytesIO) -> "pd.DataFrame":
    """Read what write_samples wrote."""
    return pq.read_table(file).to_pandas()


def aggregate(samples: "pd.DataFrame", metric: str, aggregation: str) -> float:
    """Recompute a metric from the samples of one task; aggregation is lm-eval's name, such as 'mean'."""
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation is {aggregation!r}; it must be one of {', '.join(AGGREGATIONS)}.")
    if metric not in samples or not samples[metric].notna().any():
        raise ValueError(f"The samples have no values of the metric {metric!r}; they have {', '.join(samples)}.")
    rows = samples[samples[metric].notna()]
    weights = rows[metric + WEIGHT] if metric + WEIGHT in rows else np.ones(len(rows))
    return AGGREGATIONS[aggregation](rows[metric].to_numpy(), np.asarray(weights))


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array."""
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def as_floats(column: pa.ChunkedArray | pa.Array) -> Floats:
    """A column of numbers as float64, NaN for null.

    From its buffers: pyarrow's own conversions import pandas, which takes longer than a check does.
    """
    array = one_array(column) if isinstance(column, pa.ChunkedArray) else column
    valid, content = array.buffers()
    numbers = np.frombuffer(content, array.type.to_pandas_dtype())[array.offset : array.offset + len(array)]
    numbers = numbers.astype(np.float64)
    if valid is not None and array.null_count:
        bits = np.unpackbits(np.frombuffer(valid, np.uint8), bitorder="little")
        numbers[bits[array.offset : array.offset + len(array)] == 0] = np.nan
    return numbers


def gold_logprobs(table: pa.Table) -> Floats:
    """The log-softmax of the right answer over the choices, the mean of them if several are right; NaN without choices.

    Of the log-likelihoods, those beyond the choices (acc_mutual_info's unconditional ones) do not count.
    """
    rows = np.arange(len(table))
    scores, lengths = lists(table["loglikelihoods"])
    gold, golds = lists(table["gold"])
    choices = lists(table["characters"])[1]
    has_choices = (choices >= 2) & (golds > 0) & (lengths >= choices)
    starts = np.cumsum(lengths) - lengths
    row_of = np.repeat(rows, lengths)
    counted = has_choices[row_of] & (np.arange(len(scores)) - starts[row_of] < choices[row_of])
    totals = np.full(len(rows), np.nan)
    if counted.any():
        kept_rows = row_of[counted]
        firsts = np.flatnonzero(np.diff(kept_rows, prepend=-1))
        totals[kept_rows[firsts]] = np.logaddexp.reduceat(scores[counted], firsts)
    gold_rows, gold = np.repeat(rows, golds), gold.astype(np.int64)
    right = has_choices[gold_rows] & (gold >= 0) & (gold < choices[gold_rows])
    gold_rows, gold = gold_rows[right], gold[right]
    logprobs = scores[starts[gold_rows] + gold] - totals[gold_rows]
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN: a document without choices
        sums = np.bincount(gold_rows, weights=logprobs, minlength=len(rows))
        return sums / np.bincount(gold_rows, minlength=len(rows))


def rows_of_tasks(table: pa.Table) -> dict[str, Ints]:
    """The rows of each task."""
    encoded = one_array(table["task"]).dictionary_encode()
    codes = np.from_dlpack(encoded.indices)
    return {name: np.flatnonzero(codes == code) for code, name in enumerate(encoded.dictionary.to_pylist())}


def lists(column: pa.ChunkedArray) -> tuple[Floats, Ints]:
    """The values of a column of lists, one after the other, and how many there are in each row."""
    array = one_array(column)
    return as_floats(array.flatten()), np.diff(np.from_dlpack(array.offsets)).astype(np.int64)


def _schema(columns: "Sequence[str] | pd.Index") -> pa.Schema:
    metrics = [column for column in columns if column not in FIELDS.names]
    return pa.schema([*FIELDS, *((metric, pa.float64()) for metric in metrics)])


def _encoding(schema: pa.Schema) -> dict[str, Any]:
    """Lossless and small, since baselines are committed: a third less than with parquet's defaults.

    Scores are sums of float32: with the bytes of a float apart, the low ones are mostly zeros and compress away.
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
