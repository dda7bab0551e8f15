"""Rounding to a few bits: against plain definitions in float64, value by value, and against torchao."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from qbench.quantizers.number_formats import FORMATS
from qbench.quantizers.rounding import levels_in_groups, min_max, nearest, nearest_e2m1, number_count, quantized

E2M1 = [sign * size for size in (0, 0.5, 1, 1.5, 2, 3, 4, 6) for sign in (1, -1)]
# e4m3: subnormals m/8 · 2^-6, normals (1 + m/8) · 2^(e - 7); 1.75 · 2^8 = 448 is the largest, then comes NaN
E4M3 = sorted({s * v for s in (1, -1) for v in [m / 8 * 2**-6 for m in range(8)]} | {0.0}) + [
    s * (1 + m / 8) * 2.0 ** (e - 7) for s in (1, -1) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)
]
CASES = [(name, bits) for name, known in FORMATS.items() for bits in known.widths]


def values(rows: int = 6, columns: int = 64, seed: int = 0) -> Tensor:
    """Values of very different sizes, in float32."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=draw)
    return x * torch.exp(1.5 * torch.randn(rows, columns, generator=draw))


def closest(grid: list[float], x: Tensor) -> Tensor:
    """The number of a grid that is nearest to each x in float64, by comparing with all of them."""
    numbers = torch.tensor(sorted(set(grid)), dtype=torch.float64)
    return numbers[(x.double()[..., None] - numbers).abs().argmin(-1)]


def grid_of(name: str, bits: int) -> list[float]:
    if name == "int":
        return [float(n) for n in range(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1))]
    return E4M3 if name == "fp8" else E2M1


def defined(name: str, bits: int, groups: Tensor, tensor_amax: float) -> Tensor:
    """The definition for groups [groups, size] that share a scale each, in float64."""
    amax = groups.abs().amax(1, keepdim=True)
    if name == "mxfp4":
        scale = 2.0 ** (amax.log2().floor() - 2)
    elif name == "nvfp4":
        whole = tensor_amax / (448 * 6)
        scale = closest(E4M3, amax / 6 / whole) * whole
    else:
        scale = amax / max(grid_of(name, bits))
    return closest(grid_of(name, bits), groups / scale) * scale


@pytest.mark.parametrize(("name", "bits"), CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_are_those_of_the_definition(name: str, bits: int, dtype: torch.dtype) -> None:
    x = values().to(dtype)
    amax = x.abs().max()
    size = FORMATS[name].block or x.shape[1]
    expected = defined(name, bits, x.double().reshape(-1, size), float(amax))
    found = quantized(name, bits, x, tensor_amax=amax)
    assert found.dtype == dtype
    # Values are rounded to the dtype at the end; in float32, x / scale is rounded too, which may turn a near tie.
    off = (found.double().reshape(-1, size) - expected).abs() > torch.finfo(dtype).eps * 2 * expected.abs()
    assert off.double().mean() <= (0 if dtype == torch.float64 else 2 / x.numel())


@pytest.mark.parametrize(("name", "bits"), [case for case in CASES if not FORMATS[case[0]].block])
def test_one_static_scale_for_all_clips_what_is_beyond_it(name: str, bits: int) -> None:
    x = values().double()
    limit = x.abs().median()
    found = quantized(name, bits, x, tensor_amax=limit, whole=True)
    scale = float(limit) / max(grid_of(name, bits))
    assert found == pytest.approx(closest(grid_of(name, bits), x / scale) * scale, abs=1e-12)
    assert float(found.abs().max()) == pytest.approx(float(limit))


@pytest.mark.parametrize(("grid", "function"), [(E2M1, nearest_e2m1), (E4M3, lambda x: nearest("fp8", 8, x))])
def test_floats_round_to_the_nearest_number_and_ties_to_even(grid: list[float], function: Callable) -> None:
    ordered = sorted(set(grid))
    ties = [(a + b) / 2 for a, b in pairwise(ordered)]
    found = function(torch.tensor(ties, dtype=torch.float64)).tolist()
    for pair, value in zip(pairwise(ordered), found, strict=True):
        even = [n for n in pair if (ordered.index(n) - len(ordered) // 2) % 2 == 0]  # they alternate from 0
        assert [value] == even
    assert function(torch.tensor(ordered)).tolist() == ordered
    assert function(torch.tensor([1e9, -1e9])).tolist() == [ordered[-1], ordered[0]]


@pytest.mark.parametrize(("name", "bits"), CASES)
def test_zeros_stay_zeros_and_rows_do_not_depend_on_each_other(name: str, bits: int) -> None:
    x = values()
    amax = x.abs().max()
    x[2] = 0
    together = quantized(name, bits, x, tensor_amax=amax)
    assert torch.equal(together[2], torch.zeros(64))
    for row, found in zip(x, together, strict=True):
        assert torch.equal(quantized(name, bits, row[None], tensor_amax=amax)[0], found)
    assert int(levels_in_groups(together.reshape(-1, FORMATS[name].block or 64)).max()) <= number_count(name, bits)


def test_an_nvfp4_block_whose_scale_is_zero_becomes_zeros() -> None:
    x = torch.cat([torch.linspace(0.5, 2, 16), torch.full((16,), 3e6)])[None]
    expected = defined("nvfp4", 4, x.double().view(2, 16), 3e6)  # 0 · x / 0
    found = quantized("nvfp4", 4, x, tensor_amax=x.max())
    assert torch.equal(found[0, :16], torch.zeros(16))
    assert found[0, 16:].double() == pytest.approx(expected[1])


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_min_max_follows_the_definition_and_ignores_exact_values(bits: int) -> None:
    x = values().double()
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    assert min_max(bits, x, 1) == pytest.approx(((x - low) / step).round() * step + low, abs=1e-12)
    exact = torch.arange(64) < 3
    kept = min_max(bits, x, 1, exact)
    assert torch.equal(kept[:, :3], x[:, :3])
    assert torch.equal(kept[:, 3:], min_max(bits, x[:, 3:], 1))
    assert torch.equal(min_max(bits, torch.ones(2, 4), 1), torch.ones(2, 4))


def test_int8_per_token_is_torchaos() -> None:
    from torchao.quantization import quant_primitives as theirs

    x = values(64, 256)
    how = ((1, 256), torch.int8, -127, 127)
    scale, zero = theirs.choose_qparams_affine(
        x, theirs.MappingType.SYMMETRIC, how[0], torch.int8, -127, 127, eps=1e-5, scale_dtype=torch.float32
    )
    codes = theirs.quantize_affine(x, how[0], scale, zero, *how[1:])
    found = theirs.dequantize_affine(codes, how[0], scale, zero, *how[1:], output_dtype=torch.float32)
    assert torch.equal(quantized("int", 8, x), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_torchaos(dtype: torch.dtype) -> None:
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    x = values(64, 256).to(dtype)
    scale, codes = to_mx(x, torch.float4_e2m1fn_x2, 32)
    assert torch.equal(quantized("mxfp4", 4, x), to_dtype(codes, scale, torch.float4_e2m1fn_x2, 32, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_is_torchaos(dtype: torch.dtype) -> None:
    from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    x = values(64, 256).to(dtype)
    amax = x.abs().amax()
    whole = per_tensor_amax_to_scale(amax.float())
    scale, codes = nvfp4_quantize(x, 16, whole)
    assert float(scale.float().min()) > 2**-6  # torchao has no scales below that; the format does
    numbers = f4_unpacked_to_f32(unpack_uint4(codes)).view(64, -1, 16)
    found = (numbers * (scale.float() * whole)[..., None]).view(64, 256)
    assert torch.equal(quantized("nvfp4", 4, x, tensor_amax=amax), found.to(dtype))


def test_fp8_per_token_is_torchaos() -> None:
    from torchao.quantization import quant_primitives as theirs

    x = values(64, 256)
    scale = theirs._choose_scale_float8(x, [1, 256], float8_dtype=torch.float8_e4m3fn)
    codes = theirs._quantize_affine_float8(x, scale, torch.float8_e4m3fn)
    found = theirs._dequantize_affine_float8(codes, scale, torch.float32)
    assert (quantized("fp8", 8, x) - found).abs().max() <= 1e-6 * found.abs().max()
