"""Sparsity: exact zeros in the causal triangle, weights near zero, and tiles that a kernel could skip."""

import torch
import torch.nn.functional as F
from torch import Tensor

from qbench.analysis.rows import indicator
from qbench.records.analysis import NEAR_ZERO, TILE

ROWS, COLUMNS = TILE


class ZeroCounter:
    """Counts the zeros of a layer, one block of rows at a time.

    empty: the tiles in the query's block of ROWS whose weights are all 0, up to and including this query.
    """

    def __init__(self) -> None:
        self._seen = torch.empty(0)  # [batch, heads, tiles]: nonzero weights in each tile of the current ROWS

    def count(self, start: int, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """zeros, near zeros and empty for each row, [batch, heads, rows] each; weights as from RowBlocks."""
        t = torch.arange(start, start + weights.shape[2], device=weights.device)
        tiles = F.pad(indicator(torch.ne, weights, 0), (0, -weights.shape[3] % COLUMNS)).unflatten(-1, (-1, COLUMNS))
        tiles = tiles.sum(-1)  # [batch, heads, rows, tiles]
        zeros = t + 1 - tiles.sum(-1).double()
        near = t + 1 - indicator(torch.gt, weights.abs(), NEAR_ZERO).sum(-1).double()
        if start % ROWS == 0:
            self._seen = tiles.new_zeros(*tiles.shape[:2], tiles.shape[3])
        seen = F.pad(self._seen, (0, tiles.shape[3] - self._seen.shape[2]))[:, :, None] + tiles.cumsum(2)
        self._seen = seen[:, :, -1]
        return zeros, near, t // COLUMNS + 1 - seen.gt(0).sum(-1).double()


def tile_steps(empty: Tensor) -> Tensor:
    """What each query adds to the number of empty tiles: differences of `empty` [batch, heads, length] within ROWS."""
    before = F.pad(empty, (1, 0))[..., :-1]
    inside = torch.arange(empty.shape[-1], device=empty.device) % ROWS != 0
    return empty - before * inside
