"""Checkpoints: both layouts load to the right logits, what we save loads again, and a bad one is one clear sentence."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import qbench
from qbench import load_checkpoint, save_checkpoint
from qbench.attention.register import attention_kind
from qbench.checkpoint import load as checkpoint
from qbench.checkpoint.load import CheckpointError, empty_model, llama_config

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, VOCAB = 64, 96, 2, 4, 2, 61
IDS = torch.tensor([[1, 5, 9, 33, 60, 2, 17, 17, 4, 50, 8, 12]])
ATTN_IMPL = {"softmax": "parallel_attn", "softpick": "parallel_softpick_attn"}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
}
FLA = {
    "model_type": "transformer",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "vocab_size": VOCAB,
}


def fla_tensors(std: float = 0.15) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    tensors = {"model.embeddings.weight": weight(VOCAB, HIDDEN), "lm_head.weight": weight(VOCAB, HIDDEN)}
    tensors["model.norm.weight"] = 1 + weight(HIDDEN)
    kv = HIDDEN * KV_HEADS // HEADS
    for layer in (f"model.layers.{n}" for n in range(LAYERS)):
        for norm in ("attn_norm", "mlp_norm"):
            tensors[f"{layer}.{norm}.weight"] = 1 + weight(HIDDEN)
        for proj, rows in (("q", HIDDEN), ("k", kv), ("v", kv), ("o", HIDDEN)):
            tensors[f"{layer}.attn.{proj}_proj.weight"] = weight(rows, HIDDEN)
        for proj in ("gate", "up"):
            tensors[f"{layer}.mlp.{proj}_proj.weight"] = weight(INTERMEDIATE, HIDDEN)
        tensors[f"{layer}.mlp.down_proj.weight"] = weight(HIDDEN, INTERMEDIATE)
    return tensors


def llama_tensors() -> dict[str, torch.Tensor]:
    def rename(name: str) -> str:
        name = name.replace("embeddings", "embed_tokens").replace(".attn.", ".self_attn.")
        return name.replace("attn_norm", "input_layernorm").replace("mlp_norm", "post_attention_layernorm")

    return {rename(name): tensor for name, tensor in fla_tensors().items()}


def write(folder: Path, config: dict, tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names, weight_map = list(tensors), {}
    for n in range(shards):
        file = f"model-{n + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name] for name in names[n::shards]}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names[n::shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def fla(folder: Path, attention: str = "softmax", shards: int = 1, **fields: object) -> Path:
    return write(folder, {**FLA, "attn_impl": ATTN_IMPL[attention], **fields}, fla_tensors(), shards)


def llama(folder: Path, attention: str = "softmax", shards: int = 1, **fields: object) -> Path:
    says = {"attn_implementation": "softpick"} if attention == "softpick" else {}
    return write(folder, {**LLAMA, **says, **fields}, llama_tensors(), shards)


def expected_logits(attention: str) -> torch.Tensor:
    """The network of `fla_tensors` on IDS, written out in float64 from its definition."""
    w = {name: tensor.double() for name, tensor in fla_tensors().items()}
    length, dim = IDS.shape[1], HIDDEN // HEADS
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    angles = torch.arange(length).double()[:, None] * 1e4 ** (-torch.arange(0, dim, 2).double() / dim)  # [T, dim/2]

    def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale

    def heads(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.view(length, count, dim).transpose(0, 1).repeat_interleave(HEADS // count, 0)  # [heads, T, dim]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def normalize(scores: torch.Tensor) -> torch.Tensor:
        if attention == "softmax":
            return scores.masked_fill(future, -torch.inf).softmax(-1)
        y = torch.expm1(scores.masked_fill(future, 0))
        return y.relu() / (y.abs().sum(-1, keepdim=True) + 1e-6)

    x = w["model.embeddings.weight"][IDS[0]]
    for n in range(LAYERS):
        layer = {name.removeprefix(f"model.layers.{n}.").removesuffix(".weight"): t for name, t in w.items()}
        h = norm(x, layer["attn_norm"])
        q = rotate(heads(h @ layer["attn.q_proj"].T, HEADS))
        k, v = (heads(h @ layer[f"attn.{name}_proj"].T, KV_HEADS) for name in "kv")
        out = normalize(q @ rotate(k).transpose(1, 2) / dim**0.5) @ v
        x = x + out.transpose(0, 1).reshape(length, HIDDEN) @ layer["attn.o_proj"].T
        h = norm(x, layer["mlp_norm"])
        gate = torch.nn.functional.silu(h @ layer["mlp.gate_proj"].T)
        x = x + (gate * (h @ layer["mlp.up_proj"].T)) @ layer["mlp.down_proj"].T
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


@torch.no_grad()
def logits(model: LlamaForCausalLM, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model(ids.to(model.device)).logits[0].float().cpu()


def error(*arguments: object, **keywords: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(*arguments, **keywords)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Loading


@pytest.mark.parametrize("attention", ["softmax", "softpick"])
def test_the_shared_fixtures_give_the_expected_logits(shared, attention):
    folder = shared / "fixtures" / f"fla-{attention}-tiny"
    expected = np.load(folder / "expected.npz")
    model = load_checkpoint(folder, attention=attention)
    with torch.no_grad():
        got = model(torch.from_numpy(expected["input_ids"])).logits
    torch.testing.assert_close(got.double(), torch.from_numpy(expected["logits"]).double(), atol=1e-4, rtol=0)


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
    assert "tie_word_embeddings is true, but lm_head.weight is not the embeddings" in error(tmp_path)


def test_the_generation_config_is_usable(tmp_path):
    assert load_checkpoint(fla(tmp_path)).generation_config.pad_token_id == 2  # eos, where the checkpoint has no pad
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

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
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
    assert "device is 'cuda', which torch cannot use here" in error(fla(tmp_path), device="cuda")


def test_importing_qbench_does_not_import_torch():
    code = "import qbench, sys; assert 'torch' not in sys.modules; assert 'load_checkpoint' in dir(qbench)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'load_checkpiont'; it exports load_checkpoint"):
        qbench.load_checkpiont  # noqa: B018


# The hub


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
    monkeypatch.setattr(checkpoint, "snapshot_download", lambda name, **kw: asked.update(kw) or fla(tmp_path / name))
    load_checkpoint("owner/name")
    assert asked.pop("revision") is None
    from huggingface_hub.utils import filter_repo_objects

    files = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "tokenizer.json", "merges.txt"]
    others = ["pytorch_model.bin", "modeling.py", "original/model.safetensors", "model.gguf", "consolidated.pth"]
    assert list(filter_repo_objects(files + others, **asked)) == files


def test_a_hub_id_that_is_not_there_is_one_sentence(tmp_path, monkeypatch):
    hub_cache(tmp_path, monkeypatch)
    message = error("owner/name")
    assert message.startswith("owner/name is not a folder, and could not be had from the hub")
    assert "one that is in the Hugging Face cache" in message


# Saving


@pytest.mark.parametrize("attention", ["softmax", "softpick"])
def test_what_is_saved_loads_again_with_the_same_logits(tmp_path, attention, monkeypatch):
    model = load_checkpoint(fla(tmp_path / "fla", attention))
    monkeypatch.setattr(checkpoint, "SHARD_SIZE", "50KB")
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
    for name in ("softpick", "softpick-by-save_pretrained"):
        try:
            load.from_pretrained(f"{folder}/{name}")
        except ValueError as error:
            assert "softpick" in str(error), error
        else:
            sys.exit(f"{load.__name__} loaded {name}")
    model = load.from_pretrained(f"{folder}/softmax", dtype=torch.float32)
    with torch.no_grad():
        np.save(f"{folder}/{load.__name__}.npy", model(torch.tensor([[1, 5, 9, 33]])).logits[0].numpy())
assert "qbench" not in sys.modules and "softpick" not in sys.modules
"""


def test_plain_transformers_refuses_softpick_and_runs_softmax(tmp_path):
    softmax, softpick = (load_checkpoint(fla(tmp_path / kind, kind)) for kind in ("softmax", "softpick"))
    save_checkpoint(softmax, tmp_path / "softmax")
    save_checkpoint(softpick, tmp_path / "softpick")
    softpick.save_pretrained(tmp_path / "softpick-by-save_pretrained")
    child = subprocess.run([sys.executable, "-c", PLAIN_TRANSFORMERS, tmp_path], capture_output=True, text=True)
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
    assert "config.json cannot be read" in error(tmp_path / "saved")


def test_a_quantized_model_is_not_saved_as_a_dense_one(tmp_path):
    model = load_checkpoint(fla(tmp_path / "fla"))
    projection = model.model.layers[1].mlp.up_proj
    packed = projection.weight.data.to(torch.int8)
    projection.weight = torch.nn.Parameter(packed, requires_grad=False)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is not that of a dense Llama"):
        save_checkpoint(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


# Bad input


@pytest.mark.parametrize(("attention", "asked"), [("softpick", "softmax"), ("softmax", "softpick")])
@pytest.mark.parametrize("layout", [fla, llama])
def test_a_caller_who_disagrees_with_the_checkpoint_is_told(tmp_path, layout, attention, asked):
    message = error(layout(tmp_path, attention), attention=asked)
    assert f"attention='{asked}' was asked for, but {tmp_path / 'config.json'} has" in message
    assert f"which is {attention}; ask for '{attention}'" in message


def test_an_attention_that_does_not_exist_is_told(tmp_path):
    assert error(fla(tmp_path), attention="sotfpick").endswith("it must be None or one of softmax, softpick.")


@pytest.mark.parametrize(
    "value", ["parallel_scaled_softpick_attn", "parallel_rectified_attn", "softmax_plus_one", "softpick", "", 3]
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
        (llama, {"hidden_act": "geluu"}, "cannot build a Llama from it: KeyError('geluu')"),
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


def test_a_path_that_is_no_folder_is_told(tmp_path):
    assert "not a folder, and not a hub id" in error(tmp_path / "absent")
    assert "is a file; give the folder" in error(fla(tmp_path) / "model.safetensors")


def test_a_dtype_that_is_none_is_told(tmp_path):
    assert "dtype is torch.int8; it must be one of torch.float64" in error(fla(tmp_path), dtype=torch.int8)


def test_missing_weights_are_told(tmp_path):
    (fla(tmp_path) / "model.safetensors").unlink()
    assert f"{tmp_path} has no safetensors weights: it must have model.safetensors" in error(tmp_path)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_a_truncated_file_is_named(tmp_path, shards, keep):
    file = sorted(fla(tmp_path, shards=shards).glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:keep])
    message = error(tmp_path)
    assert message.startswith(f"{file} cannot be read as safetensors")
    assert message.endswith("; copy it again or `git checkout` it, or, from the hub, remove it and `qbench fetch` it.")


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
def test_a_bad_index_is_told(tmp_path, index, words):
    fla(tmp_path / "other")
    file = fla(tmp_path / "model", shards=2) / "model.safetensors.index.json"
    file.write_text(json.dumps(index))
    assert f"{file}: {words}" in error(tmp_path / "model")


def test_a_tensor_in_two_shards_is_told(tmp_path):
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
    assert message == f"{file}: {name} has shape [64, 64]; by config.json it must be [32, 64]."

    for value in (torch.nan, torch.inf, -torch.inf):
        broken = tensors[name].clone()
        broken[3, 5] = value
        message = message_with(broken)
        assert message == f"{file}: {name} has NaN or infinite values in torch.float32; weights must be finite."

    message = message_with(tensors[name].to(torch.int8))
    assert message == f"{file}: {name} is stored as I8; it must be one of F64, F32, F16, BF16."

    save_file({**tensors, name.replace("k_proj.weight", "s"): torch.zeros(HEADS, 1)}, file)
    message = error(tmp_path)
    assert f"1 tensors have no place in the model that config.json describes, the first is {name[:-13]}s;" in message


def test_weights_too_large_for_half_precision_are_told(tmp_path):
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
