"""Checkpoints small enough to write in a test, in both layouts, and their correct logits."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from qbench import load_checkpoint
from qbench.checkpoint.layout import CheckpointError

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, VOCAB = 64, 96, 2, 4, 2, 61
IDS = torch.tensor([[1, 5, 9, 33, 60, 2, 17, 17, 4, 50, 8, 12]])
# What the FLA layout's config says about each kind, besides model_type "transformer".
SAYS: dict[str, dict[str, object]] = {
    "softmax": {"attn_impl": "parallel_attn"},
    "softpick": {"attn_impl": "parallel_softpick_attn"},
    "rectified": {"attn_impl": "parallel_rectified_attn"},
    "relu_softmax": {"attn_impl": "parallel_relu_softpick_1_attn", "model_type": "relu_softpick_1_transformer"},
    "softmax_plus_one": {
        "attn_impl": "parallel_softmax_plus_one_attn",
        "model_type": "softmax_plus_one_transformer",
    },
    "gpt_oss_sink": {"attn_impl": "gpt_oss_flex_attention_sink", "model_type": "gpt_oss_sink_transformer"},
    "gated": {
        "attn_impl": "parallel_gated_attn",
        "model_type": "gated_attention_transformer",
        "elementwise_gate": True,
    },
    "scaled_softpick": {"attn_impl": "parallel_scaled_softpick_attn"},
    "scalable_softmax": {"attn_impl": "parallel_scaled_attn"},
}
SINKS = torch.linspace(-1, 1.5, HEADS)
S = torch.linspace(0.4, 1.2, HEADS)[:, None]
LOGN = (torch.arange(4 * 2048) + 2.0).log()[:, None, None]
SCALED = ("scaled_softpick", "scalable_softmax")
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


def fla_tensors(attention: str = "softmax", std: float = 0.15) -> dict[str, torch.Tensor]:
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
    for layer in (f"model.layers.{n}.attn" for n in range(LAYERS)):  # after all others, which softmax has too
        if attention == "gpt_oss_sink":
            tensors[f"{layer}.sinks"] = SINKS.clone()
        if attention in SCALED:
            tensors |= {f"{layer}.s": S.clone(), f"{layer}.logn": LOGN.clone()}
        if attention == "gated":
            gate = weight(HIDDEN, HIDDEN)
            tensors[f"{layer}.q_proj.weight"] = torch.cat([tensors[f"{layer}.q_proj.weight"], gate])
    return tensors


def llama_tensors(attention: str = "softmax") -> dict[str, torch.Tensor]:
    def rename(name: str) -> str:
        name = name.replace("embeddings", "embed_tokens").replace(".attn.", ".self_attn.")
        return name.replace("attn_norm", "input_layernorm").replace("mlp_norm", "post_attention_layernorm")

    tensors = fla_tensors(attention).items()
    return {rename(name): tensor for name, tensor in tensors if not name.endswith(".logn")}


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
    return write(folder, {**FLA, **SAYS[attention], **fields}, fla_tensors(attention), shards)


def llama(folder: Path, attention: str = "softmax", shards: int = 1, **fields: object) -> Path:
    says = {"attn_implementation": attention} if attention != "softmax" else {}
    return write(folder, {**LLAMA, **says, **fields}, llama_tensors(attention), shards)


def softmax(scores: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(future, -torch.inf).softmax(-1)


def softpick(scores: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
    y = torch.expm1(scores.masked_fill(future, 0))
    m = scores.masked_fill(future, 0).amax(-1, keepdim=True).clamp_min(0)
    return y.relu() / (y.abs().sum(-1, keepdim=True) + 1e-6 * m.exp())


def rectified(scores: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
    e = scores.exp().masked_fill(future | (scores < 0), 0)
    return e / e.sum(-1, keepdim=True).clamp_min(1e-300)  # a row without any is zeros


def relu_softmax(scores: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
    m = scores.masked_fill(future, 0).amax(-1, keepdim=True).clamp_min(0)
    y = torch.expm1(scores.masked_fill(future, 0)).relu()
    return y / (y.sum(-1, keepdim=True) + 1e-6 * m.exp())


def sink_softmax(scores: torch.Tensor, future: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    e = scores.exp().masked_fill(future, 0)
    return e / (sinks.double().exp()[:, None, None] + e.sum(-1, keepdim=True))


def scaled(normalize: "Normalize", scores: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
    t = torch.arange(scores.shape[1]).double()
    return normalize(scores * S.double()[:, None] * (t + 2).log()[None, :, None], future)


Normalize = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # scores [heads, T, T], future [T, T] -> weights
NORMALIZE: dict[str, Normalize] = {
    "softmax": softmax,
    "softpick": softpick,
    "rectified": rectified,
    "relu_softmax": relu_softmax,
    "softmax_plus_one": partial(sink_softmax, sinks=torch.zeros(HEADS)),
    "gpt_oss_sink": partial(sink_softmax, sinks=SINKS),
    "gated": softmax,
    "scaled_softpick": partial(scaled, softpick),
    "scalable_softmax": partial(scaled, softmax),
}


def expected_logits(attention: str) -> torch.Tensor:
    """The network of `fla_tensors(attention)` on IDS, written out in float64 from its definition."""
    w = {name: tensor.double() for name, tensor in fla_tensors(attention).items()}
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

    x = w["model.embeddings.weight"][IDS[0]]
    for n in range(LAYERS):
        layer = {name.removeprefix(f"model.layers.{n}.").removesuffix(".weight"): t for name, t in w.items()}
        h = norm(x, layer["attn_norm"])
        q = rotate(heads(h @ layer["attn.q_proj"][:HIDDEN].T, HEADS))
        k, v = (heads(h @ layer[f"attn.{name}_proj"].T, KV_HEADS) for name in "kv")
        out = NORMALIZE[attention](q @ rotate(k).transpose(1, 2) / dim**0.5, future) @ v
        out = out.transpose(0, 1).reshape(length, HIDDEN)
        if attention == "gated":
            out = out * (h @ layer["attn.q_proj"][HIDDEN:].T).sigmoid()
        x = x + out @ layer["attn.o_proj"].T
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
