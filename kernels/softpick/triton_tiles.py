"""The tiles of the Triton kernels: those of tiles.py, but for the entries below, where one of the normalizers spilled.

Head dims that are padded to a power of two need more registers, and so do padding masks. On cdna (gfx942) each key's
flag, for padding or a score below 0, takes two scalar registers, so that tiles of fewer keys are needed; and 4 warps
may have twice the vector registers that 8 may have.
"""

from softpick import tiles as shared
from softpick.tiles import FAMILIES, INTERPRETER, TileConfig

# Keys as in tiles.py; an architecture's own tiles go before its family's, and "any" has those of all not named.
REPLACED: dict[tuple[str, int, int], dict[str, list[TileConfig]]] = {
    ("forward", 2, 64): {
        "blackwell": [TileConfig(128, 64, 8, 2)],
        "cdna": [TileConfig(128, 32, 4, 1)],
    },
    ("forward", 2, 127): {"cdna": [TileConfig(128, 32, 4, 1)]},
    ("forward", 2, 128): {"cdna": [TileConfig(128, 32, 4, 1)]},
    ("decode", 2, 63): {"any": [TileConfig(16, 64, 4, 2)]},
    ("decode", 2, 256): {"any": [TileConfig(16, 32, 8, 2)]},
    ("key_value", 2, 63): {"any": [TileConfig(32, 64, 8, 2)], "cdna": [TileConfig(16, 64, 4, 1)]},
    ("key_value", 2, 64): {"cdna": [TileConfig(16, 64, 4, 1)]},
    ("key_value", 2, 127): {"cdna": [TileConfig(16, 64, 4, 1)]},
    ("key_value", 2, 128): {"cdna": [TileConfig(16, 64, 4, 1)]},
    ("key_value", 2, 256): {"cdna": [TileConfig(16, 32, 4, 1)]},
    ("query", 2, 64): {"cdna": [TileConfig(128, 16, 4, 1)]},
    ("query", 2, 127): {
        "any": [TileConfig(64, 64, 8, 2)],
        "hopper": [TileConfig(128, 32, 8, 2)],
        "cdna": [TileConfig(128, 16, 4, 1)],
    },
    ("query", 2, 128): {"sm_120": [TileConfig(64, 64, 8, 2)], "cdna": [TileConfig(128, 16, 4, 1)]},
    ("query", 2, 256): {"cdna": [TileConfig(64, 16, 4, 1)]},
    ("key_value", 4, 64): {"cdna": [TileConfig(32, 32, 4, 1)]},
    ("key_value", 4, 256): {"cdna": [TileConfig(16, 16, 4, 1)]},
    ("query", 4, 256): {"cdna": [TileConfig(16, 16, 4, 1)]},
}
TILES = shared.TILES | {key: shared.TILES.get(key, {}) | families for key, families in REPLACED.items()}


def tiles(kernel: str, arch: str, head_dim: int, itemsize: int) -> list[TileConfig]:
    """The tiles to choose from, best guess first."""
    if arch == INTERPRETER:
        return shared.tiles(kernel, arch, head_dim, itemsize)
    widest = min(dim for name, size, dim in TILES if (name, size) == (kernel, itemsize) and head_dim <= dim)
    by_family = TILES[kernel, itemsize, widest]
    return next(by_family[name] for name in (arch, FAMILIES.get(arch, "ampere"), "any") if name in by_family)
