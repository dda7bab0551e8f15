"""The normalizers beside softpick, on every backend, against their formulas in float64."""

import cases
import pytest
import torch
from cases import OTHERS
from softpick import NORMALIZERS, normalized_attention, softpick_attention
from softpick.attention import choose_backend

BACKENDS = ["reference", None]
SHAPES = [*cases.SHAPES[::3], *cases.SHAPES[-9:], *cases.DECODING, *cases.EMPTY]


@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize("normalizer", OTHERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_float32(backend, normalizer, case):
    cases.check(cases.with_normalizer(cases.make_inputs(case), normalizer), backend)


@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize("normalizer", OTHERS)
def test_the_reference_in_float64_is_the_formula(normalizer, case):
    cases.check(cases.with_normalizer(cases.make_inputs(case, torch.float64), normalizer), "reference")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", SHAPES[::3], ids=str)
@pytest.mark.parametrize("normalizer", OTHERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision(backend, normalizer, case, dtype):
    cases.check(cases.with_normalizer(cases.make_inputs(case, dtype), normalizer), backend)


@pytest.mark.parametrize("case", cases.EXTREME_SHAPES, ids=str)
@pytest.mark.parametrize("name", cases.EXTREMES)
@pytest.mark.parametrize(
    ("normalizer", "sinks"), [*((name, None) for name in OTHERS), ("sink_softmax", 50.0), ("sink_softmax", -50.0)]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_scores(backend, normalizer, sinks, name, case):
    cases.check_extreme(name, case, torch.float32, backend, normalizer=normalizer, sinks=sinks)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_that_attends_to_nothing_gives_zeros(backend, normalizer):
    inputs = cases.make_inputs(cases.Case(2, 2, 2, 20, 20, 32, padding="all"))
    result = cases.run(cases.with_normalizer(inputs, normalizer), backend)
    for name in ("out", "dq", "dk", "dv"):
        assert (getattr(result, name)[0] == 0).all(), name


def test_rectified_with_negative_scores_only_gives_zeros():
    q, k, v = torch.ones(1, 1, 3, 8), -torch.ones(1, 1, 3, 8), torch.ones(1, 1, 3, 8)
    for backend in BACKENDS:
        assert (normalized_attention(q, k, v, normalizer="rectified", backend=backend) == 0).all()


def test_softpick_attention_is_the_normalizer_softpick():
    inputs = cases.make_inputs(cases.Case(2, 4, 2, 17, 40, 32, padding="left"))
    arguments, mask = (inputs.q, inputs.k, inputs.v), inputs.key_mask
    wanted = softpick_attention(*arguments, key_mask=mask)
    assert torch.equal(normalized_attention(*arguments, normalizer="softpick", key_mask=mask), wanted)


def test_softmax_is_torchs_own_by_default():
    assert choose_backend(torch.zeros(1), normalizer="softmax") == "sdpa"
    assert choose_backend(torch.zeros(1, device="meta"), normalizer="softmax") == "sdpa"
    with pytest.raises(ValueError, match=r"'sdpa' computes softmax only.*'rectified'"):
        choose_backend(torch.zeros(1), "sdpa", "rectified")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"normalizer": "softpik"}, ["'softpik'", "Did you mean 'softpick'", *NORMALIZERS]),
        ({"normalizer": "x"}, ["'x'", *NORMALIZERS]),
        ({"normalizer": "sink_softmax"}, ["'sink_softmax'", "sinks is None", "[heads]"]),
        ({"normalizer": "softmax", "sinks": torch.zeros(4)}, ["'softmax'", "sinks is given", "no other"]),
        ({"normalizer": "sink_softmax", "sinks": torch.zeros(3)}, ["sinks has shape [3]", "[heads] = [4]"]),
        ({"normalizer": "sink_softmax", "sinks": torch.zeros(4).long()}, ["torch.int64", "floating-point"]),
    ],
    ids=str,
)
def test_a_wrong_call_is_explained(options, words):
    q, k = torch.zeros(1, 4, 5, 8), torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are what is tested)
        normalized_attention(q, k, k, **options)
    for word in words:
        assert word in str(error.value)
