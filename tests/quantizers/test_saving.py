"""Quantized checkpoints: what is on disk, what can read it, and that the logits are the same."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from qbench import load_checkpoint, save_checkpoint, save_quantized
from qbench.checkpoint.load import CheckpointError
from qbench.quantizers.declaration import QuantizeError
from qbench.quantizers.options import quantizer, quantizers
from qbench.quantizers.packed import packed_form
from qbench.quantizers.quantize import quantize
from qbench.quantizers.saving import quantization_config, quantization_of

from . import tiny
from .conftest import logits

WIDTHS = [(method, bits, {}) for method, own in quantizers().items() if method != "none" for bits in own.widths]
OPTIONS = [
    ("bnb", 4, {"quant_type": "fp4", "double_quant": True}),
    ("bnb", 8, {"threshold": 3.0}),
    ("hqq", 3, {"axis": 0}),
    ("gptq", 3, {"group_size": 32, "act_order": True, "sym": False}),
]
HEADS = [(m, bits, {"include_lm_head": True}) for m, bits in [("bnb", 4), ("bnb", 8), ("hqq", 2), ("gptq", 4)]]
# Tensors with codes, by the ends of their names; repeated here so the count does not depend on the code.
CODES = {"gptq": ".qweight", "hqq": ".W_q", "bnb": ".weight", "rtn": ".packed"}


@pytest.fixture(scope="module")
def saved(quantized, tmp_path_factory):
    """The folder of the trained model quantized as asked."""

    def save(method, bits, **options):
        model, audit = quantized(method, bits, **options)
        folder = tmp_path_factory.getbasetemp() / audit.label
        if not folder.exists():
            save_quantized(model, folder)
        return folder

    return save


@pytest.fixture(scope="module")
def softpick(calibration, tmp_path_factory):
    """A small softpick model quantized as asked, and its folder."""
    source = tmp_path_factory.mktemp("softpick")
    torch.manual_seed(0)
    save_checkpoint(LlamaForCausalLM(tiny.config(num_hidden_layers=1)), source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"attn_implementation": "softpick"}))

    def save(method, bits):
        model, audit = quantize(load_checkpoint(source), method, bits, calibration=calibration[:4])
        save_quantized(model, source / audit.label)
        return model, source / audit.label

    return save


@pytest.mark.parametrize(("method", "bits", "options"), WIDTHS + OPTIONS)
def test_a_saved_model_gives_the_same_logits(quantized, saved, probe, method, bits, options):
    model, audit = quantized(method, bits, **options)
    loaded = load_checkpoint(saved(method, bits, **options))
    assert (logits(loaded, probe) - logits(model, probe)).abs().max() <= 1e-5
    assert packed_form(loaded).quantization.label == audit.label
    assert not loaded.training
    with pytest.raises(QuantizeError, match=rf"already quantized.*{audit.label}"):
        quantize(loaded, "none", 16)


@pytest.mark.parametrize(("method", "bits", "options"), WIDTHS + OPTIONS)
def test_storage_bits_are_those_of_the_file(quantized, saved, method, bits, options):
    _, audit = quantized(method, bits, **options)
    codes = metadata = 0
    with safe_open(saved(method, bits, **options) / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            if "_proj." in name:
                tensor = file.get_tensor(name)
                size = tensor.numel() * tensor.element_size()
                if name.endswith(CODES[method]):
                    codes += size
                else:
                    metadata += size
    assert audit.code_bits == pytest.approx(8 * codes / audit.weights)
    assert audit.storage_bits == pytest.approx(8 * (codes + metadata) / audit.weights)


def test_packed_and_dense_models_are_saved_alike(quantized, saved, tmp_path):
    save_quantized(quantized("hqq", 3, execution="packed")[0], tmp_path)
    dense, packed = (load_file(folder / "model.safetensors") for folder in (saved("hqq", 3), tmp_path))
    assert dense.keys() == packed.keys()
    assert all(torch.equal(dense[name], packed[name]) for name in dense)


@pytest.mark.parametrize(("method", "bits", "options"), [("hqq", 3, {}), ("gptq", 4, {}), ("bnb", 8, {})])
def test_a_loaded_model_can_be_saved_again(saved, tmp_path, method, bits, options):
    folder = saved(method, bits, **options)
    save_quantized(load_checkpoint(folder), tmp_path)
    first, again = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert (folder / "config.json").read_text() == (tmp_path / "config.json").read_text()


@pytest.mark.parametrize(("method", "bits", "options"), WIDTHS + OPTIONS + HEADS)
def test_the_config_says_all_that_was_asked_for(method, bits, options):
    from qbench.quantizers.options import quantization

    wanted = quantization(method, bits, **options)
    written = json.loads(json.dumps(quantization_config(wanted, torch.float32)))
    assert quantization_of(written) == wanted


READ_BY_TRANSFORMERS = """
import sys, torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM
ids, out, *folders = sys.argv[1:]

def read(load, folder):
    try:
        model = load.from_pretrained(folder, dtype=torch.float32).eval()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for layer in model.modules():
        if type(layer).__name__ == "Linear4bit":
            layer.train()  # otherwise it multiplies in bfloat16 on CPUs that support it
    with torch.no_grad():
        return model(torch.load(ids)).logits

classes = AutoModelForCausalLM, LlamaForCausalLM
torch.save({folder: [read(load, folder) for load in classes] for folder in folders}, out)
"""


@pytest.fixture
def read_by_transformers(probe, tmp_path):
    """What plain transformers gets from folders, by either class: the logits, or the error as text."""

    def read(folders, *packages):
        torch.save(probe, tmp_path / "ids")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, packages))}
        command = [sys.executable, "-c", READ_BY_TRANSFORMERS, tmp_path / "ids", tmp_path / "out", *folders]
        subprocess.run(command, check=True, timeout=280, cwd=tmp_path, env=environment)
        found = torch.load(tmp_path / "out")
        return [found[str(folder)] for folder in folders]

    return read


def of(cases, *methods):
    return [case for case in cases if case[0] in methods]


def test_plain_transformers_reads_bnb_folders_and_refuses_hqq_and_softpick(
    quantized, saved, softpick, read_by_transformers, probe
):
    bnb, hqq = of(WIDTHS + OPTIONS + HEADS, "bnb"), of(WIDTHS + OPTIONS + HEADS, "hqq")
    folders = [saved(method, bits, **options) for method, bits, options in bnb + hqq]
    folders += [softpick(method, bits)[1] for method, bits, _ in of(WIDTHS, "bnb", "hqq")]
    found = read_by_transformers(folders)
    for (method, bits, options), both in zip(bnb, found, strict=False):
        ours = logits(quantized(method, bits, **options)[0], probe)
        assert all((theirs - ours).abs().max() <= 1e-5 for theirs in both)
    for error in (error for both in found[len(bnb) :] for error in both):
        assert re.match("ValueError: .*(no `quant_method`|softpick)", error)


@pytest.mark.skipif(find_spec("optimum") is not None, reason="needs an environment without optimum")
@pytest.mark.slow
def test_without_optimum_plain_transformers_asks_for_it(saved, softpick, read_by_transformers):
    folders = [saved(method, bits, **options) for method, bits, options in of(WIDTHS + OPTIONS + HEADS, "gptq")]
    folders += [softpick(method, bits)[1] for method, bits, _ in of(WIDTHS, "gptq")]
    for error in (error for both in read_by_transformers(folders) for error in both):
        assert re.match("ImportError: .*pip install optimum", error)


@pytest.mark.slow
def test_with_optimum_plain_transformers_reads_gptq_folders_and_refuses_softpick(
    quantized, saved, softpick, read_by_transformers, probe, optimum
):
    cases = [*of(WIDTHS + OPTIONS + HEADS, "gptq"), ("gptq", 4, {"group_size": -1})]
    folders = [saved(method, bits, **options) for method, bits, options in cases]
    folders += [softpick(method, bits)[1] for method, bits, _ in of(WIDTHS, "gptq")]
    found = read_by_transformers(folders, optimum)
    for (method, bits, options), both in zip(cases, found, strict=False):
        ours = logits(quantized(method, bits, **options)[0], probe)
        # Its kernels round to half precision: 0.003 was measured at 4 bits, 0.0001 at the others.
        assert all((theirs - ours).norm() / ours.norm() < 0.01 for theirs in both)
    for error in (error for both in found[len(cases) :] for error in both):
        assert re.match("ValueError: .*softpick", error)


@pytest.mark.parametrize("bits", quantizer("hqq").widths)
def test_hqq_folders_of_older_versions_are_read(quantized, saved, probe, tmp_path, bits):
    """They had `quant_method: hqq`, which transformers would try to load itself."""
    source = saved("hqq", bits)
    config = json.loads((source / "config.json").read_text())
    settings = config["quantization_config"]
    settings["quant_method"] = settings.pop("qbench_quant_method")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    loaded = load_checkpoint(tmp_path)
    assert (logits(loaded, probe) - logits(quantized("hqq", bits)[0], probe)).abs().max() <= 1e-5


def test_gptq_is_written_as_auto_gptq_v1_says(quantized, saved):
    """A reader of the format in numpy: codes packed along the input, zeros stored minus one, scales by g_idx."""
    for bits in (2, 3, 4, 8):
        folder = saved("gptq", bits)
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert json.loads((folder / "quantize_config.json").read_text()) == config
        assert (config["quant_method"], config["checkpoint_format"], config["bits"]) == ("gptq", "gptq", bits)
        name = "model.layers.1.mlp.down_proj"
        stored = {key: t.numpy() for key, t in load_file(folder / "model.safetensors").items() if name in key}

        def unpack(words, bits=bits):  # [words, m] int32 to [values, m]: one little-endian stream of bits per column
            stream = np.unpackbits(np.ascontiguousarray(words.T).view(np.uint8), axis=1, bitorder="little")
            return stream.reshape(len(stream), -1, bits) @ (1 << np.arange(bits))

        codes = unpack(stored[f"{name}.qweight"])  # [out, in]
        zeros = unpack(stored[f"{name}.qzeros"].T) + 1  # [groups, out]
        groups = stored[f"{name}.g_idx"]
        weight = stored[f"{name}.scales"][groups].T * (codes - zeros[groups].T)
        dense = quantized("gptq", bits)[0].get_submodule(name).weight
        np.testing.assert_allclose(weight, dense.numpy(), rtol=1e-6)


READ_BY_GPTQMODEL = """
import os, sys, torch
os.environ["GPTQMODEL_CPU_WORKERS"] = "2"
from gptqmodel import BACKEND, GPTQModel
model = GPTQModel.load(sys.argv[1], backend=BACKEND.TORCH, device="cpu", dtype=torch.bfloat16).model.eval()
with torch.no_grad():
    torch.save(model(torch.load(sys.argv[2])).logits.float(), sys.argv[3])
"""


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptqmodel_reads_gptq_folders(quantized, probe, tmp_path, bits):
    model, _ = quantized("gptq", bits)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(tiny.VOCAB)}, unk_token="0"))
    save_quantized(model, tmp_path / "model", PreTrainedTokenizerFast(tokenizer_object=words, pad_token="2"))
    torch.save(probe, tmp_path / "ids")
    arguments = [tmp_path / "model", tmp_path / "ids", tmp_path / "logits"]
    subprocess.run([sys.executable, "-c", READ_BY_GPTQMODEL, *arguments], check=True, timeout=200, cwd=tmp_path)
    ours, theirs = logits(model, probe), torch.load(tmp_path / "logits")
    assert (theirs - ours).norm() / ours.norm() < 0.03  # its CPU kernel needs bfloat16, which rounds at 0.004


@pytest.mark.parametrize(("method", "bits"), [("hqq", 4), ("bnb", 4), ("bnb", 8), ("gptq", 4)])
def test_a_softpick_model_stays_softpick(softpick, probe, method, bits):
    model, folder = softpick(method, bits)
    assert json.loads((folder / "config.json").read_text())["attn_implementation"] == "softpick"
    loaded = load_checkpoint(folder, attention="softpick")
    assert (logits(loaded, probe) - logits(model, probe)).abs().max() <= 1e-5


SHAPES = {
    "biases": ({"attention_bias": True, "mlp_bias": True}, {}),
    "tied": ({"tie_word_embeddings": True}, {}),
    "head": ({}, {"include_lm_head": True}),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("method", "bits"), [("hqq", 3), ("bnb", 4), ("bnb", 8), ("gptq", 4)])
def test_models_with_biases_tied_embeddings_or_a_quantized_head_come_back(
    probe, calibration, tmp_path, shape, method, bits
):
    settings, options = SHAPES[shape]
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny.config(num_hidden_layers=1, **settings)).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model, audit = quantize(model, method, bits, calibration=calibration[:4], probe=probe, **options)
    save_quantized(model, tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert (logits(loaded, probe) - logits(model, probe)).abs().max() <= 1e-5
    form = packed_form(loaded)
    assert form.quantization.label == audit.label
    assert ("lm_head" in form.layers) == (shape == "head")
    if shape != "head":
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == (shape == "tied")
    assert all((layer.bias is not None) == (shape == "biases") for layer in form.layers.values())


def test_models_load_in_other_dtypes(saved, quantized, probe):
    for method, bits in [("hqq", 8), ("bnb", 4), ("bnb", 8), ("gptq", 4)]:
        half = load_checkpoint(saved(method, bits), dtype=torch.bfloat16)
        expected = logits(quantized(method, bits)[0], probe)
        assert (logits(half, probe).float() - expected).norm() / expected.norm() < 0.05


def test_nothing_of_a_gptq_model_stays_when_another_is_saved_over_it(quantized, probe, tmp_path):
    other, _ = quantized("hqq", 3)
    for save, model in [(save_quantized, other), (save_checkpoint, tiny.trained_model())]:
        save_quantized(quantized("gptq", 3)[0], tmp_path)
        assert (tmp_path / "quantize_config.json").exists()
        save(model, tmp_path)
        assert not (tmp_path / "quantize_config.json").exists()
        torch.testing.assert_close(logits(load_checkpoint(tmp_path), probe), logits(model, probe), rtol=0, atol=1e-5)


def test_an_unquantized_model_is_not_saved_as_quantized(untrained, tmp_path):
    with pytest.raises(QuantizeError, match=r"not quantized.*save_checkpoint"):
        save_quantized(untrained, tmp_path)


@pytest.mark.parametrize("execution", ["packed", "dense"])
def test_save_checkpoint_does_not_write_quantized_models(quantized, tmp_path, execution):
    with pytest.raises(CheckpointError, match=r"hqq-3-g64.*save_quantized"):
        save_checkpoint(quantized("hqq", 3, execution=execution)[0], tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"quant_method": "awq"}, "quant_method.*'awq'.*unquantized"),
        ({"checkpoint_format": "gptq_v2"}, "checkpoint_format.*'gptq_v2'.*'gptq'"),
        ({"bits": 5}, "5 bits.*gptq"),
        ({"bits": 4}, "config.json.*(gptq-4-g128|weight)"),
        ({"quant_method": "hqq"}, "'quant_config'.*hqq"),
    ],
)
def test_a_config_that_is_wrong_is_refused(saved, tmp_path, change, says):
    source = saved("gptq", 3)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=says):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("lost", ["W_q", "scale"])
def test_a_lost_tensor_is_named(saved, tmp_path, lost):
    source, name = saved("hqq", 3), f"model.layers.2.mlp.up_proj.{lost}"
    tensors = load_file(source / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"model.layers.2.mlp.up_proj"):
        load_checkpoint(tmp_path)


def test_the_unquantized_model_is_not_replaced(softpick, tmp_path):
    model, folder = softpick("hqq", 4)
    save_checkpoint(LlamaForCausalLM(tiny.config(num_hidden_layers=1)), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match=r"holds an unquantized model.*another folder"):
        save_quantized(model, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    save_quantized(model, folder)  # over a quantized one
    with pytest.raises(CheckpointError, match=r"config\.json is a file.*folder"):
        save_quantized(model, tmp_path / "config.json")


@pytest.mark.parametrize("weights", ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"])
def test_a_config_and_weights_of_any_format_are_an_unquantized_model(softpick, tmp_path, weights):
    model, _ = softpick("hqq", 4)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / weights).touch()
    with pytest.raises(CheckpointError, match="holds an unquantized model"):
        save_quantized(model, tmp_path)


@pytest.mark.parametrize(("config", "files"), [("{}", []), ("[]", ["model.safetensors"]), ("{", ["model.safetensors"])])
def test_a_folder_without_a_model_is_not_refused(softpick, tmp_path, config, files):
    model, _ = softpick("hqq", 4)
    (tmp_path / "config.json").write_text(config)
    for name in files:
        (tmp_path / name).touch()
    save_quantized(model, tmp_path)
    assert packed_form(load_checkpoint(tmp_path)).quantization == packed_form(model).quantization


QUIET = """
import sys
import torch
from qbench import load_checkpoint, quantize, save_quantized
for method, bits in (("gptq", 4), ("bnb", 4), ("bnb", 8), ("hqq", 3), ("rtn", 8)):
    texts = [torch.randint(5, 800, (1, 64))] if method == "gptq" else None
    model, _ = quantize(load_checkpoint(sys.argv[1]), method, bits, calibration=texts)
    save_quantized(model, f"{sys.argv[2]}/{method}-{bits}")
"""


@pytest.mark.slow  # 15 seconds of imports
def test_other_libraries_are_not_heard(tmp_path):
    """Neither gptqmodel's banner and log, nor bitsandbytes' warnings, in a script or notebook of the user's."""
    twin = Path(__file__).parents[2] / "recipes/mini/softmax"
    done = subprocess.run([sys.executable, "-c", QUIET, twin, tmp_path], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
