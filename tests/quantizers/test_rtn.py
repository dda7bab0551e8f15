"""Round to nearest: weights are those of the number formats, as stored and read back, and next to activations."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from qbench import quantize
from qbench.quantizers.declaration import QuantizeError
from qbench.quantizers.options import quantization
from qbench.quantizers.packed import check_shapes, packed_form
from qbench.quantizers.rounding import quantized
from qbench.quantizers.rtn.layer import RtnLinear

CASES: list[tuple[int, dict[str, Any], float]] = [
    (8, {}, 8 + 32 / 128),
    (4, {}, 4 + 32 / 128),
    (4, {"format": "mxfp4"}, 4 + 8 / 32),
    (4, {"format": "nvfp4"}, 4 + 8 / 16),
]


@pytest.mark.parametrize(("bits", "options", "storage"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_rounded_to_the_format(
    untrained: LlamaForCausalLM, bits: int, options: dict[str, Any], storage: float, dtype: torch.dtype
) -> None:
    untrained = untrained.to(dtype)
    model, audit = quantize(untrained, "rtn", bits, copy=True, **options)
    for name, layer in packed_form(model).layers.items():
        weight = untrained.get_parameter(f"{name}.weight")
        expected = quantized(options.get("format", "int"), bits, weight, tensor_amax=weight.abs().max())
        assert torch.equal(model.get_parameter(f"{name}.weight"), expected)
        assert torch.equal(layer.dequantize(), expected)
    narrow = [layer for layer in audit.layers if "down_proj" not in layer.name]  # rows of 128
    found = 8 * sum(o.code_bytes + o.metadata_bytes for o in narrow) / sum(o.weights for o in narrow)
    assert found == pytest.approx(storage, abs=0.01)


@pytest.mark.parametrize(("bits", "options", "_"), CASES)
def test_zeros_and_very_different_rows_are_stored(bits: int, options: dict[str, Any], _: float) -> None:
    linear = nn.Linear(64, 6, bias=True)
    with torch.no_grad():
        linear.weight.mul_(torch.tensor([[0.0], [1e-20], [1e-3], [1.0], [1e3], [1e20]]))
    layer = RtnLinear.from_linear(linear, bits, quantization("rtn", bits, **options).options)
    weight = layer.dequantize()
    assert weight.isfinite().all()
    assert torch.equal(weight[0], torch.zeros(64))
    assert int(layer.codes().max()) < 2**bits
    last = linear.weight[5].detach()
    assert weight[5] == pytest.approx(last, abs=float(last.abs().max()) / 3)


@pytest.mark.parametrize(
    ("bits", "options", "width", "facts"),
    [(4, {"format": "mxfp4"}, 48, ["48", "32"]), (4, {"format": "nvfp4"}, 24, ["24", "16"]), (4, {}, 7, ["7", "2"])],
)
def test_rows_that_blocks_do_not_divide_are_a_sentence(
    bits: int, options: dict[str, Any], width: int, facts: list[str]
) -> None:
    with pytest.raises(QuantizeError) as caught:
        check_shapes({"q_proj": nn.Linear(width, 8)}, bits, quantization("rtn", bits, **options).options)
    assert all(fact in str(caught.value) for fact in ["q_proj", *facts])


def test_a_format_is_offered_at_its_width() -> None:
    assert quantization("rtn", 4, format="nvfp4").label == "rtn-4-nvfp4"
    with pytest.raises(QuantizeError, match="format is an option of rtn at 4 bits"):
        quantization("rtn", 8, format="mxfp4")
