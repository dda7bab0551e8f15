"""Compile a kernel for a GPU, which need not be present, and read the compiler's report."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import triton
from softpick.normalizers import NORMALIZERS
from softpick.tiles import ARCHITECTURES, TileConfig, block_dim
from softpick.triton_op import FUNCTIONS
from softpick.triton_op import constants as normalizer_constants
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@dataclass(frozen=True)
class Compiled:
    """A kernel's machine code for one architecture and one tile."""

    kernel: str
    arch: str
    head_dim: int
    dtype: str
    tile: TileConfig
    asm: dict[str, Any]
    shared: int  # bytes per block

    @cached_property
    def resources(self) -> tuple[int, int]:
        """Registers per thread, and bytes per thread that did not fit into them (on NVIDIA, the stack)."""
        if "amdgcn" in self.asm:
            text = self.asm["amdgcn"]
            spilled = int(_find(r"\.vgpr_spill_count:\s+(\d+)", text)) + int(
                _find(r"\.sgpr_spill_count:\s+(\d+)", text)
            )
            return int(_find(r"\.vgpr_count:\s+(\d+)", text)), 4 * spilled
        text = self._cuobjdump("-res-usage")
        return int(_find(r"REG:(\d+)", text)), int(_find(r"STACK:(\d+)", text))

    @property
    def registers(self) -> int:
        """Registers per thread."""
        return self.resources[0]

    @property
    def spills(self) -> int:
        """Bytes per thread that did not fit into registers."""
        return self.resources[1]

    @cached_property
    def occupancy(self) -> float:
        """The share of an SM's warps that can be resident, limited by registers and shared memory."""
        limits = ARCHITECTURES[self.arch]
        lanes = 64 if self.arch.startswith("gfx") else 32
        registers = -(-max(self.registers, 1) // 8) * 8 * lanes * self.tile.warps
        by_registers = limits.registers // registers
        by_shared = limits.shared // (self.shared + limits.shared_reserved)
        by_warps = limits.warps // self.tile.warps
        return min(by_registers, by_shared, by_warps) * self.tile.warps / limits.warps

    @cached_property
    def loops(self) -> list[list[str]]:
        """The instructions of each innermost loop that multiplies matrices, in code order."""
        if "amdgcn" in self.asm:
            return _amd_loops(self.asm["amdgcn"])
        return _sass_loops(self._cuobjdump("-sass"))

    @property
    def main_loop(self) -> int:
        """Instructions of the loop over tiles without a causal mask, which takes most of the time."""
        return len(self.loops[-1 if self.kernel == "key_value" else 0])

    def _cuobjdump(self, option: str) -> str:
        """The output of cuobjdump, which is part of the triton wheel, for the machine code."""
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder, "kernel.cubin")
            cubin.write_bytes(self.asm["cubin"])
            command = [knobs.nvidia.cuobjdump.path, option, str(cubin)]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compile_kernel(
    kernel: str,
    arch: str,
    head_dim: int,
    dtype: str,
    tile: TileConfig,
    *,
    causal: bool = True,
    key_mask: bool = False,
    normalizer: str = "softpick",
) -> Compiled:
    """Compile one kernel for `arch` ("sm_80", "gfx942"); tensors are aligned and contiguous in their last dim."""
    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET=1 is set, so this process cannot compile; start one without it.")
    function = FUNCTIONS[kernel]
    constants: dict[str, Any] = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_dim(head_dim),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "CAUSAL": causal,
        "HAS_MASK": key_mask,
        "PRECISION": "ieee",
        "LONG": True,
        **normalizer_constants(normalizer),
    }
    if not NORMALIZERS[normalizer].sinks:
        constants["SINKS"] = None
    signature: dict[str, str] = {}
    constexprs: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, name in enumerate(function.arg_names):
        if name in constants or re.fullmatch(r"stride_(.*d|mt)", name):
            signature[name] = "constexpr"
            constexprs[(index,)] = constants.get(name, 1)
            continue
        pointer = {"KEY_MASK": "*i1", "SINKS": "*fp32", "LSE": "*fp32", "DELTA": "*fp32"}.get(name, f"*{dtype}")
        number = "fp32" if name in ("scale", "scale_log2", "eps") else "i32"
        signature[name] = pointer if name.isupper() else number
        if name.isupper() or name.startswith("stride"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(function, signature, constexprs, attributes),
        target=_target(arch),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )
    return Compiled(kernel, arch, head_dim, dtype, tile, compiled.asm, compiled.metadata.shared)


def _target(arch: str) -> GPUTarget:
    return GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch[3:]), 32)


def _find(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise RuntimeError(f"The compiler's report has no {pattern!r}: {text[:400]}")
    return match.group(1)


def _sass_loops(sass: str) -> list[list[str]]:
    """Loops in cuobjdump's listing, which has one address and instruction per line, and jumps to addresses."""
    code = [(int(address, 16), text) for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", sass)]
    target = re.compile(r"\bBRA\b.*\b0x([0-9a-f]+)")
    jumps = [(int(match.group(1), 16), at) for at, text in code if (match := target.search(text))]
    return _innermost(code, jumps, "MMA|FFMA")


def _amd_loops(text: str) -> list[list[str]]:
    """Loops in assembly with labels; line numbers serve as addresses."""
    lines = [line.strip() for line in text.splitlines()]
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if re.match(r"\.LBB\w+:", line)}
    jumps = [(labels.get(line.split()[-1], at), at) for at, line in enumerate(lines) if re.match(r"s_c?branch", line)]
    code = [(at, line) for at, line in enumerate(lines) if re.match(r"[a-z]\w+", line)]
    return _innermost(code, jumps, "mfma|v_(pk_)?fma")


def _innermost(code: list[tuple[int, str]], jumps: list[tuple[int, int]], multiply: str) -> list[list[str]]:
    """The loops that multiply and contain no other loop. A loop is the span (start, end) of a backward jump."""
    loops = {
        (start, end): [text for at, text in code if start <= at <= end] for start, end in sorted(jumps) if start < end
    }
    return [
        body
        for (start, end), body in loops.items()
        if re.search(multiply, " ".join(body))
        and not any(other != (start, end) and start <= other[0] and other[1] <= end for other in loops)
    ]
