"""The Triton kernels compared with float64: compiled if there is a GPU, otherwise in Triton's interpreter."""

import itertools
from dataclasses import astuple, replace

import interpreter
import pytest
import torch
from cases import (
    DECODING,
    EMPTY,
    EXTREME_SHAPES,
    EXTREMES,
    SHAPES,
    Case,
    check,
    check_extreme,
    expected,
    in_turn,
    largest_error,
    make_inputs,
    on_device,
    relative_error,
    run,
    tiny_scores,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from softpick import softpick_attention, triton_op
from softpick.tiles import TILES, TileConfig, tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALVES = [Case(1, 2, 1, 300, 300, 64), Case(2, 2, 2, 17, 128, 128, padding="left"), Case(1, 2, 2, 128, 128, 96)]


def properties(case):
    return *astuple(case), (case.q_len, case.k_len)


# Triton's interpreter takes about a second for what a GPU does at once: only some cases are in `make test`.
@pytest.mark.parametrize("case", in_turn([*SHAPES, *DECODING, *EMPTY], 16, properties), ids=str)
def test_float32_agrees_with_float64(case):
    check(make_inputs(case, device=DEVICE), "triton")


@pytest.mark.parametrize(
    ("dtype", "case"),
    in_turn(
        itertools.product(
            [torch.float16, torch.bfloat16],
            [*HALVES, *DECODING[:2], Case(1, 2, 2, 1, 1, 32), Case(1, 2, 2, 17, 17, 32)],
        ),
        7,
    ),
    ids=str,
)
def test_half_precision_agrees_with_float64(case, dtype, monkeypatch):
    interpreter.mend_bfloat16(monkeypatch)
    check(make_inputs(case, dtype, device=DEVICE), "triton")


@pytest.mark.parametrize(("name", "case"), in_turn(itertools.product(EXTREMES, EXTREME_SHAPES), 9), ids=str)
def test_extreme_scores_are_finite_and_right(name, case):
    check_extreme(name, case, torch.float32, "triton", device=DEVICE)


def test_tiny_scores_are_finite_and_as_right_as_a_difference_of_exponentials():
    inputs = on_device(tiny_scores(Case(1, 2, 2, 60, 60, 32), torch.float32), DEVICE)
    actual, wanted = run(inputs, "triton"), expected(inputs)
    assert all(getattr(actual, name).isfinite().all() for name in ("out", "dq", "dk", "dv"))
    # e^x is known to 2^-24 near 1, so each weight |e^x - 1| / (sum + 1e-6) is off by at most 2^-23 / 1e-6 = 0.12.
    assert largest_error(actual.out, wanted.out) <= 0.12 * inputs.v.abs().max() * 2


def test_float16_gradients_of_rows_with_tiny_sums_are_right():
    # e^x / sum reaches 1e6 if all scores are near 0: too large for float16, although the gradients fit.
    inputs = make_inputs(Case(1, 2, 2, 60, 60, 64), torch.float16, device=DEVICE)
    inputs = replace(inputs, q=(inputs.q.float() * 1e-4).half())
    actual, wanted = run(inputs, "triton"), expected(inputs)
    for name in ("out", "dq", "dk", "dv"):
        assert relative_error(getattr(actual, name), getattr(wanted, name)) <= 4e-3, name


SHAPES_SHIPPED = sorted(
    {(kernel, t.block_m, t.block_n) for (kernel, *_), by in TILES.items() for ts in by.values() for t in ts}
)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs its own tiles")
@pytest.mark.parametrize(("kernel", "rows", "columns"), in_turn(SHAPES_SHIPPED, 12))
def test_every_shipped_tile_shape_is_right(kernel, rows, columns, monkeypatch):
    def shipped(name, *options):
        return [TileConfig(rows, columns, 4, 1)] if name == kernel else tiles(name, *options)

    triton_op.autotuned.cache_clear()
    monkeypatch.setattr(triton_op, "tiles", shipped)
    q_len = 10 if kernel == "decode" else 70
    check(make_inputs(Case(1, 2, 1, q_len, 145, 32, padding="left")), "triton")
    triton_op.autotuned.cache_clear()


@pytest.mark.parametrize("dim", [160, 256])
def test_wide_heads(dim):
    check(make_inputs(Case(1, 1, 1, 40, 70, dim), device=DEVICE), "triton")


@pytest.mark.slow
@given(
    batch=st.integers(1, 2),
    group=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    k_len=st.integers(1, 80),
    prefix=st.integers(0, 80),
    dim=st.integers(8, 80),
    causal=st.booleans(),
    padding=st.sampled_from(["none", "left", "right"]),
)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_random_shapes_agree_with_float64(batch, group, kv_heads, k_len, prefix, dim, causal, padding):
    case = Case(batch, group * kv_heads, kv_heads, max(1, k_len - prefix), k_len, dim, causal, padding)
    check(make_inputs(case, device=DEVICE), "triton", gradient_error=5e-6)


def test_any_strides_are_taken_without_a_copy():
    case = Case(2, 2, 2, 40, 40, 32)
    inputs = make_inputs(case, device=DEVICE)
    wanted = softpick_attention(inputs.q, inputs.k, inputs.v, backend="triton")
    # [batch, heads, dim, length] transposed: the last dim is strided; heads broadcast with stride 0.
    q, k, v = (t.transpose(2, 3).contiguous().transpose(2, 3) for t in (inputs.q, inputs.k, inputs.v))
    assert q.stride(-1) != 1
    assert torch.equal(softpick_attention(q, k, v, backend="triton"), wanted)
    shared = inputs.k[:, :1].expand(-1, 2, -1, -1)
    assert shared.stride(1) == 0
    assert torch.equal(
        softpick_attention(inputs.q, shared, shared, backend="triton"),
        softpick_attention(inputs.q, shared.contiguous(), shared.contiguous(), backend="triton"),
    )


def test_the_output_is_laid_out_for_the_next_projection():
    inputs = make_inputs(Case(2, 3, 3, 20, 20, 32), device=DEVICE)
    assert softpick_attention(inputs.q, inputs.k, inputs.v, backend="triton").transpose(1, 2).is_contiguous()


def test_the_op_passes_torchs_own_checks():
    from softpick.triton_op import attention

    inputs = make_inputs(Case(1, 2, 1, 20, 33, 32, padding="left"), device=DEVICE)
    q, k, v = (t.nan_to_num(0, 0, 0).requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    torch.library.opcheck(attention, (q, k, v, None, inputs.key_mask, "softpick", 0.2, True, 1e-6))


def test_torch_compile_takes_it_whole():
    inputs = make_inputs(Case(1, 2, 1, 33, 33, 32), device=DEVICE)

    def step(q, k, v):
        return softpick_attention(q * 2, k, v, backend="triton").sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for function in (step, compiled):
        q = inputs.q.clone().requires_grad_()
        function(q, inputs.k, inputs.v).backward()
        assert q.grad is not None
        if function is step:
            wanted = q.grad
    torch.testing.assert_close(q.grad, wanted)


def test_nan_is_not_hidden():
    inputs = make_inputs(Case(1, 1, 1, 20, 20, 32), device=DEVICE)
    k = inputs.k.clone()
    k[0, 0, 3] = float("nan")
    out = softpick_attention(inputs.q, k, inputs.v, backend="triton")
    assert out[0, 0, 3:].isnan().all()
    assert out[0, 0, :3].isfinite().all()
