"""Saving: saved models load again, and only qbench runs attentions other than softmax."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from qbench import load_checkpoint, save_checkpoint
from qbench.checkpoint import save
from qbench.checkpoint.layout import CheckpointError

from .small_checkpoints import SAYS, error, expected_logits, fla, llama, logits


@pytest.mark.parametrize("attention", ["softmax", "softpick"])
def test_what_is_saved_loads_again_with_the_same_logits(tmp_path, attention, monkeypatch):
    model = load_checkpoint(fla(tmp_path / "fla", attention))
    monkeypatch.setattr(save, "SHARD_SIZE", "50KB")
    save_checkpoint(model, tmp_path / "saved")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    again = load_checkpoint(tmp_path / "saved", attention=attention)
    assert torch.equal(logits(again), logits(model))
    assert again.generation_config.to_dict() == model.generation_config.to_dict()

    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert str(tmp_path) not in json.dumps(config)
    assert config["model_type"] == "llama"
    if attention == "softpick":
        assert (config["attn_implementation"], config["architectures"]) == ("softpick", ["SoftpickLlamaForCausalLM"])
    else:
        assert "attn_implementation" not in config
        assert config["architectures"] == ["LlamaForCausalLM"]


def test_half_precision_is_kept(tmp_path):
    save_checkpoint(load_checkpoint(fla(tmp_path / "fla")).bfloat16(), tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "bfloat16"
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


def test_the_tokenizer_is_saved_beside_the_model(tmp_path):
    words = Tokenizer(WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    save_checkpoint(load_checkpoint(fla(tmp_path / "fla")), tmp_path / "saved", tokenizer)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("ab b c").input_ids == tokenizer("ab b c").input_ids


PLAIN_TRANSFORMERS = """
import sys
import numpy as np, torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM
folder = sys.argv[1]
for load in (AutoModelForCausalLM, LlamaForCausalLM):
    for kind in sys.argv[2:]:
        for name in (kind, f"{kind}-by-save_pretrained"):
            try:
                load.from_pretrained(f"{folder}/{name}")
            except ValueError as error:
                assert kind in str(error), error
            else:
                sys.exit(f"{load.__name__} loaded {name}")
    model = load.from_pretrained(f"{folder}/softmax", dtype=torch.float32)
    with torch.no_grad():
        np.save(f"{folder}/{load.__name__}.npy", model(torch.tensor([[1, 5, 9, 33]])).logits[0].numpy())
assert "qbench" not in sys.modules and "softpick" not in sys.modules
"""


def test_plain_transformers_runs_softmax_and_refuses_all_others(tmp_path):
    others = [kind for kind in SAYS if kind != "softmax"]
    for kind in others:
        model = load_checkpoint(fla(tmp_path / "fla", kind))
        save_checkpoint(model, tmp_path / kind)
        model.save_pretrained(tmp_path / f"{kind}-by-save_pretrained")
    softmax = load_checkpoint(fla(tmp_path / "fla"))
    save_checkpoint(softmax, tmp_path / "softmax")
    command = [sys.executable, "-c", PLAIN_TRANSFORMERS, tmp_path, *others]
    child = subprocess.run(command, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    expected = logits(softmax, torch.tensor([[1, 5, 9, 33]]))
    for loader in ("AutoModelForCausalLM", "LlamaForCausalLM"):
        torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / f"{loader}.npy")), expected, atol=1e-5, rtol=0)


def test_saving_over_an_older_checkpoint_leaves_nothing_of_it(tmp_path):
    llama(tmp_path / "saved", shards=3)
    save_checkpoint(load_checkpoint(fla(tmp_path / "fla", "softpick")), tmp_path / "saved")
    assert [file.name for file in sorted((tmp_path / "saved").glob("model*"))] == ["model.safetensors"]
    again = load_checkpoint(tmp_path / "saved", attention="softpick")
    torch.testing.assert_close(logits(again).double(), expected_logits("softpick"), atol=1e-4, rtol=0)


def test_an_interrupted_save_does_not_load(tmp_path, monkeypatch):
    llama(tmp_path / "saved")
    model = load_checkpoint(fla(tmp_path / "fla", "softpick"))
    monkeypatch.setattr(model.generation_config, "to_json_string", lambda: 1 / 0)  # after the weights
    with pytest.raises(ZeroDivisionError):
        save_checkpoint(model, tmp_path / "saved")
    assert "config.json" in error(tmp_path / "saved")


def test_a_quantized_model_is_not_saved_as_a_dense_one(tmp_path):
    model = load_checkpoint(fla(tmp_path / "fla"))
    projection = model.model.layers[1].mlp.up_proj
    packed = projection.weight.data.to(torch.int8)
    projection.weight = torch.nn.Parameter(packed, requires_grad=False)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*unquantized"):
        save_checkpoint(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
