"""The CPU path against the definition in float64, and its memory and speed."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from softpick import cpu, softpick_attention

HALVES = [torch.float16, torch.bfloat16]
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "cpu_attention.py"


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles in a short sequence: every boundary between tiles, heads and batch items is crossed."""
    monkeypatch.setattr(cpu, "ROWS", 32)
    monkeypatch.setattr(cpu, "COLUMNS", 16)
    monkeypatch.setattr(cpu, "SCORES", 1024)


@pytest.mark.parametrize("case", cases.SHAPES + cases.DECODING + cases.EMPTY, ids=str)
def test_float32(case: cases.Case) -> None:
    cases.check(cases.make_inputs(case), "cpu")


@pytest.mark.parametrize("case", cases.SHAPES + cases.DECODING, ids=str)
def test_small_tiles(case: cases.Case, small_tiles: None) -> None:
    cases.check(cases.make_inputs(case), "cpu")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("case", cases.SHAPES[::3] + cases.DECODING, ids=str)
def test_half_precision(case: cases.Case, dtype: torch.dtype) -> None:
    cases.check(cases.make_inputs(case, dtype), "cpu")


@pytest.mark.parametrize("case", cases.SHAPES[::4] + cases.DECODING, ids=str)
def test_float64_is_the_definition(case: cases.Case) -> None:
    cases.check(cases.make_inputs(case, torch.float64), "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("case", cases.EXTREME_SHAPES, ids=str)
@pytest.mark.parametrize("name", cases.EXTREMES)
def test_extreme_scores(name: str, case: cases.Case, dtype: torch.dtype) -> None:
    cases.check_extreme(name, case, dtype, "cpu")


@pytest.mark.parametrize("case", cases.EXTREME_SHAPES, ids=str)
@pytest.mark.parametrize("name", cases.EXTREMES)
def test_extreme_scores_across_tiles(name: str, case: cases.Case, small_tiles: None) -> None:
    cases.check_extreme(name, case, torch.float32, "cpu")


@pytest.mark.parametrize("case", cases.EXTREME_SHAPES, ids=str)
def test_tiny_scores_do_not_cancel(case: cases.Case) -> None:
    cases.check(cases.tiny_scores(case, torch.float32), "cpu")


def test_tiny_scores_beside_a_large_one() -> None:
    """Here e^x - 1 is taken with exp, not expm1: the rounding must be lost in the large one's weight."""
    inputs = cases.tiny_scores(cases.Case(1, 2, 2, 64, 2048, 32, causal=False), torch.float32)
    inputs.k[:, :, 5] = inputs.q[:, :, 0] * 2.0**46  # scores of about +-3
    cases.check(inputs, "cpu", gradient_error=1e-5)


def test_a_row_that_attends_to_nothing_gives_zeros() -> None:
    inputs = cases.make_inputs(cases.Case(2, 2, 2, 20, 20, 32, padding="all"))
    result = cases.run(inputs, "cpu")
    assert (result.out[0] == 0).all()
    assert (result.dq[0] == 0).all()
    assert (result.dk[0] == 0).all()
    assert (result.dv[0] == 0).all()


def test_decoding_token_by_token_is_the_full_forward() -> None:
    inputs = cases.make_inputs(cases.Case(2, 4, 2, 40, 40, 32, padding="left"))
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.key_mask
    full = softpick_attention(q, k, v, key_mask=mask)
    steps = [
        softpick_attention(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], key_mask=mask[:, : t + 1])
        for t in range(40)
    ]
    torch.testing.assert_close(torch.cat(steps, dim=2), full, rtol=0, atol=5e-6)


@st.composite
def random_cases(draw: st.DrawFn) -> cases.Case:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    q_len = draw(st.integers(1, 90))
    return cases.Case(
        batch=draw(st.integers(1, 3)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        q_len=q_len,
        k_len=q_len + draw(st.integers(0, 90)),
        dim=draw(st.integers(1, 80)),
        causal=draw(st.booleans()),
        padding=draw(st.sampled_from(["none", "left", "right", "all"])),
    )


@settings(max_examples=60, deadline=None)
@given(
    case=random_cases(),
    seed=st.integers(0, 1000),
    rows=st.sampled_from([8, 32, 128]),
    scores=st.sampled_from([1, 4096]),
)
def test_random_shapes_and_tiles(case: cases.Case, seed: int, rows: int, scores: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "ROWS", rows)
        patch.setattr(cpu, "COLUMNS", rows)
        patch.setattr(cpu, "SCORES", scores)
        # In float64, where a badly conditioned row has digits to lose.
        cases.check(cases.make_inputs(case, torch.float64, seed), "cpu", forward_error=1e-8, gradient_error=1e-7)


OP_CASES = [cases.Case(2, 4, 2, 5, 9, 8, padding="left"), cases.Case(1, 2, 2, 6, 6, 8, causal=False)]


def arguments(inputs: cases.Inputs) -> tuple:
    q, k, v = (t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    return q, k, v, inputs.sinks, inputs.key_mask, inputs.normalizer, inputs.scale, inputs.causal, 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [*OP_CASES, *cases.EMPTY], ids=str)
def test_opcheck(case: cases.Case, dtype: torch.dtype) -> None:
    torch.library.opcheck(cpu.attention, arguments(cases.make_inputs(case, dtype)))


@pytest.mark.parametrize("case", OP_CASES, ids=str)
def test_gradcheck(case: cases.Case) -> None:
    # finite differences cannot cross into the NaN of the padding
    inputs = cases.make_inputs(case, torch.float64)
    k, v = (t.nan_to_num(nan=0.5, posinf=0.5) for t in (inputs.k, inputs.v))
    q, k, v, *rest = arguments(replace(inputs, k=k, v=v))
    assert torch.autograd.gradcheck(lambda q, k, v: cpu.attention(q, k, v, *rest)[0], (q, k, v))


@pytest.mark.parametrize("case", OP_CASES, ids=str)
def test_compiles_without_graph_breaks(case: cases.Case) -> None:
    inputs = cases.make_inputs(case)
    q, k, v, *_ = arguments(inputs)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return softpick_attention(q * 2, k, v, causal=inputs.causal, key_mask=inputs.key_mask).sin()

    results = []
    for function in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        out = function(q, k, v)
        results.append((out, *torch.autograd.grad(out, (q, k, v), inputs.grad)))
    torch.testing.assert_close(results[1], results[0])


def test_the_output_is_laid_out_as_models_read_it() -> None:
    out = softpick_attention(*(torch.randn(2, 4, 10, 8) for _ in range(3)), backend="cpu")
    assert out.transpose(1, 2).is_contiguous()


def load_benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cpu_attention", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of the resident set from /proc")
def test_memory_grows_linearly_and_stays_under_64_mib() -> None:
    measure = load_benchmark().measure_memory
    short, long = measure(2048, heads=16, dim=64), measure(8192, heads=1, dim=64)
    assert short["forward"] < 64  # the scores alone would be 256 MiB
    for direction in ("forward", "backward"):  # as much a position and head; the scores would be four times as much
        assert long[direction] / 8192 < 1.5 * short[direction] / (2048 * 16), direction


@pytest.mark.slow
def test_forward_takes_at_most_1_6_times_softmax() -> None:
    benchmark, threads = load_benchmark(), torch.get_num_threads()
    q, k, v, _ = benchmark.make_inputs(2048, heads=16, dim=64)
    functions = [lambda: benchmark.softpick(q, k, v), lambda: benchmark.softmax(q, k, v)]
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            ours, theirs = benchmark.least_times(functions, repeats=20)
    finally:
        torch.set_num_threads(threads)
    assert ours <= 1.6 * theirs, f"{ours / theirs:.2f}"
