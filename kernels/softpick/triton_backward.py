"""Backward kernels: scores are recomputed tile by tile from q, k and the forward's LSE = m + log2(den).

With e_ij = 2^{x_ij - LSE_i}, dP = dO Vᵀ and delta_i = dO_i · O_i:
    p_ij  = ReLU(e_ij - 2^{-LSE_i})                             with MINUS_ONE
    ds_ij = e_ij (step(x_ij) dP_ij - sign(x_ij) delta_i)        with ABSOLUTE; step(0) = 0, sign(0) = +1
    ds_ij = e_ij step(x_ij) (dP_ij - delta_i)                   without
    p_ij  = e_ij, ds_ij = p_ij (dP_ij - delta_i)                without MINUS_ONE; e_ij = 0 for keys that are not seen
    dV = pᵀ dO      dK = scale · dsᵀ Q      dQ = scale · ds K
With MINUS_ONE e is at most about 2 while LSE >= 0, but reaches 1/eps in a row whose scores are all near 0, which
float16 cannot hold: such a row's ds is multiplied by 2^shift, shift = min(LSE, 0), and the results are multiplied by
2^-shift. Without MINUS_ONE e is at most 1.
Padded queries are loaded as zeros, and so are padded keys for dQ, so their scores are multiplied by zero.
Two kernels, one for a block of keys and one for a block of queries, so no atomic additions are needed.
"""

import triton
import triton.language as tl

from softpick.triton_forward import keep_keys, load_tile


@triton.jit
def delta_kernel(
    OUT, GRAD, DELTA,
    stride_ob, stride_oh, stride_ot, stride_od,
    stride_gb, stride_gh, stride_gt, stride_gd,
    heads, q_len,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta [batch, heads, q_len]: the dot product of each row of the output with its gradient."""
    blocks = tl.cdiv(q_len, BLOCK_M)
    row = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)  # [BM]
    batch = (tl.program_id(0) // blocks // heads).to(tl.int64)
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    OUT += batch * stride_ob + head * stride_oh
    GRAD += batch * stride_gb + head * stride_gh
    DELTA += (batch * heads + head) * q_len
    dims = tl.arange(0, BLOCK_D)
    rows = row[:, None].to(tl.int64)
    inside = (row[:, None] < q_len) & (dims[None, :] < HEAD_DIM)  # [BM, BD]
    out = tl.load(OUT + rows * stride_ot + dims[None, :] * stride_od, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(GRAD + rows * stride_gt + dims[None, :] * stride_gd, mask=inside, other=0.0).to(tl.float32)
    tl.store(DELTA + row, tl.sum(out * grad, 1), mask=row < q_len)


@triton.jit
def half_shift(lse):
    """min(LSE, 0) / 2 as a whole number: for dK, one half goes to ds and the other to q, where it is exact."""
    return tl.floor(tl.minimum(lse, 0.0) * 0.5)


@triton.jit
def score_gradient(e, s, dp, delta, MINUS_ONE: tl.constexpr, ABSOLUTE: tl.constexpr):
    """ds of a tile from e, s, dP [.., ..] and delta that broadcasts to them."""
    if ABSOLUTE:
        return e * (tl.where(s > 0, dp, 0.0) - tl.where(s >= 0, delta, -delta))
    if MINUS_ONE:
        return tl.where(s > 0, e * (dp - delta), 0.0)
    return e * (dp - delta)


@triton.jit
def key_value_kernel(
    Q, K, V, KEY_MASK, GRAD, LSE, DELTA, DK, DV,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd,
    stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dkb, stride_dkh, stride_dkt, stride_dkd,
    stride_dvb, stride_dvh, stride_dvt, stride_dvd,
    stride_mb, stride_mt,
    heads, group, q_len, k_len, scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, LONG: tl.constexpr,
    MINUS_ONE: tl.constexpr, ABSOLUTE: tl.constexpr, RECTIFIED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: one query head's contribution to dK and dV of BLOCK_N keys, over all queries that see them."""
    blocks = tl.cdiv(k_len, BLOCK_N)
    block = tl.program_id(0) % blocks  # the first keys are seen by the most queries: they come first
    batch = (tl.program_id(0) // blocks // heads).to(tl.int64)
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    Q += batch * stride_qb + head * stride_qh
    K += batch * stride_kb + head // group * stride_kh
    V += batch * stride_vb + head // group * stride_vh
    GRAD += batch * stride_gb + head * stride_gh
    DK += batch * stride_dkb + head * stride_dkh
    DV += batch * stride_dvb + head * stride_dvh
    LSE += (batch * heads + head) * q_len
    DELTA += (batch * heads + head) * q_len

    keys = block * BLOCK_N + tl.arange(0, BLOCK_N)  # [BN]
    dims = tl.arange(0, BLOCK_D)  # [BD]
    key_rows = keys[:, None].to(tl.int64)
    inside = (keys[:, None] < k_len) & (dims[None, :] < HEAD_DIM)  # [BN, BD]
    k = tl.load(K + key_rows * stride_kt + dims[None, :] * stride_kd, mask=inside, other=0.0)
    v = tl.load(V + key_rows * stride_vt + dims[None, :] * stride_vd, mask=inside, other=0.0)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)

    # Queries [first, full) cross the diagonal, [full, q_len) see all keys of the block.
    offset = k_len - q_len
    first = 0
    full = 0
    if CAUSAL:
        first = tl.maximum(block * BLOCK_N - offset, 0) // BLOCK_M * BLOCK_M
        full = tl.cdiv(tl.maximum((block + 1) * BLOCK_N - 1 - offset, 0), BLOCK_M) * BLOCK_M
        full = tl.minimum(full, q_len)
        dk, dv = add_queries(
            dk, dv, k, v, Q, GRAD, LSE, DELTA, keys, offset, first, full, q_len, scale_log2,
            stride_qt, stride_qd, stride_gt, stride_gd, HEAD_DIM, BLOCK_D, BLOCK_M, True, PRECISION,
            MINUS_ONE, ABSOLUTE, RECTIFIED,
        )  # fmt: skip
    dk, dv = add_queries(
        dk, dv, k, v, Q, GRAD, LSE, DELTA, keys, offset, full, q_len, q_len, scale_log2,
        stride_qt, stride_qd, stride_gt, stride_gd, HEAD_DIM, BLOCK_D, BLOCK_M, False, PRECISION,
        MINUS_ONE, ABSOLUTE, RECTIFIED,
    )  # fmt: skip
    if HAS_MASK:
        # Each key has its own row of dk and dv, so padding needs no mask before this one.
        keep = tl.load(KEY_MASK + batch * stride_mb + keys * stride_mt, mask=keys < k_len, other=0) != 0
        dk = tl.where(keep[:, None], dk, 0.0)
        dv = tl.where(keep[:, None], dv, 0.0)
    dk *= scale
    tl.store(DK + key_rows * stride_dkt + dims[None, :] * stride_dkd, dk.to(DK.dtype.element_ty), mask=inside)
    tl.store(DV + key_rows * stride_dvt + dims[None, :] * stride_dvd, dv.to(DV.dtype.element_ty), mask=inside)


@triton.jit
def add_queries(
    dk, dv, k, v, Q, GRAD, LSE, DELTA, keys, offset, start, end, q_len, scale_log2,
    stride_qt, stride_qd, stride_gt, stride_gd,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    DIAGONAL: tl.constexpr, PRECISION: tl.constexpr,
    MINUS_ONE: tl.constexpr, ABSOLUTE: tl.constexpr, RECTIFIED: tl.constexpr,
):  # fmt: skip
    """Add the queries [start, end) to dk, dv [BN, BD]; k, v [BN, BD]. Tiles are transposed: [BN, BM]."""
    cols = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    first = tl.cast(start, tl.int64)
    q_pointers = Q + first * stride_qt + cols[:, None] * stride_qt + dims[None, :] * stride_qd  # [BM, BD]
    g_pointers = GRAD + first * stride_gt + cols[:, None] * stride_gt + dims[None, :] * stride_gd  # [BM, BD]
    for i in range(start, end, BLOCK_M):
        rows = i + cols  # [BM]
        keep = rows < q_len
        # Rows beyond q_len are zeros throughout: q and dO, and so s, dP, delta and ds.
        q = load_tile(q_pointers, keep[:, None], dims[None, :], HEAD_DIM, BLOCK_D, True)
        grad = load_tile(g_pointers, keep[:, None], dims[None, :], HEAD_DIM, BLOCK_D, True)
        lse = tl.load(LSE + rows, mask=keep, other=0.0)
        delta = tl.load(DELTA + rows, mask=keep, other=0.0)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BN, BM]
        e = tl.exp2(s * scale_log2 - lse[None, :])
        if DIAGONAL:
            # Unseen pairs get e = 0, and with it p = 0 and ds = 0.
            e = tl.where(keys[:, None] <= rows[None, :] + offset, e, 0.0)
        if RECTIFIED:
            e = tl.where(s < 0, 0.0, e)
        p = tl.maximum(e - tl.exp2(-lse)[None, :], 0.0) if MINUS_ONE else e
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)  # [BN, BM]
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
        ds = score_gradient(e, s, dp, delta[None, :], MINUS_ONE, ABSOLUTE)
        if MINUS_ONE and q.dtype == tl.float16:
            shift = half_shift(lse)
            ds *= tl.exp2(shift)[None, :]
            q = (q * tl.exp2(-shift)[:, None]).to(tl.float16)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        q_pointers += BLOCK_M * stride_qt
        g_pointers += BLOCK_M * stride_gt
    return dk, dv


@triton.jit
def query_kernel(
    Q, K, V, KEY_MASK, GRAD, LSE, DELTA, DQ,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd,
    stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd,
    stride_mb, stride_mt,
    heads, group, q_len, k_len, scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, LONG: tl.constexpr,
    MINUS_ONE: tl.constexpr, ABSOLUTE: tl.constexpr, RECTIFIED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: dQ of BLOCK_M queries of one head, over all the keys they see."""
    blocks = tl.cdiv(q_len, BLOCK_M)
    block = blocks - 1 - tl.program_id(0) % blocks
    batch = (tl.program_id(0) // blocks // heads).to(tl.int64)
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    Q += batch * stride_qb + head * stride_qh
    K += batch * stride_kb + head // group * stride_kh
    V += batch * stride_vb + head // group * stride_vh
    GRAD += batch * stride_gb + head * stride_gh
    DQ += batch * stride_dqb + head * stride_dqh
    KEY_MASK += batch * stride_mb
    stat = (batch * heads + head) * q_len

    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)  # [BM]
    dims = tl.arange(0, BLOCK_D)  # [BD]
    query_rows = rows[:, None].to(tl.int64)
    inside = (rows[:, None] < q_len) & (dims[None, :] < HEAD_DIM)  # [BM, BD]
    q = tl.load(Q + query_rows * stride_qt + dims[None, :] * stride_qd, mask=inside, other=0.0)
    grad = tl.load(GRAD + query_rows * stride_gt + dims[None, :] * stride_gd, mask=inside, other=0.0)
    lse = tl.load(LSE + stat + rows, mask=rows < q_len, other=0.0)
    delta = tl.load(DELTA + stat + rows, mask=rows < q_len, other=0.0)
    positions = rows + (k_len - q_len)  # [BM]: the last key that each query sees
    if CAUSAL:
        full = tl.minimum(block * BLOCK_M + k_len - q_len + 1, k_len) // BLOCK_N * BLOCK_N
        end = tl.minimum((block + 1) * BLOCK_M + k_len - q_len, k_len)
    else:
        full = k_len // BLOCK_N * BLOCK_N
        end = k_len
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dq = add_keys(
        dq, q, grad, lse, delta, K, V, KEY_MASK, positions, 0, full, k_len, scale_log2,
        stride_kt, stride_kd, stride_vt, stride_vd, stride_mt,
        HEAD_DIM, BLOCK_D, BLOCK_N, False, False, HAS_MASK, PRECISION,
        MINUS_ONE, ABSOLUTE, RECTIFIED,
    )  # fmt: skip
    dq = add_keys(
        dq, q, grad, lse, delta, K, V, KEY_MASK, positions, full, end, k_len, scale_log2,
        stride_kt, stride_kd, stride_vt, stride_vd, stride_mt,
        HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, True, HAS_MASK, PRECISION,
        MINUS_ONE, ABSOLUTE, RECTIFIED,
    )  # fmt: skip
    if MINUS_ONE:
        dq *= scale * tl.exp2(-tl.minimum(lse, 0.0))[:, None]
    else:
        dq *= scale
    tl.store(DQ + query_rows * stride_dqt + dims[None, :] * stride_dqd, dq.to(DQ.dtype.element_ty), mask=inside)


@triton.jit
def add_keys(
    dq, q, grad, lse, delta, K, V, KEY_MASK, positions, start, end, k_len, scale_log2,
    stride_kt, stride_kd, stride_vt, stride_vd, stride_mt,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    DIAGONAL: tl.constexpr, EDGE: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
    MINUS_ONE: tl.constexpr, ABSOLUTE: tl.constexpr, RECTIFIED: tl.constexpr,
):  # fmt: skip
    """Add the keys [start, end) to dq [BM, BD]; q, grad [BM, BD], lse, delta [BM]."""
    cols = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    first = tl.cast(start, tl.int64)
    k_pointers = K + first * stride_kt + cols[:, None] * stride_kt + dims[None, :] * stride_kd  # [BN, BD]
    v_pointers = V + first * stride_vt + cols[:, None] * stride_vt + dims[None, :] * stride_vd  # [BN, BD]
    for n in range(start, end, BLOCK_N):
        keys = n + cols  # [BN]
        keep = keep_keys(KEY_MASK, keys, k_len, stride_mt, EDGE, HAS_MASK)
        k = load_tile(k_pointers, keep[:, None], dims[None, :], HEAD_DIM, BLOCK_D, EDGE or HAS_MASK)
        if MINUS_ONE:  # Padding has s = 0, where dP is not used: its values need no mask.
            v = load_tile(v_pointers, (keys < k_len)[:, None], dims[None, :], HEAD_DIM, BLOCK_D, EDGE)
        else:
            v = load_tile(v_pointers, keep[:, None], dims[None, :], HEAD_DIM, BLOCK_D, EDGE or HAS_MASK)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BM, BN]
        e = tl.exp2(s * scale_log2 - (tl.maximum(lse, 0.0) if MINUS_ONE else lse)[:, None])  # times 2^shift
        if not MINUS_ONE and (EDGE or HAS_MASK):
            e = tl.where(keep[None, :], e, 0.0)
        if RECTIFIED:
            e = tl.where(s < 0, 0.0, e)
        if DIAGONAL:
            e = tl.where(keys[None, :] <= positions[:, None], e, 0.0)
        dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)  # [BM, BN]
        ds = score_gradient(e, s, dp, delta[:, None], MINUS_ONE, ABSOLUTE)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        k_pointers += BLOCK_N * stride_kt
        v_pointers += BLOCK_N * stride_vt
    return dq
