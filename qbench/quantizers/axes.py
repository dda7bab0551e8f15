"""Axes: what a quantization may have besides a method for the weights, such as masked heads. Imports no torch.

To add one: its options in axis_options.py, one entry in AXES, and a class like mask_heads.MaskedHeads in its own
module. Recipes, quantize(), keys, labels and audits read the table; nothing else names an axis.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError

from qbench.errors import did_you_mean
from qbench.quantizers.axis_options import ActivationsOptions, AxisOptions, KvCacheOptions, MaskHeadsOptions
from qbench.quantizers.declaration import QuantizeError
from qbench.validation import problem

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaForCausalLM

    from qbench.records.audit import PartAudit


class AppliedAxis(Protocol):
    """An axis applied to one model; it is created before the weights are quantized."""

    def __init__(self, model: "LlamaForCausalLM", options: Any, calibration: Any, linears: Sequence[str]) -> None:
        """Measure what must be known of the unquantized model.

        linears: the names of the linear layers that the method quantizes, or would quantize.
        """

    def apply(self, model: "LlamaForCausalLM") -> None:
        """Change the model in place, in its final form: its weights are quantized, and dense if that was requested."""

    def audit(self, model: "LlamaForCausalLM", probe: "Tensor") -> "PartAudit":
        """Measure on the model that the axis was applied; probe: token ids [batch, length]."""


@dataclass(frozen=True)
class Axis:
    """What is known about an axis without torch."""

    name: str  # in a recipe's quantizations and in quantize()
    options: type[AxisOptions]
    implementation: str  # module:class of an AppliedAxis

    def load(self) -> type[AppliedAxis]:
        """Its implementation, which imports torch."""
        module, name = self.implementation.split(":")
        loaded: type[AppliedAxis] = getattr(import_module(module), name)
        return loaded


# In the order of labels.
AXES = {
    axis.name: axis
    for axis in (
        Axis("mask_heads", MaskHeadsOptions, "qbench.quantizers.mask_heads:MaskedHeads"),
        Axis("activations", ActivationsOptions, "qbench.quantizers.activations:QuantizedActivations"),
        Axis("kv_cache", KvCacheOptions, "qbench.quantizers.kv_cache:QuantizedCache"),
    )
}


@dataclass(frozen=True)
class Part:
    """An axis with its options: one part of a quantization besides the weights."""

    axis: str
    options: AxisOptions

    @property
    def label(self) -> str:
        """Its piece of the label: mask1e-06."""
        return "-".join(self.options.label_parts())

    @property
    def declaration(self) -> Axis:
        """Its entry in the table."""
        return AXES[self.axis]


def parts_of(settings: Mapping[str, Any]) -> tuple[Part, ...]:
    """The parts with these options. settings: by the name of the axis; an axis that is None is left out."""
    return tuple(Part(name, _options(AXES[name], settings[name])) for name in AXES if settings.get(name) is not None)


def _options(axis: Axis, given: Any) -> AxisOptions:
    fields = axis.options.model_fields
    if isinstance(given, axis.options):
        return given
    if not isinstance(given, Mapping):
        raise QuantizeError(f"{axis.name} is {given!r}; it must be a mapping with its options: {', '.join(fields)}.")
    for name in given:
        if name not in fields:
            raise QuantizeError(
                f"{name} is not an option of {axis.name}, which has {', '.join(fields)}.{did_you_mean(name, fields)}"
            )
    try:
        return axis.options(**given)
    except ValidationError as error:
        first = error.errors()[0]
        hint = _yaml_hint(first["input"])
        raise QuantizeError(f"{axis.name}: {first['loc'][0]} {problem(first)}{hint}") from None


def _yaml_hint(value: Any) -> str:
    """YAML reads 1e-6 as a string."""
    try:
        number = float(value) if isinstance(value, str) else None
    except ValueError:
        return ""
    return "" if number is None else f" In YAML, a number such as {value} needs a decimal point: 1.0e-6."
