"""Make a forward and a backward function into one torch op that autograd, torch.compile and opcheck accept."""

from collections.abc import Callable

import torch
from torch import Tensor

# (q, k, v, sinks, key_mask, normalizer, scale, causal, eps) -> out, lse
Forward = Callable[
    [Tensor, Tensor, Tensor, Tensor | None, Tensor | None, str, float, bool, float], tuple[Tensor, Tensor]
]
# (grad, q, k, v, sinks, key_mask, out, lse, normalizer, scale, causal) -> dq, dk, dv, dsinks (empty without sinks)
Backward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


def empty_output(q: Tensor) -> Tensor:
    """An output [batch, heads, q_len, dim] laid out as [batch, q_len, heads, dim], which is what models read next."""
    batch, heads, q_len, dim = q.shape
    return q.new_empty(batch, q_len, heads, dim).transpose(1, 2)


def empty_lse(q: Tensor) -> Tensor:
    """One float32 per query row, kept for the backward: the log of its denominator."""
    return q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def sink_gradient(grad: Tensor, out: Tensor, sinks: Tensor | None, log_share: Tensor | None) -> Tensor:
    """dsinks [heads] = - sum over batch and queries of (grad . out) e^(s - lse); log_share is s - lse, natural."""
    if sinks is None or log_share is None:
        return grad.new_empty(0)
    delta = (grad.to(log_share.dtype) * out).sum(-1)  # [batch, heads, q_len]
    return -(delta * log_share.exp()).sum((0, 2)).to(sinks.dtype)


def register(name: str, forward: Forward, backward: Backward) -> Forward:
    """Register `softpick::<name>` and its backward; return the differentiable op, which gives (out, lse)."""

    @torch.library.custom_op(f"softpick::{name}", mutates_args=())
    def op(
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
        return forward(q, k, v, sinks, key_mask, normalizer, scale, causal, eps)

    @torch.library.custom_op(f"softpick::{name}_backward", mutates_args=())
    def op_backward(
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
        return backward(grad, q, k, v, sinks, key_mask, out, lse, normalizer, scale, causal)

    @op.register_fake
    def _(q, k, v, sinks, key_mask, normalizer, scale, causal, eps):  # type: ignore[no-untyped-def]
        return empty_output(q), empty_lse(q)

    @op_backward.register_fake
    def _(grad, q, k, v, sinks, key_mask, out, lse, normalizer, scale, causal):  # type: ignore[no-untyped-def]
        dsinks = grad.new_empty(0) if sinks is None else torch.empty_like(sinks)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsinks

    def save(ctx, inputs, output):  # type: ignore[no-untyped-def]
        q, k, v, sinks, key_mask, *ctx.settings, _ = inputs
        ctx.save_for_backward(q, k, v, sinks, key_mask, *output)

    def differentiate(ctx, grad, _grad_lse):  # type: ignore[no-untyped-def]
        sinks = ctx.saved_tensors[3]
        dq, dk, dv, dsinks = op_backward(grad, *ctx.saved_tensors, *ctx.settings)
        return dq, dk, dv, None if sinks is None else dsinks, None, None, None, None, None

    op.register_autograd(differentiate, setup_context=save)
    return op
