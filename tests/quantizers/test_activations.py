"""Quantized activations: what linear layers compute with, static ranges, audits, and errors if nothing is quantized."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from qbench import quantize, save_quantized
from qbench.quantizers import rounding
from qbench.quantizers.activations import InputQuantizer, QuantizedActivations, input_ranges
from qbench.quantizers.axis_options import ActivationsOptions
from qbench.quantizers.declaration import QuantizeError
from qbench.quantizers.options import quantization
from qbench.quantizers.rounding import quantized, scales
from qbench.records.audit import AuditError

from . import tiny
from .conftest import logits

SETTINGS: list[dict[str, Any]] = [
    {"bits": 8},
    {"bits": 6},
    {"bits": 4},
    {"bits": 8, "per_tensor": True},
    {"bits": 8, "per_tensor": True, "percentile": 99.5},
    {"format": "fp8"},
    {"format": "fp8", "per_tensor": True},
    {"format": "mxfp4"},
    {"format": "nvfp4"},
]


@pytest.fixture(scope="module")
def texts() -> list[Tensor]:
    return tiny.calibration_ids(4, 48)


class Reference(nn.Module):
    """A linear layer that rounds its input itself."""

    def __init__(self, linear: nn.Linear, options: ActivationsOptions, amax: float | None) -> None:
        super().__init__()
        self.linear, self.options = linear, options
        self.amax = None if amax is None else torch.tensor(amax)

    def forward(self, x: Tensor) -> Tensor:
        own = self.options
        return F.linear(
            quantized(own.format, own.bits, x, tensor_amax=self.amax, whole=own.per_tensor), self.linear.weight
        )


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda own: ActivationsOptions(**own).label_parts()[-1])
def test_every_linear_layer_computes_with_a_rounded_input(
    untrained: LlamaForCausalLM, texts: list[Tensor], probe: Tensor, settings: dict[str, Any]
) -> None:
    options = ActivationsOptions(**settings)
    names = list(linears(untrained))
    ranges = input_ranges(untrained, names, texts, options.percentile) if options.calibrated else {}
    expected = copy.deepcopy(untrained)
    for name, linear in linears(expected).items():
        expected.set_submodule(name, Reference(linear, options, ranges.get(name)))
    before = logits(untrained, probe)
    model, audit = quantize(untrained, "none", 16, calibration=texts, activations=settings)
    assert torch.equal(logits(model, probe), logits(expected, probe))
    assert not torch.equal(logits(model, probe), before)
    assert audit.label == quantization("none", 16, activations=settings).label
    assert audit.kl is not None
    assert audit.kl > 0
    assert f"{len(names)} linear layers" in audit.parts[0].details[0]
    assert "simulated" in audit.parts[0].details[0]


def test_labels_tell_what_is_quantized() -> None:
    def label(method: str, bits: int, **options: Any) -> str:
        return quantization(method, bits, **options).label

    assert label("gptq", 4, activations={"bits": 8}, kv_cache={"bits": 4}) == "gptq-4-g128-a8-kv4"
    assert label("none", 16, kv_cache={"bits": 2}) == "none-16-kv2"
    assert label("none", 16, activations={"per_tensor": True}) == "none-16-a8-tensor"
    assert label("rtn", 4, format="mxfp4", activations={"format": "mxfp4"}) == "rtn-4-mxfp4-a4-mxfp4"
    assert label("none", 16, activations={"bits": 4}, mask_heads={}) == "none-16-mask1e-06-a4"
    everything = {"kv_cache": {"bits": 2, "keys": "token", "channels": 16, "keep_first": 4}}
    assert label("none", 16, **everything) == "none-16-kv2-token-c16-keep4"


def test_lm_head_follows_the_option_of_the_weights(untrained: LlamaForCausalLM, probe: Tensor) -> None:
    model, _ = quantize(untrained, "rtn", 8, activations={"bits": 4}, include_lm_head=True, copy=True)
    assert any(isinstance(hook, InputQuantizer) for hook in model.lm_head._forward_pre_hooks.values())
    model, _ = quantize(untrained, "rtn", 8, activations={"bits": 4})
    assert not model.lm_head._forward_pre_hooks


@pytest.mark.parametrize("percentile", [100.0, 99.0, 50.0])
def test_static_ranges_are_percentiles_of_what_linear_layers_read(
    untrained: LlamaForCausalLM, texts: list[Tensor], percentile: float
) -> None:
    layer = untrained.model.layers[0]
    with torch.no_grad():
        read = torch.cat([layer.input_layernorm(untrained.model.embed_tokens(ids)).flatten() for ids in texts]).abs()
    name = "model.layers.0.self_attn.v_proj"
    found = input_ranges(untrained, [name], texts, percentile)
    expected = float(torch.quantile(read, percentile / 100))
    assert found == {name: pytest.approx(expected, rel=0 if percentile == 100 else 1 / 128)}


def test_a_static_scale_does_not_know_the_text_and_clips_it(untrained: LlamaForCausalLM, texts: list[Tensor]) -> None:
    how = {"per_tensor": True, "percentile": 90.0}
    model, audit = quantize(untrained, "none", 16, calibration=texts, activations=how)
    clipped = next(m for m in audit.parts[0].measured if "clipped" in m.what)
    assert clipped.value > 0
    ids = torch.cat(texts)
    assert logits(model, ids[:1]) == pytest.approx(logits(model, ids)[:1], abs=1e-4)


def test_beside_a_mask_and_packed_weights(untrained: LlamaForCausalLM, texts: list[Tensor], probe: Tensor) -> None:
    axes = {"mask_heads": {"epsilon": 1e9}, "activations": {"bits": 8}, "kv_cache": {"bits": 4, "group_size": 8}}
    model, audit = quantize(untrained, "hqq", 4, calibration=texts, execution="packed", copy=True, **axes)
    assert audit.label == "hqq-4-g64-mask1000000000.0-a8-kv4-g8"
    assert [part.label for part in audit.parts] == ["mask1000000000.0", "a8", "kv4-g8"]
    dense, _ = quantize(untrained, "hqq", 4, calibration=texts, **axes)
    assert logits(model, probe) == pytest.approx(logits(dense, probe), abs=1e-3)
    with pytest.raises(QuantizeError, match="activations"):
        save_quantized(model, "nowhere")
    assert torch.equal(logits(copy.deepcopy(model), probe), logits(model, probe))


# What is not quantized ---------------------------------------------------------------------------


def never(self: QuantizedActivations, model: LlamaForCausalLM) -> None:
    """Quantize nothing."""


def all_but_one(self: QuantizedActivations, model: LlamaForCausalLM) -> None:
    _APPLY(self, model)
    model.model.layers[1].mlp.down_proj._forward_pre_hooks.clear()


def through(self: QuantizedActivations, model: LlamaForCausalLM) -> None:
    """A hook that runs and changes nothing."""
    for linear in linears(model).values():
        linear.register_forward_pre_hook(lambda _, arguments: arguments)


def lost_in_a_new_layer(self: QuantizedActivations, model: LlamaForCausalLM) -> None:
    """As dense execution puts new layers in the place of packed ones."""
    _APPLY(self, model)
    for name, linear in linears(model).items():
        new = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
        new.weight = linear.weight
        model.set_submodule(name, new.eval())


def more_bits(self: QuantizedActivations, model: LlamaForCausalLM) -> None:
    right, self.options = self.options, ActivationsOptions(bits=8, per_tensor=self.options.per_tensor)
    _APPLY(self, model)
    self.options = right


def fewer_bits(self: QuantizedActivations, model: LlamaForCausalLM) -> None:
    """Three levels are those of 2 bits."""
    for linear in linears(model).values():
        linear.register_forward_pre_hook(lambda _, x: (quantized("int", 2, x[0]),))


def noise(self: QuantizedActivations, model: LlamaForCausalLM) -> None:
    for linear in linears(model).values():
        linear.register_forward_pre_hook(lambda _, x: (x[0] * (1 + 0.01 * torch.randn_like(x[0])),))


def nan(self: QuantizedActivations, model: LlamaForCausalLM) -> None:
    for linear in linears(model).values():
        linear.register_forward_pre_hook(lambda _, x: (x[0] * torch.nan,))


_APPLY = QuantizedActivations.apply


@pytest.mark.parametrize(
    ("sabotage", "reason"),
    [
        (never, "not quantized is 14"),
        (all_but_one, "not quantized is 1;"),
        (through, "not quantized is 14"),
        (lost_in_a_new_layer, "not quantized is 14"),
        (more_bits, "levels in a group of an input is"),
        (fewer_bits, "levels in a group of an input is 3;"),
        (noise, "levels in a group of an input is"),
        (nan, "not quantized is"),
    ],
)
def test_an_input_that_was_not_quantized_fails_the_audit(
    untrained: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, sabotage: Any, reason: str
) -> None:
    monkeypatch.setattr(QuantizedActivations, "apply", sabotage)
    with pytest.raises(AuditError) as caught:
        quantize(untrained, "none", 16, activations={"bits": 4})
    assert any(found.startswith("a4: ") and reason in found for found in caught.value.reasons), caught.value.reasons


@pytest.mark.parametrize("forgotten", [["model.layers.0.mlp.up_proj"], None])
def test_a_static_scale_that_was_never_calibrated_fails_the_audit(
    untrained: LlamaForCausalLM, texts: list[Tensor], monkeypatch: pytest.MonkeyPatch, forgotten: list[str] | None
) -> None:
    def forgetful(model: Any, names: Any, *others: Any) -> dict[str, float]:
        found = input_ranges(model, names, *others)
        return {name: own for name, own in found.items() if forgotten is not None and name not in forgotten}

    monkeypatch.setattr("qbench.quantizers.activations.input_ranges", forgetful)
    with pytest.raises(AuditError, match="never calibrated"):
        quantize(untrained, "none", 16, calibration=texts, activations={"per_tensor": True})


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda own: ActivationsOptions(**own).label_parts()[-1])
def test_a_wrong_scale_fails_the_audit(
    untrained: LlamaForCausalLM, texts: list[Tensor], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    factor = 2 if settings.get("format") == "mxfp4" else 1.03
    monkeypatch.setattr(rounding, "scales", lambda *given: factor * scales(*given))
    with pytest.raises(AuditError, match="does not explain"):
        quantize(untrained, "none", 16, calibration=texts, activations=settings)


def test_one_layer_with_fewer_bits_or_the_range_of_another_fails_the_audit(
    untrained: LlamaForCausalLM, texts: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_off(self: QuantizedActivations, model: LlamaForCausalLM) -> None:
        _APPLY(self, model)
        (hook,) = model.model.layers[1].mlp.down_proj._forward_pre_hooks.values()
        if self.options.per_tensor:
            hook.amax = self.ranges["model.layers.0.mlp.up_proj"]
        else:
            hook.options = ActivationsOptions(bits=4)

    monkeypatch.setattr(QuantizedActivations, "apply", one_off)
    for settings in ({"bits": 8}, {"bits": 8, "per_tensor": True}):
        with pytest.raises(AuditError, match="does not explain"):
            quantize(untrained, "none", 16, calibration=texts, activations=settings, copy=True)


def test_a_masked_input_that_was_not_quantized_fails_the_audit(
    untrained: LlamaForCausalLM, texts: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask changes it, but does not round it."""

    def only_masked(self: QuantizedActivations, model: LlamaForCausalLM) -> None:
        _APPLY(self, model)
        hooks = model.model.layers[1].self_attn.o_proj._forward_pre_hooks
        _, rounding = hooks
        del hooks[rounding]

    untrained.model.layers[1].self_attn.v_proj.weight[:32] *= 1e-3  # two of four heads
    axes = {"mask_heads": {"epsilon": 3e-3}, "activations": {"bits": 8}}
    _, audit = quantize(untrained, "none", 16, calibration=texts, copy=True, **axes)
    assert "2 of 8 heads" in audit.parts[0].details[0]
    monkeypatch.setattr(QuantizedActivations, "apply", only_masked)
    with pytest.raises(AuditError, match="not quantized is 1"):
        quantize(untrained, "none", 16, calibration=texts, **axes)


def test_inference_mode_gives_the_same(untrained: LlamaForCausalLM, probe: Tensor) -> None:
    model, _ = quantize(untrained, "none", 16, activations={"bits": 8})
    with torch.inference_mode():
        found = model(input_ids=probe).logits
    assert torch.equal(found, model(input_ids=probe).logits)


# Bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"bits": 5}, ["activations", "bits", "5", "8, 6, 4"]),
        ({"bits": "8"}, ["activations", "bits", "whole number"]),
        ({"format": "fp8", "bits": 4}, ["bits", "4", "fp8", "8"]),
        ({"format": "fp4"}, ["format", "fp4", "mxfp4"]),
        ({"format": "mxfp4", "per_tensor": True}, ["per_tensor", "mxfp4", "block of 32"]),
        ({"percentile": 99.0}, ["percentile", "99", "per_tensor"]),
        ({"percentile": 101.0, "per_tensor": True}, ["percentile", "101", "100 or less"]),
        ({"per_token": True}, ["per_token", "per_tensor?"]),
        (8, ["activations", "8", "mapping"]),
        ({"per_tensor": True}, ["token-id tensors"]),
        ({"format": "nvfp4"}, ["token-id tensors"]),
    ],
)
def test_wrong_options_are_a_sentence(untrained: LlamaForCausalLM, given: Any, facts: list[str]) -> None:
    with pytest.raises(QuantizeError) as caught:
        quantize(untrained, "none", 16, activations=given)
    assert all(fact in str(caught.value) for fact in facts), str(caught.value)


def test_llm_int8_quantizes_activations_already(untrained: LlamaForCausalLM) -> None:
    with pytest.raises(QuantizeError, match=r"bnb at 8 bits.*activations"):
        quantize(untrained, "bnb", 8, activations={"bits": 8})
    assert quantization("bnb", 8, kv_cache={"bits": 4}).label == "bnb-8-kv4"
    assert quantization("bnb", 4, activations={"bits": 8}).label == "bnb-4-nf4-a8"


def test_blocks_must_divide_the_inputs() -> None:
    model = LlamaForCausalLM(tiny.config(num_hidden_layers=1, intermediate_size=144)).eval()
    with pytest.raises(QuantizeError, match=r"mxfp4.*32.*down_proj.*144"):
        quantize(model, "none", 16, activations={"format": "mxfp4"})
