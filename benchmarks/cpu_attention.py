"""Compare softpick on the CPU with torch's softmax attention: forward and backward time, and peak extra memory.

    OMP_NUM_THREADS=1 python benchmarks/cpu_attention.py [--lengths 512 1024 2048] [--heads 16] [--dim 64] [--repeats 5]

Time is the process's CPU time with one thread. The two are interleaved, and the least of the repeats counts, so other
load on the machine has little effect. Memory is how much the peak of the resident set grows in a new process (Linux
only).
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from softpick import softpick_attention
from torch import Tensor

LENGTHS = [512, 1024, 2048, 4096, 8192]


def make_inputs(length: int, heads: int, dim: int, batch: int = 1) -> list[Tensor]:
    """q, k, v and the output's gradient, float32."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(batch, heads, length, dim, generator=generator) for _ in range(4))
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad]


def softpick(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softpick_attention(q, k, v, causal=True, backend="cpu")


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def least_times(functions: list[Callable[[], object]], repeats: int) -> list[float]:
    """Least CPU seconds of each function, interleaved. Each runs at least `repeats` times and a third of a second."""
    least, spent, calls = [math.inf] * len(functions), 0.0, 0
    while calls < repeats or spent < len(functions) / 3:
        for index, function in enumerate(functions):
            start = time.process_time()
            function()
            elapsed = time.process_time() - start
            least[index], spent = min(least[index], elapsed), spent + elapsed
        calls += 1
    return least


def measure_time(length: int, heads: int, dim: int, repeats: int, batch: int = 1) -> dict[str, float]:
    """Least seconds of both, forward and backward, with one thread."""
    torch.set_num_threads(1)
    q, k, v, grad = make_inputs(length, heads, dim, batch)
    with torch.no_grad():
        forward = least_times([lambda: softpick(q, k, v), lambda: softmax(q, k, v)], repeats)
    outputs = [softpick(q, k, v), softmax(q, k, v)]
    backward = least_times(
        [lambda out=out: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True) for out in outputs], repeats
    )
    names = ("forward", "softmax_forward", "backward", "softmax_backward")
    return dict(zip(names, forward + backward, strict=True))


def measure_memory(length: int, heads: int, dim: int) -> dict[str, float]:
    """Peak MiB of forward and of backward in a new process: outputs are included, inputs are not."""
    command = [sys.executable, __file__, "--memory-of", str(length), "--heads", str(heads), "--dim", str(dim)]
    # With a fixed threshold, malloc returns large blocks at once, so the resident set is the memory in use.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


def _memory_in_this_process(length: int, heads: int, dim: int) -> dict[str, float]:
    torch.set_num_threads(1)
    small = make_inputs(64, heads, dim)
    torch.autograd.grad(softpick(*small[:3]), small[:3], small[3])  # loads libraries and starts thread pools
    q, k, v, grad = make_inputs(length, heads, dim)
    before = _reset_peak()
    out = softpick(q, k, v)
    forward = _resident("VmHWM") - before
    before = _reset_peak()
    grads = torch.autograd.grad(out, (q, k, v), grad)
    backward = _resident("VmHWM") - before
    del grads
    return {"forward": forward, "backward": backward}


def _reset_peak() -> float:
    """Reset the peak of the resident set, and return the MiB that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _resident(field: str) -> float:
    """A field of /proc/self/status in MiB. getrusage would return the parent's peak if that is larger."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":"))


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)  # the child process of measure_memory
    args = parser.parse_args()
    if args.memory_of is not None:
        print(json.dumps(_memory_in_this_process(args.memory_of, args.heads, args.dim)))
        return
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"{cpu_name()}, {capability}, 1 thread, torch {torch.__version__}")
    print(
        f"float32, causal, batch {args.batch}, {args.heads} heads of {args.dim}; CPU ms, ratio to softmax, extra MiB\n"
    )
    print("| T | forward | softmax | ratio | backward | softmax | ratio | forward MiB | backward MiB |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for length in args.lengths:
        times = measure_time(length, args.heads, args.dim, args.repeats, args.batch)
        memory = measure_memory(length, args.heads, args.dim) if sys.platform == "linux" and args.batch == 1 else {}
        cells = [f"{length}"]
        for name in ("forward", "backward"):
            ours, theirs = times[name] * 1e3, times[f"softmax_{name}"] * 1e3
            cells += [f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}"]
        cells += [f"{memory[name]:.0f}" if memory else "" for name in ("forward", "backward")]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
