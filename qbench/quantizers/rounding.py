"""Rounding to a few bits, simulated: a tensor in, the values that would be stored and read back out, in the same dtype.

Formats of number_formats.py have symmetric grids; `min_max` has a zero point. Everything is computed in float32, or in
float64 for float64 tensors, and rounded to the tensor's dtype at the end.
"""

import torch
from torch import Tensor

from qbench.quantizers.number_formats import E2M1_LARGEST, E4M3_LARGEST, FORMATS


def largest_number(name: str, bits: int) -> float:
    """The largest number of a format's grid, before it is multiplied with a scale."""
    return {"int": 2 ** (bits - 1) - 1, "fp8": E4M3_LARGEST}.get(name, E2M1_LARGEST)


def nearest(name: str, bits: int, x: Tensor) -> Tensor:
    """The number of the grid nearest to each x, ties to even; beyond the largest number, that one."""
    if name == "int":
        largest = largest_number(name, bits)
        return x.round().clamp_(-largest, largest)
    if name == "fp8":
        return x.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn).to(x.dtype)
    return nearest_e2m1(x)


def nearest_e2m1(x: Tensor) -> Tensor:
    """The nearest of 0, ±0.5, ±1, ±1.5, ±2, ±3, ±4, ±6; ties to the one whose mantissa bit is 0."""
    x = x.clamp(-E2M1_LARGEST, E2M1_LARGEST)
    size = x.abs()
    step = torch.full_like(x, 0.5).masked_fill_(size >= 2, 1.0).masked_fill_(size >= 4, 2.0)
    return x.div_(step).round_().mul_(step)


def scales(name: str, bits: int, amax: Tensor, tensor_amax: Tensor | None = None) -> Tensor:
    """The scale of each group with this largest |x|; never 0. tensor_amax: of the whole tensor, for nvfp4."""
    if name == "mxfp4":
        _, exponent = torch.frexp(amax)  # amax = m · 2^exponent with m in [0.5, 1), so ⌊log2 amax⌋ = exponent - 1
        return torch.ldexp(torch.ones_like(amax), (exponent - 3).clamp_(-127, 127))
    if name == "nvfp4":
        assert tensor_amax is not None
        whole = _not_zero(tensor_amax.to(amax.dtype) / (E4M3_LARGEST * E2M1_LARGEST))
        # A block so small that its scale is 0 becomes zeros, as it does with a scale of 1 times the tensor's.
        return _not_zero(nearest("fp8", 8, amax / E2M1_LARGEST / whole)) * whole
    return _not_zero(amax / largest_number(name, bits))


def quantized(name: str, bits: int, x: Tensor, *, tensor_amax: Tensor | None = None, whole: bool = False) -> Tensor:
    """x [..., n] rounded to a format: a scale per block, or per row of n if the format has no blocks.

    tensor_amax: the range of the whole tensor, known beforehand; larger values are clipped to it if `whole`, or if the
    format (nvfp4) has a scale for the tensor. whole: one scale for all of x, from tensor_amax.
    """
    wide = _wide(x)
    block = FORMATS[name].block
    if whole:
        assert tensor_amax is not None
        scale = scales(name, bits, tensor_amax.to(wide.dtype))
    else:
        wide = wide.unflatten(-1, (-1, block)) if block else wide
        scale = scales(name, bits, wide.abs().amax(-1, keepdim=True), tensor_amax)
    return nearest(name, bits, wide / scale).mul_(scale).reshape(x.shape).to(x.dtype)


def min_max(bits: int, x: Tensor, dim: int, exact: Tensor | None = None) -> Tensor:
    """x rounded to 2^bits levels between the smallest and the largest value along a dimension.

    exact: where values stay as they are, and have no part in the range; it broadcasts to x.
    """
    wide = _wide(x)
    if exact is None:
        low, high = wide.aminmax(dim=dim, keepdim=True)
    else:
        low = wide.masked_fill(exact, torch.inf).amin(dim, keepdim=True)
        high = wide.masked_fill(exact, -torch.inf).amax(dim, keepdim=True)
    step = _not_zero((high - low) / (2**bits - 1))
    rounded = (wide - low).div_(step).round_().mul_(step).add_(low).to(x.dtype)
    return rounded if exact is None else torch.where(exact, x, rounded)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _not_zero(scale: Tensor) -> Tensor:
    """A group of zeros keeps its zeros with any scale."""
    return scale.masked_fill(scale == 0, 1.0)


def number_count(name: str, bits: int) -> int:
    """How many different numbers a format's grid has: 255 for 8-bit integers."""
    return {"int": 2**bits - 1, "fp8": 253}.get(name, 15)


def levels_in_groups(groups: Tensor) -> Tensor:
    """How many different values each group has; groups [..., size]."""
    ordered = groups.sort(-1).values
    return (ordered[..., 1:] != ordered[..., :-1]).sum(-1) + 1
