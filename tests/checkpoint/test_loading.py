"""Loading: both layouts give the right logits, from a folder or from the Hub."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import qbench
from qbench import load_checkpoint, save_checkpoint
from qbench.attention.register import attention_kind
from qbench.checkpoint import load
from qbench.checkpoint.load import empty_model, llama_config

from ..messages import states
from .small_checkpoints import (
    FLA,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    LLAMA,
    VOCAB,
    error,
    expected_logits,
    fla,
    llama,
    llama_tensors,
    logits,
    write,
)


@pytest.mark.parametrize("attention", ["softmax", "softpick"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("layout", [fla, llama])
def test_both_layouts_give_the_networks_logits(tmp_path, layout, shards, attention):
    model = load_checkpoint(layout(tmp_path / "model", attention, shards))
    assert type(model) is LlamaForCausalLM
    assert not model.training
    assert attention_kind(model) == attention
    torch.testing.assert_close(logits(model).double(), expected_logits(attention), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("flash_attn", "softmax"),
        ("parallel_attn", "softmax"),
        ("naive_attn", "softmax"),
        (None, "softmax"),
        ("parallel_softpick_attn", "softpick"),
        ("naive_softpick_attn", "softpick"),
    ],
)
def test_attn_impl_names_the_attention(tmp_path, value, kind):
    assert attention_kind(load_checkpoint(fla(tmp_path, attn_impl=value), attention=kind)) == kind


@pytest.mark.parametrize("value", ["eager", "sdpa", "flash_attention_2"])
def test_the_llama_layouts_own_implementations_are_softmax(tmp_path, value):
    assert attention_kind(load_checkpoint(llama(tmp_path, attn_implementation=value))) == "softmax"


def test_absent_fla_fields_have_the_layouts_defaults():
    config = llama_config({"model_type": "transformer"}, Path("config.json"))
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (2048, 24, 32000)
    assert (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size) == (32, 32, 5632)
    assert (config.max_position_embeddings, config.rms_norm_eps, config.hidden_act) == (2048, 1e-6, "silu")
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, None)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False, False, False)


def test_every_fla_field_reaches_the_config():
    fields = {**FLA, "rope_theta": 500000, "norm_eps": 1e-5, "max_position_embeddings": 4096, "pad_token_id": 9}
    fields |= {"bos_token_id": 3, "eos_token_id": 4, "tie_word_embeddings": True, "hidden_ratio": None}
    config = llama_config(fields, Path("config.json"))
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (HIDDEN, INTERMEDIATE, LAYERS)
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (HEADS, KV_HEADS, VOCAB)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert (config.rms_norm_eps, config.max_position_embeddings, config.tie_word_embeddings) == (1e-5, 4096, True)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (3, 4, 9)
    ratio = llama_config({**FLA, "intermediate_size": None, "hidden_ratio": 8}, Path("config.json"))
    assert ratio.intermediate_size == 512  # 64 * 8 * 2/3 = 341, up to a multiple of 256


@pytest.mark.parametrize(
    ("hidden", "layers", "heads", "intermediate", "tensors", "parameters"),
    [(1024, 24, 16, 2816, 219, 373_867_520), (2048, 32, 32, 5632, 291, 1_775_372_288)],
)
def test_the_published_sizes_have_the_published_counts(hidden, layers, heads, intermediate, tensors, parameters):
    fields = {
        "model_type": "transformer",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_heads": heads,
        "num_kv_heads": None,
        "intermediate_size": None,
        "max_position_embeddings": 8192,
        "fuse_norm": True,
        "attn_impl": "parallel_softpick_attn",
    }
    model = empty_model(llama_config(fields, Path("config.json")))
    assert len(model.state_dict()) == tensors
    assert model.num_parameters() == parameters
    assert model.get_parameter("model.layers.0.mlp.down_proj.weight").shape == (hidden, intermediate)
    assert model.get_parameter(f"model.layers.{layers - 1}.self_attn.k_proj.weight").shape == (hidden, hidden)


def test_rotary_frequencies_are_real_and_float32_in_half_precision(tmp_path):
    scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    model = load_checkpoint(llama(tmp_path, rope_parameters=scaling), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.dtype == model.config.dtype == torch.bfloat16
    dim = HIDDEN // HEADS
    expected = 5e5 ** (-torch.arange(0, dim, 2).double() / dim) / 4
    for buffer in (model.model.rotary_emb.inv_freq, model.model.rotary_emb.original_inv_freq):
        assert buffer.dtype == torch.float32
        torch.testing.assert_close(buffer.double(), expected, rtol=1e-6, atol=0)
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_tied_embeddings_are_one_parameter(tmp_path):
    tensors = llama_tensors()
    head = tensors.pop("lm_head.weight")
    folder = write(tmp_path, {**LLAMA, "tie_word_embeddings": True}, tensors)
    model = load_checkpoint(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    save_checkpoint(model, tmp_path / "saved")
    assert "lm_head.weight" not in load_file(tmp_path / "saved" / "model.safetensors")
    assert torch.equal(logits(load_checkpoint(tmp_path / "saved")), logits(model))

    write(tmp_path, {**LLAMA, "tie_word_embeddings": True}, {**tensors, "lm_head.weight": head})
    assert states(error(tmp_path), "tie_word_embeddings…lm_head.weight…false")


def test_the_generation_config_is_usable(tmp_path):
    assert load_checkpoint(fla(tmp_path)).generation_config.pad_token_id == 2  # eos, if the checkpoint has no pad
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8], "bos_token_id": 3}))
    generation = load_checkpoint(tmp_path).generation_config
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (3, [7, 8], 7)


def test_old_llama_files_with_rotary_frequencies_load(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    model = load_checkpoint(write(tmp_path, LLAMA, {**llama_tensors(), **extra}))
    torch.testing.assert_close(logits(model).double(), expected_logits("softmax"), atol=1e-4, rtol=0)


def test_the_model_does_not_depend_on_the_file_after_loading(tmp_path):
    model = load_checkpoint(fla(tmp_path))
    before = logits(model)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(bytes((tmp_path / "model.safetensors").stat().st_size))
    assert torch.equal(logits(model), before)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc to read the peak of memory")
def test_loading_never_holds_two_copies(tmp_path):
    config = LlamaConfig(vocab_size=8192, hidden_size=512, num_attention_heads=8, num_hidden_layers=24)
    config.intermediate_size = 1024
    model = empty_model(config).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    save_checkpoint(model, tmp_path)
    del model
    size = (tmp_path / "model.safetensors").stat().st_size

    def memory(field: str) -> int:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status[field].split()[0]) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = memory("VmRSS")
    load_checkpoint(tmp_path)
    assert memory("VmHWM") - before < 1.3 * size


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("attention", ["softmax", "softpick"])
def test_loading_to_cuda_gives_the_networks_logits(tmp_path, attention):
    model = load_checkpoint(fla(tmp_path, attention), device="cuda")
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"cuda"}
    torch.testing.assert_close(logits(model).double(), expected_logits(attention), atol=1e-3, rtol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_a_device_that_is_not_here_is_named(tmp_path):
    assert states(error(fla(tmp_path), device="cuda"), "device…'cuda'…'cpu'")


def test_importing_qbench_does_not_import_torch():
    code = "import qbench, sys; assert 'torch' not in sys.modules; assert 'load_checkpoint' in dir(qbench)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match=r"'load_checkpiont'.* load_checkpoint"):
        qbench.load_checkpiont  # noqa: B018


def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache without network; the folder where `owner/name` would be."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models--owner--name"


def test_a_hub_id_loads_from_the_cache_when_offline(tmp_path, monkeypatch):
    repository, commit = hub_cache(tmp_path, monkeypatch), "0123456789abcdef0123456789abcdef01234567"
    fla(repository / "snapshots" / commit, "softpick")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    model = load_checkpoint("owner/name", attention="softpick")
    torch.testing.assert_close(logits(model).double(), expected_logits("softpick"), atol=1e-4, rtol=0)
    assert commit in model.name_or_path


def test_only_what_is_read_is_downloaded(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(load, "snapshot_download", lambda name, **kw: asked.update(kw) or fla(tmp_path / name))
    load_checkpoint("owner/name")
    assert asked.pop("revision") is None
    from huggingface_hub.utils import filter_repo_objects

    files = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "tokenizer.json", "merges.txt"]
    others = ["pytorch_model.bin", "modeling.py", "original/model.safetensors", "model.gguf", "consolidated.pth"]
    assert list(filter_repo_objects(files + others, **asked)) == files


def test_a_hub_id_that_is_not_there_is_one_sentence(tmp_path, monkeypatch):
    hub_cache(tmp_path, monkeypatch)
    assert states(error("owner/name"), "owner/name…folder…Hub…Hugging Face cache")
