"""HQQ's layer."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qbench.quantizers.hqq import HqqOptions
from qbench.quantizers.packed import PackedLinear

# How many rows of codes the library packs into one; it drops or misplaces an incomplete one. 3 bits are padded.


class HqqLinear(PackedLinear):
    """A linear layer in HQQ's packing; its state_dict is HQQLinear's encoded one, so hqq can read it."""

    CODE_TENSORS: ClassVar = frozenset({"W_q"})
    NEAREST: ClassVar = True
    MIN_STEP: ClassVar = 1 / 2e4  # the library's cap on the inverse of a scale

    W_q: Tensor
    scale: Tensor
    zero: Tensor

    def __init__(
        self,
        tensors: dict[str, Tensor],
        options: HqqOptions,
        *,
        bits: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        if why := options.misfit(bits, shape):  # of a damaged file; the library would fail at the first product
            raise ValueError(f"{why} of the layer")
        self.out_features, self.in_features = shape
        self.bits, self.group_size, self.axis, self.dtype = bits, options.group_size, options.axis, dtype
        for name in ("W_q", "scale", "zero"):
            self.register_buffer(name, tensors[name])
        self.register_buffer("bias", tensors.get("bias"))

    @classmethod
    def from_linear(cls, linear: nn.Linear, bits: int, options: HqqOptions) -> Self:
        """Quantize one linear layer on its device."""
        from hqq.core.quantize import Quantizer

        weight = linear.weight.detach()
        with _float32_solver():
            W_q, meta = Quantizer.quantize(weight, device=str(weight.device), **_weight_params(bits, options))
        # As in the library, scales and zeros are cast to the compute dtype, but float16 replaces bfloat16: with eight
        # bits of mantissa, the zero points of 8-bit codes, around 128, would be off by up to a step.
        meta_dtype = torch.float16 if weight.dtype in (torch.float16, torch.bfloat16) else torch.float32
        tensors = {"W_q": W_q, "scale": meta["scale"].to(meta_dtype), "zero": meta["zero"].to(meta_dtype)}
        # The solver runs in inference mode: only clones made outside it can be copied and moved.
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        if linear.bias is not None:
            tensors["bias"] = linear.bias.detach()
        return cls(tensors, options, bits=bits, shape=(linear.out_features, linear.in_features), dtype=weight.dtype)

    def codes(self) -> Tensor:
        """The integer codes, [out_features, in_features]."""
        return self._unpack(torch.uint8).reshape(self.out_features, self.in_features)

    def dequantize(self) -> Tensor:
        """(codes - zero) · scale, in float32 until the last rounding."""
        return self.dequantize_float32().to(self.dtype)

    def dequantize_float32(self) -> Tensor:
        """The same without the last rounding."""
        weight = (self._unpack(torch.float32) - self.zero.float()) * self.scale.float()
        return weight.reshape(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b as HQQLinear's pytorch backend computes it, the weight dequantized by the library's code in float32.

        In float16, codes minus zero points would be rounded to 11 bits, an error of part of a step for 8-bit codes.
        """
        from hqq.core.quantize import Quantizer

        meta = self._meta(torch.float32) | {"scale": self.scale.float(), "zero": self.zero.float()}
        return F.linear(x, Quantizer.dequantize(self.W_q, meta).to(x.dtype), self.bias)

    def packed_bytes(self) -> int:
        """Ten 3-bit codes of different groups fill a 32-bit word; the other widths fill bytes."""
        if self.bits != 3:
            return super().packed_bytes()
        groups = self.out_features * self.in_features // self.group_size
        rows, columns = (groups, self.group_size) if self.axis == 1 else (self.group_size, groups)
        return -(-rows // 10) * 4 * columns

    def settings(self) -> dict[str, object]:
        """The groups, from the shape of the scales."""
        weights = self.out_features * self.in_features
        return {"group_size": weights // self.scale.numel(), "axis": 1 if self.scale.shape[1] == 1 else 0}

    def groups(self, weight: Tensor) -> Tensor:
        """What shares a scale, in one row: consecutive weights of a row (axis 1), or weights across rows (axis 0)."""
        return weight.reshape(-1, self.group_size) if self.axis == 1 else weight.reshape(self.group_size, -1).T

    def _unpack(self, dtype: torch.dtype) -> Tensor:
        from hqq.core.quantize import Quantizer

        rows = self.out_features * self.in_features // self.group_size if self.axis == 1 else self.group_size
        return Quantizer.unpack[Quantizer.bit_to_packing[self.bits]](self.W_q, dtype=dtype)[:rows]

    def _meta(self, dtype: torch.dtype) -> dict[str, Any]:
        """What the library keeps besides W_q, without the tensors; dtype is what it computes in."""
        from hqq.core.quantize import Quantizer

        packing = Quantizer.bit_to_packing[self.bits]
        return {
            **_weight_params(self.bits, HqqOptions(group_size=self.group_size, axis=self.axis)),
            "shape": torch.Size((self.out_features, self.in_features)),
            "packing": packing,
            "unpack_view_dtype": Quantizer.unpack_view_dtype[packing],
            "compute_dtype": dtype,
            "quant_scale": False,
            "quant_zero": False,
            "offload_meta": False,
        }

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        from hqq.core.utils import encode_safetensor_type

        super()._save_to_state_dict(destination, prefix, keep_vars)
        meta = {**self._meta(self.dtype), "encoded_state_dict": True, "stores_quant_config": True}
        destination.update({prefix + name: encode_safetensor_type(value) for name, value in meta.items()})


@contextlib.contextmanager
def _float32_solver() -> Iterator[None]:
    """The library's solver in float32 on every device; the original uses float16 on CUDA."""
    from hqq.core.quantize import Quantizer

    theirs = Quantizer.optimize_weights
    Quantizer.optimize_weights = solve
    try:
        yield
    finally:
        Quantizer.optimize_weights = theirs


@torch.no_grad()
def solve(
    tensor: Tensor, scale: Tensor, zero: Tensor, min_max: list[int], axis: int, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The codes, scales and zeros of a grouped weight in float32; bit-identical to the library's loop on a CPU.

    Each step of the half-quadratic solver fits the zeros; it stops when the mean error no longer falls.
    """
    from hqq.core.optimize import optimize_weights_proximal_legacy_step as step

    beta, least = 1e1, math.inf
    for _ in range(20):
        approximation, _, zero, scale = step(tensor, scale, zero, min_max, beta, 0.7, axis)
        error = float((tensor - approximation).abs().mean())
        if not error < least:
            break
        least = error
    return torch.round(tensor * scale + zero).clamp_(*min_max), scale, zero


def _weight_params(bits: int, options: HqqOptions) -> dict:
    from hqq.core.quantize import BaseQuantizeConfig

    config = BaseQuantizeConfig(nbits=bits, group_size=options.group_size, axis=options.axis)
    return config["weight_quant_params"]
