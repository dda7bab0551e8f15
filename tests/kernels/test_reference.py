"""The definition itself: against a naive float64 formula, its Jacobian, and torch's gradcheck."""

import pytest
import torch
from cases import DECODING, EMPTY, EXTREME_SHAPES, EXTREMES, SHAPES, check, check_extreme, make_inputs
from softpick import softpick, softpick_attention


def naive(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """The paper's formula as written, scaled by e^{-m}; fine in float64 for moderate scores."""
    m = x.amax(-1, keepdim=True).clamp_min(0)
    y = torch.exp(x - m) - torch.exp(-m)
    return y.relu() / (y.abs().sum(-1, keepdim=True) + eps)


def jacobian(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """ds_i/dx_j = e^{x_j-m} / sum · (delta_ij step(x_i) - sign(x_j) s_i), with step(0) = 0 and sign(0) = +1."""
    m = x.max().clamp_min(0)
    total = (torch.exp(x - m) - torch.exp(-m)).abs().sum() + eps
    sign = torch.where(x >= 0, 1.0, -1.0).double()
    return torch.exp(x - m) / total * (torch.diag((x > 0).double()) - sign * naive(x[None])[0][:, None])


def test_it_is_the_papers_formula():
    x = torch.randn(50, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    torch.testing.assert_close(softpick(x), naive(x), rtol=1e-12, atol=1e-15)


def test_weights_need_not_sum_to_one_and_negative_scores_get_exactly_zero():
    weights = softpick(torch.tensor([2.0, -1.0, 0.0, -5.0]))
    assert weights[0] > 0
    assert torch.equal(weights[1:], torch.zeros(3))
    assert weights.sum() < 1


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_any_dim(dim):
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(softpick(x, dim=dim), softpick(x.movedim(dim, -1)).movedim(-1, dim))


@pytest.mark.parametrize(
    "scores", [[1.5, -0.5, 0.0, 3.0, 0.0], [0.0, 0.0, 0.0], [-1.0, -2.0, -300.0], [1e-7, -1e-7, 0]]
)
def test_the_derivative_is_the_stated_one(scores):
    x = torch.tensor(scores, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.functional.jacobian(softpick, x), jacobian(x), rtol=1e-9, atol=1e-12)


def test_gradcheck():
    """Any draw will do. eps is tiny: m, which scales it, is a constant to the gradient but not to the function."""
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: softpick(x, eps=1e-12), x)
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(lambda *t: softpick_attention(*t, eps=1e-12, backend="reference"), (q, k, v))


def test_what_the_gradient_leaves_out_is_the_slope_of_m_times_eps():
    """It matters in a row whose only score is just above 0: the gradient then depends only on eps e^m.

    One score x > 0: s = y / (y + eps e^x) with y = e^x - 1, whose slope is eps e^x / (y + eps e^x)^2; with m held
    constant it is e^m times that.
    """
    x = torch.tensor([0.0625], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(softpick(x).sum(), x)
    step = 1e-7
    true = (softpick(x.detach() + step) - softpick(x.detach() - step)) / (2 * step)
    torch.testing.assert_close(slope, true * x.detach().exp(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scores", [[-1e4, -200.0], [300.0, 299.0, -300.0], [0.0, 0.0], []])
def test_extreme_scores_are_finite_in_value_and_gradient(scores, dtype):
    x = torch.tensor(scores, dtype=dtype, requires_grad=True)
    weights = softpick(x)
    (gradient,) = torch.autograd.grad(weights.sum(), x)
    assert weights.dtype == dtype
    assert weights.isfinite().all()
    assert gradient.isfinite().all()


def test_tiny_scores_do_not_cancel():
    x = torch.tensor([1e-7, 3e-7, -2e-7, 5e-8])
    assert (softpick(x).double() - softpick(x.double())).abs().max() <= 1e-7


def test_integers_are_refused():
    with pytest.raises(ValueError, match=r"torch.int64.*floating-point"):
        softpick(torch.tensor([1, 2]))


def test_float32_agrees_with_float64():
    for case in [*SHAPES[::3], *DECODING, *EMPTY]:
        check(make_inputs(case), "reference")


@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_attention_is_right_in_float32(name):
    for case in EXTREME_SHAPES:
        check_extreme(name, case, torch.float32, "reference")
