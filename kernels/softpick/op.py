"""A forward and a backward function made into one torch op that autograd, torch.compile and opcheck accept."""

from collections.abc import Callable

import torch
from torch import Tensor

# (q, k, v, key_mask, scale, causal, eps) -> out, lse
Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, bool, float], tuple[Tensor, Tensor]]
# (grad, q, k, v, key_mask, out, lse, scale, causal) -> dq, dk, dv
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def empty_output(q: Tensor) -> Tensor:
    """An output [batch, heads, q_len, dim] laid out as [batch, q_len, heads, dim], which is what models read next."""
    batch, heads, q_len, dim = q.shape
    return q.new_empty(batch, q_len, heads, dim).transpose(1, 2)


def empty_lse(q: Tensor) -> Tensor:
    """One float32 per query row, kept for the backward: the log of its denominator."""
    return q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def register(name: str, forward: Forward, backward: Backward) -> Forward:
    """Register `softpick::<name>` and its backward; the result is the differentiable op, giving (out, lse)."""

    @torch.library.custom_op(f"softpick::{name}", mutates_args=())
    def op(
        q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float, causal: bool, eps: float
    ) -> tuple[Tensor, Tensor]:
        return forward(q, k, v, key_mask, scale, causal, eps)

    @torch.library.custom_op(f"softpick::{name}_backward", mutates_args=())
    def op_backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        out: Tensor,
        lse: Tensor,
        scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return backward(grad, q, k, v, key_mask, out, lse, scale, causal)

    @op.register_fake
    def _(q, k, v, key_mask, scale, causal, eps):  # type: ignore[no-untyped-def]
        return empty_output(q), empty_lse(q)

    @op_backward.register_fake
    def _(grad, q, k, v, key_mask, out, lse, scale, causal):  # type: ignore[no-untyped-def]
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def save(ctx, inputs, output):  # type: ignore[no-untyped-def]
        q, k, v, key_mask, ctx.scale, ctx.causal, _ = inputs
        ctx.save_for_backward(q, k, v, key_mask, *output)

    def differentiate(ctx, grad, _grad_lse):  # type: ignore[no-untyped-def]
        grads = op_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.causal)
        return *grads, None, None, None, None

    op.register_autograd(differentiate, setup_context=save)
    return op
