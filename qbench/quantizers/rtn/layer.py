"""RTN's layer."""

from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from qbench.quantizers.number_formats import E2M1_LARGEST, E4M3_LARGEST, FORMATS
from qbench.quantizers.packed import PackedLinear
from qbench.quantizers.rounding import largest_number, nearest, scales
from qbench.quantizers.rtn import Rtn4Options, Rtn8Options

E2M1 = (-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; 15 is not used
E8M0_BIAS = 127


class RtnLinear(PackedLinear):
    """Codes in ascending order of their numbers, and scales as each format stores them.

    int: float32. mxfp4: exponents in a byte. nvfp4: e4m3 numbers as bytes, and a float32 scale of the whole weight.
    """

    CODE_TENSORS: ClassVar = frozenset({"packed"})
    NEAREST: ClassVar = True

    packed: Tensor
    scale: Tensor
    whole_scale: Tensor | None

    def __init__(
        self,
        tensors: dict[str, Tensor],
        options: Rtn4Options | Rtn8Options,
        *,
        bits: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.bits, self.dtype, self.format = bits, dtype, _format(options)
        self.group_size = FORMATS[self.format].block or self.in_features
        for name in ("packed", "scale"):
            self.register_buffer(name, tensors[name])
        self.register_buffer("whole_scale", tensors.get("whole_scale"))
        self.register_buffer("bias", tensors.get("bias"))

    @classmethod
    def from_linear(cls, linear: nn.Linear, bits: int, options: Rtn4Options | Rtn8Options) -> Self:
        """Quantize one linear layer on its device."""
        weight, name = linear.weight.detach().float(), _format(options)
        groups = weight.reshape(-1, FORMATS[name].block or linear.in_features)
        amax = groups.abs().amax(1, keepdim=True)
        scale = scales(name, bits, amax, weight.abs().amax())
        numbers = nearest(name, bits, groups / scale)
        codes = _codes(name, bits, numbers).view_as(weight)
        tensors = {"packed": codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4}
        tensors |= _stored_scales(name, scale, weight)
        if linear.bias is not None:
            tensors["bias"] = linear.bias.detach()
        shape = (linear.out_features, linear.in_features)
        return cls(tensors, options, bits=bits, shape=shape, dtype=linear.weight.dtype)

    def codes(self) -> Tensor:
        """The integer codes, [out_features, in_features]."""
        if self.bits == 8:
            return self.packed
        return torch.stack([self.packed & 15, self.packed >> 4], -1).reshape(self.out_features, self.in_features)

    def dequantize(self) -> Tensor:
        """Numbers times scales, in float32 until the last rounding."""
        return self.dequantize_float32().to(self.dtype)

    def dequantize_float32(self) -> Tensor:
        """The same without the last rounding."""
        codes, grid = self.groups(self.codes()), self.grid()
        numbers = codes.float() - largest_number(self.format, self.bits) if grid is None else grid[codes.long()]
        return (numbers * self._scales()).view(self.out_features, self.in_features)

    def grid(self) -> Tensor | None:
        """The numbers of 4-bit floats; integers have equal steps."""
        return None if self.format == "int" else torch.tensor([*E2M1, torch.nan], device=self.packed.device)

    def settings(self) -> dict[str, object]:
        """The format, from how scales are stored."""
        whole = "nvfp4" if self.whole_scale is not None else "mxfp4"
        return {"format": "int" if self.scale.is_floating_point() else whole}

    def _scales(self) -> Tensor:
        """[groups, 1] in float32."""
        if self.format == "mxfp4":
            return torch.ldexp(torch.ones_like(self.scale, dtype=torch.float32), self.scale.int() - E8M0_BIAS)
        if self.whole_scale is not None:
            return self.scale.view(torch.float8_e4m3fn).float() * self.whole_scale
        return self.scale


def _format(options: Rtn4Options | Rtn8Options) -> str:
    return options.format if isinstance(options, Rtn4Options) else "int"


def _codes(name: str, bits: int, numbers: Tensor) -> Tensor:
    """The place of each number in the ascending order of the format's numbers."""
    if name == "int":
        return (numbers + largest_number(name, bits)).to(torch.uint8)
    return torch.bucketize(numbers, torch.tensor(E2M1, device=numbers.device)).to(torch.uint8)


def _stored_scales(name: str, scale: Tensor, weight: Tensor) -> dict[str, Tensor]:
    if name == "mxfp4":
        return {"scale": (torch.frexp(scale).exponent - 1 + E8M0_BIAS).to(torch.uint8)}
    if name == "nvfp4":
        whole = weight.abs().amax() / (E4M3_LARGEST * E2M1_LARGEST)
        whole = whole.masked_fill(whole == 0, 1.0).view(1)
        return {"scale": (scale / whole).to(torch.float8_e4m3fn).view(torch.uint8), "whole_scale": whole}
    return {"scale": scale}
