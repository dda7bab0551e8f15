"""Softpick in plain torch: the definition that every other backend is measured against.

softpick(x)_i = ReLU(e^{x_i} - 1) / (sum_j |e^{x_j} - 1| + eps), https://arxiv.org/abs/2504.20966
"""

import torch
from torch import Tensor


def softpick(x: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    """Rectified softmax along `dim`: weights that are sparse and need not sum to one."""
    dtype = x.dtype
    if not dtype.is_floating_point:
        raise ValueError(f"x is {dtype}; softpick takes floating-point scores.")
    if dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    if x.shape[dim] == 0:
        return x.to(dtype)
    # m >= 0 keeps e^{-m} finite. It is a constant to autograd: it only scales eps.
    m = x.detach().amax(dim, keepdim=True).clamp_min(0)
    above, below = x.clamp_min(0), x.clamp_max(0)
    # e^{x-m} - e^{-m} without cancellation, each half finite where the other one is chosen.
    positive = -torch.exp(above - m) * torch.expm1(-above)
    negative = torch.exp(-m) * torch.expm1(below)
    # `where` rather than abs and relu: sign(0) is +1 and step(0) is 0 in the derivative
    #   ds_i/dx_j = e^{x_j-m} / sum * (delta_ij step(x_i) - sign(x_j) s_i).
    magnitude = torch.where(x >= 0, positive, -negative)
    rectified = torch.where(x > 0, positive, 0)
    return (rectified / (magnitude.sum(dim, keepdim=True) + eps)).to(dtype)


def visible_keys(q_len: int, k_len: int, device: torch.device) -> Tensor:
    """Causal mask [q_len, k_len]: the queries are the last q_len positions."""
    ones = torch.ones(q_len, k_len, dtype=torch.bool, device=device)
    return ones.tril(k_len - q_len)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    scale: float,
    causal: bool,
    eps: float,
) -> Tensor:
    """Softpick attention with the whole [q_len, k_len] matrix in memory; arguments as in `softpick_attention`."""
    dtype = q.dtype
    if dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    if key_mask is not None:
        # A key of zeros scores 0, and a score of 0 adds 0 to numerator and denominator.
        k, v = (t.masked_fill(~key_mask[:, None, :, None], 0) for t in (k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * scale  # [batch, heads, q_len, k_len]
    if causal:
        scores = scores.masked_fill(~visible_keys(q.shape[2], k.shape[2], q.device), 0)
    return (softpick(scores, dim=-1, eps=eps) @ v).to(dtype)
