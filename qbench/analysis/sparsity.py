"""Sparsity: exact zeros of the causal triangle, weights near zero, and tiles that a kernel could skip."""

import torch
import torch.nn.functional as F
from torch import Tensor

from qbench.analysis.rows import indicator
from qbench.records.analysis import NEAR_ZERO, TILE

ROWS, COLUMNS = TILE


class ZeroCounter:
    """Counts the zeros of a layer, block by block of rows.

    empty: over all queries up to this one, the tiles of its block of ROWS that have no other weight than 0.
    """

    def __init__(self) -> None:
        self._seen = torch.empty(0)  # [batch, heads, tiles]: weights other than 0 in each tile of the present ROWS

    def count(self, start: int, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """zeros, near zeros and empty of each row, [batch, heads, rows] each; weights as RowBlocks gives them."""
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
    """What each query adds to the number of empty tiles: `empty` [batch, heads, length] by differences within ROWS."""
    before = F.pad(empty, (1, 0))[..., :-1]
    inside = torch.arange(empty.shape[-1], device=empty.device) % ROWS != 0
    return empty - before * inside
