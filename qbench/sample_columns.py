"""Columns of samples.parquet as numpy arrays. From arrow's buffers: arrow's own conversions import pandas, which takes
longer than many a check."""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


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
    encoded = one_chunk(table["task"]).dictionary_encode()
    codes = np.from_dlpack(encoded.indices)
    return {name: np.flatnonzero(codes == code) for code, name in enumerate(encoded.dictionary.to_pylist())}


def lists(column: pa.ChunkedArray) -> tuple[Floats, Ints]:
    """The values of a column of lists, one after the other, and how many there are in each row."""
    array = one_chunk(column)
    return numbers(array.flatten()), np.diff(np.from_dlpack(array.offsets)).astype(np.int64)


def numbers(array: pa.Array) -> Floats:
    """An array as floats, NaN for null."""
    valid, content = array.buffers()
    found = np.frombuffer(content, array.type.to_pandas_dtype())[array.offset : array.offset + len(array)]
    found = found.astype(np.float64)
    if valid is not None and array.null_count:
        bits = np.unpackbits(np.frombuffer(valid, np.uint8), bitorder="little")
        found[bits[array.offset : array.offset + len(array)] == 0] = np.nan
    return found


def one_chunk(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array."""
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
