"""GPTQ (https://arxiv.org/abs/2210.17323) by gptqmodel's solver, saved in auto-gptq's format."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from qbench.quantizers.declaration import LinearOptions, QuantizeError, Quantizer

if TYPE_CHECKING:
    from qbench.quantizers.packed import PackedLinear


GROUP_SIZES = (-1, 16, 32, 64, 128, 256, 512, 1024)  # supported by the solver and by the kernels that read the format
PACKED = 32  # values that the format packs together


class GptqOptions(LinearOptions):
    """The defaults are auto-gptq's at the time of the paper."""

    group_size: int = Field(default=128, ge=-1)  # -1: one group per row
    sym: bool = True
    act_order: bool = False
    damp: float = Field(default=0.1, gt=0, lt=1)

    label_always: ClassVar = {"group_size": "g{}"}
    label_if_changed: ClassVar = {"sym": "asym", "act_order": "actorder", "damp": "damp{:g}"}

    def misfit(self, bits: int, shape: tuple[int, int]) -> str:
        """Groups must divide the inputs, and inputs and outputs must be multiples of what the format packs together."""
        size, inputs = self.group_size, shape[1]
        if size not in GROUP_SIZES:
            return f"gptq's format has no group_size {size} for the {inputs:,} inputs"
        if shape[0] % PACKED or inputs % PACKED:
            return f"gptq's format packs {PACKED} values, so it needs multiples of {PACKED} as the outputs and inputs"
        return super().misfit(bits, shape)


class Gptq(Quantizer):
    """Quantizes layer by layer, so each layer is fitted to the outputs of the quantized layers before it."""

    name = "gptq"
    title = "GPTQ"
    widths: ClassVar = dict.fromkeys((2, 3, 4, 8), GptqOptions)
    library = "gptqmodel"
    calibrated = True
    column_seconds = 3e-4  # Python overhead of the solver's loop: 1,920 columns of the mini twins took 0.6 s
    config_file = "quantize_config.json"  # auto-gptq's file, which older readers expect next to config.json

    def layer_class(self, bits: int) -> "type[PackedLinear]":
        """One class for all widths."""
        from qbench.quantizers.gptq.layer import GPTQLinear

        return GPTQLinear

    def quantize_linears(self, model: Any, bits: int, options: GptqOptions, **settings: Any) -> None:
        """Calibrate and replace the linear layers, one decoder layer after the other."""
        from qbench.quantizers.gptq.layer import quantize_linears

        quantize_linears(model, bits, options, **settings)

    def write_config(self, bits: int, options: GptqOptions, dtype: str) -> dict[str, Any]:
        """In auto-gptq's words."""
        settings = {
            "quant_method": "gptq",
            "checkpoint_format": "gptq",  # v1: zeros stored minus one
            "bits": bits,
            "group_size": options.group_size,
            "sym": options.sym,
            "desc_act": options.act_order,
            "damp_percent": options.damp,
            "static_groups": False,
            "true_sequential": True,
            "lm_head": options.include_lm_head,
        }
        # For optimum, which otherwise leaves lm_head out: it reads layers whose names start with this.
        return settings | ({"block_name_to_quantize": ""} if options.include_lm_head else {})

    def read_config(self, settings: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """The inverse of `write_config`; configs from other tools may lack some fields."""
        if (found := settings.get("checkpoint_format", "gptq")) != "gptq":
            raise QuantizeError(f"checkpoint_format is {found!r}; it must be 'gptq' (v1).")
        return settings["bits"], {
            "group_size": settings["group_size"],
            "sym": settings["sym"],
            "act_order": settings["desc_act"],
            "damp": settings.get("damp_percent", GptqOptions().damp),
            "include_lm_head": settings.get("lm_head", False),
        }

    def cuda_environment(self) -> dict[str, str]:
        """Whether gptqmodel can compile its CUDA kernel: a failed attempt takes half a minute in every process."""
        from qbench.quantizers.gptq.layer import solver

        solver()
        from gptqmodel.quantization.gptq_cuda import block_update_available

        return {} if block_update_available() else {"GPTQMODEL_DISABLE_GPTQ_CUDA": "1"}

    def preload(self) -> None:
        """The solver; importing it takes seconds."""
        from qbench.quantizers.gptq.layer import solver

        solver()


QUANTIZER = Gptq()
