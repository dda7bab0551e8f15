"""GPTQ's packed layers: auto-gptq's format, bit by bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import qbench.quantizers.gptq.layer as gptq
from qbench.quantizers.gptq.layer import GPTQLinear, pack, unpack
from qbench.quantizers.options import quantizers

from .gptq_models import G64


def slow_pack(values: np.ndarray, bits: int) -> np.ndarray:
    """auto-gptq's packing, bit by bit: the codes of a column one after the other, lowest bit first, in 32-bit words."""
    n, m = values.shape
    words = np.zeros((n * bits // 32, m), dtype=np.uint32)
    for column in range(m):
        for row in range(n):
            for bit in range(bits):
                position = row * bits + bit
                words[position // 32, column] |= np.uint32((int(values[row, column]) >> bit & 1) << position % 32)
    return words.view(np.int32)


@pytest.mark.parametrize("bits", quantizers()["gptq"].widths)
@settings(max_examples=10, deadline=None)
@given(blocks=st.integers(1, 3), columns=st.integers(1, 5), seed=st.integers(0, 2**16))
def test_packing_is_auto_gptqs_and_unpacking_its_inverse(bits: int, blocks: int, columns: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 2**bits, (32 * blocks, columns))
    words = pack(torch.from_numpy(values), bits)
    assert words.dtype == torch.int32
    assert np.array_equal(words.numpy(), slow_pack(values, bits))
    assert np.array_equal(unpack(words, bits).numpy(), values)


def random_layer(bits: int, out: int, groups: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple:
    """A packed layer with act-order's scattered groups, and what it was made of: codes, scales, zeros, g_idx."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (out, 32 * groups), generator=draw)
    scales = torch.rand(out, groups, generator=draw) + 0.1
    zeros = torch.randint(1, 2**bits + 1, (out, groups), generator=draw)
    g_idx = torch.arange(groups).repeat(32)[torch.randperm(32 * groups, generator=draw)]
    layer = GPTQLinear.from_codes(codes, scales, zeros, g_idx, torch.ones(out, dtype=dtype), bits=bits, dtype=dtype)
    return layer, codes, scales, zeros, g_idx


@pytest.mark.parametrize("bits", quantizers()["gptq"].widths)
def test_the_tensors_are_those_of_the_v1_format(bits: int) -> None:
    layer, codes, scales, zeros, g_idx = random_layer(bits, out=64, groups=3)
    assert {name: (tuple(t.shape), t.dtype) for name, t in layer.state_dict().items()} == {
        "qweight": ((96 * bits // 32, 64), torch.int32),
        "qzeros": ((3, 64 * bits // 32), torch.int32),
        "scales": ((3, 64), torch.float32),
        "g_idx": ((96,), torch.int32),
        "bias": ((64,), torch.float32),
    }
    assert np.array_equal(layer.qzeros.numpy(), slow_pack(zeros.numpy() - 1, bits).T)  # minus one
    assert torch.equal(layer.codes(), codes.int())
    assert torch.equal(layer.dequantize(), scales[:, g_idx] * (codes - zeros[:, g_idx]))
    assert layer.storage().code_bytes == 64 * 96 * bits // 8
    assert layer.storage().metadata_bytes == 3 * 64 * bits // 8 + 3 * 64 * 4 + 96 * 4


def test_a_layer_is_the_linear_of_its_dequantized_weight_and_comes_back_from_its_tensors() -> None:
    layer, *_ = random_layer(3, out=32, groups=2)
    x = torch.randn(5, 64)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.dequantize(), layer.bias))
    again = GPTQLinear.from_tensors(layer.state_dict(), G64, bits=3, shape=(32, 64), dtype=torch.float32)
    assert torch.equal(again(x), layer(x))
    assert (again.in_features, again.out_features, again.group_size) == (64, 32, 32)


def test_groups_gather_the_columns_that_share_a_scale() -> None:
    layer, _, scales, *_ = random_layer(4, out=32, groups=2)
    each = layer.scales[layer.g_idx].T  # [out, in]: the scale of every weight
    assert torch.equal(layer.groups(each), scales.reshape(-1, 1).expand(-1, 32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_layer_has_the_formats_half_scales(dtype: torch.dtype) -> None:
    layer, codes, scales, zeros, g_idx = random_layer(8, out=32, groups=2, dtype=dtype)
    assert layer.scales.dtype == torch.float16
    assert layer.dequantize().dtype == dtype
    assert torch.equal(layer.codes(), codes.int())
    exact = scales.half().float()[:, g_idx] * (codes - zeros[:, g_idx])
    assert torch.equal(layer.dequantize(), exact.to(dtype))


@pytest.mark.parametrize("bits", quantizers()["gptq"].widths)
def test_gptqmodels_own_layer_packs_and_reads_the_same(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # of its layer: 20 seconds
    _, QuantizeConfig = gptq.solver()
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module

    layer, codes, scales, zeros, _ = random_layer(bits, out=64, groups=2)
    zeros = zeros.clamp(max=2**bits - 1)
    g_idx = torch.arange(64) // 32
    scales = scales.half().float()  # its scales are always half
    layer = GPTQLinear.from_codes(codes, scales, zeros, g_idx, bits=bits, dtype=torch.float32)
    theirs = TorchLinear(
        bits=bits, group_size=32, sym=False, desc_act=False, in_features=64, out_features=64, bias=False,
        pack_dtype=torch.int32, dtype=torch.float16, register_buffers=True,
    )  # fmt: skip
    linear = nn.Linear(64, 64, bias=False)
    linear.weight.data = layer.dequantize()
    theirs.pack_original(linear, scales, zeros.float(), g_idx.int())
    assert torch.equal(theirs.qweight, layer.qweight)
    assert torch.equal(theirs.qzeros, pack(zeros, bits).T)  # v2 stores them unchanged; v1, which we write, minus one
    assert torch.equal(theirs.scales, layer.scales.half())
    convert_gptq_v2_to_v1_format_module(theirs, QuantizeConfig(bits=bits, offload_to_disk=False))
    assert torch.equal(theirs.qzeros, layer.qzeros)
    convert_gptq_v1_to_v2_format_module(theirs, bits, torch.int32)
    theirs.post_init()
    assert torch.equal(theirs.dequantize_weight().T, layer.dequantize().half())
