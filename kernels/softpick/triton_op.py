"""The Triton kernels behind one torch op, `softpick::triton_attention`: any strides, no copies."""

import contextlib
import functools
import math
from typing import Any

import torch
import triton
from torch import Tensor

from softpick.normalizers import NORMALIZERS
from softpick.op import empty_lse, empty_output, register, sink_gradient
from softpick.tiles import architecture, block_dim, tiles
from softpick.triton_backward import delta_kernel, key_value_kernel, query_kernel
from softpick.triton_forward import forward_kernel

LOG2_E = math.log2(math.e)
LONG_LENGTH = 1024  # keys; tiles are tuned separately for shorter and for longer sequences
DECODE_LENGTH = 16  # up to this many queries run on tiles of 16 rows
FUNCTIONS = {
    "forward": forward_kernel,
    "decode": forward_kernel,
    "key_value": key_value_kernel,
    "query": query_kernel,
}


def constants(normalizer: str) -> dict[str, bool]:
    """The kernels' compile-time choices for a normalizer."""
    kind = NORMALIZERS[normalizer]
    return {"MINUS_ONE": kind.minus_one, "ABSOLUTE": kind.absolute, "RECTIFIED": kind.rectified}


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    key_mask: Tensor | None,
    normalizer: str,
    scale: float,
    causal: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Output [batch, heads, q_len, dim] and LSE [batch, heads, q_len] in base 2."""
    out, lse = empty_output(q), empty_lse(q)
    if out.numel() == 0:
        return out, lse
    batch, heads, q_len, _ = q.shape
    mask, mask_strides = _mask_arguments(key_mask, q)
    decode = q_len <= DECODE_LENGTH
    _launch(
        "decode" if decode else "forward",
        q,
        k.shape[2],
        lambda meta: (triton.cdiv(q_len, meta["BLOCK_M"]) * heads * batch,),
        tensors=(q, k, v, None if sinks is None else sinks.contiguous(), mask, out, lse),
        strides=(*q.stride(), *k.stride(), *v.stride(), *out.stride(), *mask_strides),
        numbers=(heads, heads // k.shape[1], q_len, k.shape[2], scale * LOG2_E, eps),
        CAUSAL=causal,
        HAS_MASK=key_mask is not None,
        **constants(normalizer),
    )
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    key_mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    normalizer: str,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and sinks."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dsinks = sink_gradient(grad, out, sinks, None if sinks is None else sinks[:, None].float() - lse / LOG2_E)
    if q.numel() == 0:
        return dq, dk.zero_(), dv.zero_(), dsinks
    batch, heads, q_len, dim = q.shape
    kv_heads, k_len = k.shape[1:3]
    mask, mask_strides = _mask_arguments(key_mask, q)
    delta = torch.empty_like(lse)
    with _device(q):
        delta_kernel[(triton.cdiv(q_len, 64) * heads * batch,)](
            out,
            grad,
            delta,
            *out.stride(),
            *grad.stride(),
            heads,
            q_len,
            HEAD_DIM=dim,
            BLOCK_D=block_dim(dim),
            BLOCK_M=64,
        )
    strides = (*q.stride(), *k.stride(), *v.stride(), *grad.stride())
    numbers = (heads, heads // kv_heads, q_len, k_len, scale, scale * LOG2_E)
    options = {"CAUSAL": causal, "HAS_MASK": key_mask is not None, **constants(normalizer)}
    # Grouped heads share keys: each query head gets its own dk and dv, which are then added up in a fixed order.
    shared = heads != kv_heads
    dk_heads, dv_heads = (q.new_empty(batch, heads, k_len, dim, dtype=torch.float32) if shared else t for t in (dk, dv))
    _launch(
        "key_value",
        q,
        k_len,
        lambda meta: (triton.cdiv(k_len, meta["BLOCK_N"]) * heads * batch,),
        tensors=(q, k, v, mask, grad, lse, delta, dk_heads, dv_heads),
        strides=(*strides, *dk_heads.stride(), *dv_heads.stride(), *mask_strides),
        numbers=numbers,
        **options,
    )
    if shared:
        for total, parts in ((dk, dk_heads), (dv, dv_heads)):
            total.copy_(parts.unflatten(1, (kv_heads, -1)).sum(2))
    _launch(
        "query",
        q,
        k_len,
        lambda meta: (triton.cdiv(q_len, meta["BLOCK_M"]) * heads * batch,),
        tensors=(q, k, v, mask, grad, lse, delta, dq),
        strides=(*strides, *dq.stride(), *mask_strides),
        numbers=numbers,
        **options,
    )
    return dq, dk, dv, dsinks


@functools.cache
def autotuned(kernel: str, arch: str, head_dim: int, itemsize: int) -> Any:
    """The kernel with the tiles that compile without spills for this architecture, head dim and element size."""
    configs = [
        triton.Config({"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}, num_warps=tile.warps, num_stages=tile.stages)
        for tile in tiles(kernel, arch, head_dim, itemsize)
    ]
    # LONG is a key instead of the length, since a benchmark has hundreds of lengths. Choices are kept on disk, so a
    # machine does not change them.
    key = ["HEAD_DIM", "CAUSAL", "HAS_MASK", "PRECISION", "LONG", *constants("softpick")]
    return triton.autotune(configs, key=key, cache_results=True)(FUNCTIONS[kernel])


def _launch(
    kernel: str,
    q: Tensor,
    k_len: int,
    grid: Any,
    *,
    tensors: tuple[Tensor | None, ...],
    strides: tuple[int, ...],
    numbers: tuple[float, ...],
    **options: bool,
) -> None:
    """Run a kernel; its arguments are tensors, strides and numbers, in this order."""
    tuned = autotuned(kernel, architecture(q.device), q.shape[-1], q.element_size())
    tf32 = q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    with _device(q):
        tuned[grid](
            *tensors,
            *strides,
            *numbers,
            HEAD_DIM=q.shape[-1],
            BLOCK_D=block_dim(q.shape[-1]),
            PRECISION="tf32" if tf32 else "ieee",
            LONG=k_len >= LONG_LENGTH,
            **options,
        )


def _mask_arguments(key_mask: Tensor | None, q: Tensor) -> tuple[Tensor, tuple[int, int]]:
    # Without a mask the kernel reads nothing there, but it needs a pointer.
    return (q, (0, 1)) if key_mask is None else (key_mask, (key_mask.stride(0), key_mask.stride(1)))


def _device(q: Tensor) -> Any:
    return torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext()


attention = register("triton_attention", forward, backward)
