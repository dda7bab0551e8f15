"""Sinks: how much of its attention a head puts on the first token.

α = the mean over all queries of A[t, 0]; a head is a sink on a text if α > ε. Rows need not sum to one, so a second α
uses rows divided by their sums, as Gu et al. (2410.10781) measure it.
"""

import torch
from torch import Tensor

from qbench.records.analysis import SINK_EPSILONS


def first_and_sum(weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weight on the first token and the sum of all weights for each row: [batch, heads, rows] each, float64."""
    return weights[..., 0].double(), weights.sum(-1).double()


def normalized(first: Tensor, row_sums: Tensor) -> Tensor:
    """The first weight of each row divided by the row's sum; 0 for a row of zeros."""
    return torch.where(row_sums == 0, 0, first / row_sums)


def sinks(first: Tensor, tokens: Tensor) -> Tensor:
    """The number of heads whose mean weight on the first token is above each of SINK_EPSILONS: [batch, n, ε].

    first [batch, heads, n]: sums over the first `tokens` [batch, n] queries.
    """
    alpha = first / tokens[:, None]
    return torch.stack([(alpha > epsilon).sum(1) for epsilon in SINK_EPSILONS], dim=-1)
