"""Each linear quantized alone: compared with a computation by hand; the model stays unchanged."""

import pytest
import torch
from transformers import LlamaForCausalLM

from qbench.analysis.sensitivity import sensitivity
from qbench.quantizers.measure import hashes
from qbench.quantizers.options import quantization
from qbench.records.analysis import AnalysisError

from .conftest import VOCAB, tiny

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@torch.no_grad()
def log_probabilities(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    return model(ids[None]).logits[0, :-1].double().log_softmax(-1)


@pytest.mark.parametrize(("method", "bits"), [("hqq", 3), ("gptq", 2), ("bnb", 8)])
def test_one_linear_by_hand_and_the_weights_unchanged(method: str, bits: int, texts) -> None:
    subject, texts = tiny("softpick", torch.float32, odd=False), [texts[0], texts[4]]
    asked = quantization(method, bits, **({"group_size": 32} if method == "gptq" else {}))
    calibration = [torch.randint(VOCAB, (1, 48), generator=torch.Generator().manual_seed(n)) for n in range(4)]
    before, modules = hashes(subject), dict(subject.named_modules())
    found = sensitivity(subject, texts, asked, calibration=calibration)
    assert hashes(subject) == before
    assert all(subject.get_submodule(name) is module for name, module in modules.items())
    assert [(d.layer, d.linear) for d in found] == [(layer, name) for layer in range(3) for name in LINEARS]
    assert {d.tokens for d in found} == {sum(len(ids) - 1 for ids in texts)}
    reference = [log_probabilities(subject, ids) for ids in texts]
    asked.quantizer.quantize_linears(
        subject, bits, asked.options, targets=["model.layers.1.mlp.down_proj"], calibration=calibration
    )
    lost = kl = 0.0
    for ids, p in zip(texts, reference, strict=True):
        q = log_probabilities(subject, ids)
        lost += float((p - q).gather(1, ids[1:, None]).sum())
        kl += float((p.exp() * (p - q)).sum())
    (own,) = [d for d in found if (d.layer, d.linear) == (1, "down_proj")]
    assert own.label == asked.label
    assert own.nats_per_token == pytest.approx(lost / own.tokens, abs=1e-5)
    assert own.kl == pytest.approx(kl / own.tokens, rel=1e-3, abs=1e-6)
    assert own.kl > 1e-5


def test_an_error_midway_leaves_the_model_unchanged(texts) -> None:
    subject = tiny("softpick", torch.float32, odd=False)
    before = hashes(subject)

    def fail_once_quantized(*_: object) -> None:
        if hashes(subject) != before:
            raise ZeroDivisionError

    hook = subject.lm_head.register_forward_pre_hook(fail_once_quantized)
    with pytest.raises(ZeroDivisionError):
        sensitivity(subject, texts, quantization("hqq", 3))
    hook.remove()
    assert hashes(subject) == before


def test_what_quantizes_nothing_is_an_error(texts) -> None:
    with pytest.raises(AnalysisError, match=r"none-16.*hqq-3"):
        sensitivity(tiny("softpick"), texts, quantization("none", 16))
