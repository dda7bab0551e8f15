"""Malicious checkpoints: small files that ask for unbounded work, paths that leave the folder, wrong types."""

import json
import os
import time
from pathlib import Path

import pytest

from qbench.checkpoint.layout import config_note, parameter_count

from ..messages import states
from .small_checkpoints import error, fla, llama


@pytest.mark.parametrize(
    ("field", "value", "facts"),
    [
        ("num_hidden_layers", 10**7, "num_hidden_layers…10000000…10,000"),
        ("num_hidden_layers", 9000, "num_hidden_layers…9000…2 layers"),
        ("num_hidden_layers", 3, "num_hidden_layers…3…2 layers"),
        ("vocab_size", 10**9, "embed_tokens.weight…[61, 64]…[1000000000, 64]"),
        ("hidden_size", 2**16, "[61, 64]…[61, 65536]"),
        ("hidden_size", 10**30, "hidden_size…10000"),
        ("intermediate_size", 2**30, "gate_proj.weight…1073741824"),
        ("head_dim", 2**30, "head_dim…65,536"),
        ("hidden_size", "64", "hidden_size…'64'…integer"),
        ("hidden_size", [64], "hidden_size…[64]…integer"),
        ("hidden_size", 64.5, "hidden_size…64.5…integer"),
        ("tie_word_embeddings", "no", "tie_word_embeddings…'no'…true or false"),
        ("mlp_bias", 1, "mlp_bias…1…true or false"),
        ("rms_norm_eps", "small", "rms_norm_eps"),
        ("rope_parameters", 5, "rope_parameters"),
        ("rope_scaling", {"type": []}, "config.json"),
    ],
)
def test_a_config_is_compared_with_the_headers_before_anything_is_built(tmp_path, field, value, facts):
    started = time.process_time()
    message = error(llama(tmp_path, **{field: value}))
    assert states(message, facts), message
    assert time.process_time() - started < 5


def test_fields_of_other_models_cost_nothing(tmp_path):
    from qbench import load_checkpoint

    started = time.process_time()
    load_checkpoint(llama(tmp_path, num_labels=10**9, id2label=3, return_dict=False, layer_types=7))
    assert time.process_time() - started < 5


def test_a_plan_does_not_count_ten_million_layers(tmp_path):
    config = llama(tmp_path, num_hidden_layers=10**7) / "config.json"
    assert "10,000" in config_note(config, "softmax")
    with pytest.raises(ValueError, match="num_hidden_layers"):
        parameter_count(config)


@pytest.mark.parametrize(
    "name", [3, None, ["a"], {}, "../other.safetensors", "/etc/passwd", "a/b", "..", "", "a\0b", "x" * 5000]
)
def test_a_shard_is_a_file_of_the_folder(tmp_path, name):
    folder = llama(tmp_path / "own", shards=2)
    (tmp_path / "other.safetensors").write_bytes(next(folder.glob("*.safetensors")).read_bytes())
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = name
    index.write_text(json.dumps(content))
    message = error(folder)
    assert str(index) in message
    assert len(message) < 500


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "facts"),
    [
        (b"[" * 100_000, "levels deep"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "levels deep"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1e999}', "1e999"),
        (b'{"a": 1, "a": 2}', "'a'"),
        (b'{"a": "\xff"}', "0xff"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": ' + b"1" * 5000 + b"}", "digits"),
        (b"5", "object"),
        (b"", "JSON"),
    ],
)
def test_json_that_no_checkpoint_has(tmp_path, file, content, facts):
    folder = llama(tmp_path, shards=2)
    (folder / file).write_bytes(content)
    message = error(folder)
    assert str(folder / file) in message
    assert facts in message, message


def test_a_pipe_is_not_waited_for(tmp_path):
    folder = llama(tmp_path)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert "not a regular file" in error(folder)


@pytest.mark.parametrize("size", [0, 2, 2**40, 2**63])
def test_a_header_of_another_size(tmp_path, size):
    file = fla(tmp_path) / "model.safetensors"
    file.write_bytes(size.to_bytes(8, "little") + file.read_bytes()[8:])
    assert str(file) in error(tmp_path)


def test_a_cut_off_file(tmp_path):
    file: Path = fla(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert str(file) in error(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"), [("eos_token_id", "a"), ("pad_token_id", 2.5), ("eos_token_id", [1, None])]
)
def test_token_ids_of_a_generation_config(tmp_path, field, value):
    folder = llama(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({field: value}))
    assert states(error(folder), f"generation_config.json…{field}…token id")
