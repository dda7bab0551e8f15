"""Masked heads: those that are dead on the calibration text are set to zero, as a pruned model would have them.

The output of a head is its slice of o_proj's input. At a token it is off if max |value| < epsilon; the head is dead if
it is off at more than 95% of tokens. Heads are judged on the unquantized model, so that they are the same ones whatever
the method for the weights, which are quantized as without the mask.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from qbench.quantizers.axes import Part
from qbench.quantizers.axis_options import MaskHeadsOptions
from qbench.quantizers.calibration import token_ids
from qbench.quantizers.hooks import watched_inputs
from qbench.records.analysis import DEAD
from qbench.records.audit import Measured, PartAudit


class HeadMask:
    """A hook that sets the slices of masked heads to zero in what o_proj is called with, [..., heads * dim]."""

    def __init__(self, masked: Tensor) -> None:
        self.masked = masked  # [heads * dim] bool

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with zeros; a NaN becomes zero too."""
        x, *rest = arguments
        self.masked = self.masked.to(x.device)
        return x.masked_fill(self.masked, 0), *rest


class MaskedHeads:
    """The axis mask_heads of one model."""

    def __init__(
        self, model: LlamaForCausalLM, options: MaskHeadsOptions, calibration: Any, linears: Sequence[str] = ()
    ) -> None:
        """Find the dead heads of the unquantized model."""
        self.label = Part("mask_heads", options).label
        texts = token_ids(calibration, model)
        self.tokens = sum(ids.numel() for ids in texts)
        self.dead = off_share(model, texts, options.epsilon) > DEAD  # [layers, heads]

    def apply(self, model: LlamaForCausalLM) -> None:
        """Hook the mask into each layer that has dead heads."""
        for o_proj, dead in zip(output_projections(model), self.dead, strict=True):
            if dead.any():
                o_proj.register_forward_pre_hook(HeadMask(dead.repeat_interleave(o_proj.in_features // len(dead))))

    def audit(self, model: LlamaForCausalLM, probe: Tensor) -> PartAudit:
        """Which heads are masked, by what reaches o_proj of a one in each place, and of the probe's values."""
        ones = _ones_through(model, self.dead.shape[1])  # [layers, heads, dim]
        masked, touched = (ones == 0).all(-1), (ones != 1).any(-1)  # [layers, heads]
        largest, change = _on_probe(model, probe, self.dead)
        count, heads = int(self.dead.sum()), self.dead.numel()
        return PartAudit(
            label=self.label,
            details=(
                f"{count} of {heads} heads are dead on {self.tokens:,} tokens of calibration text",
                *(f"layer {i}: {_listed(row)}" for i, row in enumerate(self.dead) if row.any()),
            ),
            measured=(
                _none_of("dead heads that are not masked", self.dead & ~masked),
                _none_of("masked heads that are not dead", touched & ~self.dead),
                Measured(what="the largest |output| of a masked head on the probe", value=largest, at_most=0),
                Measured(what="the largest change of any other head's output", value=change, at_most=0),
            ),
            may_change_nothing=True,  # heads that are silent anyway
        )


def output_projections(model: LlamaForCausalLM) -> list[Any]:
    """The o_proj of each layer: nn.Linear, or its packed form."""
    return [layer.self_attn.o_proj for layer in model.model.layers]


def is_off(outputs: Tensor, heads: int, epsilon: float) -> Tensor:
    """At which tokens each head is off, [..., heads] bool; outputs: what o_proj reads, [..., heads * dim]."""
    return outputs.unflatten(-1, (heads, -1)).abs().amax(-1) < epsilon


@torch.no_grad()
def off_share(model: LlamaForCausalLM, texts: Sequence[Tensor], epsilon: float) -> Tensor:
    """At which share of the tokens of texts [1, length] each head is off, [layers, heads]."""
    heads, tokens = model.config.num_attention_heads, sum(ids.numel() for ids in texts)
    off = [torch.zeros(heads, dtype=torch.long) for _ in model.model.layers]

    def count(layer: int, x: Tensor) -> None:
        off[layer] += is_off(x, heads, epsilon).sum((0, 1)).cpu()

    with _watching(model, count):
        for ids in texts:
            model.model(input_ids=ids.to(model.device), use_cache=False)
    return torch.stack(off).double() / tokens


@torch.no_grad()
def _ones_through(model: LlamaForCausalLM, heads: int) -> Tensor:
    """What each o_proj computes with when it is called with ones, [layers, heads, dim]."""
    seen: dict[int, Tensor] = {}
    with _watching(model, lambda layer, x: seen.update({layer: x.float().cpu().view(heads, -1)})):
        for o_proj in output_projections(model):
            o_proj(torch.ones(1, 1, o_proj.in_features, dtype=model.dtype, device=model.device))
    return torch.stack([seen[layer] for layer in range(len(seen))])


@torch.no_grad()
def _on_probe(model: LlamaForCausalLM, probe: Tensor, dead: Tensor) -> tuple[float, float]:
    """The largest |value| that o_proj gets of a masked head, and the largest change of the others' by hooks."""
    before: dict[int, Tensor] = {}
    largest, change = [0.0], [0.0]

    def compare(layer: int, x: Tensor) -> None:
        now, then = (t.float().cpu().unflatten(-1, (dead.shape[1], -1)) for t in (x, before.pop(layer)))
        largest.append(float(now[..., dead[layer], :].abs().amax()) if dead[layer].any() else 0.0)
        change.append(float((now - then)[..., ~dead[layer], :].abs().amax()) if (~dead[layer]).any() else 0.0)

    with _watching(model, lambda layer, x: before.update({layer: x}), first=True), _watching(model, compare):
        model.model(input_ids=probe.to(model.device), use_cache=False)
    return float(torch.tensor(largest).max()), float(torch.tensor(change).max())  # NaN if any is


def _watching(
    model: LlamaForCausalLM, see: Callable[[int, Tensor], None], first: bool = False
) -> AbstractContextManager[None]:
    """Show what each layer's o_proj is called with, [batch, length, heads * dim]; first: before other hooks."""
    return watched_inputs(dict(enumerate(output_projections(model))), see, first)


def _none_of(what: str, found: Tensor) -> Measured:
    """A number of heads that must be none."""
    return Measured(what=f"the number of {what}", value=float(found.sum()), at_most=0)


def _listed(row: Tensor) -> str:
    heads = row.nonzero().flatten().tolist()
    return f"head{'s' if len(heads) > 1 else ''} {', '.join(map(str, heads))}"
