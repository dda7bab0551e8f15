"""Attention maps on disk: a Parquet file with one row per head. Imports no torch."""

import io
import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from qbench.errors import one_line
from qbench.records.analysis import AnalysisError, AttentionMap
from qbench.records.samples import open_parquet, parquet_errors


def maps_to_parquet(maps: Sequence[AttentionMap]) -> bytes:
    """The maps as a Parquet file; the same bytes for the same maps."""
    columns = {
        "layer": pa.array([own.layer for own in maps]),
        "head": pa.array([own.head for own in maps]),
        "tokens": pa.array([list(own.tokens) for own in maps], pa.list_(pa.int64())),
        "weights": pa.array([own.weights.astype(np.float32).ravel() for own in maps], pa.list_(pa.float32())),
    }
    content = io.BytesIO()
    pq.write_table(pa.table(columns), content, compression="zstd", write_statistics=False, store_schema=False)
    return content.getvalue()


def read_maps(content: bytes, where: object) -> list[AttentionMap]:
    """The maps from the bytes of such a file; where: its path, for errors."""
    with parquet_errors(where, AnalysisError):
        rows = open_parquet(content, where, AnalysisError).read(use_threads=False).to_pylist()
    try:
        return [_map(row) for row in rows]
    except (KeyError, ValueError, TypeError) as error:
        raise AnalysisError(f"{where} is not a file of attention maps ({one_line(error)}); run it again.") from None


def _map(row: dict[str, list[float]]) -> AttentionMap:
    weights = np.array(row["weights"], dtype=np.float32)
    size = math.isqrt(weights.size)
    layer, head = int(row["layer"]), int(row["head"])  # type: ignore[call-overload]
    tokens = tuple(int(token) for token in row["tokens"])
    return AttentionMap(layer, head, tokens, weights.reshape(size, size))
