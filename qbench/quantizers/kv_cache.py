"""A quantized KV cache, simulated: keys and values are rounded to a few bits and back inside the attention call.

Keys are rounded after their rotation. Every query sees the rounded ones, whether a text is read at once, after a cached
prefix, or token by token: caches hold exact keys and values, and each attention call rounds them.

No query sees a scale that a later token helped to set. With keys in groups of G tokens, a query at position t sees the
key and value at j rounded if and only if ⌊j/G⌋ < ⌊t/G⌋; positions count from the first real token. So there is one
call of the attention function per group of queries, with the rounded groups before it as its cache.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from qbench.attention.register import attend_through
from qbench.quantizers.axes import Part
from qbench.quantizers.axis_options import KvCacheOptions
from qbench.quantizers.declaration import QuantizeError
from qbench.quantizers.kv_cache_audit import CacheWatch, audit_cache
from qbench.quantizers.rounding import min_max
from qbench.records.audit import PartAudit


class RoundedCache:
    """Attention over rounded keys and values: a wrapper for `attend_through`."""

    def __init__(self, options: KvCacheOptions) -> None:
        self.options = options
        self.watch: CacheWatch | None = None  # set while an audit looks at what the attention function is called with

    def __call__(
        self,
        function: Callable[..., Tensor],
        q: Tensor,  # [batch, heads, q_len, dim]
        k: Tensor,  # [batch, kv_heads, k_len, dim]
        v: Tensor,
        *,
        causal: bool,
        key_mask: Tensor | None = None,  # [batch, k_len]
        **options: Any,
    ) -> Tensor:
        """The attention that the function computes, with rounded keys and values."""
        if not causal:
            raise ValueError("A quantized KV cache is for causal attention: keys are rounded before later queries.")
        first = None if key_mask is None else key_mask.int().argmax(1)  # [batch]: where each text starts
        rounded = self._rounded_keys(k, first), self._rounded_values(v, first)

        def attend(begin: int, end: int, keys: Tensor, values: Tensor) -> Tensor:
            """Queries and keys up to the column `end`; the first query is at the column `begin`."""
            offset = k.shape[2] - q.shape[2]
            mask = None if key_mask is None else key_mask[:, :end]
            if self.watch:
                self.watch((k[:, :, :end], v[:, :, :end]), (keys, values), begin)
            queries = q[:, :, begin - offset : end - offset]
            return function(queries, keys, values, causal=True, key_mask=mask, **options)

        if self.options.keys == "token":
            return attend(k.shape[2] - q.shape[2], k.shape[2], *rounded)
        if first is None:
            return self._group_by_group(attend, q, (k, v), rounded)
        return self._padded(attend, q, (k, v), rounded, first)

    def _group_by_group(
        self, attend: Callable[..., Tensor], q: Tensor, exact: tuple[Tensor, Tensor], rounded: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Texts that start at column 0: one call per group of queries."""
        size, k_len = self.options.group_size, exact[0].shape[2]
        begin = k_len - q.shape[2]
        start = begin // size * size
        # What queries see: rounded up to their group, exact in it.
        seen = [
            torch.cat([new[:, :, :start], old[:, :, start:]], dim=2) for new, old in zip(rounded, exact, strict=True)
        ]
        found = []
        while start < k_len:
            end = min(start + size, k_len)
            found.append(attend(max(start, begin), end, *(own[:, :, :end] for own in seen)))
            for own, new in zip(seen, rounded, strict=True):
                own[:, :, start:end] = new[:, :, start:end]
            start = end
        return torch.cat(found, dim=2)

    def _padded(
        self,
        attend: Callable[..., Tensor],
        q: Tensor,
        exact: tuple[Tensor, Tensor],
        rounded: tuple[Tensor, Tensor],
        first: Tensor,  # [batch]
    ) -> Tensor:
        """Texts that start at different columns, so groups do too: a call per group computes the columns that it may
        cover in any row, and each query takes the result of its own group."""
        size, k_len = self.options.group_size, exact[0].shape[2]
        begin = k_len - q.shape[2]
        columns, out = torch.arange(k_len, device=q.device), torch.empty_like(q)
        for column in range(begin, k_len + size - 1, size):
            # [batch, 1]: where the group that holds this column starts in each row, in (column - size, column]
            start = (first + (column - first).div(size, rounding_mode="floor") * size)[:, None]
            low, end = max(begin, column - size + 1), min(k_len, column + size)
            before = (columns[:end] < start)[:, None, :, None]
            seen = (new[:, :, :end].where(before, old[:, :, :end]) for new, old in zip(rounded, exact, strict=True))
            result = attend(low, end, *seen)
            own = (columns[low:end] >= start) & (columns[low:end] < start + size)  # [batch, queries]
            place = out[:, :, low - begin : end - begin]
            place.copy_(result.where(own[:, None, :, None], place))
        return out

    def _rounded_keys(self, k: Tensor, first: Tensor | None) -> Tensor:
        """Keys that are rounded per channel in whole groups of tokens, or per token in all tokens."""
        if self.options.keys == "token":
            return self._rounded_values(k, first)
        size, k_len = self.options.group_size, k.shape[2]
        if first is not None:  # move texts to column 0, so groups of all rows start at the same columns
            columns = torch.arange(k_len, device=k.device)
            moved = _columns(k, (columns + first[:, None]).clamp_max(k_len - 1))
            return _columns(self._rounded_keys(moved, None), (columns - first[:, None]).clamp_min(0))
        whole = k_len // size * size
        groups = k[:, :, :whole].unflatten(2, (-1, size))  # [batch, kv_heads, groups, size, dim]
        exact = None
        if self.options.keep_first:
            exact = (torch.arange(whole, device=k.device) < self.options.keep_first).view(-1, size, 1)
        return torch.cat([min_max(self.options.bits, groups, 3, exact).flatten(2, 3), k[:, :, whole:]], dim=2)

    def _rounded_values(self, v: Tensor, first: Tensor | None) -> Tensor:
        """Every token rounded in groups of channels."""
        rounded = min_max(self.options.bits, v.unflatten(-1, (-1, self.options.channels)), -1).flatten(-2)
        if not self.options.keep_first:
            return rounded
        start = torch.zeros(1, dtype=torch.long, device=v.device) if first is None else first
        kept = torch.arange(v.shape[2], device=v.device) < start[:, None] + self.options.keep_first  # [batch, length]
        return v.where(kept[:, None, :, None], rounded)


def _columns(tensor: Tensor, index: Tensor) -> Tensor:
    """tensor [batch, heads, length, dim] with each row's columns in the order of index [batch, length]."""
    return tensor.gather(2, index[:, None, :, None].expand_as(tensor))


class QuantizedCache:
    """The axis kv_cache of one model."""

    def __init__(
        self, model: LlamaForCausalLM, options: KvCacheOptions, calibration: Any, linears: Sequence[str]
    ) -> None:
        """Check that groups fit the heads and the texts."""
        self.label, self.options = Part("kv_cache", options).label, options
        dim, longest = model.model.layers[0].self_attn.head_dim, model.config.max_position_embeddings
        if dim % options.channels:
            raise QuantizeError(
                f"kv_cache: channels is {options.channels}; it must divide the dimension of a head, {dim}."
            )
        if options.window >= longest:
            raise QuantizeError(
                f"kv_cache: {options.why_exact} leaves the first {options.window} tokens of a text exact, but the "
                f"model takes only {longest}, so no key would ever be quantized; choose a smaller value."
            )
        self.longest = longest

    def apply(self, model: LlamaForCausalLM) -> None:
        """Make the attention of each layer go through a rounded cache."""
        self.caches = [RoundedCache(self.options) for _ in model.model.layers]
        attend_through(model, self.caches)

    def audit(self, model: LlamaForCausalLM, probe: Tensor) -> PartAudit:
        """What the attention functions are called with on the probe, compared with the exact keys and values."""
        wanted = min(2 * self.options.group_size + self.options.keep_first, self.longest)
        if probe.shape[1] < wanted:
            probe = probe.repeat(1, -(-wanted // probe.shape[1]))[:, :wanted]
        return audit_cache(model, probe, self.label, self.options, self.caches)
