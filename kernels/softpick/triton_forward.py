"""Forward kernel: FlashAttention-2's loop for every normalizer; nothing of size q_len × k_len is stored.

Per row, with x = scale · s and a running maximum m, both in base 2, out = Σ_j num_j v_j / den. MINUS_ONE, ABSOLUTE and
RECTIFIED are the fields of `Normalizer`; with MINUS_ONE
    num_j = ReLU(2^{x_j-m} - 2^{-m})      den = Σ_j |2^{x_j-m} - 2^{-m}| + eps, or Σ_j num_j + eps without ABSOLUTE
m starts at 0, so 2^{-m} cannot overflow, and a score of 0 adds exactly 0 to both sums: unseen keys get that score.
Without MINUS_ONE
    num_j = 2^{x_j-m}      den = Σ_j num_j + 2^{s-m}, s the head's sink, or Σ_j num_j without SINKS
and the score of an unseen key is -inf; so is one below 0 with RECTIFIED.
"""

import triton
import triton.language as tl


@triton.jit
def forward_kernel(
    Q, K, V, SINKS, KEY_MASK, OUT, LSE,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd,
    stride_ob, stride_oh, stride_ot, stride_od,
    stride_mb, stride_mt,
    heads, group, q_len, k_len, scale_log2, eps,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, LONG: tl.constexpr,
    MINUS_ONE: tl.constexpr, ABSOLUTE: tl.constexpr, RECTIFIED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head against all the keys they see; SINKS [heads] or None."""
    blocks = tl.cdiv(q_len, BLOCK_M)
    # The last queries see the most keys: start with them, so the short ones fill the gaps.
    block = blocks - 1 - tl.program_id(0) % blocks
    batch = (tl.program_id(0) // blocks // heads).to(tl.int64)
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    Q += batch * stride_qb + head * stride_qh
    K += batch * stride_kb + head // group * stride_kh
    V += batch * stride_vb + head // group * stride_vh
    OUT += batch * stride_ob + head * stride_oh
    LSE += (batch * heads + head) * q_len
    KEY_MASK += batch * stride_mb

    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)  # [BM]
    dims = tl.arange(0, BLOCK_D)  # [BD]
    inside = (rows[:, None] < q_len) & (dims[None, :] < HEAD_DIM)  # [BM, BD]
    q = tl.load(Q + rows[:, None].to(tl.int64) * stride_qt + dims[None, :] * stride_qd, mask=inside, other=0.0)
    positions = rows + (k_len - q_len)  # [BM]: the last key that each query sees

    # Keys [0, full) are seen by every row of the block; [full, end) crosses the diagonal or the edge.
    if CAUSAL:
        full = tl.minimum(block * BLOCK_M + k_len - q_len + 1, k_len) // BLOCK_N * BLOCK_N
        end = tl.minimum((block + 1) * BLOCK_M + k_len - q_len, k_len)
    else:
        full = k_len // BLOCK_N * BLOCK_N
        end = k_len
    # A lower bound of the maximum. It is finite because a tile may have nothing to see, and -inf - -inf is NaN.
    m = tl.full([BLOCK_M], 0.0 if MINUS_ONE or RECTIFIED else -1e30, tl.float32)
    den = tl.zeros([BLOCK_M], tl.float32)
    if SINKS is not None:
        m = tl.maximum(m, tl.load(SINKS + head).to(tl.float32) * 1.4426950408889634)  # s in base 2
        den += 1.0  # 2^{s-m}
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc, den, m = attend(
        acc, den, m, q, K, V, KEY_MASK, positions, 0, full, k_len, scale_log2,
        stride_kt, stride_kd, stride_vt, stride_vd, stride_mt,
        HEAD_DIM, BLOCK_D, BLOCK_N, False, False, HAS_MASK, PRECISION,
        MINUS_ONE, ABSOLUTE, RECTIFIED,
    )  # fmt: skip
    acc, den, m = attend(
        acc, den, m, q, K, V, KEY_MASK, positions, full, end, k_len, scale_log2,
        stride_kt, stride_kd, stride_vt, stride_vd, stride_mt,
        HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, True, HAS_MASK, PRECISION,
        MINUS_ONE, ABSOLUTE, RECTIFIED,
    )  # fmt: skip
    if MINUS_ONE:
        den += eps
    else:
        # Nothing to attend to: out = 0 / 1, and LSE = 0.
        m = tl.where(den == 0, 0.0, m)
        den = tl.where(den == 0, 1.0, den)
    out = acc / den[:, None]
    tl.store(
        OUT + rows[:, None].to(tl.int64) * stride_ot + dims[None, :] * stride_od,
        out.to(OUT.dtype.element_ty),
        mask=inside,
    )
    tl.store(LSE + rows, m + tl.log2(den), mask=rows < q_len)


@triton.jit
def attend(
    acc, den, m, q, K, V, KEY_MASK, positions, start, end, k_len, scale_log2,
    stride_kt, stride_kd, stride_vt, stride_vd, stride_mt,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    DIAGONAL: tl.constexpr, EDGE: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
    MINUS_ONE: tl.constexpr, ABSOLUTE: tl.constexpr, RECTIFIED: tl.constexpr,
):  # fmt: skip
    """Add the keys [start, end) to acc [BM, BD], den [BM] and m [BM]; q [BM, BD]."""
    cols = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    first = tl.cast(start, tl.int64)
    k_pointers = K + first * stride_kt + dims[:, None] * stride_kd + cols[None, :] * stride_kt  # [BD, BN]
    v_pointers = V + first * stride_vt + cols[:, None] * stride_vt + dims[None, :] * stride_vd  # [BN, BD]
    for n in range(start, end, BLOCK_N):
        keys = n + cols  # [BN]
        keep = keep_keys(KEY_MASK, keys, k_len, stride_mt, EDGE, HAS_MASK)
        k = load_tile(k_pointers, (keys < k_len)[None, :], dims[:, None], HEAD_DIM, BLOCK_D, EDGE)
        s = tl.dot(q, k, input_precision=PRECISION)  # [BM, BN]
        # After k_len, k is zeros: the edge needs a mask only without MINUS_ONE.
        if HAS_MASK or (EDGE and not MINUS_ONE):
            s = tl.where(keep[None, :], s, 0.0 if MINUS_ONE else float("-inf"))
        if DIAGONAL:
            s = tl.where(keys[None, :] <= positions[:, None], s, 0.0 if MINUS_ONE else float("-inf"))
        if RECTIFIED:
            s = tl.where(s < 0, float("-inf"), s)
        # The scale is positive, so it can be applied after the max: one FMA computes the exponent.
        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
        p = tl.exp2(s * scale_log2 - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        if MINUS_ONE:
            p -= tl.exp2(-m_new)[:, None]
        if ABSOLUTE:
            den = den * alpha + tl.sum(tl.abs(p), 1)
        num = tl.maximum(p, 0.0) if MINUS_ONE else p
        if not ABSOLUTE:
            den = den * alpha + tl.sum(num, 1)
        v = load_tile(v_pointers, keep[:, None], dims[None, :], HEAD_DIM, BLOCK_D, EDGE or HAS_MASK)
        acc = tl.dot(num.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
        k_pointers += BLOCK_N * stride_kt
        v_pointers += BLOCK_N * stride_vt
    return acc, den, m


@triton.jit
def keep_keys(KEY_MASK, keys, k_len, stride_mt, EDGE: tl.constexpr, HAS_MASK: tl.constexpr):
    """[BN] True if a key exists and is not padding."""
    if not HAS_MASK:
        return keys < k_len
    if EDGE:
        return tl.load(KEY_MASK + keys * stride_mt, mask=keys < k_len, other=0) != 0
    return tl.load(KEY_MASK + keys * stride_mt) != 0


@triton.jit
def load_tile(pointers, keep, dims, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """A tile with zeros for rows that are not kept and for padding dims; without a mask if there can be none."""
    if MASKED and HEAD_DIM < BLOCK_D:
        return tl.load(pointers, mask=keep & (dims < HEAD_DIM), other=0.0)
    if MASKED:
        return tl.load(pointers, mask=keep, other=0.0)
    if HEAD_DIM < BLOCK_D:
        return tl.load(pointers, mask=dims < HEAD_DIM, other=0.0)
    return tl.load(pointers)
