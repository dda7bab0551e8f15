"""Kernel timings on this machine for `qbench doctor --report`: a matrix product, and each attention kernel."""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from qbench.attention.kinds import Attention, attentions

REPEATS = 5
SHAPES = {"cpu": (1, 4, 512, 64), "cuda": (4, 16, 2048, 64)}  # [batch, heads, time, dim]
MATRIX = {"cpu": 512, "cuda": 8192}


def timing_cases(device: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """Names, and functions that return what was measured."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    yield f"matmul {MATRIX[device]}", partial(time_matmul, device, dtype)
    yield "torch softmax", partial(time_attention, None, device, dtype)
    for kind in attentions().values():
        if kind.normalizer is not None and not (kind.is_softmax or kind.scaled or kind.gated):
            yield kind.name, partial(time_attention, kind, device, dtype)


def time_matmul(device: str, dtype: torch.dtype) -> str:
    """The rate, for comparison with the published peak."""
    n = MATRIX[device]
    left = torch.randn(n, n, device=device, dtype=dtype)
    seconds = median_seconds(lambda: left @ left, device)
    return f"{2 * n**3 / seconds / 1e12:.3g} TFLOP/s in {str(dtype).removeprefix('torch.')}"


def time_attention(kind: Attention | None, device: str, dtype: torch.dtype) -> str:
    """Causal forward, and forward with backward; kind None: torch's softmax."""
    batch, heads, length, dim = SHAPES[device]
    q, k, v = (torch.randn(batch, heads, length, dim, device=device, dtype=dtype) for _ in range(3))
    run = attention(kind, dim)
    with torch.no_grad():
        forward = median_seconds(lambda: run(q, k, v), device)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    both = median_seconds(lambda: torch.autograd.grad(run(q, k, v).sum(), (q, k, v)), device)
    return f"forward {1000 * forward:.3g} ms, with backward {1000 * both:.3g} ms at {list(SHAPES[device])}"


def attention(kind: Attention | None, dim: int) -> Callable[..., torch.Tensor]:
    """The function that computes this attention."""
    if kind is None:
        return partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    from types import SimpleNamespace

    from qbench.attention.register import attention_function

    shapes = kind.extra_shapes(SimpleNamespace(num_attention_heads=SHAPES["cuda"][1], head_dim=dim))

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        extra = {name: q.new_zeros((q.shape[1], *shape[1:])) for name, shape in shapes.items()}
        return attention_function(kind)(q, k, v, scale=dim**-0.5, causal=True, key_mask=None, **extra)

    return run


def median_seconds(work: Callable[[], Any], device: str) -> float:
    """The median of REPEATS calls, after one that compiles."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    taken = []
    for _ in range(REPEATS + 1):
        wait()
        start = time.perf_counter()
        work()
        wait()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])
