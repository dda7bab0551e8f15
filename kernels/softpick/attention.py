"""The entry point: checks the arguments, then calls the backend for the device."""

import math
from importlib.util import find_spec

import torch
from torch import Tensor

from softpick import reference, sdpa
from softpick.normalizers import NORMALIZERS, check_normalizer
from softpick.tiles import MAX_HEAD_DIM, has_tiles

BACKENDS = ("triton", "cpu", "reference", "sdpa")
HAS_TRITON = find_spec("triton") is not None
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def softpick_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """Attention with softpick instead of softmax: softpick(q kᵀ · scale) v, as [batch, heads, q_len, dim].

    q [batch, heads, q_len, dim]; k, v [batch, kv_heads, k_len, dim]; the queries are the last q_len positions.
    key_mask [batch, k_len] bool, False = padding. backend: "triton", "cpu", "reference", or None to choose by device.
    """
    return normalized_attention(
        q, k, v, normalizer="softpick", scale=scale, causal=causal, key_mask=key_mask, eps=eps, backend=backend
    )


def normalized_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    normalizer: str,
    sinks: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """Attention with one of NORMALIZERS: normalizer(q kᵀ · scale) v, as [batch, heads, q_len, dim].

    Shapes and masks as in `softpick_attention`; sinks [heads] are the logits s of "sink_softmax", and have gradients.
    backend: the same, or "sdpa", torch's softmax; None chooses "sdpa" for "softmax".
    """
    check_normalizer(normalizer)
    _check_shapes(q, k, v)
    _check_key_mask(key_mask, k)
    _check_sinks(sinks, q, normalizer)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale}; it must be a positive, finite number.")
    if not 0 < eps < math.inf:
        raise ValueError(f"eps is {eps}; it must be a positive, finite number (the paper's is 1e-6).")
    backend = choose_backend(q, backend, normalizer)
    if backend == "sdpa":
        return sdpa.attention(q, k, v, key_mask, scale, causal)
    if backend == "reference":
        return reference.attention(q, k, v, sinks, key_mask, normalizer, scale, causal, eps)
    if backend == "cpu":
        from softpick import cpu as module
    else:
        from softpick import triton_op as module  # type: ignore[no-redef]
    return module.attention(q, k, v, sinks, key_mask, normalizer, scale, causal, eps)[0]


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    normalizer: str,
    sinks: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """The weights of the values in `normalized_attention`: [batch, heads, q_len, k_len], in float32 or float64.

    Computed by the reference, which holds the whole matrix: to save memory, pass some of the queries, with the keys up
    to the last of them.
    """
    check_normalizer(normalizer)
    _check_shapes(q, k, k)
    _check_key_mask(key_mask, k)
    _check_sinks(sinks, q, normalizer)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    return reference.weights(q, k, sinks, key_mask, normalizer, scale, causal, eps)


def choose_backend(q: Tensor, backend: str | None = None, normalizer: str = "softpick") -> str:
    """The backend for a tensor's device and dtype, or the requested one if this machine can run it."""
    if backend is None:
        if normalizer == "softmax":
            return "sdpa"
        if q.device.type == "cpu":
            return "cpu"
        fits = q.is_cuda and q.dtype != torch.float64 and q.shape[-1] <= MAX_HEAD_DIM and HAS_TRITON
        return "triton" if fits and has_tiles(q.device) else "reference"
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be None or one of {', '.join(BACKENDS)}.")
    if backend == "sdpa" and normalizer != "softmax":
        raise ValueError(f"backend 'sdpa' computes softmax only; normalizer is {normalizer!r}.")
    if backend == "cpu" and q.device.type != "cpu":
        raise ValueError(f"backend 'cpu' needs CPU tensors; q is on {q.device}. Use backend=None to choose by device.")
    if backend == "triton":
        _check_triton(q)
    return backend


def _check_triton(q: Tensor) -> None:
    if not HAS_TRITON:
        raise ValueError("backend 'triton' needs the triton package, which is not installed; use backend='reference'.")
    if q.dtype == torch.float64:
        raise ValueError("backend 'triton' takes float16, bfloat16 or float32; q is float64: use backend='reference'.")
    if q.shape[-1] > MAX_HEAD_DIM:
        raise ValueError(
            f"backend 'triton' takes head dims up to {MAX_HEAD_DIM}; q has {q.shape[-1]}: use backend='reference'."
        )
    if not q.is_cuda and not (q.device.type == "cpu" and _interpreted()):
        raise ValueError(
            f"backend 'triton' needs CUDA tensors; q is on {q.device}. Use backend='cpu', "
            "or set TRITON_INTERPRET=1 before Python starts to run the kernels in Triton's interpreter."
        )


@torch.compiler.assume_constant_result
def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be [batch, heads, length, dim].")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}; it must be float16, bfloat16, float32 or float64.")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device} and q is {q.dtype} on {q.device}; they must be the same."
            )
    if k.shape != v.shape:
        raise ValueError(f"k has shape {list(k.shape)} and v {list(v.shape)}; they must be the same.")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q has batch {q.shape[0]} and k {k.shape[0]}; they must be the same.")
    if q.shape[3] != k.shape[3] or q.shape[3] == 0:
        raise ValueError(f"q has head dim {q.shape[3]} and k {k.shape[3]}; they must be the same, and not 0.")
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} heads and k has {k.shape[1]}; k's must divide q's, and both must be above 0."
        )
    if q.shape[2] > k.shape[2]:
        raise ValueError(
            f"q_len is {q.shape[2]} and k_len is {k.shape[2]}; q_len must be at most k_len: "
            "the queries are the last q_len of the k_len positions."
        )


def _check_key_mask(key_mask: Tensor | None, k: Tensor) -> None:
    if key_mask is None:
        return
    expected = [k.shape[0], k.shape[2]]
    if list(key_mask.shape) != expected or key_mask.dtype != torch.bool:
        raise ValueError(
            f"key_mask has shape {list(key_mask.shape)} and dtype {key_mask.dtype}; "
            f"it must be bool of shape [batch, k_len] = {expected}, False for padding keys."
        )
    if key_mask.device != k.device:
        raise ValueError(f"key_mask is on {key_mask.device} and k on {k.device}; they must be on the same device.")


def _check_sinks(sinks: Tensor | None, q: Tensor, normalizer: str) -> None:
    if (sinks is not None) != NORMALIZERS[normalizer].sinks:
        raise ValueError(
            f"normalizer is {normalizer!r} and sinks is {'None' if sinks is None else 'given'}; "
            "'sink_softmax' needs sinks [heads], and no other normalizer takes them."
        )
    if sinks is None:
        return
    if list(sinks.shape) != [q.shape[1]] or sinks.dtype not in DTYPES or sinks.device != q.device:
        raise ValueError(
            f"sinks has shape {list(sinks.shape)} and dtype {sinks.dtype} on {sinks.device}; "
            f"it must be floating-point of shape [heads] = [{q.shape[1]}] on {q.device}."
        )
