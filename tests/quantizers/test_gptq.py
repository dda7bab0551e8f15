"""GPTQ: the packing, the solver against the paper's algorithm, and the loop over layers."""

import copy
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import qbench.quantizers.gptq.layer as gptq
from qbench.quantizers.declaration import QuantizeError
from qbench.quantizers.gptq import GptqOptions
from qbench.quantizers.gptq.layer import GPTQLinear, pack, quantize_linears, unpack
from qbench.quantizers.options import quantizers

from . import tiny

ENVIRONMENT = dict(os.environ)  # before any test imports the solver
LINEARS = [name for stage in gptq.STAGES for name in stage]
TARGETS = [f"model.layers.{i}.{name}" for i in range(4) for name in LINEARS]
G64 = GptqOptions(group_size=64)


def quantized(
    bits: int, options: GptqOptions = G64, targets: list[str] = TARGETS, **kwargs: object
) -> LlamaForCausalLM:
    """The trained model after GPTQ."""
    model = tiny.trained_model()
    quantize_linears(model, bits, options, targets=targets, calibration=tiny.calibration_ids(), **kwargs)
    return model


def inputs_of(model: LlamaForCausalLM, names: list[str], ids: Tensor) -> dict[str, Tensor]:
    """What enters each of these modules, [tokens, in]."""
    seen: dict[str, Tensor] = {}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: seen.__setitem__(name, args[0].detach().flatten(0, 1))
        )
        for name in names
    ]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


# --- packing ---------------------------------------------------------------------------------------------------------


def slow_pack(values: np.ndarray, bits: int) -> np.ndarray:
    """auto-gptq's packing, bit by bit: the codes of a column one after the other, lowest bit first, in 32-bit words."""
    n, m = values.shape
    words = np.zeros((n * bits // 32, m), dtype=np.uint32)
    for column in range(m):
        for row in range(n):
            for bit in range(bits):
                position = row * bits + bit
                words[position // 32, column] |= np.uint32((int(values[row, column]) >> bit & 1) << position % 32)
    return words.view(np.int32)


@pytest.mark.parametrize("bits", quantizers()["gptq"].widths)
@settings(max_examples=10, deadline=None)
@given(blocks=st.integers(1, 3), columns=st.integers(1, 5), seed=st.integers(0, 2**16))
def test_packing_is_auto_gptqs_and_unpacking_its_inverse(bits: int, blocks: int, columns: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 2**bits, (32 * blocks, columns))
    words = pack(torch.from_numpy(values), bits)
    assert words.dtype == torch.int32
    assert np.array_equal(words.numpy(), slow_pack(values, bits))
    assert np.array_equal(unpack(words, bits).numpy(), values)


def random_layer(bits: int, out: int, groups: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple:
    """A packed layer with act-order's scattered groups, and what it was made of: codes, scales, zeros, g_idx."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (out, 32 * groups), generator=draw)
    scales = torch.rand(out, groups, generator=draw) + 0.1
    zeros = torch.randint(1, 2**bits + 1, (out, groups), generator=draw)
    g_idx = torch.arange(groups).repeat(32)[torch.randperm(32 * groups, generator=draw)]
    layer = GPTQLinear.from_codes(codes, scales, zeros, g_idx, torch.ones(out, dtype=dtype), bits=bits, dtype=dtype)
    return layer, codes, scales, zeros, g_idx


@pytest.mark.parametrize("bits", quantizers()["gptq"].widths)
def test_the_tensors_are_those_of_the_v1_format(bits: int) -> None:
    layer, codes, scales, zeros, g_idx = random_layer(bits, out=64, groups=3)
    assert {name: (tuple(t.shape), t.dtype) for name, t in layer.state_dict().items()} == {
        "qweight": ((96 * bits // 32, 64), torch.int32),
        "qzeros": ((3, 64 * bits // 32), torch.int32),
        "scales": ((3, 64), torch.float32),
        "g_idx": ((96,), torch.int32),
        "bias": ((64,), torch.float32),
    }
    assert np.array_equal(layer.qzeros.numpy(), slow_pack(zeros.numpy() - 1, bits).T)  # minus one
    assert torch.equal(layer.codes(), codes.int())
    assert torch.equal(layer.dequantize(), scales[:, g_idx] * (codes - zeros[:, g_idx]))
    assert layer.storage().code_bytes == 64 * 96 * bits // 8
    assert layer.storage().metadata_bytes == 3 * 64 * bits // 8 + 3 * 64 * 4 + 96 * 4


def test_a_layer_is_the_linear_of_its_dequantized_weight_and_comes_back_from_its_tensors() -> None:
    layer, *_ = random_layer(3, out=32, groups=2)
    x = torch.randn(5, 64)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.dequantize(), layer.bias))
    again = GPTQLinear.from_tensors(layer.state_dict(), G64, bits=3, shape=(32, 64), dtype=torch.float32)
    assert torch.equal(again(x), layer(x))
    assert (again.in_features, again.out_features, again.group_size) == (64, 32, 32)


def test_groups_gather_the_columns_that_share_a_scale() -> None:
    layer, _, scales, *_ = random_layer(4, out=32, groups=2)
    each = layer.scales[layer.g_idx].T  # [out, in]: the scale of every weight
    assert torch.equal(layer.groups(each), scales.reshape(-1, 1).expand(-1, 32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_layer_has_the_formats_half_scales(dtype: torch.dtype) -> None:
    layer, codes, scales, zeros, g_idx = random_layer(8, out=32, groups=2, dtype=dtype)
    assert layer.scales.dtype == torch.float16
    assert layer.dequantize().dtype == dtype
    assert torch.equal(layer.codes(), codes.int())
    exact = scales.half().float()[:, g_idx] * (codes - zeros[:, g_idx])
    assert torch.equal(layer.dequantize(), exact.to(dtype))


@pytest.mark.parametrize("bits", quantizers()["gptq"].widths)
def test_gptqmodels_own_layer_packs_and_reads_the_same(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # of its layer: 20 seconds
    _, QuantizeConfig = gptq.solver()
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module

    layer, codes, scales, zeros, _ = random_layer(bits, out=64, groups=2)
    zeros = zeros.clamp(max=2**bits - 1)
    g_idx = torch.arange(64) // 32
    scales = scales.half().float()  # its scales are always half
    layer = GPTQLinear.from_codes(codes, scales, zeros, g_idx, bits=bits, dtype=torch.float32)
    theirs = TorchLinear(
        bits=bits, group_size=32, sym=False, desc_act=False, in_features=64, out_features=64, bias=False,
        pack_dtype=torch.int32, dtype=torch.float16, register_buffers=True,
    )  # fmt: skip
    linear = nn.Linear(64, 64, bias=False)
    linear.weight.data = layer.dequantize()
    theirs.pack_original(linear, scales, zeros.float(), g_idx.int())
    assert torch.equal(theirs.qweight, layer.qweight)
    assert torch.equal(theirs.qzeros, pack(zeros, bits).T)  # v2 stores them unchanged; v1, which we write, minus one
    assert torch.equal(theirs.scales, layer.scales.half())
    convert_gptq_v2_to_v1_format_module(theirs, QuantizeConfig(bits=bits, offload_to_disk=False))
    assert torch.equal(theirs.qzeros, layer.qzeros)
    convert_gptq_v1_to_v2_format_module(theirs, bits, torch.int32)
    theirs.post_init()
    assert torch.equal(theirs.dequantize_weight().T, layer.dequantize().half())


# --- the solver ------------------------------------------------------------------------------------------------------


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


# --- the loop --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_output_error_on_held_out_data_is_below_round_to_nearests_on_the_same_grid(bits: int) -> None:
    source, model = tiny.trained_model(), quantized(bits)
    inputs = inputs_of(model, TARGETS, tiny.held_out_ids())  # what each layer really sees
    for kind in LINEARS:
        errors = {"gptq": 0.0, "nearest": 0.0}
        for name in (target for target in TARGETS if target.endswith(kind)):
            packed, weight = model.get_submodule(name), source.get_submodule(name).weight.data
            scale, zero = packed.scales[packed.g_idx].T, packed.zeros()[packed.g_idx].T
            nearest = scale * ((torch.round(weight / scale) + zero).clamp(0, 2**bits - 1) - zero)
            for method, approximation in {"gptq": packed.dequantize(), "nearest": nearest}.items():
                errors[method] += float((inputs[name] @ (approximation - weight).T).square().sum())
        assert errors["gptq"] < 0.9 * errors["nearest"], kind


def test_fewer_bits_cost_more() -> None:
    source = tiny.trained_model()
    costs = [kl(source, quantized(bits)) for bits in (8, 4, 3, 2)]
    assert 0 < costs[0] < costs[1] < costs[2] < costs[3]


def test_the_same_call_gives_the_same_bits() -> None:
    first, second = (quantized(3).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_only_the_targets_change() -> None:
    source, model = tiny.trained_model(), quantized(4, targets=["model.layers.2.mlp.down_proj"])
    packed = [name for name, m in model.named_modules() if isinstance(m, GPTQLinear)]
    assert packed == ["model.layers.2.mlp.down_proj"]
    weights = model.state_dict()
    for name, tensor in source.state_dict().items():
        assert name == "model.layers.2.mlp.down_proj.weight" or torch.equal(weights[name], tensor)


def stages_with_inputs(model: LlamaForCausalLM, ids: list[Tensor]) -> Iterator[tuple[list[str], Tensor]]:
    """Each stage's linears and their inputs in the model as it is when that stage is reached."""
    for i in range(len(model.model.layers)):
        for stage in gptq.STAGES:
            names = [f"model.layers.{i}.{name}" for name in stage]
            yield names, inputs_of(model, names[:1], torch.cat(ids))[names[0]]


def test_each_stage_is_calibrated_on_what_the_quantized_modules_before_it_put_out() -> None:
    # The truth, without any cleverness: after each stage put it in place, and run the whole model up to the next.
    ids = tiny.calibration_ids(8)
    source, model, slow, shortcut = (tiny.trained_model() for _ in range(4))
    quantize_linears(model, 3, G64, targets=TARGETS, calibration=ids)
    for names, x in stages_with_inputs(slow, ids):
        for name, packed in gptq.solve({n: slow.get_submodule(n) for n in names}, [x], 3, G64).items():
            slow.set_submodule(name, packed)
    assert disagreement(model, slow) < 0.005

    # Sabotage: every stage calibrated on the activations of the unquantized model. It shows in the codes. Whether it is
    # worse does not show on a model this small: its divergence was 0.97 to 1.05 times the other's over four settings.
    for names, x in stages_with_inputs(source, ids):
        for name, packed in gptq.solve({n: source.get_submodule(n) for n in names}, [x], 3, G64).items():
            shortcut.set_submodule(name, packed)
    assert disagreement(model, shortcut) > 0.02


@torch.no_grad()
def kl(reference: LlamaForCausalLM, model: LlamaForCausalLM) -> float:
    """The mean divergence of the model's next-token distributions from the reference's on held-out tokens."""
    ids = tiny.held_out_ids(128)
    p, q = (m(input_ids=ids, use_cache=False).logits.double().log_softmax(-1) for m in (reference, model))
    return float((p.exp() * (p - q)).sum(-1).mean())


def disagreement(a: LlamaForCausalLM, b: LlamaForCausalLM) -> float:
    """The share of codes that differ."""
    pairs = [(a.get_submodule(name).codes(), b.get_submodule(name).codes()) for name in TARGETS]
    return float(torch.cat([(x != y).flatten() for x, y in pairs]).float().mean())


def test_lm_head_is_calibrated_on_the_final_norms_outputs() -> None:
    model = quantized(4, targets=[*TARGETS, "lm_head"])
    source = tiny.trained_model()
    x = inputs_of(model, ["lm_head"], torch.cat(tiny.calibration_ids()))["lm_head"]
    expected = gptq.solve({"lm_head": source.lm_head}, [x], 4, G64)["lm_head"]
    assert (model.lm_head.codes() != expected.codes()).float().mean() < 0.01


def test_the_models_own_attention_runs_in_the_loop() -> None:
    # A model with a different attention gets different codes from the second stage on.
    from transformers import AttentionInterface

    def uniform(module, q, k, v, mask, **_):  # every position attends equally to all
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        return v.mean(2, keepdim=True).expand(q.shape).transpose(1, 2), None

    AttentionInterface.register("uniform", uniform)
    names = [f"model.layers.0.self_attn.{x}_proj" for x in "qkvo"]
    usual = quantized(3, targets=names)
    other = tiny.trained_model()
    other.set_attn_implementation("uniform")
    quantize_linears(other, 3, G64, targets=names, calibration=tiny.calibration_ids())
    same = {n[-6]: torch.equal(usual.get_submodule(n).codes(), other.get_submodule(n).codes()) for n in names}
    assert same == {"q": True, "k": True, "v": True, "o": False}


def test_samples_of_several_lengths_are_all_used() -> None:
    mixed = [ids[:, : 64 - 8 * (i % 3)] for i, ids in enumerate(tiny.calibration_ids(12))]
    batches = list(gptq.batches(mixed, torch.device("cpu")))
    assert sum(b.numel() for b in batches) == sum(ids.numel() for ids in mixed)
    one = torch.cat(tiny.calibration_ids(64))
    assert [tuple(b.shape) for b in gptq.batches(list(one.split(1)), torch.device("cpu"))] == [(16, 64)] * 4
    model = tiny.trained_model()
    quantize_linears(model, 4, G64, targets=TARGETS, calibration=mixed)
    assert tiny.perplexity(model, tiny.held_out_ids()) < 4


def test_half_precision_models_quantize() -> None:
    model = tiny.trained_model().bfloat16()
    quantize_linears(model, 8, G64, targets=TARGETS[:7], calibration=tiny.calibration_ids(4))
    packed = model.get_submodule(TARGETS[0])
    source = tiny.trained_model().get_submodule(TARGETS[0]).weight
    assert (packed.scales.dtype, packed.dequantize().dtype) == (torch.float16, torch.bfloat16)
    assert (packed.dequantize() - source).norm() < 0.02 * source.norm()


def test_a_pass_writes_into_no_source_weight() -> None:
    model = tiny.trained_model()
    weights = {name: model.get_submodule(name).weight for name in TARGETS}
    before = copy.deepcopy(weights)
    quantize_linears(model, 2, G64, targets=TARGETS, calibration=tiny.calibration_ids(4))
    assert all(torch.equal(weights[name], before[name]) for name in TARGETS)


def test_importing_the_solver_leaves_the_environment_alone() -> None:
    # By itself gptqmodel's import moves the Hugging Face cache to /tmp, and renumbers GPUs, also for child processes.
    gptq.solver()
    moved = ("HF_HOME", "HF_HUB_CACHE", "HF_MODULES_CACHE", "CUDA_DEVICE_ORDER", "PYTORCH_ALLOC_CONF")
    assert {name: os.environ.get(name) for name in moved} == {name: ENVIRONMENT.get(name) for name in moved}


# --- bad input -------------------------------------------------------------------------------------------------------


def refuse(match: str, options: GptqOptions = G64, calibration: object = None, **config: object) -> None:
    """The call must fail with this message and leave the model unchanged."""
    model = LlamaForCausalLM(tiny.config(**config))
    before = copy.deepcopy(model.state_dict())
    ids = tiny.calibration_ids(2) if calibration is None else calibration
    with pytest.raises(QuantizeError, match=match):
        quantize_linears(model, 4, options, targets=TARGETS, calibration=ids)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_bad_input_is_a_sentence_and_changes_nothing() -> None:
    refuse(r"group_size 128.*192 inputs", GptqOptions(), intermediate_size=192)
    refuse(r"group_size.*48.*-1, 16, 32", GptqOptions(group_size=48))
    refuse(r"mlp\.gate_proj.*200 × 128.*multiples of 32", intermediate_size=200)
    refuse(r"token-id tensors.*empty", calibration=[])
    refuse(
        r"sample 1.*64.*0 to 63",
        calibration=[torch.tensor([[i]]) for i in (3, 64)],
    )
    refuse(r"sample 0.*torch.int64.*\[2, 8\].*\[1, length\]", calibration=[torch.zeros(2, 8, dtype=torch.long)])
    refuse(r"sample 0.*torch.float32", calibration=[torch.zeros(1, 8)])


def test_a_module_that_the_loop_does_not_reach_is_named() -> None:
    model = tiny.trained_model()
    with pytest.raises(QuantizeError, match=r"gptq.*model\.embed_tokens"):
        quantize_linears(model, 4, G64, targets=["model.embed_tokens"], calibration=tiny.calibration_ids(1))


def test_quantizing_twice_is_refused() -> None:
    model = quantized(4, targets=TARGETS[:1])
    with pytest.raises(QuantizeError, match=r"q_proj.*GPTQLinear.*quantized already"):
        quantize_linears(model, 4, G64, targets=TARGETS, calibration=tiny.calibration_ids(1))


# --- compared with gptqmodel's pipeline, and on CUDA -----------------------------------------------------------------


def benchmarks_quantize() -> ModuleType:
    """benchmarks/quantize.py, which knows how that pipeline is run."""
    path = Path(__file__).parents[2] / "benchmarks" / "quantize.py"
    spec = importlib.util.spec_from_file_location("benchmarks_quantize", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 4])
def test_perplexity_agrees_with_gptqmodels_own_pipeline(bits: int, tmp_path: Path) -> None:
    benchmark = benchmarks_quantize()
    tiny.trained_model().save_pretrained(tmp_path / "model")
    benchmark.save_tokenizer(tmp_path / "model", tiny.VOCAB)
    ids = torch.cat(tiny.calibration_ids())
    (tmp_path / "calibration.json").write_text(json.dumps(ids.tolist()))
    benchmark.run_worker("gptqmodel", tmp_path, bits, cores=1, group_size=64)
    theirs = torch.load(tmp_path / "gptqmodel.pt", weights_only=True)
    model, ours = tiny.trained_model(), quantized(bits)
    for name in TARGETS:  # v2: zeros unchanged
        linear = GPTQLinear(
            *(theirs[f"{name}.{tensor}"] for tensor in ("qweight", "qzeros", "scales", "g_idx")),
            bits=bits, dtype=torch.float32,
        )  # fmt: skip
        linear.qzeros = pack(unpack(linear.qzeros.T, bits) - 1, bits).T
        model.set_submodule(name, linear)
    held_out = tiny.held_out_ids(128)
    assert tiny.perplexity(ours, held_out) == pytest.approx(tiny.perplexity(model, held_out), rel=0.002)
    assert disagreement(ours, model) < 0.05


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_a_model_quantizes_on_cuda_one_layer_at_a_time(home: str) -> None:
    model = tiny.trained_model().to(home)
    quantize_linears(model, 4, G64, targets=[*TARGETS, "lm_head"], calibration=tiny.calibration_ids(), device="cuda")
    assert {t.device.type for t in model.state_dict().values()} == {home}
    reference = quantized(4, targets=[*TARGETS, "lm_head"])
    ids = tiny.held_out_ids()
    assert tiny.perplexity(model.cpu(), ids) == pytest.approx(tiny.perplexity(reference, ids), rel=0.005)


@pytest.mark.gpu
@needs_cuda
def test_no_more_than_a_layer_is_on_the_gpu() -> None:
    model = LlamaForCausalLM(tiny.config(hidden_size=512, intermediate_size=1024, num_hidden_layers=12)).eval()
    layer_bytes = sum(p.numel() * p.element_size() for p in model.model.layers[0].parameters())
    targets = [f"model.layers.{i}.{name}" for i in range(12) for name in LINEARS]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    quantize_linears(model, 4, G64, targets=targets, calibration=tiny.calibration_ids(), device="cuda")
    assert torch.cuda.max_memory_allocated() - before < 6 * layer_bytes  # of twelve
    assert torch.cuda.memory_allocated() - before < layer_bytes
