"""Activations: power sums, extremes, quartiles and massive values of hidden states."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from qbench.analysis.rows import indicator, up_to
from qbench.records.analysis import LISTED, PARTS, Quartiles

CHUNK = 2**16  # float64 values at a time: they fit in a CPU's cache
BINS = 2**16  # of a histogram: the upper half of a float32's bits, which is bfloat16 by truncation


class StateSums:
    """Sums and extremes of one state of a batch [batch, length, hidden], for any number of leading tokens."""

    def __init__(self, x: Tensor) -> None:
        tokens = x.flatten(0, 1)
        step = max(1, CHUNK // x.shape[2])
        sums = torch.cat([_powers(chunk.double()) for chunk in tokens.split(step)])  # [tokens, powers]
        low, high = tokens.amin(-1), tokens.amax(-1)  # aminmax takes ten times as long
        self._sums = sums.unflatten(0, x.shape[:2]).mT  # [batch, powers, length]
        self._extremes = torch.stack([low, -high]).double().unflatten(1, x.shape[:2])  # [2, batch, length]: both minima
        self.largest_abs = torch.maximum(-low, high).unflatten(0, x.shape[:2])  # [batch, length]

    def sums(self, ends: Tensor) -> Tensor:
        """Power sums of the first `ends` [batch, n] tokens by part: [batch, n, parts, powers]."""
        first = self._sums[..., :1].expand(-1, -1, ends.shape[1])
        others = self._sums.clone()  # summed separately: the first token's may be larger by orders of magnitude
        others[..., 0] = 0
        return torch.stack([first, up_to(others, ends)]).permute(1, 3, 0, 2)

    def extremes(self, ends: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and the largest value by part: [batch, n, parts] each; NaN if there is no token."""
        first = self._extremes[..., :1].expand(-1, -1, ends.shape[1])
        others = self._extremes.clone()
        others[..., 0] = torch.inf
        least = others.cummin(-1).values.gather(-1, (ends - 1).expand_as(first))
        found = torch.stack([first, least], dim=-1)  # [2, batch, n, parts]
        found = found.masked_fill(found == torch.inf, torch.nan)
        return found[0], -found[1]


def _powers(x: Tensor) -> Tensor:
    """Σ x, Σ x², Σ x³ and Σ x⁴ over the last axis."""
    square = x * x
    return torch.stack([x.sum(-1), square.sum(-1), (square * x).sum(-1), (square * square).sum(-1)], dim=-1)


def massive(x: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """The median of |x| of each text [batch], and the number of massive values by each limit in MASSIVE [batch, 3].

    With an even number of values, the median is the lower of the two in the middle.
    """
    size = x.abs().masked_fill_(~real[..., None], torch.nan).flatten(1)
    median = size.nanmedian(1).values
    limits = torch.stack([100 * median, 1000 * median, (1000 * median).clamp_min(100)])
    counts = [indicator(torch.gt, size, limit[:, None]).sum(1, dtype=torch.float64) for limit in limits]
    return median, torch.stack(counts, dim=1).long()


def largest(x: Tensor, largest_abs: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The LISTED values with the largest |x| of each text, and their tokens and channels: [batch, LISTED] each.

    They are in the LISTED tokens with the largest |x|. If values are equal, as in a repeated token's embedding, the
    first counts.
    """
    size, token = _largest_first(largest_abs.masked_fill(~real, -1))  # [batch, tokens]
    rows = x.gather(1, token[..., None].expand(-1, -1, x.shape[2]))
    place = _largest_first(rows.abs().masked_fill(size[..., None] < 0, -1).flatten(1))[1]
    return rows.flatten(1).gather(1, place), token.gather(1, place // x.shape[2]), place % x.shape[2]


def _largest_first(values: Tensor) -> tuple[Tensor, Tensor]:
    ordered, index = values.sort(dim=1, descending=True, stable=True)
    return ordered[:, :LISTED], index[:, :LISTED]


class Histogram:
    """A histogram of the values of each state over all batches, separately for first tokens and the others."""

    def __init__(self, states: int, device: torch.device) -> None:
        self._counts = torch.zeros(states, len(PARTS), BINS + 1, dtype=torch.int64, device=device)

    def add(self, state: int, x: Tensor, real: Tensor) -> None:
        """Count the values of a batch."""
        bins = (x.float().view(torch.int32) >> 16) & (BINS - 1)
        bins = bins.masked_fill(~real[..., None], BINS)  # padding has a separate bin
        for part, chosen in enumerate((bins[:, :1], bins[:, 1:])):
            self._counts[state, part] += torch.bincount(chosen.flatten(), minlength=BINS + 1)

    def quartiles(self) -> tuple[Quartiles, ...]:
        """The quartiles of every state and part."""
        counts = self._counts[..., :BINS].cpu().numpy()
        found = []
        for state, by_part in enumerate(counts):
            for part, own in {"all": by_part.sum(0), **dict(zip(PARTS, by_part, strict=True))}.items():
                if own.any():
                    q1, median, q3 = _quantiles(own, (0.25, 0.5, 0.75))
                    folded = np.concatenate([own[: BINS // 2] + own[BINS // 2 :], np.zeros(BINS // 2, own.dtype)])
                    (size,) = _quantiles(folded, (0.5,))
                    found.append(Quartiles(state=state, part=part, q1=q1, median=median, q3=q3, median_abs=size))
        return tuple(found)


def _quantiles(counts: np.ndarray, shares: tuple[float, ...]) -> list[float]:
    """Quantiles of a histogram [BINS], interpolated within their bin by rank."""
    order, low, high = _bins()
    counts = counts[order]
    total = counts.cumsum()
    found = []
    for share in shares:
        rank = share * (total[-1] - 1)
        place = int(np.searchsorted(total, rank, side="right"))
        inside = (rank - (total[place] - counts[place]) + 0.5) / counts[place]
        found.append(float(low[place] + (high[place] - low[place]) * min(max(inside, 0.0), 1.0)))
    return found


@cache
def _bins() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The bins in order from -inf to inf, and the lower and upper end of each."""
    order = np.concatenate([np.arange(BINS - 1, BINS // 2 - 1, -1), np.arange(BINS // 2)])
    bits = order.astype(np.uint32) << 16
    with np.errstate(invalid="ignore"):  # the bins of NaN
        ends = np.stack([bits, bits + 0xFFFF]).view(np.float32).astype(np.float64)  # towards 0, and away from it
    return order, ends.min(0), ends.max(0)
