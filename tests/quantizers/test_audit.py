"""Sabotage: quantizers that do not do what their label says, each caught by the audit."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from qbench.quantizers.hqq import HqqOptions
from qbench.quantizers.hqq.layer import HqqLinear
from qbench.quantizers.measure import compare_logits, default_probe, measure_layer
from qbench.quantizers.options import quantization, quantizer
from qbench.quantizers.quantize import quantize
from qbench.records.audit import AuditError, LayerAudit

from ..messages import states
from .conftest import logits


@pytest.fixture
def sabotage(monkeypatch, untrained, calibration):
    """Quantize with a method whose quantize_linears is replaced; returns why the audit rejects it."""

    def run(method, bits, replacement, **options):
        real = quantizer(method).quantize_linears

        def replaced(model, bits, options, **settings):
            replacement(
                lambda **changes: real(model, **({"bits": bits, "options": options} | settings | changes)),
                model,
                settings,
            )

        monkeypatch.setattr(quantizer(method), "quantize_linears", replaced)
        with pytest.raises(AuditError) as caught:
            quantize(untrained, method, bits, calibration=calibration[:4], **options)
        assert "Load the model again" in str(caught.value)
        return caught.value.reasons

    return run


def packed_layers(model, targets):
    return [model.get_submodule(name) for name in targets]


@pytest.mark.parametrize(("method", "bits"), [("hqq", 2), ("hqq", 3), ("bnb", 4), ("gptq", 3)])
def test_a_model_returned_unchanged(sabotage, method, bits):
    reasons = sabotage(method, bits, lambda real, model, settings: None)
    assert len(reasons) == 14
    assert states(reasons[0], "model.layers.0.self_attn.q_proj…not quantized")


def test_packed_layers_that_hold_the_source_weights(sabotage, monkeypatch):
    def quantizer(real, model, settings):
        sources = {name: model.get_submodule(name).weight.clone() for name in settings["targets"]}
        real()
        for name, source in sources.items():
            model.get_submodule(name).dequantize = lambda source=source: source

    reasons = sabotage("hqq", 3, quantizer)
    assert any("nothing was quantized" in reason for reason in reasons)
    assert any(states(reason, "one code…different weights") for reason in reasons)


@pytest.mark.parametrize(("method", "bits"), [("hqq", 3), ("bnb", 8)])
def test_all_attention_layers_skipped(sabotage, method, bits):
    def quantizer(real, model, settings):
        real(targets=[name for name in settings["targets"] if "self_attn" not in name])

    reasons = sabotage(method, bits, quantizer)
    assert len(reasons) == 8
    assert all("self_attn" in reason and "not quantized" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("method", "used", "asked"),
    [("hqq", 4, 3), ("hqq", 2, 3), ("hqq", 8, 4), ("hqq", 3, 4), ("hqq", 2, 8), ("gptq", 4, 3), ("gptq", 2, 3)],
)
@pytest.mark.parametrize("admits", [True, False])
def test_other_bits_than_asked_for(sabotage, method, used, asked, admits):
    def quantizer(real, model, settings):
        real(bits=used)
        for layer in packed_layers(model, settings["targets"]):
            if not admits:  # claims the requested bits, but unpacks its codes with the actual ones
                codes, weight, storage = layer.codes(), layer.dequantize(), layer.storage()
                layer.codes, layer.dequantize, layer.storage = (lambda x=x: x for x in (codes, weight, storage))
                shown = layer.settings()
                layer.settings = lambda shown=shown: shown
                layer.bits = asked

    reasons = sabotage(method, asked, quantizer)
    assert len({reason.split(":")[0] for reason in reasons}) == 14
    if not admits:
        assert any("levels in a group" in r if used > asked else "codes are in use" in r for r in reasons)


def test_narrow_codes_spread_over_a_wide_range(sabotage):
    def quantizer(real, model, settings):
        real(bits=2)
        for layer in packed_layers(model, settings["targets"]):  # 2-bit codes 0, 2, 4, 6 instead of 3-bit ones
            codes, weight, storage = layer.codes() * 2, layer.dequantize(), layer.storage()
            layer.codes, layer.dequantize, layer.storage = (lambda x=x: x for x in (codes, weight, storage))
            layer.bits = 3

    assert any(states(reason, "4 codes") for reason in sabotage("hqq", 3, quantizer))


@pytest.mark.parametrize("own_scale", [False, True])
def test_fewer_bits_in_every_second_group(sabotage, own_scale):
    def quantizer(real, model, settings):
        sources = {name: model.get_submodule(name).weight for name in settings["targets"]}
        real()
        for name, source in sources.items():
            layer = model.get_submodule(name)
            codes, storage, scale, zero = layer.codes().view(-1, 64), layer.storage(), layer.scale, layer.zero
            codes[::2] = ((codes[::2] / 5.0).round() * (1 if own_scale else 5)).to(codes.dtype)  # 4 levels
            if own_scale:
                scale[::2] *= 5
                zero[::2] /= 5
            weight = ((codes - zero) * scale).view(source.shape)
            codes = codes.view(source.shape)
            layer.codes, layer.dequantize, layer.storage = (lambda x=x: x for x in (codes, weight, storage))

    reasons = sabotage("hqq", 4, quantizer)
    says = "groups…codes span" if own_scale else "level…nearest"
    assert sum(states(reason, says) for reason in reasons) == 14


def test_fewer_levels_in_every_second_block_of_nf4(sabotage):
    def quantizer(real, model, settings):
        real()
        for layer in packed_layers(model, settings["targets"]):
            blocks = layer.weight.view(-1, 32)  # two codes per byte
            blocks[::2] &= 0xCC  # every fourth level

    assert any(states(r, "level…nearest") for r in sabotage("bnb", 4, quantizer))


@pytest.mark.parametrize("method", ["hqq", "gptq"])
def test_three_bits_in_nibbles(sabotage, method):
    def quantizer(real, model, settings):
        real()
        for layer in packed_layers(model, settings["targets"]):
            size = SimpleNamespace(code_bytes=layer.codes().numel() // 2, metadata_bytes=0)
            layer.storage = lambda size=size: size

    reasons = sabotage(method, 3, quantizer)
    assert len(reasons) == 14
    assert all(states(reason, "4.00 bits per weight…3 ") for reason in reasons)


def test_codes_kept_in_bytes_are_not_three_bits(sabotage):
    def quantizer(real, model, settings):
        real()
        for layer in packed_layers(model, settings["targets"]):
            size = SimpleNamespace(code_bytes=layer.codes().numel(), metadata_bytes=0)
            layer.storage = lambda size=size: size

    assert all(states(reason, "8.00 bits per weight…3 ") for reason in sabotage("hqq", 3, quantizer))


@pytest.mark.parametrize(("method", "bits"), [("hqq", 3), ("bnb", 4), ("bnb", 8)])
def test_a_layer_left_on_meta(sabotage, method, bits):
    def quantizer(real, model, settings):
        real()
        model.get_submodule(settings["targets"][5]).to("meta")

    reasons = sabotage(method, bits, quantizer)
    assert all("mlp.up_proj" in reason and "meta device" in reason for reason in reasons)
    assert reasons


def test_any_other_parameter_left_on_meta(sabotage):
    def quantizer(real, model, settings):
        real()
        model.model.norm.to("meta")

    (reason,) = sabotage("hqq", 3, quantizer)
    assert states(reason, "model.norm.weight…meta device")


def test_scales_left_on_meta(sabotage):
    def quantizer(real, model, settings):
        real()
        layer = model.get_submodule(settings["targets"][5])
        layer.quant_state.absmax = layer.quant_state.absmax.to("meta")  # no buffer of the module

    (reason,) = sabotage("bnb", 4, quantizer)
    assert states(reason, "model.layers.0.mlp.up_proj.weight.absmax…meta device")


def shift_hqq(layer):
    layer.zero += 1


def shift_gptq_as_v2(layer):
    """What a reader gets if it reads v1's zeros as v2's: each zero point is one lower."""
    dequantize, scales = layer.dequantize(), layer.scales.float()[layer.g_idx].T
    layer.dequantize = lambda: dequantize + scales


def shift_int8(layer):
    layer.weight.clamp_(max=126).add_(1)


def shift_nf4(layer):
    """The next level up; the highest stays."""
    high, low = (layer.weight >> 4).clamp(max=14) + 1, (layer.weight & 15).clamp(max=14) + 1
    layer.weight.copy_(high << 4 | low)


@pytest.mark.parametrize(
    ("method", "bits", "shift"),
    [("hqq", b, shift_hqq) for b in (1, 2, 3, 4, 8)]
    + [("gptq", b, shift_gptq_as_v2) for b in (2, 8)]
    + [("bnb", 8, shift_int8), ("bnb", 4, shift_nf4)],
)
def test_one_quantization_step_off(sabotage, method, bits, shift):
    def quantizer(real, model, settings):
        real()
        shift(model.get_submodule(settings["targets"][9]))

    reason, *_ = sabotage(method, bits, quantizer)
    assert states(reason, "model.layers.1.self_attn.v_proj: …weights…source")


@pytest.mark.parametrize(("method", "bits"), [("hqq", 2), ("hqq", 4), ("bnb", 4)])
def test_a_few_weights_one_step_off(sabotage, method, bits):
    def quantizer(real, model, settings):
        real()
        layer = model.get_submodule(settings["targets"][9])
        if method == "bnb":
            layer.weight[:40] = layer.weight[:40].bitwise_xor(0x11)  # each code's neighbour
        else:
            layer.W_q[0] = layer.W_q[0].bitwise_xor(0x11 if bits == 4 else 0x55)

    (reason,) = sabotage(method, bits, quantizer)
    assert states(reason, "model.layers.1.self_attn.v_proj: …level…nearest")


def negative(model, name):
    model.get_submodule(name).scales *= -1


def smaller(model, name):
    model.get_submodule(name).scales *= 0.7


def larger(model, name):
    model.get_submodule(name).scales *= 1.5


def shuffled_rows(model, name):
    layer = model.get_submodule(name)
    layer.qweight.copy_(layer.qweight[:, torch.randperm(layer.out_features)])


def swapped(model, name):
    other = name.replace("q_proj", "o_proj")
    here, there = model.get_submodule(name), model.get_submodule(other)
    model.set_submodule(name, there)
    model.set_submodule(other, here)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("damage", [negative, smaller, larger, shuffled_rows, swapped])
def test_gptq_weights_that_are_not_the_source_s(sabotage, bits, damage):
    def quantizer(real, model, settings):
        real()
        damage(model, settings["targets"][0])

    reasons = sabotage("gptq", bits, quantizer)
    layer = "model.layers.0.self_attn.q_proj"
    assert any(states(reason, f"{layer}: …weights…source…cosine") for reason in reasons)
    assert all(reason.startswith((layer, layer.replace("q_proj", "o_proj"))) for reason in reasons)


def test_lm_head_quantized_unasked(sabotage):
    def quantizer(real, model, settings):
        real(targets=[*settings["targets"], "lm_head"])

    (reason,) = sabotage("hqq", 4, quantizer)
    assert states(reason, "lm_head…quantized…not asked for")


@pytest.mark.parametrize(
    "name",
    ["model.norm.weight", "lm_head.weight", "model.rotary_emb.inv_freq", "model.layers.1.self_attn.q_proj.bias"],
)
def test_what_was_to_stay_as_it_was(sabotage, untrained, name):
    def quantizer(real, model, settings):
        real()
        tensor = {**model.state_dict(), **dict(model.named_buffers())}[name]
        tensor.flatten()[0] += 0.001

    if name.endswith("bias"):
        projection = untrained.get_submodule(name.removesuffix(".bias"))
        projection.bias = nn.Parameter(torch.ones(projection.out_features), requires_grad=False)
    (reason,) = sabotage("hqq", 4, quantizer)
    assert reason.startswith(f"{name} ")


@pytest.mark.parametrize(
    ("method", "bits", "asked", "used", "says"),
    [
        ("hqq", 4, {}, {"group_size": 128}, "group_size 128, not 64"),
        ("hqq", 4, {}, {"axis": 0}, "axis 0, not 1"),
        ("bnb", 4, {}, {"quant_type": "fp4"}, "quant_type fp4, not nf4"),
        ("bnb", 4, {"double_quant": True}, {"double_quant": False}, "double_quant False, not True"),
        ("bnb", 8, {}, {"threshold": 0.0}, "threshold 0.0, not 6.0"),
        ("gptq", 4, {}, {"group_size": 64}, "group_size 64, not 128"),
        ("gptq", 4, {"group_size": -1}, {"group_size": 32}, "group_size 32, not 128"),
        ("gptq", 4, {}, {"sym": False}, "sym False, not True"),
        ("gptq", 4, {"sym": False}, {"sym": True}, "sym True, not False"),
        ("gptq", 4, {"group_size": 32}, {"act_order": True}, "act_order True, not False"),
        ("gptq", 4, {"group_size": 32, "act_order": True}, {"act_order": False}, "act_order False, not True"),
    ],
)
def test_options_that_contradict_the_label(sabotage, method, bits, asked, used, says):
    kind = type(quantization(method, bits).options)
    reasons = sabotage(method, bits, lambda real, *_: real(options=kind(**(asked | used))), **asked)
    assert any(states(reason, f"model.layers.0.self_attn.q_proj: …{says}") for reason in reasons)


def test_int8_left_in_train_mode(sabotage):
    def quantizer(real, model, settings):
        real()
        for layer in packed_layers(model, settings["targets"]):
            layer.train()

    reasons = sabotage("bnb", 8, quantizer)
    assert len(reasons) == 14
    assert states(reasons[0], "train mode…activations")


@pytest.mark.parametrize(
    "forward",
    [
        lambda layer, other: lambda x: nn.functional.linear(x, layer.dequantize()),
        lambda layer, other: lambda x: 1.2 * type(layer).forward(layer, x),
        lambda layer, other: other.forward,
    ],
    ids=["weights alone", "a wrong kernel", "another layer"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_int8_layer_that_does_not_multiply_as_it_says(sabotage, untrained, forward, dtype):
    def quantizer(real, model, settings):
        real()
        layer, other = packed_layers(model, settings["targets"])[:4:3]  # q_proj and o_proj
        layer.forward = forward(layer, other)

    untrained.to(dtype)
    (reason,) = sabotage("bnb", 8, quantizer)
    assert states(reason, "model.layers.0.self_attn.q_proj: …output on the probe…int8")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite(sabotage, value):
    def quantizer(real, model, settings):
        real()
        model.get_submodule(settings["targets"][0]).scale[0] = value

    reasons = sabotage("hqq", 3, quantizer)
    for facts in ("q_proj.scale…NaN or infinite", "q_proj: …dequantized…NaN or infinite"):
        assert any(states(reason, f"model.layers.0.self_attn.{facts}") for reason in reasons)


def test_a_kernel_that_does_not_run_the_packed_weights(sabotage):
    def quantizer(real, model, settings):
        real()
        layer = model.get_submodule(settings["targets"][0])
        layer.forward = lambda x: 1.01 * nn.functional.linear(x, layer.dequantize())

    (reason,) = sabotage("hqq", 3, quantizer)
    assert states(reason, "Packed and dense logits…1e-04…float32")


def test_a_failed_audit_of_a_copy_reports_that_the_model_is_unchanged(untrained, monkeypatch, probe):
    before = logits(untrained, probe)
    monkeypatch.setattr(quantizer("hqq"), "quantize_linears", lambda *_, **__: None)
    with pytest.raises(AuditError, match="model passed in"):
        quantize(untrained, "hqq", 3, copy=True)
    assert torch.equal(logits(untrained, probe), before)


def test_the_measures_of_a_layer_are_those_of_the_definition():
    torch.manual_seed(0)
    linear = nn.Linear(128, 64)
    layer = HqqLinear.from_linear(linear, 2, HqqOptions())
    audit: LayerAudit = measure_layer("x", linear.weight, layer)
    source, weight = linear.weight.detach().double(), layer.dequantize().double()
    assert audit.relative_error == pytest.approx(((weight - source).norm() / source.norm()).item())
    assert audit.levels == max(len(group.unique()) for group in weight.view(-1, 64)) == 4
    step = torch.stack([group.unique().diff().min() for group in weight.view(-1, 64)]).repeat_interleave(64)
    steps = (weight - source).flatten().abs() / step
    assert audit.median_steps == pytest.approx(steps.median().item(), rel=1e-3)
    assert audit.misplaced == 0
    assert audit.cosine == pytest.approx((weight * source).sum().item() / (weight.norm() * source.norm()).item())
    assert audit.slope == pytest.approx(1 + ((weight - source) * source).sum().item() / source.norm().item() ** 2)


def test_kl_is_that_of_the_definition():
    torch.manual_seed(0)
    p, q = torch.randn(100, 7), torch.randn(100, 7)
    kl, agreement = compare_logits(p, q)
    expected = nn.functional.kl_div(q.log_softmax(-1), p.log_softmax(-1), reduction="batchmean", log_target=True)
    assert kl == pytest.approx(expected.item(), rel=1e-5)
    assert agreement == (p.argmax(-1) == q.argmax(-1)).float().mean()


def test_the_probe_is_the_same_every_time_and_within_the_vocabulary():
    first, again = default_probe(50), default_probe(50)
    assert torch.equal(first, again)
    assert first.min() >= 0
    assert first.max() < 50
