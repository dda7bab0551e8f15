"""The unquantized baseline, which comes through the same door."""

from typing import ClassVar

from qbench.quantizers.declaration import Options, Quantizer


class NoOptions(Options):
    """There is nothing to set."""


class Unquantized(Quantizer):
    """16 bits, as the checkpoint has them."""

    name = "none"
    title = "unquantized"
    widths: ClassVar = {16: NoOptions}

    def preload(self) -> None:
        """Nothing more is needed."""


QUANTIZER = Unquantized()
