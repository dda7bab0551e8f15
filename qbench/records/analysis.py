"""What an analysis found: facts for record.json, and counts and power sums of every text for a parquet file.

Imports no torch. Everything that is pooled over texts is kept per text: qbench.records.analysis_metrics resamples
texts. Quartiles cannot be pooled; they are facts. The axes of the arrays:

    text      every text that was measured, in the order of the source
    layer     the model's layers, from 0
    head      the query heads of a layer, from 0
    state     0: after the embedding; i: after i layers; `layers`: after the final norm. These are what
              `output_hidden_states` returns. And one more: the raw output of the last layer
    part      the first token of the text; the others
    length    of the sweep: the texts with at least that many tokens, truncated there
"""

import io
from dataclasses import dataclass, fields
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from qbench.errors import InputError
from qbench.numbers import counted
from qbench.records.analysis_facts import AnalysisFacts, LinearDamage, Quartiles
from qbench.records.samples import one_array, open_parquet, parquet_errors

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Analysis", "AnalysisError", "AnalysisFacts", "AttentionMap", "LinearDamage", "Quartiles", "TextSums"]

SINK_EPSILONS = (0.2, 0.3)
GU_LENGTH = 64  # tokens at which Gu et al. (2410.10781) measure sink rates
NEAR_ZERO = 1e-5
TILE = (128, 64)  # queries × keys that a kernel would skip together
DEAD_EPSILONS = (1e-6, 1e-2)
DEAD, MOSTLY_DEAD = 0.95, 0.75  # a head is, if it is off at more than this share of the tokens
POWERS = (1, 2, 3, 4)
# Massive values: |x| > 100 or 1,000 times the median of |x| of that text and state; and as Sun et al. (2402.17762)
# define them: > 100 and > 1,000 times that median.
MASSIVE = ("100", "1000", "sun")
LISTED = 8  # largest |x| of a text and state, with their tokens and channels
PARTS = ("first", "others")
WEIGHT_KINDS = ("raw", "normalized")  # attention weights as they are; each row divided by its sum
# Quartiles are read off a histogram of bfloat16's bins: a bin is narrower than 1/128 of its values.
QUARTILE_ERROR = 2.0**-7


class AnalysisError(InputError):
    """Texts or a model that cannot be analyzed, or a stored analysis that cannot be read; in a sentence."""


@dataclass(frozen=True)
class TextSums:
    """One row per text: counts, power sums and extremes. Shapes beyond the first axis are in `shapes`."""

    number: np.ndarray  # of the text in the source, from 0
    hash: np.ndarray  # of its token ids: two analyses are paired if their hashes are equal
    tokens: np.ndarray
    # Over all queries, of each layer and head:
    first: np.ndarray  # sum of the weights on the first token, A[t, 0]
    first_normalized: np.ndarray  # the same with each row divided by its sum; a row of zeros stays zeros
    row_sums: np.ndarray  # sum of all weights
    zeros: np.ndarray  # weights of the causal triangle that are 0 in the model's dtype
    near_zeros: np.ndarray  # |weight| ≤ NEAR_ZERO
    empty_tiles: np.ndarray  # tiles with a part in the causal triangle whose weights are all 0
    off: np.ndarray  # by DEAD_EPSILONS: tokens at which the head's output is below epsilon
    # Of each state:
    power_sums: np.ndarray  # by part: sums of x, x², x³ and x⁴
    minimum: np.ndarray  # by part; NaN if there is no token
    maximum: np.ndarray
    median_abs: np.ndarray  # of |x|
    massive: np.ndarray  # by MASSIVE: how many values
    largest: np.ndarray  # the LISTED values with the largest |x|, largest first
    largest_token: np.ndarray  # their tokens, from 0
    largest_channel: np.ndarray
    # For each length of the sweep, over all layers and heads, or all states except the raw one; 0 or NaN if the text is
    # shorter:
    sweep_sinks: np.ndarray  # by WEIGHT_KINDS and SINK_EPSILONS: heads with a mean weight on the first token above it
    sweep_row_sums: np.ndarray
    sweep_zeros: np.ndarray
    sweep_near_zeros: np.ndarray
    sweep_empty_tiles: np.ndarray
    sweep_power_sums: np.ndarray
    sweep_minimum: np.ndarray
    sweep_maximum: np.ndarray


def shapes(facts: AnalysisFacts) -> dict[str, tuple[int, ...]]:
    """The shape of each array of TextSums beyond its first axis."""
    head, state, sweep = (facts.layers, facts.heads), (facts.states,), (len(facts.lengths),)
    powers, parts = (len(POWERS),), (len(PARTS),)
    return {
        "number": (),
        "hash": (),
        "tokens": (),
        "first": head,
        "first_normalized": head,
        "row_sums": head,
        "zeros": head,
        "near_zeros": head,
        "empty_tiles": head,
        "off": (len(DEAD_EPSILONS), *head),
        "power_sums": state + parts + powers,
        "minimum": state + parts,
        "maximum": state + parts,
        "median_abs": state,
        "massive": (*state, len(MASSIVE)),
        "largest": (*state, LISTED),
        "largest_token": (*state, LISTED),
        "largest_channel": (*state, LISTED),
        "sweep_sinks": (*sweep, len(WEIGHT_KINDS), len(SINK_EPSILONS)),
        "sweep_row_sums": sweep,
        "sweep_zeros": sweep,
        "sweep_near_zeros": sweep,
        "sweep_empty_tiles": sweep,
        "sweep_power_sums": sweep + powers,
        "sweep_minimum": sweep,
        "sweep_maximum": sweep,
    }


@dataclass(frozen=True)
class Analysis:
    """What `qbench.analyze` returns: facts, and the sums of every text."""

    facts: AnalysisFacts
    sums: TextSums

    def __post_init__(self) -> None:
        """Check that the arrays match the facts."""
        for name, shape in shapes(self.facts).items():
            found, wanted = getattr(self.sums, name).shape, (self.facts.texts, *shape)
            if found != wanted:
                raise AnalysisError(f"The analysis has {name} of shape {list(found)}; it must be {list(wanted)}.")

    def __repr__(self) -> str:
        """What was measured, in a line; the figures are in `to_frame`."""
        f = self.facts
        texts = f"{counted(f.texts, 'text')} of up to {counted(f.length, 'token')}"
        return f"Analysis({f.attention}: {texts}, {counted(f.layers, 'layer')} of {counted(f.heads, 'head')})"

    def _repr_html_(self) -> str:
        caption, figures = escape(repr(self)), self.to_frame()
        return f"<p>{caption}</p>{figures[figures.length == self.facts.length].to_html(index=False, max_rows=60)}"

    def to_frame(self) -> "pd.DataFrame":
        """Every pooled figure, one row each: metric, setting, value, low, high, length, tokens, dtype, part, texts.

        Rates are in percent; low and high are a 95% interval over texts, NaN for extremes and for a single text.
        """
        from qbench.records.analysis_metrics import figures_frame

        return figures_frame(self)

    def layers_frame(self) -> "pd.DataFrame":
        """Activations by state and part, one row each."""
        from qbench.records.analysis_metrics import layers_frame

        return layers_frame(self)

    def heads_frame(self) -> "pd.DataFrame":
        """Sinks, zeros and dead heads by layer and head, one row each."""
        from qbench.records.analysis_metrics import heads_frame

        return heads_frame(self)


def sums_to_parquet(analysis: Analysis) -> bytes:
    """The sums as a parquet file, one row per text; the same bytes for the same sums."""
    sums = analysis.sums
    columns = {field.name: _column(getattr(sums, field.name)) for field in fields(TextSums)}
    table = pa.table(columns)
    floats = [
        f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name
        for field in table.schema
        if pa.types.is_floating(getattr(field.type, "value_type", field.type))
    ]
    content = io.BytesIO()
    pq.write_table(
        table,
        content,
        compression="zstd",
        compression_level=9,
        column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
    )
    return content.getvalue()


def read_analysis(facts: AnalysisFacts, content: bytes, where: object) -> Analysis:
    """The analysis with these facts from the bytes of its parquet file; where: its path, for errors."""
    with parquet_errors(where, AnalysisError):
        table = open_parquet(content, where, AnalysisError).read(use_threads=False)
        table.validate(full=True)
    arrays: dict[str, Any] = {}
    for name, shape in shapes(facts).items():
        if name not in table.column_names:
            raise AnalysisError(f"{where} lacks the column {name}; run the analysis again.")
        column = one_array(table[name])
        fits, kind = (pa.types.is_string, "text") if name == "hash" else (_is_numeric, "numbers")
        if column.null_count or not fits(column.type):
            raise AnalysisError(
                f"{where}: the column {name} has type {column.type}; it must have {kind}, and no nulls."
            )
        flat = (column.flatten() if pa.types.is_list(column.type) else column).to_numpy(zero_copy_only=False)
        wanted = (len(table), *shape)
        if flat.size != np.prod(wanted, dtype=int):
            raise AnalysisError(f"{where}: the column {name} has {flat.size} values; it must have {wanted}.")
        arrays[name] = flat.reshape(wanted)
    return Analysis(facts, TextSums(**arrays))


def _is_numeric(kind: pa.DataType) -> bool:
    inner = kind.value_type if pa.types.is_list(kind) else kind
    return pa.types.is_floating(inner) or pa.types.is_integer(inner)


def _column(array: np.ndarray) -> pa.Array:
    if array.ndim == 1:
        return pa.array(array)
    flat = pa.array(array.reshape(-1))
    width = array[0].size if len(array) else 0
    return pa.ListArray.from_arrays(np.arange(len(array) + 1, dtype=np.int32) * width, flat)


@dataclass(frozen=True)
class AttentionMap:
    """The attention weights of one head on one text, for a picture."""

    layer: int
    head: int
    tokens: tuple[int, ...]  # token ids
    weights: np.ndarray  # [tokens, tokens] float32: query, key
