"""The audit in half precision: the rounding of weights to 16 bits is not mistaken for misplaced codes."""

import pytest
import torch
from torch import Tensor, nn

from qbench.quantizers.measure import measure_layer
from qbench.quantizers.options import quantization
from qbench.quantizers.packed import PackedLinear
from qbench.records.audit import MAX_MEDIAN_STEPS, MAX_MISPLACED

HALF = (torch.bfloat16, torch.float16)
METHODS = [("bnb", 4), ("bnb", 8), ("hqq", 8), ("hqq", 4)]
# Just above a power of two the steps of bfloat16 are largest relative to those of 8 bits: up to half as large.
DRAWN = {"normal": torch.Tensor.normal_, "uniform": lambda t, **options: t.uniform_(-1.25, 1.25, **options)}


def packed(method: str, bits: int, dtype: torch.dtype, drawn: str = "uniform") -> tuple[Tensor, PackedLinear]:
    linear = nn.Linear(512, 256, bias=False)
    weight = DRAWN[drawn](torch.empty(256, 512), generator=torch.Generator().manual_seed(0))
    linear.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
    wanted = quantization(method, bits)
    return linear.weight, wanted.quantizer.layer_class(bits).from_linear(linear, bits, wanted.options)


@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("method", "bits"), METHODS)
def test_no_weight_of_an_honest_layer_is_misplaced(method, bits, dtype, drawn) -> None:
    source, layer = packed(method, bits, dtype, drawn)
    found = measure_layer("x", source, layer)
    assert found.misplaced < MAX_MISPLACED / 10
    assert found.one_value_a_code
    assert found.median_steps < MAX_MEDIAN_STEPS


@pytest.mark.parametrize(("method", "bits"), [("bnb", 8), ("hqq", 8)])
def test_measured_on_bfloat16_weights_honest_layers_come_near_the_limit(method, bits) -> None:
    """Why weights are measured before they are rounded."""
    source, layer = packed(method, bits, torch.bfloat16)
    assert measure_layer("x", source, layer).misplaced == 0
    rounded = layer.dequantize()
    layer.dequantize, layer.dequantize_float32 = (lambda: rounded), rounded.float
    assert measure_layer("x", source, layer).misplaced > MAX_MISPLACED / 10


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("method", "bits", "codes"), [("bnb", 8, "weight"), ("hqq", 8, "W_q")])
def test_codes_in_the_wrong_place_are_seen(method, bits, codes, dtype) -> None:
    source, layer = packed(method, bits, dtype)
    tensor = getattr(layer, codes)
    tensor.view(-1)[::50] = (tensor.view(-1)[::50].int() // 2).to(tensor.dtype)
    assert measure_layer("x", source, layer).misplaced > MAX_MISPLACED


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize(("method", "bits"), METHODS)
def test_the_weight_is_the_float32_one_rounded(method, bits, dtype) -> None:
    _, layer = packed(method, bits, dtype)
    exact = layer.dequantize_float32()
    assert exact.dtype == torch.float32
    assert layer.dequantize().dtype == dtype
    torch.testing.assert_close(layer.dequantize().float(), exact, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_a_layer_of_someone_else_needs_no_float32_form() -> None:
    class Theirs(PackedLinear):
        def dequantize(self) -> Tensor:
            return torch.ones(2, 2, dtype=torch.bfloat16)

    assert torch.equal(Theirs().dequantize_float32(), torch.ones(2, 2))
