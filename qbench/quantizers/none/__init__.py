"""The unquantized baseline, declared like any other method."""

from typing import ClassVar

from qbench.quantizers.declaration import Options, Quantizer


class NoOptions(Options):
    """No options."""


class Unquantized(Quantizer):
    """16 bits, as in the checkpoint."""

    name = "none"
    title = "unquantized"
    widths: ClassVar = {16: NoOptions}

    def preload(self) -> None:
        """Nothing to import."""


QUANTIZER = Unquantized()
