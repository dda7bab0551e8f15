"""The number formats of activations and of `rtn` weights: their widths and blocks. Imports no torch.

To add one: an entry here, and its rounding in rounding.py.
"""

from dataclasses import dataclass

E4M3_LARGEST, E2M1_LARGEST = 448.0, 6.0


@dataclass(frozen=True)
class NumberFormat:
    """A format: a value is a scale times one of a few numbers."""

    widths: tuple[int, ...]  # bits of a value
    block: int | None = None  # how many neighbours share a scale; None: a token, or a tensor, as requested
    tensor_scale: bool = False  # besides the blocks' scales there is one for the whole tensor

    @property
    def default_bits(self) -> int:
        """The width if none is given."""
        return self.widths[0]


FORMATS = {
    "int": NumberFormat((8, 6, 4)),  # symmetric: -127 to 127 at 8 bits
    "fp8": NumberFormat((8,)),  # e4m3, up to 448
    "mxfp4": NumberFormat((4,), block=32),  # e2m1, up to 6; scales are powers of two
    "nvfp4": NumberFormat((4,), block=16, tensor_scale=True),  # e2m1; scales are e4m3 numbers times the tensor's scale
}
