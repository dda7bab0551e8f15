"""The normalizers in plain torch: the definitions that every other backend is compared with.

softpick(x)_i = ReLU(e^{x_i} - 1) / (sum_j |e^{x_j} - 1| + eps), https://arxiv.org/abs/2504.20966
"""

import math

import torch
from torch import Tensor

from softpick.normalizers import NORMALIZERS, Normalizer


def softpick(x: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    """Rectified softmax along `dim`: weights that are sparse and need not sum to one."""
    dtype = x.dtype
    if not dtype.is_floating_point:
        raise ValueError(f"x is {dtype}; softpick needs floating-point scores.")
    if dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    return _shifted_weights(x, dim, eps, absolute=True).to(dtype)


def _shifted_weights(x: Tensor, dim: int, eps: float, absolute: bool) -> Tensor:
    """ReLU(e^x - 1) over its sum, or over the sum of |e^x - 1|, plus eps e^m; a score of 0 adds nothing."""
    if x.shape[dim] == 0:
        return x
    # m >= 0 keeps e^{-m} finite. Autograd treats it as a constant: it only scales eps.
    m = x.detach().amax(dim, keepdim=True).clamp_min(0)
    above, below = x.clamp_min(0), x.clamp_max(0)
    # e^{x-m} - e^{-m} without cancellation; each branch is finite where the other is chosen.
    positive = -torch.exp(above - m) * torch.expm1(-above)
    negative = torch.exp(-m) * torch.expm1(below)
    # `where` rather than abs and relu: sign(0) is +1 and step(0) is 0 in the derivative
    #   ds_i/dx_j = e^{x_j-m} / sum * (delta_ij step(x_i) - sign(x_j) s_i).
    rectified = torch.where(x > 0, positive, 0)
    summed = torch.where(x >= 0, positive, -negative) if absolute else rectified
    return rectified / (summed.sum(dim, keepdim=True) + eps)


def _exponential_weights(x: Tensor, normalizer: Normalizer, sinks: Tensor | None) -> Tensor:
    """e^x over its sum, plus e^s with sinks [heads]; x [batch, heads, q_len, k_len], -inf where a key is not seen."""
    if normalizer.rectified:
        x = x.masked_fill(x < 0, -math.inf)
    logits = x if sinks is None else torch.cat([x, sinks[:, None, None].expand(*x.shape[:3], 1)], -1)
    if logits.shape[-1] == 0:
        return x
    # Autograd treats it as a constant, as the weights do not depend on it; 0 in a row with nothing to attend to.
    m = logits.detach().amax(-1, keepdim=True)
    numerator = torch.exp(logits - m.masked_fill(m == -math.inf, 0))
    total = numerator.sum(-1, keepdim=True)
    return numerator[..., : x.shape[-1]] / total.masked_fill(total == 0, 1)


def visible_keys(q_len: int, k_len: int, device: torch.device) -> Tensor:
    """Causal mask [q_len, k_len]: the queries are the last q_len positions."""
    ones = torch.ones(q_len, k_len, dtype=torch.bool, device=device)
    return ones.tril(k_len - q_len)


def weights(
    q: Tensor,
    k: Tensor,
    sinks: Tensor | None,
    key_mask: Tensor | None,
    normalizer: str,
    scale: float,
    causal: bool,
    eps: float,
) -> Tensor:
    """The weights of the values, [batch, heads, q_len, k_len], in float32, or in float64 if q and k are.

    Arguments as in `normalized_attention`.
    """
    kind = NORMALIZERS[normalizer]
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(wide), k.to(wide)
    # A score of 0 adds 0 to numerator and denominator of ReLU(e^x - 1); for the others, only -inf does.
    unseen = 0 if kind.minus_one else -math.inf
    if key_mask is not None:
        k = k.masked_fill(~key_mask[:, None, :, None], 0)
    grouped = q.unflatten(1, (k.shape[1], -1))  # [batch, kv_heads, group, q_len, dim]: keys are shared, not copied
    scores = (grouped.flatten(2, 3) @ k.mT).view(*q.shape[:3], k.shape[2]) * scale  # [batch, heads, q_len, k_len]
    if causal:
        scores = scores.masked_fill(~visible_keys(q.shape[2], k.shape[2], q.device), unseen)
    if key_mask is not None and not kind.minus_one:
        scores = scores.masked_fill(~key_mask[:, None, None, :], unseen)
    if kind.minus_one:
        return _shifted_weights(scores, -1, eps, kind.absolute)
    return _exponential_weights(scores, kind, None if sinks is None else sinks.to(q.dtype))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    key_mask: Tensor | None,
    normalizer: str,
    scale: float,
    causal: bool,
    eps: float,
) -> Tensor:
    """Attention with the whole [q_len, k_len] matrix in memory; arguments as in `normalized_attention`."""
    found = weights(q, k, sinks, key_mask, normalizer, scale, causal, eps)
    v = v.to(found.dtype)
    if key_mask is not None:
        v = v.masked_fill(~key_mask[:, None, :, None], 0)
    return (found @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)).to(q.dtype)
