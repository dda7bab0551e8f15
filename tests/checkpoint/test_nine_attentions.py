"""The nine attentions: each gives its logits, in both layouts, and none runs as another."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

from qbench import Scorer, load_checkpoint, quantize, save_checkpoint
from qbench.attention.kinds import ATTENTIONS
from qbench.attention.register import attention_kind, build_model, set_attention
from qbench.checkpoint.layout import config_attention, config_sizes, parameter_count, tensor_shapes
from qbench.recipe.cells import load_recipe
from qbench.recipe.yaml import RecipeError

from ..messages import states
from ..small_recipe import write_recipe
from .small_checkpoints import (
    FLA,
    HEADS,
    HIDDEN,
    IDS,
    LAYERS,
    LOGN,
    SAYS,
    SCALED,
    SINKS,
    VOCAB,
    S,
    error,
    expected_logits,
    fla,
    fla_tensors,
    llama,
    logits,
    write,
)

KINDS = list(SAYS)
EXTRA = {"gpt_oss_sink": ["sinks"], "scaled_softpick": ["s"], "scalable_softmax": ["s"]}
PAIRS = list(itertools.permutations(KINDS, 2))
each = pytest.mark.parametrize("kind", KINDS)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), atol=1e-4, rtol=0)


@torch.no_grad()
def assert_logits(model: LlamaForCausalLM, ids: torch.Tensor, expected: torch.Tensor) -> None:
    """Alone, in a batch padded on the left, and in parts through a cache, also padded."""
    length = ids.shape[1]
    assert_close(model(ids, use_cache=False).logits, expected)

    padded = torch.cat([torch.full((len(ids), 5), 7), ids], dim=1)
    mask = (torch.arange(length + 5) >= 5).long()[None].repeat(len(ids), 1)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    # Rotary embeddings are relative, and t counts real tokens: where positions start must not matter.
    for given in (positions, None):
        assert_close(model(padded, attention_mask=mask, position_ids=given).logits[:, 5:], expected)

    for tokens, real, skip in ((ids, None, 0), (padded, mask, 5)):
        cache, found, done = DynamicCache(config=model.config), [], 0
        for part in tokens.split([skip + 3, 1, length - 4], dim=1):
            done += part.shape[1]
            seen = None if real is None else real[:, :done]
            found.append(model(part, attention_mask=seen, past_key_values=cache, use_cache=True).logits)
        assert_close(torch.cat(found, dim=1)[:, skip:], expected)


def test_the_table_has_the_nine() -> None:
    assert list(ATTENTIONS) == KINDS
    assert len(PAIRS) == 72


@each
def test_the_fixtures_give_their_logits(kind: str, tmp_path: Path) -> None:
    folder = Path(__file__).parent / "fixtures" / f"fla-{kind.replace('_', '-')}"
    expected = np.load(folder / "expected.npz")
    ids, answer = (torch.from_numpy(expected[field]) for field in ("input_ids", "logits"))
    model = load_checkpoint(folder, attention=kind)
    assert_logits(model, ids, answer)
    save_checkpoint(model, tmp_path)
    assert_logits(load_checkpoint(tmp_path, attention=kind), ids, answer)


@each
def test_both_layouts_give_the_logits_of_the_definition(tmp_path: Path, kind: str) -> None:
    expected = expected_logits(kind)[None]
    for model in (load_checkpoint(fla(tmp_path / "fla", kind)), load_checkpoint(llama(tmp_path / "llama", kind))):
        assert attention_kind(model) == kind
        assert_logits(model, IDS, expected)


@each
def test_what_is_saved_loads_again_and_says_its_kind(tmp_path: Path, kind: str) -> None:
    model = load_checkpoint(fla(tmp_path / "fla", kind))
    save_checkpoint(model, tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    # test_saving.py shows that transformers refuses an attn_implementation that it does not know.
    assert config.get("attn_implementation") == (None if kind == "softmax" else kind)
    assert (config["architectures"] == ["LlamaForCausalLM"]) == (kind == "softmax")
    assert torch.equal(logits(load_checkpoint(tmp_path / "saved", attention=kind)), logits(model))
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    assert stored.keys() == model.state_dict().keys()


@each
def test_its_sizes_are_known_without_loading(tmp_path: Path, kind: str) -> None:
    file = fla(tmp_path, kind) / "config.json"
    fields, model = json.loads(file.read_text()), load_checkpoint(tmp_path)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert tensor_shapes(config_sizes(fields, file), config_attention(fields, file)) == expected
    assert parameter_count(file) == model.num_parameters()


@each
def test_every_learned_tensor_gets_a_gradient(tmp_path: Path, kind: str) -> None:
    model = load_checkpoint(fla(tmp_path, kind)).train()
    model(IDS, labels=IDS).loss.backward()
    names = [name for name, _ in model.named_parameters()]
    assert {name.split(".")[-1] for name in names} == {"weight", *EXTRA.get(kind, [])}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
    if kind == "gated":
        gate = model.model.layers[0].self_attn.q_proj.weight.grad[HIDDEN:]
        assert gate.abs().max() > 0


@each
def test_a_new_model_is_ready_to_train(tmp_path: Path, kind: str) -> None:
    config = load_checkpoint(fla(tmp_path, kind)).config
    config.initializer_range = 0.2
    torch.manual_seed(0)
    model = build_model(config)
    attention = model.model.layers[1].self_attn
    assert 0.19 < attention.q_proj.weight.std() < 0.21
    for name in EXTRA.get(kind, []):
        assert torch.equal(getattr(attention, name).unique(), torch.tensor([0.3 if name == "s" else 0.0]))


@pytest.mark.parametrize("method", ["hqq", "gptq"])
def test_quantizers_see_a_gated_q_proj_as_one_linear(tmp_path: Path, method: str) -> None:
    model = load_checkpoint(fla(tmp_path, "gated"))
    expected = logits(model)
    calibration = list(torch.randint(0, VOCAB, (8, 64), generator=torch.Generator().manual_seed(0)).split(1))
    options = {"calibration": calibration} if method == "gptq" else {}
    quantized, audit = quantize(model, method, 8, group_size=16, execution="packed", **options)
    assert len(audit.layers) == 7 * LAYERS
    assert audit.weights == sum(t.numel() for name, t in fla_tensors("gated").items() if "_proj" in name)
    assert 0 < (logits(quantized) - expected).abs().max() < 0.2


@each
@torch.no_grad()
def test_generate_with_a_static_cache_and_padding_gives_what_a_full_forward_gives(tmp_path: Path, kind: str) -> None:
    model = load_checkpoint(fla(tmp_path, kind))
    padded = torch.cat([torch.full((1, 5), 7), IDS], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 5).long()[None]
    settings = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    out = model.generate(padded, attention_mask=mask, eos_token_id=None, pad_token_id=7, **settings)[:, 5:]
    assert out[0, IDS.shape[1] :].tolist() == model(out).logits[0, IDS.shape[1] - 1 : -1].argmax(-1).tolist()


def word(token: int) -> str:
    return f"w{token}."  # no word is part of another, or a special token would split it


def a_request(context: list[int], continuation: list[int], number: int) -> Instance:
    arguments = (" ".join(map(word, context)), "".join(f" {word(token)}" for token in continuation))
    return Instance("loglikelihood", {}, arguments, number, metadata=("numbers", number, 1))


@each
@torch.no_grad()
def test_the_scorer_gives_the_log_probabilities_of_the_definition(tmp_path: Path, kind: str) -> None:
    """Contexts of several lengths, each kept in a cache for its continuations, which are padded on their left."""
    model = load_checkpoint(fla(tmp_path, kind))
    ids = IDS[0].tolist()
    rows = [(ids[:n], ids[n : n + m]) for n in (3, 6, 9) for m in (1, 2, 3)]
    requests = [a_request(context, continuation, number) for number, (context, continuation) in enumerate(rows)]
    words = Tokenizer(WordLevel({word(token): token for token in range(VOCAB)}, unk_token=word(0)))
    words.pre_tokenizer = WhitespaceSplit()
    scorer = Scorer(model, PreTrainedTokenizerFast(tokenizer_object=words, unk_token=word(0), eos_token=word(0)))
    likely = expected_logits(kind).log_softmax(-1)
    for (found, _), (context, continuation) in zip(scorer.loglikelihood(requests), rows, strict=True):
        start = len(context) - 1
        wanted = sum(likely[start + n, token].item() for n, token in enumerate(continuation))
        assert found == pytest.approx(wanted, abs=1e-4)


# --- None runs as another


def run_as(tensors: dict[str, torch.Tensor], model: LlamaForCausalLM, other: str) -> torch.Tensor:
    """The logits of one kind's tensors in a model of another kind, as a loader without checks would compute them."""
    set_attention(model.config, ATTENTIONS[other])
    wrong = build_model(model.config).eval()
    own = wrong.state_dict()
    for name in own:  # what the kind does not have, as if trained
        own[name] = SINKS if name.endswith(".sinks") else S if name.endswith(".s") else own[name]
    for name, tensor in tensors.items():
        if name in own:
            rows = min(len(own[name]), len(tensor))  # of q_proj: a gate that is not there is σ(0)
            own[name] = torch.cat([tensor[:rows], torch.zeros_like(own[name][rows:])])
    wrong.load_state_dict(own)
    return logits(wrong)


@each
def test_a_kind_run_as_another_gives_other_logits(tmp_path: Path, kind: str) -> None:
    model = load_checkpoint(fla(tmp_path, kind))
    right, tensors = logits(model), model.state_dict()
    for other in KINDS:
        difference = (run_as(tensors, model, other) - right).abs().max()
        assert difference == 0 if other == kind else difference > 0.05, other


@each
def test_the_loader_runs_no_kind_as_another_that_was_asked_for(tmp_path: Path, kind: str) -> None:
    save_checkpoint(load_checkpoint(fla(tmp_path / "fla", kind)), tmp_path / "saved")
    for other in KINDS:
        for folder in (tmp_path / "fla", tmp_path / "saved"):
            if other == kind:
                assert attention_kind(load_checkpoint(folder, attention=other)) == kind
            else:
                assert states(error(folder, attention=other), f"'{other}'…is {kind}…'{kind}'")


@pytest.mark.parametrize(("kind", "other"), PAIRS)
def test_a_config_of_one_kind_and_tensors_or_a_model_type_of_another_are_an_error(
    tmp_path: Path, kind: str, other: str
) -> None:
    """Kinds with the same tensors are distinguished by their config, whose fields must agree."""
    if fla_tensors(kind).keys() != fla_tensors(other).keys() or "gated" in (kind, other):
        message = error(write(tmp_path / "tensors", {**FLA, **SAYS[kind]}, fla_tensors(other)))
        assert kind in message
        assert any(name in message for name in (".attn.sinks", ".attn.s", ".attn.logn", ".attn.q_proj.weight"))
    model_types = {SAYS[name].get("model_type", "transformer") for name in (kind, other)}
    if len(model_types) == 2:
        says = {**SAYS[kind], "model_type": SAYS[other].get("model_type", "transformer")}
        message = error(write(tmp_path / "model_type", {**FLA, **says}, fla_tensors(kind)))
        assert "contradict" in message
        assert f"attn_impl '{SAYS[kind]['attn_impl']}'" in message
        assert f"model_type '{says['model_type']}'" in message
    runs_as = "sdpa" if other == "softmax" else other
    message = error(llama(tmp_path / "llama", kind, attn_implementation=runs_as, attn_impl=SAYS[kind]["attn_impl"]))
    assert "contradict" in message


@pytest.mark.parametrize("kind", ["gpt_oss_sink", "gated", "relu_softmax", "softmax_plus_one"])
def test_a_model_type_alone_names_its_kind(tmp_path: Path, kind: str) -> None:
    assert attention_kind(load_checkpoint(fla(tmp_path, kind, attn_impl=None))) == kind


# --- Bad input


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [("gpt_os_sink", "gpt_oss_sink"), ("scaled-softpick", "scaled_softpick"), ("rectifed", "rectified")],
)
def test_a_misspelt_kind_is_answered_with_the_right_one(tmp_path: Path, misspelt: str, meant: str) -> None:
    assert error(fla(tmp_path / "fla"), attention=misspelt).endswith(f"Did you mean {meant}?")
    file = write_recipe(tmp_path, checkpoints={"tiny": {misspelt: "fla"}})
    with pytest.raises(RecipeError, match=rf"checkpoints\.tiny\.{misspelt}.*Did you mean {meant}\?"):
        load_recipe(file)


@pytest.mark.parametrize(
    ("kind", "name", "shape", "needed"),
    [
        ("gpt_oss_sink", "sinks", (HEADS + 1,), [HEADS]),
        ("gpt_oss_sink", "sinks", (HEADS, 1), [HEADS]),
        ("scaled_softpick", "s", (HEADS,), [HEADS, 1]),
        ("scalable_softmax", "s", (1, HEADS), [HEADS, 1]),
        ("scaled_softpick", "logn", (2048, 1, 1), [8192, 1, 1]),
        ("scalable_softmax", "logn", (8192,), [8192, 1, 1]),
        ("gated", "q_proj.weight", (HIDDEN, HIDDEN), [2 * HIDDEN, HIDDEN]),
        ("gated", "q_proj.weight", (HIDDEN + HEADS, HIDDEN), [2 * HIDDEN, HIDDEN]),  # a gate per head
    ],
)
def test_a_tensor_of_the_wrong_shape_is_named(
    tmp_path: Path, kind: str, name: str, shape: tuple[int, ...], needed: list[int]
) -> None:
    tensor = f"model.layers.1.attn.{name}"
    message = error(write(tmp_path, {**FLA, **SAYS[kind]}, fla_tensors(kind) | {tensor: torch.zeros(shape)}))
    assert states(message, f"{tensor}…{list(shape)}…config.json…{needed}"), message


@pytest.mark.parametrize(
    ("kind", "name"), [("gpt_oss_sink", "sinks"), *((kind, name) for kind in SCALED for name in ("s", "logn"))]
)
def test_an_extra_tensor_that_is_missing_is_named(tmp_path: Path, kind: str, name: str) -> None:
    tensors = fla_tensors(kind)
    del tensors[f"model.layers.1.attn.{name}"]
    message = error(write(tmp_path, {**FLA, **SAYS[kind]}, tensors))
    assert f"model.layers.1.attn.{name}" in message
    assert "missing" in message
    assert kind in message


def test_another_logn_than_that_of_the_formula_is_an_error(tmp_path: Path) -> None:
    file = fla(tmp_path, "scaled_softpick") / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.attn.logn"
    save_file(tensors | {name: LOGN.bfloat16()}, file)  # rounded
    load_checkpoint(tmp_path)
    wrong = LOGN.clone()
    wrong[9] = 2.3  # ln 10, not ln 11
    save_file(tensors | {name: wrong}, file)
    message = error(tmp_path)
    assert states(message, f"{name} is 2.3…t = 9…ln(t + 2) = 2.3979"), message


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        ({"elementwise_gate": None}, ["elementwise_gate is None", "gated", "gate per head"]),
        ({"elementwise_gate": None, "headwise_gate": True}, ["elementwise_gate is None", "gate per head"]),
        ({"headwise_gate": True}, ["elementwise_gate is True", "headwise_gate is True", "true and false"]),
        (
            {"elementwise_gate": False},
            [
                "elementwise_gate is False",
                "headwise_gate is None",
                "model_type 'gated_attention_transformer'",
                "true and false",
            ],
        ),
        ({"elementwise_gate": "per head"}, ["elementwise_gate is 'per head'", "true for gated"]),
        ({"elementwise_gate": "true"}, ["elementwise_gate is 'true'", "true for gated"]),
        ({"elementwise_gate": 1}, ["elementwise_gate is 1", "true for gated"]),
    ],
)
def test_a_gate_must_be_one_per_element(tmp_path: Path, fields: dict[str, object], facts: list[str]) -> None:
    message = error(fla(tmp_path, "gated", **fields))
    assert all(fact in message for fact in ["config.json", *facts])
    assert "contradict" not in message


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        ({"headwise_gate": True}, ["headwise_gate is True", "gate per head"]),
        ({"elementwise_gate": 1}, ["elementwise_gate is 1", "false or left out"]),
        ({"gpt_oss_sink": "yes"}, ["gpt_oss_sink is 'yes'", "false or left out"]),
    ],
)
def test_a_flag_that_is_not_one_never_loads_as_softmax(
    tmp_path: Path, fields: dict[str, object], facts: list[str]
) -> None:
    message = error(fla(tmp_path, **fields))
    assert all(fact in message for fact in facts)


def test_the_fla_layouts_own_architecture_counts(tmp_path: Path) -> None:
    gated = ["GatedAttentionTransformerForCausalLM"]
    message = error(fla(tmp_path / "a", "softmax", attn_impl="naive_attn", architectures=gated))
    assert "contradict" in message
    for meaning in (f"architectures {gated} means gated", "attn_impl 'naive_attn' means softmax"):
        assert meaning in message
    assert "contradict" in error(fla(tmp_path / "b", "gated", architectures=["TransformerForCausalLM"]))
    assert attention_kind(load_checkpoint(fla(tmp_path / "c", "gated", architectures=gated))) == "gated"


def test_a_contradiction_says_what_each_field_means(tmp_path: Path) -> None:
    message = error(fla(tmp_path, "softpick", elementwise_gate=True))
    assert "attn_impl 'parallel_softpick_attn' means softpick" in message
    assert "elementwise_gate True means gated" in message
    assert states(
        message, "model_type 'transformer' means any …relu_softmax and softmax_plus_one and gpt_oss_sink and gated"
    )


def test_a_misspelt_attn_impl_is_answered_with_the_right_one(tmp_path: Path) -> None:
    assert error(fla(tmp_path, attn_impl="parallel_softpik_attn")).endswith("Did you mean parallel_softpick_attn?")


def test_one_tensor_too_many_is_one(tmp_path: Path) -> None:
    message = error(write(tmp_path, {**FLA, **SAYS["softmax"]}, fla_tensors() | {"model.layers.1.attn.x": SINKS}))
    assert "1 tensor " in message


@pytest.mark.parametrize("flag", ["elementwise_gate", "gpt_oss_sink"])
def test_another_kinds_flag_is_a_contradiction(tmp_path: Path, flag: str) -> None:
    message = error(fla(tmp_path, "softpick", **{flag: True}))
    assert f"attn_impl 'parallel_softpick_attn' and {flag} True" in message
    assert attention_kind(load_checkpoint(fla(tmp_path, "softpick", **{flag: False}))) == "softpick"


def test_a_sink_trained_by_the_naive_path_loads_by_the_formula_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"config.json: attn_impl is 'gpt_oss_naive_sink'.*heads and positions"):
        model = load_checkpoint(fla(tmp_path, "gpt_oss_sink", attn_impl="gpt_oss_naive_sink"))
    assert_close(logits(model), expected_logits("gpt_oss_sink"))


@pytest.mark.parametrize(
    "model_type", ["abs_softmax_1_transformer", "relu_softpick_2_transformer", "stochastic_softpick_transformer"]
)
def test_a_model_type_that_is_not_in_the_table_is_named(tmp_path: Path, model_type: str) -> None:
    assert f"model_type is '{model_type}'" in error(fla(tmp_path, attn_impl=None, model_type=model_type))
