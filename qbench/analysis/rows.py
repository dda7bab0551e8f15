"""Attention weights in blocks of rows: memory is linear in the length, for every kind of attention."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from qbench.attention.register import attention_weights, config_kind
from qbench.records.analysis import TILE

# Weights of a block with all its heads: 2 MiB in float32 fit in a CPU's cache; a GPU needs fewer, larger blocks.
BLOCK_WEIGHTS = {"cpu": 2**19, "cuda": 2**24}
MIN_ROWS = 8


class RowBlocks:
    """The attention weights of a model's layers, as the model computes them, a block of queries at a time."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._kind = config_kind(model.config)
        self._weights = attention_weights(self._kind)

    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, scale: float) -> Iterator[tuple[int, Tensor]]:
        """The first row of each block, and its weights [batch, heads, rows, keys up to its last row].

        Computed in float32 (in float64 for a float64 model) and rounded to the model's dtype. Blocks are in order, and
        none crosses a multiple of TILE's rows.
        """
        extra = {name: getattr(module, name) for name in self._kind.extra_tensors}
        budget = BLOCK_WEIGHTS.get(q.device.type, BLOCK_WEIGHTS["cuda"])
        start, length = 0, q.shape[2]
        while start < length:
            rows = rows_at_once(q.shape[0] * q.shape[1] * length, budget)
            stop = min(start + rows, length)
            weights = self._weights(
                q[:, :, start:stop], k[:, :, :stop], scale=scale, causal=True, key_mask=None, **extra
            )
            yield start, weights.to(q.dtype).to(weights.dtype)
            start = stop


def rows_at_once(weights_per_row: int, budget: int) -> int:
    """The rows of a block that stays within the budget: TILE's rows, halved down to MIN_ROWS."""
    rows = TILE[0]
    while rows > MIN_ROWS and rows * weights_per_row > budget:
        rows //= 2
    return rows


def up_to(values: Tensor, ends: Tensor) -> Tensor:
    """Sums of the first `ends` rows: values [batch, …, length] and ends [batch, n] give [batch, …, n] in float64."""
    sums = values.cumsum(-1, dtype=torch.float64)
    index = (ends - 1).view(len(ends), *[1] * (values.ndim - 2), -1)
    return sums.gather(-1, index.expand(*values.shape[:-1], -1))


def indicator(compare: Callable[..., Tensor], values: Tensor, limit: float | Tensor) -> Tensor:
    """1.0 if the comparison holds, else 0.0: summing booleans takes several times as long as summing floats."""
    return compare(values, limit, out=torch.empty_like(values))
