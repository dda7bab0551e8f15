"""Round to nearest: each weight to the nearest number of its format, with a scale per output channel or per block.

The plain reference for weights next to quantized activations: W8A8, W4A4, MXFP4, NVFP4.
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from qbench.quantizers.declaration import LinearOptions, Quantizer
from qbench.quantizers.number_formats import FORMATS

if TYPE_CHECKING:
    from qbench.quantizers.packed import PackedLinear


class Rtn8Options(LinearOptions):
    """Integers from -127 to 127 times a scale per output channel."""

    def misfit(self, bits: int, shape: tuple[int, int]) -> str:
        """Blocks must divide the rows, and 4-bit codes must fill their bytes."""
        name = getattr(self, "format", "int")
        size = FORMATS[name].block or 8 // bits
        return f"{name} at {bits} bits needs a multiple of {size} as the inputs" if shape[1] % size else ""


class Rtn4Options(Rtn8Options):
    """int: from -7 to 7 times a scale per output channel. mxfp4, nvfp4: scales per block, as for activations."""

    format: Literal["int", "mxfp4", "nvfp4"] = "int"

    label_if_changed: ClassVar = {"format": "{}"}


class Rtn(Quantizer):
    """Round to nearest."""

    name = "rtn"
    title = "RTN"
    widths: ClassVar = {4: Rtn4Options, 8: Rtn8Options}

    def layer_class(self, bits: int) -> "type[PackedLinear]":
        """One class for both widths."""
        from qbench.quantizers.rtn.layer import RtnLinear

        return RtnLinear


QUANTIZER = Rtn()
