"""The compilers' report on every shipped kernel config for each normalizer and, with a GPU, the speed of softpick.

make kernels                        sm_80 and sm_90 at head dim 64, bf16
make kernels ARCH=all               every architecture, head dims 64 and 128
make kernels ARCH="sm_120 gfx942"   some of them
python -m kernels_report --help     head dims, dtypes, padding masks
"""

import argparse
import multiprocessing
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from softpick import NORMALIZERS
from softpick.tiles import ARCHITECTURES, ELEMENT_SIZE, KERNELS, TileConfig, tiles
from tabulate import tabulate

from kernels_report.speed import plot_speed, speed_rows

BASELINE = "softmax"  # the normalizer that the others are compared with
PAGE = Path(__file__).resolve().parents[2] / "docs" / "attention.md"
ON_PAGE = re.compile(r"(?<=<!-- made by kernels_report -->\n).*?(?=<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class CompileJob:
    """One causal kernel to compile; `key_mask` is for batches with padding."""

    kernel: str
    arch: str
    head_dim: int
    dtype: str
    tile: TileConfig
    normalizer: str = "softpick"
    key_mask: bool = False


@dataclass(frozen=True)
class Row:
    """The compiler's report on one kernel: spills in bytes per thread, shared memory in bytes per block."""

    job: CompileJob
    registers: int
    spills: int
    shared: int
    occupancy: float
    main_loop: int | None  # instructions


def jobs(
    archs: Sequence[str],
    head_dims: Sequence[int],
    dtypes: Sequence[str],
    normalizers: Sequence[str] = tuple(NORMALIZERS),
    key_mask: bool = False,
    kernels: Sequence[str] = KERNELS,
) -> Iterator[CompileJob]:
    """Every shipped config."""
    for arch in archs:
        for head_dim in head_dims:
            for dtype in dtypes:
                for kernel in kernels:
                    for tile in tiles(kernel, arch, head_dim, ELEMENT_SIZE[dtype]):
                        for normalizer in normalizers:
                            yield CompileJob(kernel, arch, head_dim, dtype, tile, normalizer, key_mask)


def compile_row(job: CompileJob, loops: bool) -> Row:
    """Compile one kernel. The length of its main loop needs a disassembler and is found only with `loops`."""
    from kernels_report.compiler import compile_kernel  # imports triton; the parent's may be an interpreter

    compiled = compile_kernel(
        job.kernel,
        job.arch,
        job.head_dim,
        job.dtype,
        job.tile,
        key_mask=job.key_mask,
        normalizer=job.normalizer,
    )
    main_loop = compiled.main_loop if loops else None
    return Row(job, compiled.registers, compiled.spills, compiled.shared, compiled.occupancy, main_loop)


def compile_rows(work: Sequence[CompileJob], loops: bool = True, workers: int | None = None) -> Iterator[Row]:
    """The rows of all jobs, in order, compiled with one process per core."""
    context = multiprocessing.get_context("spawn")
    with _without_interpreter(), ProcessPoolExecutor(workers or os.cpu_count(), context) as pool:
        yield from pool.map(partial(compile_row, loops=loops), work)


@contextmanager
def _without_interpreter() -> Iterator[None]:
    """Let new processes compile: triton reads the variable when it is imported, which they do first."""
    before = os.environ.pop("TRITON_INTERPRET", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


Group = dict[str, Row]  # by normalizer


def by_tile(rows: Sequence[Row]) -> list[Group]:
    """Group the rows that differ only in their normalizer."""
    groups: dict[tuple[Any, ...], Group] = {}
    for row in rows:
        job = row.job
        key = (job.arch, job.head_dim, job.dtype, job.kernel, job.tile)
        groups.setdefault(key, {})[job.normalizer] = row
    return list(groups.values())


def _tile_columns(group: Group) -> dict[str, Any]:
    job = next(iter(group.values())).job
    return {
        "arch": job.arch,
        "kernel": job.kernel,
        "dim": job.head_dim,
        "dtype": job.dtype,
        "queries × keys": f"{job.tile.block_m} × {job.tile.block_n}",
        "warps": job.tile.warps,
        "stages": job.tile.stages,
    }


def loop_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Instructions of the main loop and the ratio to softmax's: one line per tile, one column per normalizer."""
    lines = []
    for group in by_tile(rows):
        line = _tile_columns(group)
        for name, row in group.items():
            ratio = f" ({row.main_loop / group[BASELINE].main_loop:.2f})" if name != BASELINE else ""
            line[name] = f"{row.main_loop}{ratio}"
        lines.append(line)
    return lines


def register_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Registers per thread of each normalizer, and over all of them the most spills and shared memory and the least
    occupancy.
    """
    return [
        _tile_columns(group)
        | {name: row.registers for name, row in group.items()}
        | {
            "spills": max(row.spills for row in group.values()),
            "shared KiB": max(row.shared for row in group.values()) / 1024,
            "occupancy": f"{min(row.occupancy for row in group.values()):.0%}",
        }
        for group in by_tile(rows)
    ]


def page_lines(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For the documentation: "instructions · registers" of each normalizer, for the first tile of each kernel."""
    lines: dict[tuple[str, int, str], dict[str, Any]] = {}
    for group in by_tile(rows):
        tile = _tile_columns(group)
        columns = {name: tile[name] for name in ("kernel", "arch", "queries × keys", "warps")}
        cells = {name: f"{row.main_loop} · {row.registers}" for name, row in group.items()}
        lines.setdefault((tile["kernel"], tile["dim"], tile["arch"]), columns | cells)
    return [line for _, line in sorted(lines.items(), key=lambda item: KERNELS.index(item[0][0]))]


def page_tables(rows: Sequence[Row]) -> str:
    """The tables of docs/attention.md: one per head dim."""
    dims = sorted({row.job.head_dim for row in rows})
    return "\n".join(
        f"\nHead dim {dim}:\n\n"
        + tabulate(page_lines([row for row in rows if row.job.head_dim == dim]), headers="keys", tablefmt="github")
        + "\n"
        for dim in dims
    )


def compile_aloud(work: Sequence[CompileJob]) -> list[Row]:
    """The rows of all jobs. Prints a line as soon as all normalizers of a tile are compiled."""
    rows: list[Row] = []
    for row in compile_rows(work):
        rows.append(row)
        if len(rows) < len(work) and work[len(rows)].tile == row.job.tile and work[len(rows)].kernel == row.job.kernel:
            continue
        job = row.job
        print(
            f"[{len(rows):3}/{len(work)}] {job.arch}, head dim {job.head_dim}, {job.dtype}: {job.kernel}, "
            f"{job.tile.block_m} × {job.tile.block_n}",
            flush=True,
        )
    return rows


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options, and replace "all"."""
    parser = argparse.ArgumentParser(
        "python -m kernels_report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", nargs="+", choices=["all", *ARCHITECTURES], default=["sm_80", "sm_90"])
    parser.add_argument("--head-dim", nargs="+", type=int, help="default: 64; with --arch all, 64 and 128")
    parser.add_argument("--dtype", nargs="+", choices=list(ELEMENT_SIZE), default=["bf16"])
    parser.add_argument("--padding", action="store_true", help="compile the kernels for batches with a padding mask")
    parser.add_argument(
        "--write-docs", action="store_true", help="compile all of them, and rewrite the tables in docs/attention.md"
    )
    parser.add_argument("--out", type=Path, default=Path("results/kernels"), help="where the plot goes (%(default)s)")
    options = parser.parse_args(arguments)
    if options.write_docs and (options.padding or options.head_dim or options.dtype != ["bf16"]):
        parser.error("--write-docs sets head dims and dtype, and has no padding: leave out these options.")
    if "all" in options.arch or options.write_docs:
        options.arch = list(ARCHITECTURES)
        options.head_dim = options.head_dim or [64, 128]
    options.head_dim = options.head_dim or [64]
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the report; with a GPU, also plot its speed."""
    options = parse(arguments)
    work = list(jobs(options.arch, options.head_dim, options.dtype, key_mask=options.padding))
    print(f"{len(work)} kernels on {os.cpu_count()} cores, 1 to 3 seconds of one core each.", flush=True)
    rows = compile_aloud(work)
    masked = "with" if options.padding else "without"
    print(f"\nInstructions in the main loop, and the ratio to softmax's; causal, {masked} a padding mask:\n")
    print(tabulate(loop_table(rows), headers="keys"))
    print("\nRegisters per thread; the most spills (bytes per thread) and least occupancy of all five:\n")
    print(tabulate(register_table(rows), headers="keys"))
    print(f"\n{len(rows)} kernels compiled, {sum(row.spills > 0 for row in rows)} of them with spills.")
    if options.write_docs:
        PAGE.write_text(ON_PAGE.sub(lambda _: page_tables(rows), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"Written: {PAGE}")
    if not torch.cuda.is_available():
        print("No CUDA GPU here: no times. With a GPU, this report compares them with scaled_dot_product_attention's.")
        return
    name = torch.cuda.get_device_name()
    speed = speed_rows("cuda", head_dims=options.head_dim)
    print(f"\n{name}, torch {torch.__version__}, bf16, causal, medians\n")
    print(tabulate(speed, headers="keys", floatfmt=".2f"))
    file = options.out / "speed.png"
    plot_speed(speed, file, name)
    print(f"\nPlot: {file}")
