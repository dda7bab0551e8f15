"""Which tiles each kernel runs with: chosen by architecture, head dim and element size from the compiler's report.

A tile is shipped only if it compiles for causal attention without spills and fits into shared memory, for every
normalizer and, at the head dims 64 and 128, with a padding mask as well; among those, the ones with the fewest
instructions per score. `make kernels` shows what the compilers report for each.
"""

from dataclasses import dataclass

import torch

KERNELS = ("forward", "decode", "key_value", "query")
ELEMENT_SIZE = {"fp16": 2, "bf16": 2, "fp32": 4}
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class TileConfig:
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
    shared: int  # bytes per SM
    shared_block: int  # maximum bytes per block
    shared_reserved: int = 1024  # bytes that an SM reserves per block


ARCHITECTURES = {
    "sm_80": Limits(warps=64, registers=65536, shared=164 * 1024, shared_block=163 * 1024),
    "sm_86": Limits(warps=48, registers=65536, shared=100 * 1024, shared_block=99 * 1024),
    "sm_89": Limits(warps=48, registers=65536, shared=100 * 1024, shared_block=99 * 1024),
    "sm_90": Limits(warps=64, registers=65536, shared=228 * 1024, shared_block=227 * 1024),
    "sm_100": Limits(warps=64, registers=65536, shared=228 * 1024, shared_block=227 * 1024),
    "sm_120": Limits(warps=48, registers=65536, shared=100 * 1024, shared_block=99 * 1024),
    # 4 SIMDs per CU, 8 waves each, 512 VGPRs of 64 lanes per SIMD
    "gfx942": Limits(warps=32, registers=4 * 512 * 64, shared=64 * 1024, shared_block=64 * 1024, shared_reserved=0),
}

INTERPRETER = "interpreter"
FAMILIES = {"sm_90": "hopper", "sm_100": "blackwell", "gfx942": "cdna"}  # the others are "ampere": mma.sync, cp.async

# (kernel, bytes per element, widest head dim): the tiles of each family, best guess first. An architecture's tiles
# come before its family's; "any" is for all others. On cdna each key's flag, for padding or a score below 0,
# takes two scalar registers, so tiles have fewer keys; and 4 warps may use twice as many vector registers as 8.
TILES: dict[tuple[str, int, int], dict[str, list[TileConfig]]] = {
    ("forward", 2, 64): {
        "ampere": [TileConfig(128, 64, 8, 3)],
        "hopper": [TileConfig(128, 64, 8, 3), TileConfig(128, 64, 8, 2)],
        "blackwell": [TileConfig(128, 64, 8, 2)],
        "cdna": [TileConfig(128, 32, 4, 1)],
    },
    # Head dims between 64 and 128 are padded: the mask on the dims takes registers too.
    ("forward", 2, 127): {
        "ampere": [TileConfig(128, 32, 8, 2)],
        "hopper": [TileConfig(128, 64, 8, 2)],
        "blackwell": [TileConfig(128, 64, 8, 2)],
        "cdna": [TileConfig(128, 32, 4, 1)],
    },
    ("forward", 2, 128): {
        "ampere": [TileConfig(128, 64, 8, 2)],
        "hopper": [TileConfig(128, 64, 8, 3), TileConfig(128, 64, 8, 2)],
        "blackwell": [TileConfig(128, 64, 8, 2), TileConfig(128, 64, 8, 3)],
        "cdna": [TileConfig(128, 32, 4, 1)],
    },
    ("decode", 2, 63): {"any": [TileConfig(16, 64, 4, 2)], "cdna": [TileConfig(16, 64, 4, 1)]},
    ("decode", 2, 64): {
        "ampere": [TileConfig(16, 128, 4, 2)],
        "hopper": [TileConfig(16, 128, 4, 2)],
        "blackwell": [TileConfig(16, 128, 4, 2), TileConfig(16, 64, 4, 3)],
        "cdna": [TileConfig(16, 64, 4, 1)],
    },
    ("decode", 2, 128): {
        "ampere": [TileConfig(16, 64, 4, 2)],
        "hopper": [TileConfig(16, 64, 4, 2)],
        "blackwell": [TileConfig(16, 64, 4, 2)],
        "cdna": [TileConfig(16, 64, 4, 1)],
    },
    ("key_value", 2, 63): {
        "any": [TileConfig(32, 64, 8, 2)],
        "cdna": [TileConfig(16, 64, 4, 1)],
    },
    ("key_value", 2, 64): {
        "ampere": [TileConfig(32, 128, 8, 3)],
        "hopper": [TileConfig(32, 128, 8, 3)],
        "blackwell": [TileConfig(32, 128, 8, 3)],
        "cdna": [TileConfig(16, 64, 4, 1)],
    },
    ("key_value", 2, 127): {
        "any": [TileConfig(32, 64, 8, 2)],
        "cdna": [TileConfig(16, 64, 4, 1)],
    },
    ("key_value", 2, 128): {
        "ampere": [TileConfig(64, 64, 8, 2)],
        "hopper": [TileConfig(32, 64, 8, 2)],
        "blackwell": [TileConfig(32, 128, 8, 2), TileConfig(64, 64, 8, 2)],
        "cdna": [TileConfig(16, 64, 4, 1)],
    },
    ("query", 2, 64): {
        "ampere": [TileConfig(128, 64, 8, 3)],
        "hopper": [TileConfig(128, 64, 8, 3), TileConfig(128, 32, 4, 3)],
        "blackwell": [TileConfig(128, 32, 4, 3), TileConfig(128, 64, 8, 3)],
        "cdna": [TileConfig(128, 16, 4, 1)],
    },
    ("query", 2, 127): {
        "any": [TileConfig(64, 64, 8, 2)],
        "hopper": [TileConfig(128, 32, 8, 2)],
        "cdna": [TileConfig(128, 16, 4, 1)],
    },
    ("query", 2, 128): {
        "ampere": [TileConfig(128, 32, 8, 2), TileConfig(64, 64, 8, 2)],
        "sm_120": [TileConfig(64, 64, 8, 2)],
        "hopper": [TileConfig(128, 32, 8, 2)],
        "blackwell": [TileConfig(64, 64, 8, 2)],
        "cdna": [TileConfig(128, 16, 4, 1)],
    },
    # Rarely used, and never fast (float32 in IEEE precision has no tensor cores): one tile serves nearly every family.
    ("forward", 2, 256): {"any": [TileConfig(64, 32, 8, 2)]},
    ("decode", 2, 256): {"any": [TileConfig(16, 32, 8, 2)], "sm_120": [TileConfig(16, 16, 8, 2)]},
    ("key_value", 2, 256): {
        "any": [TileConfig(32, 32, 8, 1)],
        "cdna": [TileConfig(16, 32, 4, 1)],
    },
    ("query", 2, 256): {
        "any": [TileConfig(32, 32, 8, 1)],
        "cdna": [TileConfig(64, 16, 4, 1)],
    },
    ("forward", 4, 64): {"any": [TileConfig(32, 32, 4, 2)], "cdna": [TileConfig(32, 32, 4, 1)]},
    ("forward", 4, 128): {"any": [TileConfig(32, 32, 8, 1)]},
    ("forward", 4, 256): {"any": [TileConfig(16, 32, 8, 1)]},
    ("decode", 4, 64): {"any": [TileConfig(16, 32, 4, 2)]},
    ("decode", 4, 128): {"any": [TileConfig(16, 32, 8, 1)]},
    ("decode", 4, 256): {"any": [TileConfig(16, 32, 8, 1)]},
    ("key_value", 4, 64): {
        "any": [TileConfig(32, 32, 8, 2)],
        "cdna": [TileConfig(32, 32, 4, 1)],
    },
    ("key_value", 4, 128): {"any": [TileConfig(16, 32, 8, 1)]},
    ("key_value", 4, 256): {
        "any": [TileConfig(16, 16, 8, 1)],
        "cdna": [TileConfig(16, 16, 4, 1)],
    },
    ("query", 4, 64): {"any": [TileConfig(32, 32, 8, 2)]},
    ("query", 4, 128): {"any": [TileConfig(16, 16, 8, 1)]},
    ("query", 4, 256): {
        "any": [TileConfig(16, 16, 8, 1)],
        "cdna": [TileConfig(16, 16, 4, 1)],
    },
}


def architecture(device: torch.device) -> str:
    """The entry of ARCHITECTURES whose tiles suit a GPU, or INTERPRETER for the CPU."""
    if device.type == "cpu":
        return INTERPRETER
    if torch.version.hip:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    # A minor revision without an entry (sm_87, sm_103) uses the one below it, which does not need more resources.
    fitting = [name for name in ARCHITECTURES if name[3:-1] == str(major) and int(name[-1]) <= minor]
    if not fitting:
        raise ValueError(
            f"Softpick's Triton kernels are built for {', '.join(ARCHITECTURES)}; this GPU is sm_{major}{minor}: "
            "use backend='reference'."
        )
    return fitting[-1]


def has_tiles(device: torch.device) -> bool:
    """Whether the Triton kernels are built for a GPU."""
    try:
        return bool(architecture(device))
    except ValueError:
        return False


def block_dim(head_dim: int) -> int:
    """The tile's width: the next power of two, at least the 16 that a matrix product needs."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tiles(kernel: str, arch: str, head_dim: int, itemsize: int) -> list[TileConfig]:
    """The tiles to choose from, best guess first."""
    if (
        arch == INTERPRETER
    ):  # large ones: in the interpreter, time depends on the number of operations, not on their size
        return [TileConfig(16, 128, 4, 1) if kernel == "decode" else TileConfig(128, 64, 4, 1)]
    widest = min(dim for name, size, dim in TILES if (name, size) == (kernel, itemsize) and head_dim <= dim)
    by_family = TILES[kernel, itemsize, widest]
    return next(by_family[name] for name in (arch, FAMILIES.get(arch, "ampere"), "any") if name in by_family)
