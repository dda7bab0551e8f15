"""quantize(): every method and width, and every wrong call."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from qbench.quantizers.declaration import LinearOptions, QuantizeError
from qbench.quantizers.hqq.layer import HqqLinear
from qbench.quantizers.options import NotOffered, NotOfferedError, offers, quantization, quantizer, quantizers
from qbench.quantizers.packed import PackedLinear, packed_form
from qbench.quantizers.quantize import make_dense, quantize
from qbench.records.audit import Audit

from . import tiny
from .conftest import logits

WIDTHS = [(method, bits) for method, own in quantizers().items() if method != "none" for bits in own.widths]
TARGETS = 4 * 7  # layers × (q, k, v, o, gate, up, down)


@pytest.mark.parametrize(
    ("method", "bits", "options", "label"),
    [
        ("none", 16, {}, "none-16"),
        ("bnb", 8, {}, "bnb-8"),
        ("bnb", 8, {"threshold": 5.5}, "bnb-8-t5.5"),
        ("bnb", 4, {}, "bnb-4-nf4"),
        ("bnb", 4, {"quant_type": "fp4", "double_quant": True}, "bnb-4-fp4-dq"),
        ("hqq", 3, {}, "hqq-3-g64"),
        ("hqq", 3, {"axis": 0, "group_size": 32}, "hqq-3-g32-axis0"),
        ("gptq", 3, {}, "gptq-3-g128"),
        ("gptq", 2, {"sym": False, "act_order": True, "damp": 0.05}, "gptq-2-g128-asym-actorder-damp0.05"),
        ("hqq", 2, {"include_lm_head": True}, "hqq-2-g64-head"),
    ],
)
def test_a_label_names_what_was_asked_for(method, bits, options, label):
    assert quantization(method, bits, **options).label == label


def test_an_option_that_no_label_shows_cannot_be_declared():
    with pytest.raises(TypeError, match=r"Hidden.* rounds"):

        class Hidden(LinearOptions):
            rounds: int = 1


def test_parts_beside_the_weights_show_in_the_label_and_the_identity():
    weights, both = quantization("none", 16), quantization("none", 16, mask_heads={"epsilon": 0.01})
    assert weights.is_unquantized
    assert weights.identity() == {"method": "none", "bits": 16, "options": {}}
    assert both.label == "none-16-mask0.01"
    assert not both.is_unquantized
    assert both.for_weights == weights
    assert both.identity() == weights.identity() | {"parts": {"mask0.01": {"epsilon": 0.01}}}
    assert quantization("none", 16, **both.arguments) == both
    assert quantization("hqq", 4, mask_heads={}).label == "hqq-4-g64-mask1e-06"
    assert quantization("hqq", 4, mask_heads=None) == quantization("hqq", 4)


def test_widths_that_bnb_lacks_are_a_value_not_an_error():
    assert offers("bnb", 4)
    assert not offers("bnb", 3)
    assert NotOffered("bnb", 2).label == "bnb-2"
    assert "bnb" in str(NotOffered("bnb", 2))


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        ({"method": "bnb", "bits": 3}, NotOfferedError, "3 bits.* bnb.*4 and 8"),
        ({"method": "none", "bits": 8}, NotOfferedError, "8 bits.* none.*16"),
        ({"method": "hqc", "bits": 3}, QuantizeError, "'hqc'.*Did you mean hqq"),
        ({"method": "hqq", "bits": "3"}, QuantizeError, "bits.*'3'.*whole number"),
        ({"method": "hqq", "bits": 3, "group_sise": 64}, QuantizeError, "Did you mean group_size"),
        ({"method": "hqq", "bits": 3, "axis": 2}, QuantizeError, "hqq.*axis.*2.*0, 1"),
        (
            {"method": "hqq", "bits": 3, "group_size": 48},
            QuantizeError,
            "group_size 48.*16,384 weights of .*q_proj",
        ),
        ({"method": "gptq", "bits": 3, "sym": "yes"}, QuantizeError, "gptq.*sym.*'yes'"),
        ({"method": "gptq", "bits": 3}, QuantizeError, "[Cc]alibration"),
        ({"method": "bnb", "bits": 8, "quant_type": "nf4"}, QuantizeError, "quant_type.*bnb.*4 bits.*8"),
        ({"method": "hqq", "bits": 3, "execution": "fast"}, QuantizeError, "execution.*'fast'.*'dense'"),
        ({"method": "hqq", "bits": 3, "probe": torch.tensor([[64]])}, QuantizeError, "64.*vocabulary.*63"),
        ({"method": "hqq", "bits": 3, "probe": torch.tensor([1, 2])}, QuantizeError, r"probe.*token ids \[batch"),
        ({"method": "hqq", "bits": 3, "probe": [[1, 2]]}, QuantizeError, "probe.*list.*tensor"),
        ({"method": "hqq", "bits": 3, "probe": torch.ones(1, 2, dtype=torch.bool)}, QuantizeError, "probe.*torch.bool"),
        ({"method": ["hqq"], "bits": 3}, QuantizeError, r"method.*\['hqq'\].*none, bnb, gptq, hqq"),
        ({"method": "hqq", "bits": 3, "device": "gpu"}, QuantizeError, "device.*'gpu'"),
        ({"method": "hqq", "bits": 3, "device": 1.5}, QuantizeError, "device.*1.5"),
        ({"method": "hqq", "bits": 3, "device": "meta"}, QuantizeError, "device.*'meta'.*weights"),
        ({"method": "hqq", "bits": 3, "device": "cuda:99"}, QuantizeError, "device.*'cuda:99'"),
        ({"method": "gptq", "bits": 3, "calibration": [[1, 2]]}, QuantizeError, "sample 0.*list"),
        ({"method": "gptq", "bits": 3, "calibration": "wikitext3"}, QuantizeError, "'wikitext3'.*file"),
    ],
)
def test_a_wrong_call_says_what_is_wrong_and_leaves_the_model(call, kind, says):
    model = LlamaForCausalLM(tiny.config(num_hidden_layers=1))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(kind, match=says):
        quantize(model, **call)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(("method", "bits"), WIDTHS)
def test_every_width_passes_its_audit_and_shows_its_bits(quantized, method, bits):
    model, audit = quantized(method, bits)
    assert audit.target_share == 1
    assert len(audit.layers) == TARGETS
    assert bits <= audit.code_bits < bits + 0.5
    assert audit.storage_bits > audit.code_bits
    assert all(2 ** (bits - 1) < layer.codes_used <= 2**bits and layer.levels <= 2**bits for layer in audit.layers)
    assert audit.snr_db == pytest.approx(-20 * torch.tensor(audit.relative_error).log10().item(), abs=1e-3)
    assert audit.activation_bits == (8 if (method, bits) == ("bnb", 8) else None)
    assert audit.execution == ("packed" if audit.activation_bits else "dense")
    assert type(model.lm_head) is nn.Linear
    assert Audit.model_validate_json(audit.model_dump_json()) == audit
    json.loads(json.dumps(audit.model_dump()), parse_constant=pytest.fail)  # no NaN


@pytest.mark.parametrize(
    ("method", "bits", "options"),
    [
        pytest.param("gptq", b, {"act_order": a, "sym": s}, marks=[] if b == 2 else pytest.mark.slow)
        for b in (2, 3, 4)
        for a in (False, True)
        for s in (False, True)
    ]
    + [("gptq", 2, {"group_size": -1}), ("hqq", 1, {"axis": 0}), ("bnb", 4, {"quant_type": "fp4"})],
)
def test_honest_layers_are_far_from_the_limits_of_the_audit(quantized, method, bits, options):
    _, audit = quantized(method, bits, **options)
    assert all(layer.cosine > (0.75 if bits > 1 else 0.4) for layer in audit.layers)
    assert bits == 1 or all(0.95 < layer.slope < 1.05 for layer in audit.layers)


@pytest.mark.parametrize("method", ["bnb", "gptq", "hqq"])
def test_the_damage_grows_as_bits_fall(quantized, method):
    audits = [quantized(method, bits)[1] for bits in sorted(quantizer(method).widths, reverse=True)]
    kl, error = [audit.kl for audit in audits], [audit.relative_error for audit in audits]
    assert kl[0] > 0
    assert kl == sorted(kl)
    assert error == sorted(error)


def test_the_baseline_comes_through_the_same_door(model, probe):
    before = logits(model, probe)
    same, audit = quantize(model, "none", 16, probe=probe)
    assert same is model
    assert (audit.kl, audit.top1_agreement, audit.quantized_share, audit.layers) == (0, 1, 0, ())
    assert (audit.method, audit.bits, audit.label, audit.execution) == ("none", 16, "none-16", "none")
    assert (audit.code_bits, audit.storage_bits, audit.relative_error, audit.snr_db) == (None, None, None, None)
    json.loads(json.dumps(audit.model_dump()), parse_constant=pytest.fail)  # no NaN
    assert torch.equal(logits(model, probe), before)


@pytest.mark.parametrize(("method", "bits"), [("bnb", 4), ("hqq", 3), ("gptq", 3)])
def test_dense_and_packed_execution_give_the_same_logits(quantized, probe, method, bits):
    dense, audit = quantized(method, bits)
    packed, packed_audit = quantized(method, bits, execution="packed")
    assert type(dense.model.layers[0].mlp.up_proj) is nn.Linear
    assert isinstance(packed.model.layers[0].mlp.up_proj, PackedLinear)
    assert (audit.execution, packed_audit.execution) == ("dense", "packed")
    assert audit.packed_dense_gap <= 1e-5
    torch.testing.assert_close(logits(dense, probe), logits(packed, probe), rtol=1e-5, atol=1e-5)
    assert audit.layers == packed_audit.layers


def test_a_model_that_quantizes_activations_is_not_made_dense(quantized, model):
    with pytest.raises(QuantizeError, match=r"bnb-8.*activations"):
        make_dense(quantized("bnb", 8)[0])
    with pytest.raises(QuantizeError, match="not quantized"):
        make_dense(model)


def test_a_copy_leaves_the_original_as_it_was(model, probe):
    before, state = logits(model, probe), copy.deepcopy(model.state_dict())
    other, _ = quantize(model, "hqq", 2, probe=probe, copy=True)
    assert other is not model
    assert packed_form(model) is None
    assert torch.equal(logits(model, probe), before)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert not torch.equal(logits(other, probe), before)


def test_a_quantized_model_is_not_quantized_again(quantized):
    for execution in ("dense", "packed"):
        with pytest.raises(QuantizeError, match=r"already quantized.*hqq-3-g64.*unquantized"):
            quantize(quantized("hqq", 3, execution=execution)[0], "none", 16)


def test_only_models_that_load_checkpoint_gives_are_quantized(untrained):
    with pytest.raises(QuantizeError, match=r"Linear.*LlamaForCausalLM"):
        quantize(nn.Linear(64, 64), "hqq", 4)
    untrained.config.quantization_config = {"quant_method": "awq"}
    with pytest.raises(QuantizeError, match="already quantized"):
        quantize(untrained, "hqq", 4)


def test_lm_head_is_quantized_when_asked_for(untrained):
    _, audit = quantize(untrained, "hqq", 4, include_lm_head=True)
    assert audit.quantized_share == 1
    assert audit.layers[-1].name == "lm_head"
    tied = LlamaForCausalLM(tiny.config(num_hidden_layers=1, tie_word_embeddings=True))
    with pytest.raises(QuantizeError, match=r"include_lm_head.*embeddings"):
        quantize(tied, "hqq", 4, include_lm_head=True)


def test_biases_are_kept(calibration):
    model = LlamaForCausalLM(tiny.config(num_hidden_layers=1, attention_bias=True))
    bias = nn.init.normal_(model.model.layers[0].self_attn.q_proj.bias).clone()
    for method, bits in [("hqq", 4), ("bnb", 4), ("bnb", 8), ("gptq", 4)]:
        for execution in ("dense", "packed"):
            other, _ = quantize(model, method, bits, calibration=calibration[:4], execution=execution, copy=True)
            assert torch.equal(other.model.layers[0].self_attn.q_proj.bias, bias)


@pytest.mark.parametrize(("copied", "says"), [(False, "Load the model again"), (True, "model passed in")])
def test_an_error_midway_says_what_the_model_is_good_for(untrained, monkeypatch, copied, says):
    real = HqqLinear.from_linear
    left = [1, 2, 3]

    def breaks(*arguments):
        left.pop()  # an IndexError, at the fourth layer
        return real(*arguments)

    monkeypatch.setattr(HqqLinear, "from_linear", breaks)
    with pytest.raises(RuntimeError, match=rf"hqq-3-g64.*{says}"):
        quantize(untrained, "hqq", 3, copy=copied)
    assert copied == (type(untrained.model.layers[0].self_attn.q_proj) is nn.Linear)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("x"), MemoryError(), RuntimeError("can't allocate memory: y")]
)
def test_no_memory_left_is_a_sentence(untrained, monkeypatch, error):
    def raises(*_, **__):
        raise error

    monkeypatch.setattr(HqqLinear, "from_linear", raises)
    with pytest.raises(QuantizeError, match=r"memory.*hqq-3-g64.*Load the model again"):
        quantize(untrained, "hqq", 3)


def test_a_model_that_is_broken_already_is_not_quantized(untrained):
    untrained.model.norm.weight[0] = torch.nan
    with pytest.raises(QuantizeError, match=r"logits.*NaN or infinite"):
        quantize(untrained, "hqq", 3)


def test_the_model_comes_back_in_eval_mode(untrained):
    other, _ = quantize(untrained.train(), "hqq", 4)
    assert not any(module.training for module in other.modules())


def test_half_precision_models_are_quantized_too():
    for dtype in (torch.bfloat16, torch.float16):
        model = LlamaForCausalLM(tiny.config(num_hidden_layers=1)).to(dtype)
        for method, bits in [("hqq", 8), ("hqq", 2), ("bnb", 4), ("bnb", 8)]:
            other, audit = quantize(model, method, bits, copy=True)
            assert audit.dtype == str(dtype).removeprefix("torch.")
            assert other.dtype == dtype


@pytest.mark.parametrize("factor", [0.05, 0.2])
def test_small_weights_are_quantized_too(untrained, factor):
    for parameter in untrained.model.layers.parameters():
        if parameter.ndim == 2:
            parameter *= factor
    for bits in (8, 4, 2):
        _, audit = quantize(untrained, "hqq", bits, copy=True)  # its steps are at least 5e-5
        assert audit.layers[0].codes_used > audit.layers[0].codes_possible / 2


def test_labels_options_and_audits_need_no_torch():
    code = """
import sys
import qbench, qbench.quantizers
from qbench.records.audit import Audit
from qbench.quantizers.options import offers, quantization
assert quantization("gptq", 3).label == "gptq-3-g128" and not offers("bnb", 2)
heavy = {"torch", "transformers", "bitsandbytes", "hqq", "gptqmodel"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.slow
def test_importing_the_function_imports_no_library_of_a_method():
    code = """
import sys
from qbench import quantize
assert callable(quantize) and not {"bitsandbytes", "gptqmodel"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("method", "bits"), WIDTHS)
@pytest.mark.parametrize("execution", ["dense", "packed"])
def test_every_width_on_a_gpu(quantized, model, probe, calibration, method, bits, execution):
    here, audit = quantize(model.cuda(), method, bits, calibration=calibration, probe=probe, execution=execution)
    assert here.device.type == "cuda"
    there = quantized(method, bits)[1]
    assert audit.code_bits == there.code_bits
    assert audit.kl == pytest.approx(there.kl, rel=0.5, abs=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("method", "bits"), WIDTHS)
def test_a_model_on_the_cpu_is_quantized_layer_by_layer_on_a_gpu(model, calibration, method, bits):
    here, _ = quantize(model, method, bits, calibration=calibration, device="cuda")
    assert here.device.type == "cpu"
