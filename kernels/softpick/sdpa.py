"""Softmax attention by torch's scaled_dot_product_attention, with the conventions of `normalized_attention`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from softpick.reference import visible_keys


def attention(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """[batch, heads, q_len, dim]; a row with nothing to attend to gives zeros."""
    q_len, k_len = q.shape[2], k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    causal = causal and q_len > 1  # one query, the last position, sees all keys
    if key_mask is None and (q_len == k_len or not causal):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    # torch aligns is_causal with the first key; a cached prefix needs it aligned with the last one.
    seen = visible_keys(q_len, k_len, q.device) if causal else q.new_ones(1, k_len, dtype=torch.bool)
    if key_mask is None:
        return F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=grouped)
    # 0 times the NaN of a padded key or value would be NaN.
    k, v = (t.masked_fill(~key_mask[:, None, :, None], 0) for t in (k, v))
    seen = seen & key_mask[:, None, None, :]  # [batch, 1, q_len or 1, k_len]
    # Kernels differ in how they treat a row without keys and its gradient: let it see all keys, then zero it.
    alone = ~seen.any(-1, keepdim=True)
    mask = (seen | alone).expand(-1, 1, q_len, -1)
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=grouped)
    return out.masked_fill(alone, 0)
