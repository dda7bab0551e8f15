"""PackedLinear: a linear layer whose weight is stored as codes, by any method."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qbench.attention.register import show
from qbench.progress import Bar
from qbench.quantizers.declaration import LinearOptions, QuantizeError, must_define
from qbench.quantizers.options import Quantization

_ATTRIBUTE = "qbench_packed_form"


@dataclass(frozen=True)
class Storage:
    """Bytes of a packed weight as saved: the codes, and what is needed to decode them (scales, zeros, g_idx)."""

    code_bytes: int
    metadata_bytes: int


class PackedLinear(nn.Module):
    """A linear layer that stores its weight as codes; a method subclasses it and implements codes and dequantize.

    Its state_dict is what is written to disk; `storage` counts those tensors, except the bias.
    """

    CODE_TENSORS: ClassVar[
        frozenset[str]
    ]  # the names in state_dict that hold codes; the rest, except `bias`, is metadata
    # Whether each weight gets the level nearest to it; the audit checks that. GPTQ moves weights on purpose.
    NEAREST: ClassVar[bool] = False
    ACTIVATION_BITS: ClassVar[int | None] = None  # None: activations stay in the model's dtype

    MIN_STEP: ClassVar[float] = 0.0  # the smallest step that the method can represent; narrower groups use fewer codes

    in_features: int
    out_features: int
    bias: Tensor | None
    bits: int
    group_size: int  # how many weights share a scale; in_features if there is one group per row

    def codes(self) -> Tensor:
        """The integer codes, [out_features, in_features], each in 0 .. 2**bits - 1."""
        raise must_define(type(self), "codes")

    def dequantize(self) -> Tensor:
        """The weight that the codes represent, [out_features, in_features], in the compute dtype."""
        raise must_define(type(self), "dequantize")

    def dequantize_float32(self) -> Tensor:
        """The same before rounding to the compute dtype, for the audit to count steps of the grid.

        In bfloat16 a weight has 8 bits, as many as an 8-bit code, so weights on the right level may look misplaced.
        """
        return self.dequantize().float()

    @classmethod
    def from_linear(cls, linear: nn.Linear, bits: int, options: Any) -> Self:
        """Quantize one linear layer on its device."""
        raise must_define(cls, "from_linear")

    @classmethod
    def from_tensors(
        cls, tensors: dict[str, Tensor], options: Any, *, bits: int, shape: tuple[int, int], dtype: torch.dtype
    ) -> Self:
        """The layer from a saved state_dict; shape is [out_features, in_features], dtype the compute dtype.

        By default these are the arguments of the class.
        """
        return cls(tensors, options, bits=bits, shape=shape, dtype=dtype)

    @classmethod
    def marker(cls) -> str:
        """The tensor that identifies a stored layer as one of this class; by default its codes."""
        (codes,) = cls.CODE_TENSORS
        return codes

    def groups(self, weight: Tensor) -> Tensor:
        """Any [out_features, in_features] tensor as [groups, group_size]: what shares a scale in one row.

        A method whose groups are not consecutive along the last axis (act-order, HQQ's axis 0) overrides this.
        """
        return weight.reshape(-1, self.group_size)

    def grid(self) -> Tensor | None:
        """The levels of codes 0, 1, … in units of a group's scale; None if all steps are equal."""
        return None

    def packed_bytes(self) -> int:
        """The number of bytes of the codes in the method's packing."""
        return -(-self.out_features * self.in_features * self.bits // 8)

    def settings(self) -> dict[str, object]:
        """The options that the layer was made with, by their names in Options, if the layer shows them."""
        return {"group_size": self.group_size}

    def storage(self) -> Storage:
        """The bytes of the packed tensors as they are saved."""
        sizes = {name: t.numel() * t.element_size() for name, t in self.state_dict().items() if name != "bias"}
        codes = sum(size for name, size in sizes.items() if name in self.CODE_TENSORS)
        return Storage(code_bytes=codes, metadata_bytes=sum(sizes.values()) - codes)

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b with `dequantize`'s weight, as in dense execution; bnb and hqq run their libraries' code instead.

        GPTQ uses this one, so its packed and dense logits agree by construction; tests show that both match what
        gptqmodel reads from the tensors.
        """
        return F.linear(x, self.dequantize().to(x.dtype), self.bias)

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"{self.in_features} -> {self.out_features}, bits={self.bits}, group_size={self.group_size}"


def replace_linears(
    model: nn.Module,
    targets: list[str],
    kind: type[PackedLinear],
    bits: int,
    options: Any,
    *,
    progress: bool,
    device: torch.device | str | None,
) -> None:
    """Replace each target by its packed form, one after the other; for methods that need only the weight."""
    check_shapes({name: _linear(model, name) for name in targets}, bits, options)
    for name in Bar(targets, unit="linear", shown=progress):
        linear = _linear(model, name)
        home = linear.weight.device
        packed = kind.from_linear(linear.to(device or home), bits, options)
        model.set_submodule(name, packed.to(home).eval())


def check_shapes(linears: Mapping[str, nn.Linear], bits: int, options: LinearOptions) -> None:
    """Raise QuantizeError if a linear layer of these cannot be quantized so; the error has group sizes that fit all."""
    shapes = {name: (linear.out_features, linear.in_features) for name, linear in linears.items()}
    if why := options.first_misfit(bits, shapes):
        raise QuantizeError(why)


def _linear(model: nn.Module, name: str) -> nn.Linear:
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    return linear


@dataclass(frozen=True)
class PackedForm:
    """A quantized model's packed layers: the ones that it runs, or the ones its dense weights came from, on the CPU."""

    quantization: Quantization
    layers: dict[str, PackedLinear]


def packed_form(model: nn.Module) -> PackedForm | None:
    """The packed form of a quantized model; None for one that is not quantized."""
    return getattr(model, _ATTRIBUTE, None)


def attach_packed_form(model: nn.Module, form: PackedForm) -> None:
    """Attach the packed form to its model outside its modules, so it stays out of parameters and state_dict."""
    object.__setattr__(model, _ATTRIBUTE, form)
    show(model, quantization=form.quantization.label)
