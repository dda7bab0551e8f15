"""A small trained Llama: structure in its weights and activations, which a random one lacks, in seconds on one core."""

import functools

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 64


def sequences(count: int, length: int, seed: int) -> Tensor:
    """[count, length] token ids of a language to learn: two runs of one Markov chain, word by word in turn.

    A token follows from the one before the last, so the attention must fetch it, and the MLPs know the chain.
    """
    successors = torch.randint(0, VOCAB, (VOCAB, 4), generator=torch.Generator().manual_seed(0))  # one language
    draw = torch.Generator().manual_seed(seed)
    odds = torch.tensor([0.7, 0.15, 0.1, 0.05])
    choices = torch.multinomial(odds, count * length, replacement=True, generator=draw).reshape(count, length)
    ids = torch.randint(0, VOCAB, (count, length), generator=draw)
    for t in range(2, length):
        ids[:, t] = successors[ids[:, t - 2], choices[:, t]]
    return ids


def config(**overrides: object) -> LlamaConfig:
    """The config of the small model; grouped-query attention, so k and v differ from q in size."""
    settings: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
    }
    return LlamaConfig(**(settings | overrides))


@functools.cache
def _trained(steps: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    for step in range(steps):
        ids = sequences(8, 64, seed=1000 + step)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.state_dict()


def trained_model(steps: int = 150) -> LlamaForCausalLM:
    """A fresh copy of the trained model, in float32 and eval mode; trained once per process."""
    model = LlamaForCausalLM(config())
    model.load_state_dict(_trained(steps))
    return model.eval()


def calibration_ids(samples: int = 32, length: int = 64, seed: int = 1) -> list[Tensor]:
    """Calibration samples [1, length] of the language that the model was trained on."""
    return list(sequences(samples, length, seed).split(1))


def held_out_ids(samples: int = 32, length: int = 64) -> Tensor:
    """[samples, length] token ids that were not used in training or calibration."""
    return sequences(samples, length, seed=2)


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, ids: Tensor) -> float:
    """Token perplexity on ids [samples, length]."""
    return float(model(input_ids=ids, labels=ids, use_cache=False).loss.exp())
