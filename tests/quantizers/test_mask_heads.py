"""Masked heads: the right ones are zero, audited, combined with any method; and errors if a mask is missing."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from qbench import load_checkpoint, quantize, save_checkpoint, save_quantized
from qbench.checkpoint.layout import CheckpointError
from qbench.quantizers import mask_heads
from qbench.quantizers.axes import AXES, MaskHeadsOptions
from qbench.quantizers.declaration import QuantizeError
from qbench.quantizers.mask_heads import MaskedHeads, output_projections
from qbench.quantizers.options import quantization
from qbench.quantizers.quantize import make_dense
from qbench.records.audit import AuditError

from .conftest import logits

HEADS, DIM = 4, 32
DEAD = {1: [2, 3], 2: [0, 1]}  # layer: heads; each pair shares one of the two heads of values
EPSILON = 1e-2


@pytest.fixture
def half_dead(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The trained model, with the outputs of some heads divided by a thousand instead of zero."""
    for layer, heads in DEAD.items():
        rows = slice(heads[0] // 2 * DIM, (heads[0] // 2 + 1) * DIM)
        model.model.layers[layer].self_attn.v_proj.weight[rows] *= 1e-3
    return model


@torch.no_grad()
def head_outputs(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """[layers, batch, length, heads, dim] from attention weights and values, without looking at o_proj's input."""
    model = copy.deepcopy(model).double()
    model.set_attn_implementation("eager")
    output = model(input_ids=ids, output_attentions=True, output_hidden_states=True, use_cache=False)
    found = []
    for layer, weights, states in zip(model.model.layers, output.attentions, output.hidden_states, strict=False):
        values = layer.self_attn.v_proj(layer.input_layernorm(states)).unflatten(-1, (-1, DIM))
        values = values.repeat_interleave(HEADS // values.shape[2], dim=2)  # grouped heads
        found.append(torch.einsum("bhts,bshd->bthd", weights, values))
    return torch.stack(found)


def pruned(model: LlamaForCausalLM, heads: dict[int, list[int]]) -> LlamaForCausalLM:
    """A copy without these heads: zeros in the columns of o_proj that read them."""
    model = copy.deepcopy(model)
    for layer, own in heads.items():
        for head in own:
            model.model.layers[layer].self_attn.o_proj.weight[:, head * DIM : (head + 1) * DIM] = 0
    return model


def masked_by(audit: Any) -> list[str]:
    (part,) = audit.parts
    return list(part.details[1:])


@pytest.mark.parametrize("epsilon", [0.1, 0.2, 0.4])
def test_dead_heads_are_those_that_are_off_at_more_than_95_percent_of_tokens(
    model: LlamaForCausalLM, calibration: list[Tensor], epsilon: float
) -> None:
    off = head_outputs(model, torch.cat(calibration)).abs().amax(-1) < epsilon  # [layers, batch, length, heads]
    expected = off.double().mean((1, 2))
    assert mask_heads.off_share(model, calibration, epsilon).double() == pytest.approx(expected, abs=1e-6)
    axis = MaskedHeads(model, MaskHeadsOptions(epsilon=epsilon), calibration)
    assert torch.equal(axis.dead, expected > 0.95)


def test_a_masked_model_is_a_pruned_one_and_the_audit_says_which_heads(
    half_dead: LlamaForCausalLM, calibration: list[Tensor], probe: Tensor
) -> None:
    before, expected = logits(half_dead, probe), logits(pruned(half_dead, DEAD), probe)
    masked, audit = quantize(half_dead, "none", 16, calibration=calibration, mask_heads={"epsilon": EPSILON})
    assert logits(masked, probe) == pytest.approx(expected, abs=1e-5)
    assert not torch.equal(logits(masked, probe), before)
    assert audit.label == "none-16-mask0.01"
    assert audit.execution == "none"
    assert masked_by(audit) == ["layer 1: heads 2, 3", "layer 2: heads 0, 1"]
    assert "4 of 16 heads" in audit.parts[0].details[0]


def test_heads_that_work_change_the_logits_when_they_are_masked(
    model: LlamaForCausalLM, calibration: list[Tensor], probe: Tensor
) -> None:
    everything = {layer: list(range(HEADS)) for layer in range(4)}
    expected = logits(pruned(model, everything), probe)
    masked, audit = quantize(model, "none", 16, calibration=calibration, probe=probe, mask_heads={"epsilon": 1e6})
    assert logits(masked, probe) == pytest.approx(expected, abs=1e-5)
    assert audit.kl is not None
    assert audit.kl > 0.1


def test_a_model_without_dead_heads_stays_as_it_is(
    model: LlamaForCausalLM, calibration: list[Tensor], probe: Tensor
) -> None:
    before = logits(model, probe)
    masked, audit = quantize(model, "none", 16, calibration=calibration, mask_heads={})
    assert torch.equal(logits(masked, probe), before)
    assert (audit.label, audit.kl, masked_by(audit)) == ("none-16-mask1e-06", 0.0, [])


@pytest.mark.parametrize(
    ("method", "bits", "execution"),
    [("hqq", 4, "dense"), ("hqq", 4, "packed"), ("gptq", 4, "dense"), ("bnb", 8, "packed")],
)
def test_beside_any_method_the_weights_are_quantized_as_without(
    half_dead: LlamaForCausalLM, calibration: list[Tensor], probe: Tensor, method: str, bits: int, execution: str
) -> None:
    how = {"calibration": calibration, "probe": probe, "execution": execution, "copy": True}
    plain, _ = quantize(half_dead, method, bits, **how)
    masked, audit = quantize(half_dead, method, bits, **how, mask_heads={"epsilon": EPSILON})
    assert audit.label == f"{quantization(method, bits).label}-mask0.01"
    assert audit.execution == execution
    assert masked_by(audit) == ["layer 1: heads 2, 3", "layer 2: heads 0, 1"]
    for layer, (ours, theirs) in enumerate(zip(*map(output_projections, (masked, plain)), strict=True)):
        assert torch.equal(dense_weight(ours), dense_weight(theirs))
        gone = torch.tensor([channel // DIM in DEAD.get(layer, []) for channel in range(HEADS * DIM)])
        x = torch.randn(2, 3, HEADS * DIM)
        assert torch.equal(ours(x), theirs(x.where(~gone, 0)))
        assert torch.equal(ours(x), theirs(x)) == (layer not in DEAD)


def dense_weight(layer: Any) -> Tensor:
    return layer.weight if isinstance(layer, nn.Linear) else layer.dequantize()


def test_a_copy_keeps_its_mask(half_dead: LlamaForCausalLM, calibration: list[Tensor], probe: Tensor) -> None:
    masked, _ = quantize(half_dead, "none", 16, calibration=calibration, mask_heads={"epsilon": EPSILON})
    assert torch.equal(logits(copy.deepcopy(masked), probe), logits(masked, probe))
    with pytest.raises(QuantizeError, match=r"none-16-mask0\.01"):
        quantize(masked, "hqq", 4)


# What is not a mask ---------------------------------------------------------------------------------


def never(self: MaskedHeads, model: LlamaForCausalLM) -> None:
    """Mask nothing."""


def another_head(self: MaskedHeads, model: LlamaForCausalLM) -> None:
    self.dead, right = self.dead.roll(1, dims=1), self.dead
    _APPLY(self, model)
    self.dead = right


def one_head_too_many(self: MaskedHeads, model: LlamaForCausalLM) -> None:
    right = self.dead.clone()
    self.dead[0, 0] = True
    _APPLY(self, model)
    self.dead = right


def all_but_one_channel(self: MaskedHeads, model: LlamaForCausalLM) -> None:
    _APPLY(self, model)
    for o_proj in output_projections(model):
        for hook in o_proj._forward_pre_hooks.values():
            hook.masked[hook.masked.nonzero()[0]] = False


def lost_in_a_new_layer(self: MaskedHeads, model: LlamaForCausalLM) -> None:
    """As dense execution puts new layers in the place of packed ones."""
    _APPLY(self, model)
    for layer in model.model.layers:
        old = layer.self_attn.o_proj
        new = nn.Linear(old.in_features, old.out_features, bias=False, device="meta")
        new.weight = old.weight
        layer.self_attn.o_proj = new.eval()


def noise_instead_of_zeros(self: MaskedHeads, model: LlamaForCausalLM) -> None:
    for o_proj, dead in zip(output_projections(model), self.dead, strict=True):
        kept = 1 - dead.repeat_interleave(DIM).float()
        o_proj.register_forward_pre_hook(lambda _, x, kept=kept: (x[0] * kept + 1e-9 * (1 - kept) * (x[0] != 1),))


_APPLY = MaskedHeads.apply


@pytest.mark.parametrize(
    ("sabotage", "reason"),
    [
        (never, "not masked is 4"),
        (another_head, "not masked is 2"),
        (one_head_too_many, "not dead is 1"),
        (all_but_one_channel, "not masked is 2"),
        (lost_in_a_new_layer, "not masked is 4"),
        (noise_instead_of_zeros, "on the probe is 1e-09"),
    ],
)
def test_a_mask_that_is_not_there_fails_the_audit(
    half_dead: LlamaForCausalLM, calibration: list[Tensor], monkeypatch: pytest.MonkeyPatch, sabotage: Any, reason: str
) -> None:
    monkeypatch.setattr(MaskedHeads, "apply", sabotage)
    with pytest.raises(AuditError) as caught:
        quantize(half_dead, "hqq", 8, calibration=calibration, mask_heads={"epsilon": EPSILON})
    assert any(found.startswith("mask0.01: ") and reason in found for found in caught.value.reasons)


def test_a_mask_cannot_be_lost_afterwards(
    half_dead: LlamaForCausalLM, calibration: list[Tensor], tmp_path: Path
) -> None:
    how = {"calibration": calibration, "mask_heads": {"epsilon": EPSILON}, "copy": True}
    packed, _ = quantize(half_dead, "hqq", 4, execution="packed", **how)
    with pytest.raises(QuantizeError, match=r"hqq-4-g64-mask0\.01"):
        make_dense(packed)
    unquantized, _ = quantize(half_dead, "none", 16, **how)
    for masked in (packed, unquantized):
        with pytest.raises(QuantizeError, match="mask_heads"):
            save_quantized(masked, tmp_path / "there")
        with pytest.raises(CheckpointError, match=r"mask0\.01"):
            save_checkpoint(masked, tmp_path / "there")
    assert not (tmp_path / "there").exists()
    save_checkpoint(half_dead, tmp_path / "source")
    load_checkpoint(tmp_path / "source")


# Bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"epsilon": "1e-6"}, ["epsilon", "'1e-6'", "1.0e-6"]),
        ({"epsilon": 0.0}, ["epsilon", "0.0", "more than 0"]),
        ({"epsilom": 0.1}, ["epsilom", "epsilon?"]),
        (0.1, ["mask_heads", "0.1", "epsilon"]),
    ],
)
def test_wrong_options_are_a_sentence(untrained: LlamaForCausalLM, given: Any, facts: list[str]) -> None:
    with pytest.raises(QuantizeError) as caught:
        quantize(untrained, "none", 16, mask_heads=given)
    assert all(fact in str(caught.value) for fact in facts)


def test_without_calibration_text_nothing_is_dead(untrained: LlamaForCausalLM) -> None:
    with pytest.raises(QuantizeError, match="token-id tensors"):
        quantize(untrained, "none", 16, mask_heads={})
    with pytest.raises(QuantizeError, match="mask_heads"):
        quantize(untrained, "none", 16, mask_head={})


def test_every_axis_of_the_table_can_be_loaded_and_shows_in_labels() -> None:
    for name, axis in AXES.items():
        assert name == axis.name
        assert all(callable(getattr(axis.load(), method)) for method in ("apply", "audit"))
        assert axis.options().label_parts()
