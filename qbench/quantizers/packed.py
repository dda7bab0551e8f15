"""PackedLinear: a linear layer whose weight is stored as codes, whatever the method that made them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qbench.progress import Bar
from qbench.quantizers.options import Options

# A method's module has a quantize_model(model, bits, options, *, targets, calibration, progress, device) that replaces
# each target nn.Linear by a PackedLinear, in place. All checks of shapes and calibration come before the first one.
# The source weights are the audit's evidence: a method may drop them, never write into them. progress shows a bar on a
# terminal. The model stays where it is; one layer at a time visits `device`, by default the same.


@dataclass(frozen=True)
class Storage:
    """Bytes of a packed weight as it is saved: the codes, and what is needed to read them (scales, zeros, g_idx)."""

    code_bytes: int
    metadata_bytes: int


class PackedLinear(nn.Module):
    """A linear layer that holds codes for its weight; a method subclasses it and fills in codes and dequantize.

    Its state_dict is what is written to disk: `storage` counts those tensors, the bias apart.
    """

    CODE_TENSORS: ClassVar[frozenset[str]]  # the names in state_dict that hold codes; the rest but `bias` is metadata
    # Does each weight get the level nearest to it? GPTQ moves weights on purpose; who says True is held to it.
    NEAREST: ClassVar[bool] = False
    ACTIVATION_BITS: ClassVar[int | None] = None  # None: activations stay in the model's dtype

    MIN_STEP: ClassVar[float] = 0.0  # the finest step that the method can make; narrower groups use fewer codes

    in_features: int
    out_features: int
    bias: Tensor | None
    bits: int
    group_size: int  # how many weights share a scale; in_features when one group a row

    def codes(self) -> Tensor:
        """The integer codes, [out_features, in_features], each in 0 .. 2**bits - 1."""
        raise NotImplementedError

    def dequantize(self) -> Tensor:
        """The weight that the codes stand for, [out_features, in_features], in the compute dtype."""
        raise NotImplementedError

    @classmethod
    def from_tensors(
        cls, tensors: dict[str, Tensor], options: Options, *, bits: int, shape: tuple[int, int], dtype: torch.dtype
    ) -> Self:
        """The layer that a saved state_dict holds; shape is [out_features, in_features], dtype the compute dtype."""
        raise NotImplementedError

    def groups(self, weight: Tensor) -> Tensor:
        """Any [out_features, in_features] tensor as [groups, group_size]: what shares a scale in one row.

        A method whose groups are not consecutive along the last axis (act-order, HQQ's axis 0) overrides this.
        """
        return weight.reshape(-1, self.group_size)

    def grid(self) -> Tensor | None:
        """The levels of codes 0, 1, … in units of a group's scale; None where all steps are equal."""
        return None

    def packed_bytes(self) -> int:
        """The bytes that the codes take when they are packed as the method packs them."""
        return -(-self.out_features * self.in_features * self.bits // 8)

    def settings(self) -> dict[str, object]:
        """The options that the layer was made with, by their names in Options, as far as its tensors or it can tell."""
        return {"group_size": self.group_size}

    def storage(self) -> Storage:
        """The bytes of the packed tensors as they are saved."""
        sizes = {name: t.numel() * t.element_size() for name, t in self.state_dict().items() if name != "bias"}
        codes = sum(size for name, size in sizes.items() if name in self.CODE_TENSORS)
        return Storage(code_bytes=codes, metadata_bytes=sum(sizes.values()) - codes)

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b with `dequantize`'s weight, as dense execution has it; bnb and hqq run their libraries' code.

        GPTQ has this one, so its packed and dense logits agree by construction: that both are what gptqmodel reads
        from the tensors is shown by tests.
        """
        return F.linear(x, self.dequantize().to(x.dtype), self.bias)

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"{self.in_features} -> {self.out_features}, bits={self.bits}, group_size={self.group_size}"


def replace_linears(
    model: nn.Module,
    targets: list[str],
    pack: Callable[[nn.Linear], PackedLinear],
    *,
    progress: bool,
    device: torch.device | str | None,
) -> None:
    """Put the packed form of each target in its place, for methods that need only the weight, one after the other."""
    for name in Bar(targets, unit="linear", shown=progress):
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        home = linear.weight.device
        model.set_submodule(name, pack(linear.to(device or home)).to(home).eval())
