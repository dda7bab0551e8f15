"""Our HQQ layer compared with the library's."""

import copy

import pytest
import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from torch import nn

from qbench.quantizers.declaration import QuantizeError
from qbench.quantizers.hqq import QUANTIZER, HqqOptions
from qbench.quantizers.hqq.layer import HqqLinear

WIDTHS = (1, 2, 3, 4, 8)


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(256, 192).requires_grad_(False)


def library(linear: nn.Linear, bits: int, axis: int) -> HQQLinear:
    config = BaseQuantizeConfig(nbits=bits, group_size=64, axis=axis)
    return HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu", del_orig=False)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", WIDTHS)
def test_weights_and_outputs_are_the_librarys(linear, bits, axis):
    ours, theirs = HqqLinear.from_linear(linear, bits, HqqOptions(axis=axis)), library(linear, bits, axis)
    assert torch.equal(ours.dequantize(), theirs.dequantize())
    x = torch.randn(3, 256)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", WIDTHS)
def test_the_packed_forward_is_the_librarys_and_agrees_with_the_dense_weight(linear, bits, axis, dtype, monkeypatch):
    layer = HqqLinear.from_linear(linear.to(dtype), bits, HqqOptions(axis=axis))
    x = torch.randn(3, 256).to(dtype)
    dense = nn.functional.linear(x, layer.dequantize(), layer.bias)
    monkeypatch.setattr(layer, "dequantize", None)
    torch.testing.assert_close(layer(x), dense)


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_library_reads_what_we_save(linear, bits):
    ours = HqqLinear.from_linear(linear, bits, HqqOptions())
    assert ours.state_dict().keys() == library(linear, bits, 1).state_dict().keys()
    theirs = HQQLinear(None, None, compute_dtype=torch.float32, device="cpu")
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(theirs.dequantize(), ours.dequantize())


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", WIDTHS)
def test_groups_share_a_scale(linear, bits, axis):
    layer = HqqLinear.from_linear(linear, bits, HqqOptions(axis=axis))
    codes, values = layer.groups(layer.codes()), layer.groups(layer.dequantize())
    assert codes.shape == (256 * 192 // 64, 64)
    assert int(codes.max()) == 2**bits - 1
    assert all(len(group.unique()) <= 2**bits for group in values)


def test_three_bits_are_stored_in_three_point_two():
    storage = HqqLinear.from_linear(nn.Linear(640, 640, bias=False), 3, HqqOptions()).storage()
    assert 8 * storage.code_bytes / 640**2 == pytest.approx(3.2)
    assert (
        storage.metadata_bytes > 640**2 // 64 * 2 * 4
    )  # one scale and one zero per group, in float32, and the settings


def test_zero_points_of_bfloat16_models_are_not_rounded_to_a_step(linear):
    half = nn.Linear(256, 192).to(torch.bfloat16)
    half.weight.data = linear.weight.abs().to(torch.bfloat16) + 0.1  # zero points beyond -256, bfloat16's integers
    layer = HqqLinear.from_linear(half, 8, HqqOptions())
    step = layer.scale.float().repeat_interleave(64).view(192, 256)
    exact = (layer.codes().float() - layer.zero.float().repeat_interleave(64).view(192, 256)) * step
    assert ((exact - half.weight.float()).abs() / step).median() < 0.3
    assert layer.dequantize().dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "bits", "options", "says"),
    [
        ((96, 65), 4, {}, "group_size 64.*6,240 weights of 0 .65 × 96"),
        ((95, 96), 4, {"axis": 0}, "group_size 64.*9,120 weights of 0 .96 × 95"),
        ((96, 96), 4, {"group_size": 100}, "group_size 100 .*multiple of 8.* of 0 .*32, 64, 128, 256"),
        ((64, 3), 4, {}, "4-bit.* 2 groups.*3 groups of 64 of 0 "),
        ((64, 4), 1, {}, "1-bit.* 8 groups.*4 groups of 64 of 0 "),
    ],
)
def test_shapes_that_do_not_fit_are_refused_before_anything_is_changed(shape, bits, options, says):
    model = nn.Sequential(nn.Linear(*shape))
    with pytest.raises(QuantizeError, match=says):
        QUANTIZER.quantize_linears(model, bits, HqqOptions(**options), targets=["0"])
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_groups_that_do_not_divide_a_row_are_the_librarys(bits, axis):
    linear = nn.Linear(96, 128)
    layer = HqqLinear.from_linear(linear, bits, HqqOptions(group_size=64, axis=axis))
    config = BaseQuantizeConfig(nbits=bits, group_size=64, axis=axis)
    own = HQQLinear(copy.deepcopy(linear), config, compute_dtype=torch.float32, device="cpu")
    assert torch.equal(layer.dequantize(), own.dequantize())
