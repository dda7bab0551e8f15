"""Small models of every attention kind, and texts of several lengths."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from qbench.attention.kinds import attentions
from qbench.attention.register import build_model, set_attention
from qbench.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
VOCAB = 61


def tiny(kind: str, dtype: torch.dtype = torch.float64, odd: bool = True, **overrides: int) -> LlamaForCausalLM:
    """A model with random weights, grouped heads and uneven attention.

    odd: with a dead pair and a nearly dead pair of heads, and a token with a massive embedding.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 512} | overrides
    config = LlamaConfig(**sizes, initializer_range=0.3)
    set_attention(config, attentions()[kind])
    torch.manual_seed(len(kind))
    model = build_model(config).to(dtype).eval().requires_grad_(False)
    for layer in model.model.layers:
        for name in attentions()[kind].extra_tensors:
            getattr(layer.self_attn, name).uniform_(0.4, 1.2)
    if not odd:
        return model
    dim = config.head_dim
    model.model.layers[1].self_attn.v_proj.weight[:dim] = 0
    model.model.layers[2].self_attn.v_proj.weight[dim:] *= 1e-5
    model.model.embed_tokens.weight[7, 5] = 900.0
    return model


@pytest.fixture(scope="session")
def texts() -> list[Tensor]:
    """Random token ids, with lengths around the tile sizes."""
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB, (length,), generator=draw) for length in (9, 200, 2, 64, 33, 129)]


@pytest.fixture(scope="session")
def pages() -> list[Tensor]:
    """The pages of mini_wikitext, tokenized for the mini models."""
    tokenizer = load_tokenizer(ROOT / "recipes/mini/softmax")
    lines = (ROOT / "recipes/mini/tasks/mini_wikitext.jsonl").read_text().splitlines()[:100]
    return [torch.tensor(tokenizer(json.loads(line)["page"])["input_ids"]) for line in lines]
