"""bitsandbytes' layers: nf4 and fp4 at 4 bits, LLM.int8() at 8."""

import copy
import logging
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from qbench.output import quiet_import
from qbench.quantizers.bnb import Bnb4Options, Bnb8Options
from qbench.quantizers.packed import PackedLinear

with quiet_import():  # it warns that the Hub's kernel for some CPUs is not installed
    import bitsandbytes as bnb
    from bitsandbytes.functional import QuantState

BLOCK = 64  # weights that share a scale at 4 bits; the library's default
# It warns at each multiplication that inputs are cast to float16, which is part of LLM.int8.
logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


class Bnb4Linear(PackedLinear):
    """A linear layer of 4-bit codes in blocks of 64, with the tensors and names that transformers serializes."""

    CODE_TENSORS: ClassVar = frozenset({"weight"})
    NEAREST: ClassVar = True
    bits = 4
    group_size = BLOCK

    weight: Tensor

    def __init__(self, weight: Tensor, quant_state: QuantState, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = quant_state.shape
        self.quant_state = quant_state
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    @classmethod
    def from_linear(cls, linear: nn.Linear, bits: int, options: Bnb4Options) -> Self:
        """Quantize one linear layer on its device."""
        weight, state = bnb.functional.quantize_4bit(
            linear.weight.detach().contiguous(),
            blocksize=BLOCK,
            compress_statistics=options.double_quant,
            quant_type=options.quant_type,
        )
        return cls(weight, state, None if linear.bias is None else linear.bias.detach())

    @classmethod
    def from_tensors(
        cls, tensors: dict[str, Tensor], options: Bnb4Options, *, bits: int, shape: tuple[int, int], dtype: torch.dtype
    ) -> Self:
        """The layer that a saved state_dict holds."""
        rest = {name: tensor for name, tensor in tensors.items() if name not in ("weight", "bias")}
        state = QuantState.from_dict(rest, device=tensors["weight"].device)
        state.dtype = dtype
        return cls(tensors["weight"], state, tensors.get("bias"))

    @classmethod
    def marker(cls) -> str:
        """Its scales, since the codes have the same name as a plain layer's weight."""
        return "weight.absmax"

    def codes(self) -> Tensor:
        """The index of each weight's level, counted from the lowest; fp4's stored codes are sign and magnitude."""
        packed = self.weight.flatten()
        codes = torch.stack([packed >> 4, packed & 15], dim=1).flatten()[: self.out_features * self.in_features]
        rank = self.quant_state.code.argsort(stable=True).argsort()
        return rank[codes.long()].to(torch.uint8).view(self.out_features, self.in_features)

    def dequantize(self) -> Tensor:
        """Each code's level times its block's scale."""
        return self._dequantize(self.quant_state.dtype)

    def dequantize_float32(self) -> Tensor:
        """The same in float32."""
        return self._dequantize(torch.float32)

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        # As one long row: if blocks continue across rows, the library's AVX-512 code uses wrong scales.
        one_row = copy.copy(self.quant_state)
        one_row.shape, one_row.dtype = torch.Size([self.out_features * self.in_features]), dtype
        return bnb.functional.dequantize_4bit(self.weight, one_row).view(self.out_features, self.in_features)

    def grid(self) -> Tensor:
        """The levels of nf4 or fp4."""
        return self.quant_state.code.sort().values

    def settings(self) -> dict[str, object]:
        """The blocks, the grid, and whether the scales are quantized."""
        state = self.quant_state
        return {"group_size": state.blocksize, "quant_type": state.quant_type, "double_quant": state.nested}

    def groups(self, weight: Tensor) -> Tensor:
        """The blocks, which may continue across rows; a last one that is not full is left out."""
        flat = weight.flatten()
        return flat[: len(flat) // BLOCK * BLOCK].view(-1, BLOCK)

    def forward(self, x: Tensor) -> Tensor:
        """The library's kernel. Only its Linear4bit repacks weights in place, on some CPUs; this call does not."""
        if x.device.type == "cpu" and self.in_features % BLOCK:  # see dequantize
            return nn.functional.linear(x, self.dequantize().to(x.dtype), self.bias)
        return bnb.matmul_4bit(x, self.weight.t(), quant_state=self.quant_state, bias=self.bias)

    def _apply(self, fn, recurse: bool = True) -> Self:  # type: ignore[no-untyped-def]
        super()._apply(fn, recurse)
        self.quant_state.to(self.weight.device)  # not a buffer, so it would not move by itself
        return self

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in self.quant_state.as_dict(packed=True).items():
            # The library shares the table of levels between layers, which a safetensors file cannot.
            destination[f"{prefix}weight.{name}"] = tensor.clone() if name == "quant_map" else tensor


class Bnb8Linear(PackedLinear):
    """LLM.int8(): int8 weights with a scale per row, multiplied by int8 activations, except outlier columns."""

    CODE_TENSORS: ClassVar = frozenset({"weight"})
    NEAREST: ClassVar = True
    ACTIVATION_BITS: ClassVar = Bnb8Options.activation_bits
    bits = 8

    weight: Tensor
    SCB: Tensor
    weight_format: Tensor

    def __init__(
        self, weight: Tensor, scales: Tensor, bias: Tensor | None, threshold: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.group_size, self.threshold, self.dtype = self.in_features, threshold, dtype
        self.register_buffer("weight", weight)
        self.register_buffer("SCB", scales)
        self.register_buffer("weight_format", torch.tensor(0, dtype=torch.uint8))  # row-major; transformers requires it
        self.register_buffer("bias", bias)
        self.eval()

    @classmethod
    def from_linear(cls, linear: nn.Linear, bits: int, options: Bnb8Options) -> Self:
        """Quantize one linear layer on its device."""
        weight = linear.weight.detach()
        codes, scales, _ = bnb.functional.int8_vectorwise_quant(weight.to(torch.float16))
        bias = None if linear.bias is None else linear.bias.detach()
        return cls(codes, scales, bias, options.threshold, weight.dtype)

    @classmethod
    def from_tensors(
        cls, tensors: dict[str, Tensor], options: Bnb8Options, *, bits: int, shape: tuple[int, int], dtype: torch.dtype
    ) -> Self:
        """The layer that a saved state_dict holds."""
        return cls(tensors["weight"], tensors["SCB"].float(), tensors.get("bias"), options.threshold, dtype)

    @classmethod
    def marker(cls) -> str:
        """Its scales, since the codes have the same name as a plain layer's weight."""
        return "SCB"

    def codes(self) -> Tensor:
        """The int8 codes, counted from 0."""
        return self.weight.to(torch.int16) + 128

    def dequantize(self) -> Tensor:
        """codes · scale / 127."""
        return self.dequantize_float32().to(self.dtype)

    def dequantize_float32(self) -> Tensor:
        """The same in float32."""
        return self.weight.float() * self.SCB.float().view(-1, 1) / 127

    def settings(self) -> dict[str, object]:
        """The threshold for outliers."""
        return {"threshold": self.threshold}

    def forward(self, x: Tensor) -> Tensor:
        """The library's kernel; in train mode on a CPU, it silently uses one that does not quantize activations."""
        if self.training:
            raise RuntimeError("LLM.int8 does not quantize activations in train mode: call model.eval() first.")
        state = bnb.MatmulLtState()
        state.CB, state.SCB, state.threshold = self.weight, self.SCB.float(), self.threshold
        state.has_fp16_weights, state.is_training = False, False
        return bnb.matmul(x, self.weight, bias=self.bias, state=state)
