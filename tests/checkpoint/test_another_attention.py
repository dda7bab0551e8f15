"""A kind of attention is one entry in ATTENTIONS and a function: everything else follows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qbench import load_checkpoint, quantize, save_checkpoint
from qbench.attention.kinds import ATTENTIONS, Attention
from qbench.attention.register import attention_kind
from qbench.checkpoint.layout import config_attention, config_sizes, parameter_count, tensor_shapes
from qbench.doctor.checks import attention_cases
from qbench.recipe.cells import cells, load_recipe
from qbench.recipe.yaml import RecipeError

from ..messages import states
from ..small_recipe import write_recipe
from .small_checkpoints import (
    FLA,
    HEADS,
    HIDDEN,
    IDS,
    LAYERS,
    NORMALIZE,
    error,
    expected_logits,
    fla,
    fla_tensors,
    logits,
    write,
)

LEAKY = Attention(
    name="leaky",
    title="Leaky softmax",
    attn_impl=("parallel_leaky_attn",),
    model_type="leaky_transformer",
    function="leaky:attention",
    extra_tensors={"leak": ("num_attention_heads", 1)},
)
LEAK = torch.linspace(-1, 1, HEADS)[:, None]  # [heads, 1]
MODULE = """
import torch
from softpick.reference import visible_keys


def attention(q, k, v, *, leak, scale, causal, key_mask):
    \"\"\"e^x / (e^leak + sum e^x), from its definition; leak [heads, 1] is learned.\"\"\"
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    seen = visible_keys(q.shape[2], k.shape[2], q.device) if causal else torch.ones_like(scores, dtype=torch.bool)
    seen = seen if key_mask is None else seen & key_mask[:, None, None, :].bool()
    e = scores.exp() * seen
    return e / (leak.exp()[:, None] + e.sum(-1, keepdim=True)) @ v
"""


def leaky(scores: Tensor, future: Tensor) -> Tensor:
    e = scores.exp().masked_fill(future, 0)
    return e / (LEAK.double().exp()[:, None] + e.sum(-1, keepdim=True))


@pytest.fixture(autouse=True)
def one_entry(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind, added as a user would."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "leaky.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(ATTENTIONS, LEAKY.name, LEAKY)
    monkeypatch.setitem(NORMALIZE, LEAKY.name, leaky)


def checkpoint(folder: Path, **fields: object) -> Path:
    extra = {f"model.layers.{n}.attn.leak": LEAK.clone() for n in range(LAYERS)}
    says = {"model_type": "leaky_transformer", "attn_impl": "parallel_leaky_attn"}
    return write(folder, {**FLA, **says, **fields}, fla_tensors() | extra)


def test_it_loads_and_gives_its_logits(tmp_path: Path) -> None:
    model = load_checkpoint(checkpoint(tmp_path), attention="leaky")
    assert attention_kind(model) == "leaky"
    torch.testing.assert_close(logits(model).double(), expected_logits("leaky"), atol=1e-4, rtol=0)
    assert (expected_logits("leaky") - expected_logits("softmax")).abs().max() > 0.1
    padded = torch.cat([torch.full((1, 3), 7), IDS], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
    with torch.no_grad():
        got = model(padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp_min(0)).logits[0, 3:]
    torch.testing.assert_close(got.double(), expected_logits("leaky"), atol=1e-4, rtol=0)


def test_its_model_type_alone_names_it(tmp_path: Path) -> None:
    assert attention_kind(load_checkpoint(checkpoint(tmp_path, attn_impl=None))) == "leaky"


def test_its_sizes_are_known_without_loading(tmp_path: Path) -> None:
    file = checkpoint(tmp_path) / "config.json"
    fields = json.loads(file.read_text())
    model = load_checkpoint(tmp_path)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert tensor_shapes(config_sizes(fields, file), config_attention(fields, file)) == expected
    assert parameter_count(file) == model.num_parameters()


def test_what_is_saved_loads_again_and_only_here(tmp_path: Path) -> None:
    model = load_checkpoint(checkpoint(tmp_path / "fla"))
    save_checkpoint(model, tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (config["attn_implementation"], config["architectures"]) == ("leaky", ["LeakyLlamaForCausalLM"])
    assert torch.equal(logits(load_checkpoint(tmp_path / "saved", attention="leaky")), logits(model))


def test_it_is_quantized_as_the_others_are(tmp_path: Path) -> None:
    model, audit = quantize(load_checkpoint(checkpoint(tmp_path)), "hqq", 8, group_size=16)
    assert audit.kl < 1e-2
    assert torch.equal(model.model.layers[0].self_attn.leak, LEAK)


def test_it_never_runs_as_another_attention_and_none_runs_as_it(tmp_path: Path) -> None:
    for asked in ("softmax", "softpick"):
        assert states(error(checkpoint(tmp_path / "leaky"), attention=asked), f"'{asked}'…is leaky…'leaky'")
    assert states(error(fla(tmp_path / "softmax"), attention="leaky"), "'leaky'…is softmax…'softmax'")
    assert states(error(tmp_path / "leaky", attention="leakyy"), "'leakyy'…scalable_softmax, leaky…Did you mean leaky?")
    for attn_impl in ("parallel_attn", "parallel_softpick_attn"):
        message = error(checkpoint(tmp_path / "both", attn_impl=attn_impl))
        assert states(message, f"attn_impl '{attn_impl}'…model_type 'leaky_transformer'…contradict"), message


def test_its_extra_tensors_must_be_there_and_nowhere_else(tmp_path: Path) -> None:
    file = checkpoint(tmp_path / "leaky") / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.attn.leak"
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    assert states(error(tmp_path / "leaky"), f"missing…{name}.")
    save_file(tensors | {name: torch.zeros(HEADS)}, file)
    assert states(error(tmp_path / "leaky"), f"{name}…[4]…config.json…[4, 1]")
    save_file(tensors, fla(tmp_path / "softmax") / "model.safetensors")
    assert states(error(tmp_path / "softmax"), "2 tensors …model.layers.0.attn.leak")


def test_recipes_may_name_it(tmp_path: Path) -> None:
    (checkpoint(tmp_path / "leaky") / "tokenizer.json").write_text("{}")
    file = write_recipe(tmp_path, checkpoints={"tiny": {"softmax": "softmax", "leaky": "leaky"}})
    assert {cell.ref.attention for cell in cells(load_recipe(file))} == {"softmax", "leaky"}
    file = write_recipe(tmp_path, checkpoints={"tiny": {"leakyy": "leaky"}})
    with pytest.raises(RecipeError, match=r"checkpoints\.tiny\.leakyy.*Did you mean leaky\?"):
        load_recipe(file)


def test_the_doctor_tries_it() -> None:
    cases = {name: check for name, check in attention_cases("cpu") if name.startswith("leaky")}
    assert cases.keys() >= {"leaky function float32", "leaky model float32"}
    assert "no kernel" in cases["leaky function float32"]()
    assert "logits within" in cases["leaky model float32"]()


def test_the_doctor_knows_every_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape may name any size; here two that the built-in kinds do not use."""
    module = MODULE.replace("leak, scale", "leak, more, scale") + "    + more.sum()\n"
    check = "    assert more.shape == (k.shape[1], q.shape[1] * q.shape[3])\n"
    (tmp_path / "sized.py").write_text(module.replace("    k, v =", f"{check}    k, v =").replace("@ v\n ", "@ v"))
    monkeypatch.syspath_prepend(tmp_path)
    shapes = {"leak": ("num_attention_heads", 1), "more": ("num_key_value_heads", "hidden_size")}
    kind = replace(LEAKY, function="sized:attention", extra_tensors=shapes)
    monkeypatch.setitem(ATTENTIONS, LEAKY.name, kind)
    assert "no kernel" in dict(attention_cases("cpu"))["leaky function float32"]()


def test_the_shapes_of_extra_tensors_follow_from_the_sizes() -> None:
    sizes = config_sizes({**FLA, "num_heads": 8, "num_kv_heads": 4}, Path("config.json"))
    assert LEAKY.extra_shapes(sizes) == {"leak": (8, 1)}
    assert sizes.hidden_size == HIDDEN
