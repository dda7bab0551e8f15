"""Softpick attention on CPU in tiles of plain torch ops: memory linear in the length, forward and backward.

With y = e^x - 1 of a row's scores x:  out = sum_j relu(y_j) v_j / (sum_j |y_j| + eps e^m),  m = max(row max, 0).
Both sums are kept as they are while m <= 60, and times e^-c from there on, so that nothing overflows and few tiles
pay for a running maximum. A masked key is a row of zeros in k and v: its score is 0 and adds 0 to both sums.

In the shapes below: N pairs of a batch item and a kv head, G query heads to a kv head, R queries, C keys, D head dim.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from softpick.op import empty_lse, empty_output, register

ROWS, COLUMNS = 128, 256  # of a tile of scores
TILE = 2**18  # scores in a tile, all its heads together: 1 MiB in float32, to stay in cache from one op to the next
OVERFLOW = 60.0  # e^60 leaves room in float32 for the sums; rows with larger scores are kept times e^-c

Part = tuple[slice, slice]  # of the batch, of the kv heads


def forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float, causal: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """The output and the log of each row's denominator."""
    out, lse = empty_output(q), empty_lse(q)
    for part in _parts(q, k):
        keys, values = (_pack_keys(t, part, key_mask, lse.dtype) for t in (k, v))  # [N, Tk, D]
        for rows, columns in _row_blocks(q, k, causal):
            queries = _pack_rows(q, k, part, rows, lse.dtype)  # [N, GR, D]
            sums = _Sums(queries)
            for tile in columns:
                scores = _scores(queries, keys[:, tile], scale)  # [N, GR, C]
                if causal:
                    _mask_future(scores, rows, tile, q, k)
                sums.add(scores, values[:, tile])
            weighted, log_denominator = sums.finish(eps)
            _rows_of(out, k, part, rows).copy_(weighted.view(_rows_of(out, k, part, rows).shape))
            _rows_of(lse, k, part, rows).copy_(log_denominator.view(_rows_of(lse, k, part, rows).shape))
    return out, lse
