"""bitsandbytes: LLM.int8() at 8 bits (https://arxiv.org/abs/2208.07339), nf4 and fp4 at 4 (https://arxiv.org/abs/2305.14314)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from qbench.quantizers.declaration import LinearOptions, QuantizeError, Quantizer, is_head_included, skipped_modules

if TYPE_CHECKING:
    from qbench.quantizers.packed import PackedLinear

# The operators that its layers call on CUDA, by torch's names.
KERNELS = tuple(
    f"bitsandbytes::{name}"
    for name in ("quantize_4bit", "dequantize_4bit", "int8_vectorwise_quant", "int8_linear_matmul")
)


class Bnb4Options(LinearOptions):
    """Blocks of 64 weights, each with a scale, on the nf4 or the fp4 grid."""

    quant_type: Literal["nf4", "fp4"] = "nf4"
    double_quant: bool = False  # the scales are quantized too

    label_always: ClassVar = {"quant_type": "{}"}
    label_if_changed: ClassVar = {"double_quant": "dq"}


class Bnb8Options(LinearOptions):
    """LLM.int8(): int8 weights and activations; input columns with an outlier above the threshold stay in 16 bits."""

    threshold: float = Field(default=6.0, ge=0, allow_inf_nan=False)

    label_if_changed: ClassVar = {"threshold": "t{:g}"}
    activation_bits = 8
    fixed_batch_tokens = 4096  # outliers are pooled over a batch, which mixes rows of all tasks


class Bnb(Quantizer):
    """Two methods under one name, distinguished by their bits."""

    name = "bnb"
    title = "BNB"
    widths: ClassVar = {4: Bnb4Options, 8: Bnb8Options}
    library = "bitsandbytes"
    quant_method = "bitsandbytes"

    def layer_class(self, bits: int) -> "type[PackedLinear]":
        """One class per width."""
        from qbench.quantizers.bnb.layers import Bnb4Linear, Bnb8Linear

        return {4: Bnb4Linear, 8: Bnb8Linear}[bits]

    def check_kernels(self, device: str) -> None:
        """If it was imported while no GPU was visible, the library runs its plain torch fallbacks on CUDA too."""
        if device != "cuda":
            return
        import torch

        self.preload()
        missing = [op for op in KERNELS if not torch._C._dispatch_has_kernel_for_dispatch_key(op, "CUDA")]
        if missing:
            raise QuantizeError(
                f"bitsandbytes has no CUDA kernels for {', '.join(missing)} here and would run other code "
                "instead: its library for this build of torch is missing, or it was imported while no GPU was visible."
            )

    def write_config(self, bits: int, options: Bnb4Options | Bnb8Options, dtype: str) -> dict[str, Any]:
        """In the format of transformers' BitsAndBytesConfig."""
        settings: dict[str, Any]
        if isinstance(options, Bnb8Options):
            settings = {"load_in_8bit": True, "load_in_4bit": False, "llm_int8_threshold": options.threshold}
        else:
            settings = {
                "load_in_8bit": False,
                "load_in_4bit": True,
                "bnb_4bit_quant_type": options.quant_type,
                "bnb_4bit_use_double_quant": options.double_quant,
                "bnb_4bit_compute_dtype": dtype,
                "bnb_4bit_quant_storage": "uint8",
            }
        skipped = {"llm_int8_skip_modules": skipped_modules(options)}
        return {"quant_method": "bitsandbytes"} | settings | skipped

    def read_config(self, settings: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """The inverse of `write_config`."""
        head = {"include_lm_head": is_head_included(settings.get("llm_int8_skip_modules"))}
        if settings.get("load_in_8bit"):
            return 8, head | {"threshold": settings["llm_int8_threshold"]}
        return 4, head | {
            "quant_type": settings["bnb_4bit_quant_type"],
            "double_quant": settings["bnb_4bit_use_double_quant"],
        }


QUANTIZER = Bnb()
