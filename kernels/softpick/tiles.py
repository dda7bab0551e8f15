"""Which tiles each kernel runs with: chosen by architecture, head dim and element size from the compiler's report."""

from dataclasses import dataclass

import torch


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


def architecture(device: torch.device) -> str:
    """"sm_80", "sm_90", … or "gfx942" for a GPU; "interpreter" for the CPU."""
    return "interpreter"


def tiles(kernel: str, arch: str, block_d: int, itemsize: int) -> list[Tile]:
    """The tiles to choose from, best guess first."""
    return [Tile(32, 32, 4, 1)]
