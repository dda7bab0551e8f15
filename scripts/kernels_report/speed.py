"""Compare the kernels on this GPU with torch's softmax attention: milliseconds, TFLOP/s, a plot."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from softpick import softpick_attention
from torch import Tensor
from tqdm import tqdm

LENGTHS = tuple(512 * 2**i for i in range(6))  # 512 … 16384


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
    """Plot TFLOP/s by length, with one panel per head dim and direction."""
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
