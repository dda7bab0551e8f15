"""What rounding to a few bits should give, by plain definitions in float64. Audits compare it with what models compute.

Nothing here is shared with rounding.py: a mistake there is not repeated here.
"""

import torch
from torch import Tensor

from qbench.quantizers.number_formats import FORMATS

MAX_MISROUNDED = 0.05  # see `misrounded`


def defined(name: str, bits: int, x: Tensor, static: float | None) -> Tensor:
    """x [..., n] on the grid of a format; static: the range of one scale for all of x, or nvfp4's for the tensor."""
    size = FORMATS[name].block or x.shape[-1]
    groups, numbers = x.double().unflatten(-1, (-1, size)), _numbers(name, bits).to(x.device)
    amax = groups.abs().amax(-1, keepdim=True)
    if name == "mxfp4":
        scale = 2.0 ** (amax.log2().floor() - 2)
    elif name == "nvfp4":
        assert static is not None
        dtype = torch.promote_types(x.dtype, torch.float32)  # of scales: a wider one would turn near ties
        whole = torch.tensor(static, dtype=torch.float32).to(dtype) / (448 * 6)
        codes = (amax.to(dtype) / 6 / whole).clamp(max=448).to(torch.float8_e4m3fn)
        scale = codes.double() * whole.double()
    else:
        scale = (amax if static is None else torch.full_like(amax, static)) / numbers[-1]
    steps = torch.where(scale > 0, groups.abs() / scale, 0.0)
    place = torch.bucketize(steps, (numbers[1:] + numbers[:-1]) / 2)
    return (numbers[place] * scale * groups.sign()).flatten(-2)


def defined_min_max(bits: int, groups: Tensor) -> Tensor:
    """groups [..., size] on 2^bits levels between the smallest and the largest of each group."""
    wide = groups.double()
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    return torch.where(step > 0, low + ((wide - low) / step).round() * step, wide)


def misrounded(exact: Tensor, seen: Tensor, expected: Tensor) -> tuple[float, float]:
    """Two energies: of the part of the error that the definition does not explain, and of the defined error.

    Compares distances, because a tie may go to either side. The rounding of the dtype of `seen` is allowed.
    """
    wide, error = exact.double(), (expected - exact.double()).abs()
    off = ((seen.double() - wide).abs() - error).abs() - torch.finfo(seen.dtype).eps / 2 * expected.abs()
    return float(off.clamp_min(0).square().sum()), float(error.square().sum())


def _numbers(name: str, bits: int) -> Tensor:
    """The numbers of a format from 0 on, ascending."""
    if name == "int":
        return torch.arange(2 ** (bits - 1), dtype=torch.float64)
    if name == "fp8":
        return torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # code 127 is NaN
    return torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
