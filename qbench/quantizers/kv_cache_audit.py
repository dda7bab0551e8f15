"""The audit of a quantized KV cache: what attention functions are called with on a probe."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from qbench.quantizers.axis_options import KvCacheOptions
from qbench.quantizers.definitions import MAX_MISROUNDED, defined_min_max, misrounded
from qbench.quantizers.rounding import levels_in_groups
from qbench.records.audit import Measured, PartAudit

Pair = tuple[Tensor, Tensor]  # keys and values, [batch, kv_heads, length, dim] each
NAMES = ("keys", "values")
MIN_DIFFERENCE = 1e-7  # ‖x̂ - x‖ / ‖x‖; at 8 bits it is about 1e-3
MAX_SHARE_OFF = 0.01  # of pairs: a key whose rounded values are all equal to the exact ones is not counted


class Watchable(Protocol):
    """A cache that shows what it calls its attention function with."""

    watch: "CacheWatch | None"


class CacheWatch:
    """Figures of one layer's calls: how many pairs of a query and a key were quantized, and how."""

    def __init__(self, options: KvCacheOptions) -> None:
        self.options = options
        self.pairs = 0
        self.rounded = [0, 0]  # pairs, by keys and values
        self.energy, self.error = [0.0, 0.0], [0.0, 0.0]
        self.levels = [0, 0]  # the most in a group
        self.off, self.defined_error = [0.0, 0.0], [0.0, 0.0]  # as from `misrounded`

    def __call__(self, exact: Pair, seen: Pair, begin: int) -> None:
        """exact: what the cache holds; seen: what queries from the column `begin` on see. Nothing is padded."""
        rows, _, end, _ = exact[0].shape
        self.pairs += rows * sum(range(begin + 1, end + 1))
        for i, (old, new) in enumerate(zip(exact, seen, strict=True)):
            changed = (new != old).any(-1).any(1)  # [batch, end]
            self.rounded[i] += int(changed.cumsum(1)[:, begin:].sum())
            self.energy[i] += float(old.double().square().sum())
            self.error[i] += float((new - old).double().square().sum())
            off, error = misrounded(old, new, self._expected(old, i, begin))
            self.off[i] += off
            self.defined_error[i] += error
            groups = self._groups(new, i, begin)
            if groups.numel():
                self.levels[i] = max(self.levels[i], int(levels_in_groups(groups).max()))

    def _groups(self, seen: Tensor, which: int, begin: int) -> Tensor:
        """What shares a scale and is rounded for all queries of a call, [..., size]."""
        size, kept = self.options.group_size, self.options.keep_first
        if self.options.keys == "token" or which == 1:
            until = seen.shape[2] if self.options.keys == "token" else begin // size * size
            return seen[:, :, kept:until].unflatten(-1, (-1, self.options.channels))
        start, until = kept // size * size, begin // size * size
        if until <= kept:
            return seen.new_empty(0)
        groups = seen[:, :, start:until].clone()
        groups[:, :, : kept - start] = groups[:, :, kept - start, None]  # exact tokens add no levels
        return groups.unflatten(2, (-1, size)).transpose(3, 4)

    def _expected(self, exact: Tensor, which: int, begin: int) -> Tensor:
        """What queries from the column `begin` to the end of its group should see."""
        own, expected = self.options, exact.to(torch.float64, copy=True)
        until = exact.shape[2] if own.keys == "token" else begin // own.group_size * own.group_size
        if own.keys == "token" or which == 1:
            rounded = expected[:, :, own.keep_first : until]
            rounded.copy_(defined_min_max(own.bits, rounded.unflatten(-1, (-1, own.channels))).flatten(-2))
            return expected
        for start in range(0, until, own.group_size):
            group = expected[:, :, max(start, own.keep_first) : start + own.group_size].transpose(2, 3)
            if group.numel():
                group.copy_(defined_min_max(own.bits, group))
        return expected

    def misrounded(self, which: int) -> float:
        """‖what the definition does not explain‖ / ‖the defined error‖."""
        return (self.off[which] / self.defined_error[which]) ** 0.5 if self.defined_error[which] else 0.0

    def share(self, which: int) -> float:
        """The share of pairs whose key, or value, was quantized."""
        return self.rounded[which] / self.pairs if self.pairs else 0.0

    def difference(self, which: int) -> float:
        """‖x̂ - x‖ / ‖x‖."""
        return (self.error[which] / self.energy[which]) ** 0.5 if self.energy[which] else 0.0


@torch.no_grad()
def audit_cache(
    model: LlamaForCausalLM, probe: Tensor, label: str, options: KvCacheOptions, caches: Sequence[Watchable]
) -> PartAudit:
    """Run the probe [batch, length], and measure what each layer's attention function is called with."""
    layers = [CacheWatch(options) for _ in caches]
    for cache, layer in zip(caches, layers, strict=True):
        cache.watch = layer
    try:
        model.model(input_ids=probe.to(model.device), use_cache=False)
    finally:
        for cache in caches:
            cache.watch = None
    read = {(0, probe.shape[1]): 1}
    expected = [own.quantized_pairs(read) or 0.0 for own in (options.without_the_first_group(), options)]
    exact = sum(min(layer.difference(0), layer.difference(1)) < MIN_DIFFERENCE for layer in layers)
    share = min(layer.share(0) for layer in layers)
    return PartAudit(
        label=label,
        details=(
            f"the keys and values of {len(layers) - exact} layers were quantized, simulated",
            f"{share:.1%} of the pairs of a query and a key on {probe.shape[1]} tokens",
            *(f"at most {max(layer.levels[i] for layer in layers)} levels in a group of {NAMES[i]}" for i in (0, 1)),
            *([f"the first {options.keep_first} tokens are exact"] if options.keep_first else []),
        ),
        measured=(
            Measured(what="the number of layers whose cache was not quantized", value=float(exact), at_most=0),
            *(measured for which in (0, 1) for measured in _figures(layers, which, options, expected)),
        ),
        may_change_nothing=True,  # of texts with fewer tokens than a group
    )


def _figures(
    layers: Sequence[CacheWatch], which: int, options: KvCacheOptions, expected: Sequence[float]
) -> list[Measured]:
    """expected: the smallest and the largest share of pairs."""
    name, by_channel = NAMES[which], which == 0 and options.keys == "channel"
    size, allowed = options.group_size if by_channel else options.channels, 2**options.bits
    shares = [layer.share(which) for layer in layers]
    return [
        Measured(
            what=f"the most levels in a group of {name}",
            value=float(max(layer.levels[which] for layer in layers)),
            at_least=min(allowed // 2, size // 4) + 1,
            at_most=allowed,
        ),
        Measured(
            what=f"the smallest relative difference that it made to the {name} of a layer",
            value=min(layer.difference(which) for layer in layers),
            at_least=MIN_DIFFERENCE,
        ),
        Measured(
            what=f"the largest share of the error of a layer's {name} that {options.bits} bits do not explain",
            value=max(layer.misrounded(which) for layer in layers),
            at_most=MAX_MISROUNDED,
        ),
        *(
            Measured(
                what=f"the {least} share of pairs of a query and a key with quantized {name} in a layer",
                value=share,
                at_least=expected[0] - MAX_SHARE_OFF,
                at_most=expected[1] + MAX_SHARE_OFF,
            )
            for least, share in (("smallest", min(shares)), ("largest", max(shares)))
        ),
    ]
