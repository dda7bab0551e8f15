"""A bad checkpoint is reported in one sentence: the file, what is wrong with it, and what would be right."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qbench import load_checkpoint, save_checkpoint
from qbench.attention.register import attention_kind

from ..messages import states
from .small_checkpoints import FLA, HEADS, HIDDEN, error, fla, fla_tensors, llama, write


@pytest.mark.parametrize(("attention", "asked"), [("softpick", "softmax"), ("softmax", "softpick")])
@pytest.mark.parametrize("layout", [fla, llama])
def test_a_caller_who_disagrees_with_the_checkpoint_is_reported(tmp_path, layout, attention, asked):
    message = error(layout(tmp_path, attention), attention=asked)
    assert states(message, f"'{asked}'…{tmp_path / 'config.json'}…is {attention}…'{attention}'"), message


def test_an_attention_that_does_not_exist_is_reported(tmp_path):
    message = error(fla(tmp_path), attention="sotfpick")
    assert states(message, "'sotfpick'…scalable_softmax…Did you mean softpick?")


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
    assert states(message, f"config.json: attn_impl…{value!r}…flash_attn, parallel_attn, naive_attn, "), message


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation"])
def test_an_unknown_attn_implementation_is_never_softmax(tmp_path, field):
    message = error(llama(tmp_path, **{field: "owner/kernel"}))
    assert states(message, f"config.json: {field}…'owner/kernel'…eager, sdpa"), message


@pytest.mark.parametrize(
    "says",
    [
        {"attn_impl": "parallel_softpick_attn"},
        {"_attn_implementation": "softpick"},
        {"architectures": ["SoftpickLlamaForCausalLM"]},
    ],
)
def test_if_any_field_says_softpick_it_never_runs_as_softmax(tmp_path, says):
    assert attention_kind(load_checkpoint(llama(tmp_path, **says))) == "softpick"
    assert "contradict" in error(llama(tmp_path, **says, attn_implementation="sdpa"))


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
    assert field == "norm_eps" or states(message, f"{field}…{value!r}")


@pytest.mark.parametrize(
    ("layout", "fields", "facts"),
    [
        (llama, {"hidden_act": "geluu"}, "Llama…KeyError: 'geluu'"),
        (llama, {"rope_parameters": {"rope_type": "weird", "rope_theta": 1e4}}, "weird"),
        (llama, {"pad_token_id": 40_000}, "Llama"),
        (fla, {"num_heads": 5}, "hidden_size 64…num_heads 5…divide"),
        (fla, {"num_kv_heads": 3}, "num_kv_heads 3…divide…num_heads 4"),
        (llama, {"num_attention_heads": 5}, "num_attention_heads 5…divide"),
        (llama, {"num_key_value_heads": 3}, "num_key_value_heads 3…divide…num_attention_heads 4"),
        (llama, {"num_attention_heads": 64, "num_key_value_heads": 64}, "head dim…even"),
        (llama, {"hidden_act": 3}, "Llama config…hidden_act"),
        (llama, {"quantization_config": {"bits": 4}}, "quantization_config…unquantized"),
        (llama, {"model_type": "mistral"}, "model_type…'mistral'…'llama'"),
        (llama, {"model_type": None}, "model_type…None"),
    ],
)
def test_a_bad_config_is_named(tmp_path, layout, fields, facts):
    message = error(layout(tmp_path, **fields))
    assert str(tmp_path / "config.json") in message
    assert states(message, facts), message


@pytest.mark.parametrize(("content", "facts"), [(None, "does not exist"), ("{", "not JSON"), ("[]", "list…object")])
def test_a_config_that_is_not_an_object_is_named(tmp_path, content, facts):
    file = fla(tmp_path) / "config.json"
    file.unlink()
    if content is not None:
        file.write_text(content)
    assert states(error(tmp_path), f"{file}…{facts}")


def test_a_path_that_is_not_a_folder_is_reported(tmp_path):
    assert states(error(tmp_path / "absent"), f"{tmp_path / 'absent'}…not exist…owner/name")
    assert states(error(fla(tmp_path) / "model.safetensors"), "model.safetensors is a file…folder…config.json")


def test_a_dtype_that_is_not_for_weights_is_reported(tmp_path):
    assert states(error(fla(tmp_path), dtype=torch.int8), "dtype…torch.int8…torch.float64")


def test_missing_weights_are_reported(tmp_path):
    (fla(tmp_path) / "model.safetensors").unlink()
    assert states(error(tmp_path), f"{tmp_path} has no safetensors…model.safetensors")


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_a_truncated_file_is_named(tmp_path, shards, keep):
    file = sorted(fla(tmp_path, shards=shards).glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:keep])
    message = error(tmp_path)
    assert states(message, f"{file}…safetensors…`git checkout`…`qbench fetch`"), message


def test_a_shard_that_is_absent_is_named(tmp_path):
    (fla(tmp_path, shards=3) / "model-00002-of-00003.safetensors").unlink()
    message = error(tmp_path)
    assert states(message, "model.safetensors.index.json…model-00002-of-00003.safetensors…`git checkout`"), message


@pytest.mark.parametrize(
    ("index", "facts"),
    [
        ({}, "weight_map…None"),
        ({"weight_map": {"lm_head.weight": "../other/model.safetensors"}}, "weight_map…'../other/model"),
    ],
)
def test_a_bad_index_is_reported(tmp_path, index, facts):
    fla(tmp_path / "other")
    file = fla(tmp_path / "model", shards=2) / "model.safetensors.index.json"
    file.write_text(json.dumps(index))
    assert states(error(tmp_path / "model"), f"{file}: {facts}")


def test_a_tensor_in_two_shards_is_reported(tmp_path):
    first, second = sorted(fla(tmp_path, shards=2).glob("*.safetensors"))
    save_file({**load_file(first), **load_file(second)}, second)
    assert states(error(tmp_path), f"{second} and {first.name}…tensor")


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

    assert states(message_with(None), f"1 of the {len(tensors)} tensors…config.json…missing…{name}.")
    misshapen = message_with(torch.zeros(HIDDEN, HIDDEN))
    assert states(misshapen, f"{file}: {name}…[64, 64]…config.json…[32, 64]…softmax"), misshapen

    for value in (torch.nan, torch.inf, -torch.inf):
        broken = tensors[name].clone()
        broken[3, 5] = value
        assert states(message_with(broken), f"{file}: {name}…NaN or infinite…torch.float32")

    assert states(message_with(tensors[name].to(torch.int8)), f"{file}: {name}…I8…F64, F32, F16, BF16")

    save_file({**tensors, name.replace("k_proj.weight", "s"): torch.zeros(HEADS, 1)}, file)
    assert states(error(tmp_path), f"1 tensor …config.json…{name[:-13]}s")


def test_weights_too_large_for_half_precision_are_reported(tmp_path):
    tensors = fla_tensors()
    tensors["lm_head.weight"][0, 0] = 1e6
    write(tmp_path, FLA, tensors)
    load_checkpoint(tmp_path)
    assert states(error(tmp_path, dtype=torch.float16), "lm_head.weight…NaN or infinite…torch.float16")


class Trap:
    """Unpickling it creates a file."""

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
    assert states(message, f"{tmp_path}…{name}…pickle…safetensors"), message
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
    assert states(message, f"device…'{device}'…'cpu'"), message


def test_odd_but_harmless_fields_load(tmp_path):
    folder = llama(tmp_path, architectures=3)
    (folder / "generation_config.json").write_text('{"eos_token_id": []}')
    assert load_checkpoint(folder).generation_config.pad_token_id is None


def test_an_fla_head_dim_that_the_tensors_do_not_have_is_refused(tmp_path):
    assert "shape" in error(fla(tmp_path, head_dim=8))
