"""Quantized activations, simulated: the inputs of linear layers are rounded to a few bits and back, in the run's dtype.

Scales per token and per block come from the values themselves. Scales per tensor are static: they are measured on
calibration text that runs through the unquantized model, so they are the same whatever the method for the weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from qbench.quantizers.axes import Part
from qbench.quantizers.axis_options import ActivationsOptions
from qbench.quantizers.calibration import token_ids
from qbench.quantizers.declaration import QuantizeError
from qbench.quantizers.definitions import MAX_MISROUNDED, defined, misrounded
from qbench.quantizers.hooks import watched_inputs
from qbench.quantizers.number_formats import E2M1_LARGEST, FORMATS
from qbench.quantizers.rounding import levels_in_groups, number_count, quantized, scales
from qbench.records.audit import Measured, PartAudit

# Percentiles come from a histogram with 256 buckets per power of two: the upper 8 of float32's 23 bits of mantissa.
_BUCKET_BITS = 15
_BUCKETS = 2 ** (31 - _BUCKET_BITS)
MIN_DIFFERENCE = 1e-7  # ‖x̂ - x‖ / ‖x‖ of an input that was quantized; at 8 bits it is about 1e-2


class _Last:
    """The last input and what it became: q_proj, k_proj and v_proj read the same tensor."""

    def __init__(self) -> None:
        self.given: tuple[Tensor, int, float | None] | None = None
        self.result: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()


class InputQuantizer:
    """A hook that rounds what a linear layer is called with, [..., in_features]."""

    def __init__(self, options: ActivationsOptions, amax: float | None, last: _Last) -> None:
        self.options, self.amax, self.last = options, amax, last  # amax: the static range

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with a rounded input."""
        x, *rest = arguments
        if x.is_inference():  # inference tensors have no version counter: changes in place would go unnoticed
            return self._rounded(x), *rest
        last, given = self.last, (x, x._version, self.amax)
        if last.given is None or last.given[0] is not x or last.given[1:] != given[1:]:
            last.given, last.result = given, self._rounded(x)
        return last.result, *rest

    def _rounded(self, x: Tensor) -> Tensor:
        own = self.options
        amax = None if self.amax is None else x.new_full((), self.amax, dtype=torch.float32)
        return quantized(own.format, own.bits, x, tensor_amax=amax, whole=own.per_tensor)


class QuantizedActivations:
    """The axis activations of one model."""

    def __init__(
        self, model: LlamaForCausalLM, options: ActivationsOptions, calibration: Any, linears: Sequence[str]
    ) -> None:
        """Check the shapes, and measure static ranges if the options need them."""
        self.label, self.options, self.linears = Part("activations", options).label, options, tuple(linears)
        for name in self.linears:
            width, block = model.get_parameter(f"{name}.weight").shape[1], FORMATS[options.format].block
            if block and width % block:
                raise QuantizeError(
                    f"activations: {options.format} has blocks of {block} values, which must divide {name}'s "
                    f"in_features, {width}; choose another format."
                )
        self.earlier: dict[str, list[int]] = {}  # hooks of other axes, by linear layer: what they do is not rounding
        self.ranges: Mapping[str, float] = {}
        self.tokens = 0
        if options.calibrated:
            texts = token_ids(calibration, model)
            self.tokens = sum(ids.numel() for ids in texts)
            self.ranges = input_ranges(model, self.linears, texts, options.percentile)

    def apply(self, model: LlamaForCausalLM) -> None:
        """Hook the rounding into each linear layer."""
        last = _Last()
        for name in self.linears:
            amax = self.ranges.get(name, float("nan")) if self.options.calibrated else None
            linear = model.get_submodule(name)
            self.earlier[name] = list(linear._forward_pre_hooks)
            linear.register_forward_pre_hook(InputQuantizer(self.options, amax, last))

    def audit(self, model: LlamaForCausalLM, probe: Tensor) -> PartAudit:
        """What the linear layers compute with on the probe, compared with what was computed before them."""
        seen = _on_probe(model, probe, {name: model.get_submodule(name) for name in self.linears}, self)
        spared = [n for n in self.linears if n not in seen or not seen[n].difference >= MIN_DIFFERENCE]  # NaN is not
        uncalibrated = [n for n in self.linears if self.options.calibrated and not self.ranges.get(n, 0) > 0]
        figures = list(seen.values()) or [_InputFigures(0, 0, 0.0, 0.0, 0.0)]
        levels, size = max(own.levels for own in figures), max(own.size for own in figures)
        allowed, clipped = number_count(self.options.format, self.options.bits), max(own.clipped for own in figures)
        return PartAudit(
            label=self.label,
            details=(
                f"the inputs of {len(self.linears) - len(spared)} linear layers were quantized, simulated",
                f"at most {levels} levels in a group of {size} values; the largest clipped |x| is {clipped:g}",
                *([f"static ranges from {self.tokens:,} tokens of calibration text"] if self.tokens else []),
                *(f"not quantized: {name}" for name in spared[:3]),
            ),
            measured=(
                _none_of("linear layers whose input was not quantized", spared),
                _none_of("static scales that were never calibrated", uncalibrated),
                Measured(
                    what="the most levels in a group of an input",
                    value=levels,
                    at_least=min(allowed // 2, size // 4) + 1,
                    at_most=allowed,
                ),
                Measured(
                    what="the smallest relative difference that it made to an input",
                    value=min(own.difference for own in figures),
                    at_least=MIN_DIFFERENCE,
                ),
                Measured(
                    what="the largest share of an input's error that its format does not explain",
                    value=max(own.misrounded for own in figures),
                    at_most=MAX_MISROUNDED,
                ),
                Measured(what="the largest |x| that was clipped", value=clipped),
            ),
        )

    def limits(self, name: str, x: Tensor) -> Tensor:
        """The largest |x| that is not clipped, for each value of x or for all."""
        if name in self.ranges:
            return torch.tensor(self.ranges[name])
        if self.options.format == "mxfp4":
            blocks = x.unflatten(-1, (-1, FORMATS["mxfp4"].block))
            scale = scales("mxfp4", 4, blocks.abs().amax(-1, keepdim=True))
            return (scale * E2M1_LARGEST).expand_as(blocks).reshape(x.shape)
        return torch.tensor(torch.inf)


@torch.no_grad()
def input_ranges(
    model: LlamaForCausalLM, names: Sequence[str], texts: Sequence[Tensor], percentile: float
) -> dict[str, float]:
    """The largest |x|, or a percentile of |x|, of what each linear layer is called with on texts [1, length]."""
    largest: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}

    def see(name: str, x: Tensor) -> None:
        size = x.detach().abs()
        largest[name] = torch.maximum(largest.get(name, size.amax()), size.amax())
        if percentile < 100:
            buckets = torch.bincount(_bucket(size), minlength=_BUCKETS)
            counts[name] = counts.get(name, 0) + buckets

    with watched_inputs({name: model.get_submodule(name) for name in names}, see):
        for ids in texts:
            _forward(model, ids, names)
    ranges = {name: float(amax) for name, amax in largest.items()}
    if percentile < 100:
        ranges = {name: min(amax, _percentile(counts[name], percentile)) for name, amax in ranges.items()}
    return ranges


def _forward(model: LlamaForCausalLM, ids: Tensor, names: Sequence[str]) -> None:
    hidden = model.model(input_ids=ids.to(model.device), use_cache=False).last_hidden_state
    if any(name.split(".")[-1] == "lm_head" for name in names):
        model.lm_head(hidden)


def _bucket(size: Tensor) -> Tensor:
    """The bucket of each |x| in the histogram: its exponent and the first bits of its mantissa in float32."""
    return size.float().flatten().view(torch.int32) >> _BUCKET_BITS


def _percentile(counts: Tensor, percentile: float) -> float:
    """The upper end of the bucket that the percentile is in."""
    total = counts.cumsum(0).double()
    wanted = torch.tensor([percentile / 100 * float(total[-1])], dtype=torch.float64, device=total.device)
    bucket = torch.searchsorted(total, wanted).to(torch.int32)
    return float(((bucket + 1) << _BUCKET_BITS).view(torch.float32))


class _InputFigures(NamedTuple):
    """What the rounding did to the input of one linear layer on the probe."""

    levels: int  # the most in a group
    size: int  # of a group
    difference: float  # ‖x̂ - x‖ / ‖x‖
    clipped: float  # the largest |x| that was clipped, or 0
    misrounded: float  # ‖what the definition does not explain‖ / ‖the defined error‖


@torch.no_grad()
def _on_probe(
    model: LlamaForCausalLM, probe: Tensor, modules: Mapping[str, nn.Module], axis: QuantizedActivations
) -> dict[str, _InputFigures]:
    """What each linear layer was called with on the probe, before and after the rounding."""
    before: dict[str, Tensor] = {}
    found: dict[str, _InputFigures] = {}
    own, whole, block = axis.options, axis.options.per_tensor, FORMATS[axis.options.format].block

    def compare(name: str, x: Tensor) -> None:
        given = before.pop(name)
        expected = defined(own.format, own.bits, given, axis.ranges.get(name, torch.nan) if own.calibrated else None)
        off, error = misrounded(given, x, expected)
        then, now = (t.double().cpu() for t in (given, x))
        groups = now.reshape(1, -1) if whole else now.reshape(-1, block or now.shape[-1])
        size = then.abs()
        clipped = size[size > axis.limits(name, then) * (1 + 1e-6)]
        found[name] = _InputFigures(
            levels=int(levels_in_groups(groups).max()),
            size=groups.shape[1],
            difference=float((now - then).norm() / then.norm()) if then.any() else torch.inf,
            clipped=float(clipped.max()) if len(clipped) else 0.0,
            misrounded=(off / error) ** 0.5 if error else 0.0,
        )

    first = watched_inputs(modules, lambda name, x: before.update({name: x}), first=True, after=axis.earlier)
    with first, watched_inputs(modules, compare):
        _forward(model, probe, list(modules))
    return found


def _none_of(what: str, names: Sequence[str]) -> Measured:
    return Measured(what=f"the number of {what}", value=float(len(names)), at_most=0)
