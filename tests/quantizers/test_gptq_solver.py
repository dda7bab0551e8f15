"""GPTQ's solver, with every option, against the paper's algorithm."""

import pytest
import torch
from torch import Tensor, nn

import qbench.quantizers.gptq.layer as gptq
from qbench.quantizers.declaration import QuantizeError
from qbench.quantizers.gptq import GptqOptions
from qbench.quantizers.options import quantizers

from . import tiny
from .gptq_models import G64, inputs_of


def paper_gptq(weight: Tensor, x: Tensor, bits: int, options: GptqOptions) -> Tensor:
    """The codes [out, in] by Algorithm 1 of the paper in float64, one column at a time, without its blocks.

    As in the authors' code, a group's scale and zero come from the weights as they are when its 128-column block
    starts, and act-order takes the columns by falling diagonal of the Hessian.
    """
    w, x = weight.double(), x.double()
    maxq, size = 2**bits - 1, options.group_size if options.group_size > 0 else weight.shape[1]
    hessian = 2 * x.T @ x / len(x)
    dead = hessian.diagonal() == 0
    hessian[dead, dead] = 1
    w[:, dead] = 0
    order = hessian.diagonal().float().argsort(descending=True) if options.act_order else torch.arange(len(hessian))
    w, hessian = w[:, order], hessian[order][:, order]
    hessian += options.damp * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)  # Cholesky(H⁻¹)ᵀ
    codes = torch.empty_like(w)
    at_block_start = w.clone()
    for j in range(w.shape[1]):
        if j % 128 == 0:
            at_block_start = w.clone()
        if j % size == 0:
            group = (at_block_start if options.group_size > 0 else weight.double())[:, j : j + size]
            low, high = group.amin(1).clamp(max=0), group.amax(1).clamp(min=0)
            if options.sym:
                high = torch.maximum(-low, high)
                low = torch.where(low < 0, -high, low)
            empty = (low == 0) & (high == 0)
            low, high = torch.where(empty, -1, low), torch.where(empty, 1, high)
            scale = (high - low) / maxq
            zero = torch.full_like(scale, (maxq + 1) / 2) if options.sym else torch.round(-low / scale)
            scale = torch.where(zero == 0, scale * maxq / (maxq - 1), scale)  # the v1 format has no zero of 0
            zero = zero.clamp(min=1)
        codes[:, j] = (torch.round(w[:, j] / scale) + zero).clamp(0, maxq)
        error = (w[:, j] - scale * (codes[:, j] - zero)) / factor[j, j]
        w[:, j:] -= error[:, None] * factor[j, j:]
    return codes[:, order.argsort()].int()


OPTIONS = {
    "g128": GptqOptions(),
    "g64": G64,
    "g32": GptqOptions(group_size=32, damp=0.01),
    "row": GptqOptions(group_size=-1),
    "asym": GptqOptions(group_size=64, sym=False),
    "act-order": GptqOptions(group_size=64, act_order=True),
}
# Every option with 3 bits and every width with the first options; the others are slow.
WIDTHS_AND_OPTIONS = [
    pytest.param(bits, options, id=f"{bits}-{name}", marks=[] if bits == 3 or name == "g128" else pytest.mark.slow)
    for bits in quantizers()["gptq"].widths
    for name, options in OPTIONS.items()
]


@pytest.mark.parametrize(("bits", "options"), WIDTHS_AND_OPTIONS)
def test_the_codes_are_those_of_the_papers_algorithm(bits: int, options: GptqOptions) -> None:
    # float32 against float64: a weight halfway between two levels may fall to either side, and its error is passed on
    # to the later columns of its row. So whole rows agree, except a few that diverge at such a tie.
    model = tiny.trained_model()
    names = ["model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"]
    inputs = inputs_of(model, names, tiny.held_out_ids())
    for name in names:
        linear = model.get_submodule(name)
        solved = gptq.solve({name: linear}, [inputs[name]], bits, options)[name]
        differing = solved.codes() != paper_gptq(linear.weight.data, inputs[name], bits, options)
        assert differing.any(dim=1).float().mean() < 0.05, name


def test_linears_solved_together_come_out_as_alone() -> None:
    model = tiny.trained_model()
    names = [f"model.layers.1.self_attn.{x}_proj" for x in "qkv"]
    x = inputs_of(model, names, tiny.held_out_ids())[names[0]]
    linears = {name: model.get_submodule(name) for name in names}
    together = gptq.solve(linears, [x], 3, G64)
    for name, linear in linears.items():
        alone = gptq.solve({name: linear}, [x], 3, G64)[name]
        assert (alone.codes() != together[name].codes()).float().mean() < 0.001


@pytest.mark.parametrize("bits", quantizers()["gptq"].widths)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_packed_weights_equal_the_solvers_bit_for_bit(
    bits: int, options: GptqOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    GPTQ, _ = gptq.solver()
    returned = []
    original = GPTQ.quantize
    monkeypatch.setattr(GPTQ, "quantize", lambda self, **kw: returned.append(original(self, **kw)) or returned[-1])
    torch.manual_seed(0)
    linear = nn.Linear(128, 64)
    packed = gptq.solve({"it": linear}, [torch.randn(300, 128)], bits, options)["it"]
    assert torch.equal(packed.dequantize(), returned[0][0])
    assert not any(t.is_inference() for t in packed.state_dict().values())


def test_asymmetric_groups_without_negative_weights_keep_a_zero_that_v1_can_store() -> None:
    linear = nn.Linear(64, 32, bias=False)
    linear.weight.data.uniform_(0.5, 1.0, generator=torch.manual_seed(0))
    packed = gptq.solve({"it": linear}, [torch.randn(200, 64)], 4, GptqOptions(group_size=32, sym=False))["it"]
    assert packed.zeros().min() == 1
    assert (packed.dequantize() - linear.weight).abs().max() < 0.2
    assert packed.codes().max() == 15


def test_activations_that_are_not_finite_are_an_error_and_not_round_to_nearest() -> None:
    x = torch.randn(100, 64)
    x[3, 5] = torch.nan
    with pytest.raises(QuantizeError, match=r"for it with damp=0.1.*calibration activations"):
        gptq.solve({"it": nn.Linear(64, 32)}, [x], 4, G64)


def test_a_diagonal_that_the_solver_raises_on_its_own_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # An eigenvalue of -1.05 and a mean of 1: no damping helps, but with a diagonal of 1.1 the first one, 0.99, does.
    hessian = torch.eye(64)
    hessian[range(64), [i ^ 1 for i in range(64)]] = 2.05
    monkeypatch.setattr(gptq, "hessian", lambda *_: (hessian, 100))
    GPTQ, _ = gptq.solver()
    used = []
    real = GPTQ.hessian_inverse
    monkeypatch.setattr(GPTQ, "hessian_inverse", lambda self, H: (used.append(real(self, H)), used[-1])[1])
    with pytest.raises(QuantizeError, match=r"for it with damp=0.99"):
        gptq.solve({"it": nn.Linear(64, 32)}, [], 4, GptqOptions(group_size=64, damp=0.99))
    ((factor, damp),) = used
    assert factor is not None
    assert damp == 0.99
