"""A quantizer that lacks a method gets an error with its name and where it is described."""

import pytest
from torch import nn

from qbench.quantizers.declaration import Quantizer
from qbench.quantizers.packed import PackedLinear


class Unfinished(PackedLinear):
    """A layer without methods."""


class Bare(Quantizer):
    """A declaration without layers."""


def test_what_is_missing_is_named() -> None:
    calls = {
        "Unfinished must define codes()": lambda: Unfinished().codes(),
        "Unfinished must define dequantize()": lambda: Unfinished().dequantize(),
        "Unfinished must define from_linear()": lambda: Unfinished.from_linear(nn.Linear(2, 2), 4, None),
        "Bare must define layer_class()": lambda: Bare().layer_class(4),
    }
    for fact, call in calls.items():
        with pytest.raises(NotImplementedError) as error:
            call()
        assert fact in str(error.value)
        assert "docs/quantizers.md" in str(error.value)
