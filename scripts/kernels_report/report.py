"""What the compilers say of every shipped kernel config, and on a GPU how fast it runs beside softmax.

PYTHONPATH=scripts python -m kernels_report                 every architecture, head dims 64 and 128, bf16
PYTHONPATH=scripts python -m kernels_report --arch sm_90 --head-dim 64 --dtype fp16
"""

import argparse
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from softpick import softpick_attention
from softpick.tiles import ARCHITECTURES, ELEMENT_SIZE, KERNELS, TileConfig, tiles
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

LENGTHS = tuple(512 * 2**i for i in range(6))  # 512 … 16384
CompileJob = tuple[str, str, int, str, TileConfig]


def jobs(archs: Sequence[str], head_dims: Sequence[int], dtypes: Sequence[str]) -> Iterator[CompileJob]:
    """Every shipped config, as (kernel, arch, head_dim, dtype, tile)."""
    for arch in archs:
        for head_dim in head_dims:
            for dtype in dtypes:
                for kernel in KERNELS:
                    for tile in tiles(kernel, arch, head_dim, ELEMENT_SIZE[dtype]):
                        yield kernel, arch, head_dim, dtype, tile


def compile_row(
    job: CompileJob, loops: bool = True, key_mask: bool = False, normalizer: str = "softpick"
) -> dict[str, Any]:
    """One line of the report; with `loops` the main loop's length, beside its softmax twin's for the forward."""
    from kernels_report.compiler import compile_kernel  # triton, which this process may have as an interpreter

    kernel, arch, head_dim, dtype, tile = job
    compiled = compile_kernel(*job, key_mask=key_mask, normalizer=normalizer)
    row = {
        "arch": arch,
        "kernel": kernel,
        "dim": head_dim,
        "dtype": dtype,
        "queries × keys": f"{tile.block_m} × {tile.block_n}",
        "warps": tile.warps,
        "stages": tile.stages,
        "registers": compiled.registers,
        "spills": compiled.spills,
        "shared KiB": compiled.shared / 1024,
        "occupancy": compiled.occupancy,
    }
    if loops:
        row["main loop"] = compiled.main_loop
        if kernel in ("forward", "decode"):
            softmax = compile_kernel(*job, normalizer="softmax").main_loop
            row |= {"softmax's": softmax, "ratio": compiled.main_loop / softmax}
    return row


def compile_rows(
    work: Sequence[CompileJob],
    loops: bool = True,
    key_mask: bool = False,
    workers: int | None = None,
    normalizer: str = "softpick",
) -> list[dict[str, Any]]:
    """The lines of all jobs, compiled by one process per core, with a progress bar."""
    # Fresh processes, without the interpreter: under TRITON_INTERPRET=1 nothing compiles.
    interpret = os.environ.pop("TRITON_INTERPRET", None)
    try:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers or os.cpu_count(), mp_context=context) as pool:
            rows = pool.map(partial(compile_row, loops=loops, key_mask=key_mask, normalizer=normalizer), work)
            return list(tqdm(rows, total=len(work), desc="compiling", unit="kernel", leave=False, disable=None))
    finally:
        if interpret is not None:
            os.environ["TRITON_INTERPRET"] = interpret


def speed_rows(
    device: str,
    lengths: Sequence[int] = LENGTHS,
    head_dims: Sequence[int] = (64, 128),
    dtype: torch.dtype = torch.bfloat16,
) -> list[dict[str, Any]]:
    """Milliseconds and TFLOP/s of softpick and of torch's softmax attention, causal, 16384 tokens in all, 2048 wide."""
    rows = []
    for head_dim in head_dims:
        for length in tqdm(lengths, desc=f"timing head dim {head_dim}", unit="length", leave=False, disable=None):
            heads, batch = 2048 // head_dim, max(1, max(lengths) // length)
            q, k, v, grad = (torch.randn(batch, heads, length, head_dim, device=device, dtype=dtype) for _ in range(4))
            # Two matmuls of 2 · T² · D per head, half of them masked; the backward has five.
            flops = 2 * batch * heads * length**2 * head_dim
            for direction, factor in (("forward", 1.0), ("backward", 2.5)):
                row: dict[str, Any] = {"dim": head_dim, "direction": direction, "length": length, "batch": batch}
                for name, attend in (("softpick", softpick_attention), ("softmax", _softmax_attention)):
                    seconds = _seconds(_work(attend, q, k, v, grad, direction), device)
                    row |= {f"{name} ms": seconds * 1e3, f"{name} TFLOP/s": factor * flops / seconds / 1e12}
                row["time ratio"] = row["softpick ms"] / row["softmax ms"]
                rows.append(row)
    return rows


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _work(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor, direction: str
) -> Callable[[], Any]:
    if direction == "forward":
        return lambda: attend(q, k, v)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = attend(*leaves)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def _seconds(work: Callable[[], Any], device: str) -> float:
    """The median of several runs, after a warm-up."""
    if device.startswith("cuda"):
        from triton.testing import do_bench

        return float(do_bench(work, return_mode="median")) / 1e3
    work()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[1]


def plot_speed(rows: Sequence[dict[str, Any]], file: Path, title: str) -> None:
    """TFLOP/s against length, a panel for each head dim and direction."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((row["dim"], row["direction"]) for row in rows))
    columns = min(2, len(panels))
    figure, axes = plt.subplots(
        math.ceil(len(panels) / columns),
        columns,
        figsize=(5 * columns, 3.6 * math.ceil(len(panels) / columns)),
        squeeze=False,
    )
    for axis, (dim, direction) in zip(axes.flat, panels, strict=False):
        mine = [row for row in rows if (row["dim"], row["direction"]) == (dim, direction)]
        for name, style in (("softpick", "o-"), ("softmax", "s--")):
            axis.plot([row["length"] for row in mine], [row[f"{name} TFLOP/s"] for row in mine], style, label=name)
        axis.set(title=f"{direction}, head dim {dim}", xlabel="sequence length", ylabel="TFLOP/s", xscale="log")
        axis.set_xticks([row["length"] for row in mine], [str(row["length"]) for row in mine])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(title)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the report; on a GPU also write the plot of its speed."""
    parser = argparse.ArgumentParser(
        "python -m kernels_report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", nargs="+", choices=list(ARCHITECTURES), default=list(ARCHITECTURES))
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--dtype", nargs="+", choices=list(ELEMENT_SIZE), default=["bf16"])
    parser.add_argument("--out", type=Path, default=Path("results/kernels"), help="where the plot goes (%(default)s)")
    options = parser.parse_args(arguments)
    print("Compiled here, for GPUs that need not be here; causal, no padding mask. Spills in bytes per thread.\n")
    rows = compile_rows(list(jobs(options.arch, options.head_dim, options.dtype)))
    print(tabulate([row | {"occupancy": f"{row['occupancy']:.0%}"} for row in rows], headers="keys", floatfmt=".2f"))
    if not torch.cuda.is_available():
        print("\nNo CUDA GPU here: no times. On a GPU this report adds them, beside scaled_dot_product_attention.")
        return
    name = torch.cuda.get_device_name()
    rows = speed_rows("cuda", head_dims=options.head_dim)
    print(f"\n{name}, torch {torch.__version__}, bf16, causal, medians\n")
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    file = options.out / "speed.png"
    plot_speed(rows, file, name)
    print(f"\nPlot: {file}")
