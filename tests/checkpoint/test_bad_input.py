"""A checkpoint that is wrong is one sentence: the file, what is wrong in it, and what would be right."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qbench import load_checkpoint, save_checkpoint
from qbench.attention.register import attention_kind

from .small_checkpoints import FLA, HEADS, HIDDEN, error, fla, fla_tensors, llama, write


@pytest.mark.parametrize(("attention", "asked"), [("softpick", "softmax"), ("softmax", "softpick")])
@pytest.mark.parametrize("layout", [fla, llama])
def test_a_caller_who_disagrees_with_the_checkpoint_is_reported(tmp_path, layout, attention, asked):
    message = error(layout(tmp_path, attention), attention=asked)
    assert f"attention='{asked}' was asked for, but {tmp_path / 'config.json'} has" in message
    assert f"which is {attention}; ask for '{attention}'" in message


def test_an_attention_that_does_not_exist_is_reported(tmp_path):
    message = error(fla(tmp_path), attention="sotfpick")
    assert message.endswith("scalable_softmax. Did you mean softpick?")


@pytest.mark.parametrize(
    "value",
    [
        "parallel_abs_softmax_1_attn",
        "parallel_abs_softmax_2_attn",
        "parallel_relu_softpick_2_attn",
        "parallel_stochastic_softpick_attn",
        "parallel_pruned_softpick_attn",
        "softmax_plus_one",
        "softpick",
        "",
        3,
    ],
)
def test_an_unknown_attn_impl_is_never_softmax(tmp_path, value):
    message = error(fla(tmp_path, attn_impl=value))
    assert f"config.json: attn_impl is {value!r}; supported are flash_attn, parallel_attn, naive_attn, " in message


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation"])
def test_an_unknown_attn_implementation_is_never_softmax(tmp_path, field):
    message = error(llama(tmp_path, **{field: "owner/kernel"}))
    assert f"config.json: {field} is 'owner/kernel'; supported are eager, sdpa" in message


@pytest.mark.parametrize(
    "says",
    [
        {"attn_impl": "parallel_softpick_attn"},
        {"_attn_implementation": "softpick"},
        {"architectures": ["SoftpickLlamaForCausalLM"]},
    ],
)
def test_whatever_field_says_softpick_it_never_runs_as_softmax(tmp_path, says):
    assert attention_kind(load_checkpoint(llama(tmp_path, **says))) == "softpick"
    assert "contradict each other" in error(llama(tmp_path, **says, attn_implementation="sdpa"))


@pytest.mark.parametrize(
    ("field", "value", "supported"),
    [
        ("qkv_bias", True, "False"),
        ("qk_norm", True, "False"),
        ("use_rope", False, "True"),
        ("logit_soft_cap", 30.0, "None"),
        ("window_size", 512, "None"),
        ("hidden_act", "gelu", "'swish', 'silu'"),
        ("elementwise_affine", False, "True"),
        ("rope_scaling", {"factor": 2.0}, "None"),
        ("rope_theta", None, "a positive number"),
        ("hidden_ratio", -1, "a positive number"),
        ("hidden_size", "64", "a positive number"),
        ("hidden_size", 64.0, "a positive integer"),
        ("num_heads", 0, "a positive integer"),
        ("num_hidden_layers", None, "a positive integer"),
        ("vocab_size", True, "a positive integer"),
        ("norm_eps", "small", "rms_norm_eps"),
    ],
)
def test_an_unsupported_fla_field_is_named_with_its_value(tmp_path, field, value, supported):
    message = error(fla(tmp_path, **{field: value}))
    assert str(tmp_path / "config.json") in message
    assert supported in message
    assert field == "norm_eps" or f"{field} is {value!r}" in message


@pytest.mark.parametrize(
    ("layout", "fields", "words"),
    [
        (llama, {"hidden_act": "geluu"}, "cannot build a Llama from it (KeyError: 'geluu')"),
        (llama, {"rope_parameters": {"rope_type": "weird", "rope_theta": 1e4}}, "weird"),
        (llama, {"pad_token_id": 40_000}, "cannot build a Llama from it"),
        (fla, {"num_heads": 5}, "hidden_size 64 and num_heads 5; num_heads must divide hidden_size"),
        (fla, {"num_kv_heads": 3}, "num_kv_heads 3 does not divide num_heads 4"),
        (llama, {"num_attention_heads": 5}, "num_attention_heads must divide hidden_size"),
        (llama, {"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 4"),
        (llama, {"num_attention_heads": 64, "num_key_value_heads": 64}, "head dim must be even"),
        (llama, {"hidden_act": 3}, "not a valid Llama config"),
        (llama, {"quantization_config": {"bits": 4}}, "quantization_config; give the unquantized one"),
        (llama, {"model_type": "mistral"}, "model_type is 'mistral'; supported are 'llama'"),
        (llama, {"model_type": None}, "model_type is None"),
    ],
)
def test_a_bad_config_is_named(tmp_path, layout, fields, words):
    message = error(layout(tmp_path, **fields))
    assert str(tmp_path / "config.json") in message
    assert words in message


@pytest.mark.parametrize(
    ("content", "words"), [(None, "cannot be read"), ("{", "is not JSON"), ("[]", "holds a JSON list")]
)
def test_a_config_that_is_no_object_is_named(tmp_path, content, words):
    file = fla(tmp_path) / "config.json"
    file.unlink()
    if content is not None:
        file.write_text(content)
    assert f"{file} {words}" in error(tmp_path)


def test_a_path_that_is_no_folder_is_reported(tmp_path):
    assert "does not exist, and is not a Hub id (owner/name)" in error(tmp_path / "absent")
    assert "is a file; give the folder" in error(fla(tmp_path) / "model.safetensors")


def test_a_dtype_that_is_none_is_reported(tmp_path):
    assert "dtype is torch.int8; it must be one of torch.float64" in error(fla(tmp_path), dtype=torch.int8)


def test_missing_weights_are_reported(tmp_path):
    (fla(tmp_path) / "model.safetensors").unlink()
    assert f"{tmp_path} has no safetensors weights: it must have model.safetensors" in error(tmp_path)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_a_truncated_file_is_named(tmp_path, shards, keep):
    file = sorted(fla(tmp_path, shards=shards).glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:keep])
    message = error(tmp_path)
    assert message.startswith(f"{file} cannot be read as safetensors")
    assert message.endswith("; copy it again or `git checkout` it, or, from the Hub, remove it and `qbench fetch` it.")


def test_a_shard_that_is_absent_is_named(tmp_path):
    (fla(tmp_path, shards=3) / "model-00002-of-00003.safetensors").unlink()
    message = error(tmp_path)
    assert "model.safetensors.index.json names the shard model-00002-of-00003.safetensors, which is not" in message
    assert "in the folder; copy it again or `git checkout` it, or" in message


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({}, "weight_map is None"),
        ({"weight_map": {"lm_head.weight": "../other/model.safetensors"}}, "weight_map names '../other/model"),
    ],
)
def test_a_bad_index_is_reported(tmp_path, index, words):
    fla(tmp_path / "other")
    file = fla(tmp_path / "model", shards=2) / "model.safetensors.index.json"
    file.write_text(json.dumps(index))
    assert f"{file}: {words}" in error(tmp_path / "model")


def test_a_tensor_in_two_shards_is_reported(tmp_path):
    first, second = sorted(fla(tmp_path, shards=2).glob("*.safetensors"))
    save_file({**load_file(first), **load_file(second)}, second)
    assert f"{second} and {first.name} both hold the tensor" in error(tmp_path)


@pytest.mark.parametrize(
    ("layout", "name"),
    [(fla, "model.layers.1.attn.k_proj.weight"), (llama, "model.layers.1.self_attn.k_proj.weight")],
)
def test_missing_extra_misshapen_and_broken_tensors_are_named_as_in_the_file(tmp_path, layout, name):
    file = layout(tmp_path) / "model.safetensors"
    tensors = load_file(file)

    def message_with(tensor: torch.Tensor | None) -> str:
        changed = {**tensors, name: tensor}
        save_file({key: value for key, value in changed.items() if value is not None}, file)
        return error(tmp_path)

    message = message_with(None)
    assert f"1 of the {len(tensors)} tensors that config.json asks for are missing, the first is {name}." in message

    message = message_with(torch.zeros(HIDDEN, HIDDEN))
    assert message == f"{file}: {name} has shape [64, 64]; by config.json it must be [32, 64], for softmax attention."

    for value in (torch.nan, torch.inf, -torch.inf):
        broken = tensors[name].clone()
        broken[3, 5] = value
        message = message_with(broken)
        assert message == f"{file}: {name} has NaN or infinite values in torch.float32; weights must be finite."

    message = message_with(tensors[name].to(torch.int8))
    assert message == f"{file}: {name} is stored as I8; it must be one of F64, F32, F16, BF16."

    save_file({**tensors, name.replace("k_proj.weight", "s"): torch.zeros(HEADS, 1)}, file)
    message = error(tmp_path)
    assert f"1 tensor has no place in the model that config.json describes, the first is {name[:-13]}s;" in message


def test_weights_too_large_for_half_precision_are_reported(tmp_path):
    tensors = fla_tensors()
    tensors["lm_head.weight"][0, 0] = 1e6
    write(tmp_path, FLA, tensors)
    load_checkpoint(tmp_path)
    assert "lm_head.weight has NaN or infinite values in torch.float16" in error(tmp_path, dtype=torch.float16)


class Trap:
    """Unpickling it leaves a file behind."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickle_files_are_never_loaded(tmp_path, name):
    trap = tmp_path / "sprung"
    (fla(tmp_path) / name).write_bytes(pickle.dumps(Trap(trap)))
    load_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    message = error(tmp_path)
    assert f"{tmp_path} has only {name}; pickle files are never loaded" in message
    assert "convert it to safetensors" in message
    assert not trap.exists()


@pytest.mark.parametrize("layout", [fla, llama])
def test_remote_code_is_never_run_and_not_passed_on(tmp_path, layout):
    trap = tmp_path / "sprung"
    folder = layout(tmp_path / "model", auto_map={"AutoConfig": "remote.C", "AutoModelForCausalLM": "remote.M"})
    (folder / "remote.py").write_text(f"open({str(trap)!r}, 'w')")
    save_checkpoint(load_checkpoint(folder), tmp_path / "saved")
    assert not trap.exists()
    assert "auto_map" not in json.loads((tmp_path / "saved" / "config.json").read_text())


@pytest.mark.parametrize("device", ["cuad", "meta"])
def test_a_device_that_cannot_hold_weights_is_named(tmp_path, device):
    message = error(fla(tmp_path), device=device)
    assert f"device is '{device}'" in message
    assert "give 'cpu'" in message


def test_odd_but_harmless_fields_load(tmp_path):
    folder = llama(tmp_path, architectures=3)
    (folder / "generation_config.json").write_text('{"eos_token_id": []}')
    assert load_checkpoint(folder).generation_config.pad_token_id is None


def test_an_fla_head_dim_that_the_tensors_do_not_have_is_refused(tmp_path):
    assert "has shape" in error(fla(tmp_path, head_dim=8))
