"""Attention on CPU in tiles of plain torch ops: memory linear in the length, forward and backward.

For a row's scores x:  out = sum_j n_j v_j / (sum_j d_j + constant),  with n, d and constant as in normalizers.py:
n = relu(y) and d = |y| or n, for y = e^x - 1, in softpick and ReLU softmax; n = d = y, for y = e^x, in the others.
The sums of a row are multiplied by e^-c, and c stays 0 while its maximum m is within 60 of 0, so few tiles pay for a
running maximum. Scores of unseen keys are 0: e^0 - 1 adds 0 to both sums, and e^0 is multiplied by 0, because
exp(-inf) takes five times as long as exp(0).

In the shapes below: N pairs of a batch item and a kv head, G query heads per kv head, R queries, C keys, D head dim.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from softpick.normalizers import NORMALIZERS, Normalizer
from softpick.op import empty_lse, empty_output, register, sink_gradient

ROWS, COLUMNS = 128, 256  # queries and keys of a tile
SCORES = 2**19  # in a tile with all its heads: 2 MiB in float32, so it stays in cache from one op to the next

Part = tuple[slice, slice]  # slices of the batch and of the kv heads that are processed together


@dataclass(frozen=True)
class Tile:
    rows: slice
    columns: slice
    diagonal: int | None  # the causal mask hides column > row + diagonal, both counted from the tile's corner


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
    """The output, and what `_decode` reads: the log of each row's denominator.

    With e^x - 1 it is the denominator itself, or minus its log if that is above 20: the backward takes differences of
    nearly equal numbers, and e^log would have lost a digit.
    """
    kind = NORMALIZERS[normalizer]
    out, lse = empty_output(q), empty_lse(q)
    for part in _parts(q, k):
        keys, values = (_pack_keys(t, key_mask, part, lse.dtype) for t in (k, v))  # [N, Tk, D]
        keep = None if kind.minus_one else _pack_mask(key_mask, part, lse.dtype)
        q_part, out_part, lse_part = (_query_heads(t, k, part) for t in (q, out, lse[..., None]))
        s_part = None if sinks is None else _query_heads(_sink_rows(sinks, q), k, part)
        buffers = list(lse.new_empty(1 if kind.minus_one else 2, _buffer_size(q, k, part)))
        for tiles in _row_blocks(q, k, causal):
            queries = _pack_rows(q_part, tiles, lse.dtype)  # [N, GR, D]
            s = None if s_part is None else _pack_rows(s_part, tiles, lse.dtype)  # [N, GR, 1]
            out_rows, lse_rows = _forward_rows(queries, keys, values, s, keep, tiles, kind, scale, eps, buffers)
            _store_rows(out_part, tiles, out_rows)
            _store_rows(lse_part, tiles, lse_rows)
    return out, lse


def _forward_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor | None,
    keep: Tensor | None,
    tiles: list[Tile],
    kind: Normalizer,
    scale: float,
    eps: float,
    buffers: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Output [N, GR, D] and code of the denominator [N, GR, 1] of a block of rows q [N, GR, D]; s [N, GR, 1]."""
    weighted = torch.zeros_like(q)  # [N, GR, D]: sum of n v
    total, m, c = q.new_zeros(3, *q.shape[:2], 1).unbind()  # [N, GR, 1] each; total: sum of d
    if s is not None:
        m.copy_(s)
    elif not (kind.minus_one or kind.rectified):  # in these two, 0 is a lower bound of the maximum
        m.fill_(-math.inf)
    shifted = False  # whether any c is nonzero
    for tile in tiles:
        x = _matmul(q, k[:, tile.columns].mT, buffers[0], scale)  # [N, GR, C]
        _zero_future(x, tile)
        seen = None if kind.minus_one else _seen(tile, keep)
        torch.maximum(m, _row_max(x, None if kind.rectified else seen, buffers[-1]), out=m)
        low, high = (bound.item() for bound in m.aminmax())
        shifted = shifted or not (high <= 60 and low >= -60)  # NaN too: it must stay in its row
        if shifted:
            moved = torch.where((m > c + 60) | ((m < c - 60) & (m > -math.inf)), m, c)
            shrink = (
                (c - moved).clamp_max_(0).exp_()
            )  # c decreases only before the row has seen a key, so there is nothing to grow
            c, total, weighted = moved, total.mul_(shrink), weighted.mul_(shrink)
        if kind.minus_one:
            # e^x - 1 has a rounding error up to 6e-8 per key: negligible in a total above e^m - 1 >= sqrt(keys) / 32.
            precise = not low >= math.log1p(tile.columns.stop**0.5 / 32)
            y = _exp_minus_one(x, c if shifted else None, precise)
            if kind.absolute:
                total.sub_(y.sum(-1, keepdim=True))
            y.clamp_min_(0)
            total.add_(y.sum(-1, keepdim=True), alpha=2 if kind.absolute else 1)  # |y| = 2 relu(y) - y
        else:
            y = _exp(x, c if shifted else None, seen, kind, buffers[1])
            total.add_(y.sum(-1, keepdim=True))
        weighted.baddbmm_(y, v[:, tile.columns])
    if kind.minus_one:
        total.add_((m - c).exp_(), alpha=eps)
        log = total.log().add_(c)
        return weighted.div_(total), torch.where(log > 20, -log, total)
    if s is not None:
        total.add_((s - c).exp_())
    empty = total == 0
    return weighted.div_(total.masked_fill(empty, 1)), total.log().add_(c).masked_fill_(empty, 0)


def _decode(lse: Tensor, kind: Normalizer) -> tuple[Tensor, Tensor, bool]:
    """c and inverse [N, GR, 1] with 1 / denominator = inverse e^-c, and whether any c is nonzero."""
    if kind.minus_one:
        return lse.clamp_max(0).neg_(), torch.where(lse > 0, 1 / lse, 1), lse.min().item() < 0
    large = lse.abs() > 20
    c = torch.where(large, lse, 0)
    return c, (c - lse).exp_(), bool(large.any())


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
    """dq, dk, dv and dsinks; the scores are recomputed, tile by tile."""
    kind = NORMALIZERS[normalizer]
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    dsinks = sink_gradient(grad, out, sinks, None if sinks is None else sinks[:, None].to(lse.dtype) - lse)
    if q.numel() == 0:
        return dq, dk.zero_(), dv.zero_(), dsinks
    for part in _parts(q, k):
        keys, values = (_pack_keys(t, key_mask, part, lse.dtype) for t in (k, v))  # [N, Tk, D]
        keep = None if kind.minus_one else _pack_mask(key_mask, part, lse.dtype)
        dkeys, dvalues = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (keys, values))
        inputs = [_query_heads(t, k, part) for t in (q, grad, out, lse[..., None])]
        dq_part = _query_heads(dq, k, part)
        buffers = list(lse.new_empty(3, _buffer_size(q, k, part)))
        for tiles in _row_blocks(q, k, causal):
            rows = [_pack_rows(t, tiles, lse.dtype) for t in inputs]  # [N, GR, D] and lse [N, GR, 1]
            dq_rows = _backward_rows(rows, keys, values, dkeys, dvalues, keep, tiles, kind, scale, buffers)
            _store_rows(dq_part, tiles, dq_rows)
        if key_mask is not None:  # For the sums of e^x - 1, a masked key is a key of zeros, which has a gradient.
            dkeys.view(dk[part].shape).masked_fill_(~key_mask[part[0], None, :, None], 0)
        dk[part] = dkeys.view(dk[part].shape)
        dv[part] = dvalues.view(dv[part].shape)
    return dq, dk, dv, dsinks


def _backward_rows(
    rows: list[Tensor],
    k: Tensor,
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    keep: Tensor | None,
    tiles: list[Tile],
    kind: Normalizer,
    scale: float,
    buffers: list[Tensor],
) -> Tensor:
    """dq [N, GR, D] of a block of rows; its contribution is added to dk and dv [N, Tk, D].

    dv = p^T grad,  dq = dx k,  dk = dx^T q,  with p = n e^-lse, delta = grad . out, and dx by the kind:
    e^(x-lse) (step(x) grad v^T - sign(x) delta) for d = |y|, step(0) = 0 and sign(0) = +1;
    e^(x-lse) step(x) (grad v^T - delta) for d = relu(y);  p (grad v^T - delta) for n = d = e^x.
    e^-lse is multiplied into grad and delta, not into the scores; if it would be too small, c = lse is used instead.
    """
    q, grad, out, lse = rows
    c, inverse, large = _decode(lse, kind)
    delta = (grad * out).sum(-1, keepdim=True).mul_(inverse)
    grad = grad * inverse
    # If |y| is 0.2 or more on average, the rounding error of e^x - 1 is negligible.
    precise = kind.minus_one and not lse.min().item() >= 0.2 * tiles[-1].columns.stop
    dq = torch.zeros_like(q)
    for tile in tiles:
        k_tile, v_tile = k[:, tile.columns], v[:, tile.columns]  # [N, C, D]
        x = _matmul(q, k_tile.mT, buffers[0], scale)  # [N, GR, C]
        _zero_future(x, tile)
        dx = _matmul(grad, v_tile.mT, buffers[1])
        if kind.minus_one:
            y = _exp_minus_one(x, c if large else None, precise)
            torch.ops.aten.threshold_backward.grad_input(dx, y, 0, grad_input=dx)  # step(x) grad v^T
        else:
            y = _exp(x, c if large else None, _seen(tile, keep), kind, buffers[2])
        other = x if kind.rectified else _view(buffers[2], y.shape)  # y and dx are not needed
        if len(tiles) == 1:
            # With few keys, one may have all the weight (p near 1): sum p (grad v^T) rounds like its minuend.
            delta = torch.mul(y, dx, out=other).sum(-1, keepdim=True).mul_(inverse)
        dx.sub_(delta)
        if kind.minus_one:
            e = torch.add(y, (-c).exp_() if large else 1, out=other)  # e^(x-c)
            if kind.absolute:
                e.copysign_(y)  # sign(x) e^(x-c): if step(x) is 1, so is sign(x)
            else:
                torch.ops.aten.threshold_backward.grad_input(dx, y, 0, grad_input=dx)
            dx.mul_(e)
        else:
            dx.mul_(y)
        _zero_future(dx, tile)
        dq.baddbmm_(dx, k_tile, alpha=scale)
        dk[:, tile.columns].baddbmm_(dx.mT, q, alpha=scale)
        dv[:, tile.columns].baddbmm_((y.clamp_min_(0) if kind.minus_one else y).mT, grad)
    return dq


def _exp_minus_one(x: Tensor, c: Tensor | None, precise: bool) -> Tensor:
    """e^(x-c) - e^-c in place of x, never -0.0, whose sign would be -1; c [N, GR, 1], or None if all are 0."""
    if c is None:
        return x.expm1_().add_(0.0) if precise else x.exp_().sub_(1)  # expm1 takes twice the time of exp
    shifted = (x - c).exp_().sub_((-c).exp_())  # no cancellation: e^-c is negligible compared with the row's sum
    return torch.where(c > 0, shifted, x.expm1_().add_(0.0), out=x)


def _exp(x: Tensor, c: Tensor | None, seen: Tensor | None, kind: Normalizer, buffer: Tensor) -> Tensor:
    """e^(x-c), 0 for unseen keys: in place of x [N, GR, C], or in the buffer for `rectified`."""
    y = _view(buffer, x.shape) if kind.rectified else x
    if c is None:
        torch.exp(x, out=y)
    else:
        torch.sub(x, c, out=y).clamp_max_(80).exp_()  # unseen scores may be far above c, and inf times 0 would be NaN
    if kind.rectified:  # zero where x < 0
        torch.ops.aten.threshold_backward.grad_input(y, x, -torch.finfo(x.dtype).smallest_normal, grad_input=y)
    if seen is not None:
        _by_row(y, seen).mul_(seen)
    return y


def _row_max(x: Tensor, seen: Tensor | None, buffer: Tensor) -> Tensor:
    """[N, GR, 1], the largest score of a seen key in x [N, GR, C]; -inf if there is none."""
    if seen is None:
        return x.amax(-1, keepdim=True)
    masked = _view(buffer, x.shape)
    torch.add(_by_row(x, seen), seen.log(), out=_by_row(masked, seen))
    return masked.amax(-1, keepdim=True)


def _seen(tile: Tile, keep: Tensor | None) -> Tensor | None:
    """[N or 1, 1, R or 1, C], 1 for seen keys and 0 for others; None if all are seen. keep [N, 1, 1, Tk]."""
    seen = None if keep is None else keep[..., tile.columns]
    if tile.diagonal is None:
        return seen
    rows, columns = tile.rows.stop - tile.rows.start, tile.columns.stop - tile.columns.start
    past = torch.ones(1, 1, rows, columns).tril_(tile.diagonal)
    return past if seen is None else past * seen


def _by_row(x: Tensor, seen: Tensor) -> Tensor:
    """[N, G, R, C], a view of x [N, GR, C] that seen [N or 1, 1, R or 1, C] fits."""
    return x.view(x.shape[0], -1, seen.shape[2], x.shape[2])


def _zero_future(x: Tensor, tile: Tile) -> None:
    """Zero what the causal mask hides in x [N, GR, C]."""
    if tile.diagonal is not None:
        x.view(-1, tile.rows.stop - tile.rows.start, x.shape[2]).tril_(tile.diagonal)


def _matmul(a: Tensor, b: Tensor, buffer: Tensor, scale: float = 1.0) -> Tensor:
    """scale * a b, in the buffer's memory."""
    product = _view(buffer, (a.shape[0], a.shape[1], b.shape[2]))
    return product.baddbmm_(a, b, beta=0, alpha=scale)


def _view(buffer: Tensor, shape: tuple[int, ...]) -> Tensor:
    return buffer[: math.prod(shape)].view(shape)


# Cutting into tiles -------------------------------------------------------------------------------


def _tile_shape(q: Tensor, k: Tensor) -> tuple[int, int]:
    """(R, C): all rows up to ROWS if one tile holds everything, which saves ops.

    Otherwise fewer rows and more columns if the sequence is short, as the causal mask hides half of a row block's last
    R columns, or if many heads share a key.
    """
    (batch, heads, q_len, _), (_, kv_heads, k_len, _) = q.shape, k.shape
    rows = min(q_len, ROWS)
    if batch * heads * q_len * k_len > SCORES:
        rows = min(rows, max(ROWS // 4, q_len // 4), max(ROWS // 8, 8 * ROWS * kv_heads // heads))
    return rows, min(k_len, COLUMNS * ROWS // rows)


def _parts(q: Tensor, k: Tensor) -> Iterator[Part]:
    """Cut batch and kv heads into parts whose tiles have about SCORES scores; whole batch items if they fit."""
    (batch, heads, q_len, _), kv_heads = q.shape, k.shape[1]
    if batch == 0 or q_len == 0:
        return
    rows, columns = _tile_shape(q, k)
    pairs = max(1, SCORES // (heads // kv_heads * rows * columns))
    items, width = max(1, pairs // kv_heads), min(pairs, kv_heads)
    for item in range(0, batch, items):
        for head in range(0, kv_heads, width):
            yield slice(item, min(item + items, batch)), slice(head, min(head + width, kv_heads))


def _row_blocks(q: Tensor, k: Tensor, causal: bool) -> Iterator[list[Tile]]:
    """The tiles of each block of rows; those entirely in the future are left out."""
    (q_len, k_len), (height, width) = (q.shape[2], k.shape[2]), _tile_shape(q, k)
    for row in range(0, q_len, height):
        rows = slice(row, min(row + height, q_len))
        first, last = (row + k_len - q_len, rows.stop + k_len - q_len) if causal else (k_len, k_len)
        columns = (slice(column, min(column + width, last)) for column in range(0, last, width))
        # Row 0 sees up to column `first`; after it, the mask cuts through the tile.
        yield [Tile(rows, c, first - c.start if c.stop > first + 1 else None) for c in columns]


def _buffer_size(q: Tensor, k: Tensor, part: Part) -> int:
    items, heads = (s.stop - s.start for s in part)
    return items * heads * q.shape[1] // k.shape[1] * math.prod(_tile_shape(q, k))


def _pack_keys(t: Tensor, key_mask: Tensor | None, part: Part, dtype: torch.dtype) -> Tensor:
    """[N, Tk, D] of k or v [batch, kv_heads, Tk, D]: a view if mask, dtype and strides allow it."""
    t = t[part].to(dtype)
    if key_mask is not None:
        t = t.masked_fill(~key_mask[part[0], None, :, None], 0)
    return t.flatten(0, 1)


def _pack_mask(key_mask: Tensor | None, part: Part, dtype: torch.dtype) -> Tensor | None:
    """[N, 1, 1, Tk] of a mask [batch, Tk]: 1 for real keys, 0 for padding."""
    if key_mask is None:
        return None
    heads = part[1].stop - part[1].start
    return key_mask[part[0]].to(dtype).repeat_interleave(heads, 0)[:, None, None]


def _sink_rows(sinks: Tensor, q: Tensor) -> Tensor:
    """[batch, heads, Tq, 1], a view of sinks [heads]."""
    return sinks[:, None, None].expand(q.shape[0], -1, q.shape[2], 1)


def _query_heads(t: Tensor, k: Tensor, part: Part) -> Tensor:
    """[items, kv_heads, G, Tq, D], a view of t [batch, heads, Tq, D]."""
    return t.unflatten(1, (k.shape[1], -1))[part]


def _pack_rows(t: Tensor, tiles: list[Tile], dtype: torch.dtype) -> Tensor:
    """[N, GR, D] of t [items, kv_heads, G, Tq, D]."""
    return t[:, :, :, tiles[0].rows].to(dtype).flatten(0, 1).flatten(1, 2)


def _store_rows(t: Tensor, tiles: list[Tile], rows: Tensor) -> None:
    """The inverse of `_pack_rows`."""
    target = t[:, :, :, tiles[0].rows]
    target.copy_(rows.view(target.shape))


attention = register("cpu_attention", forward, backward)
