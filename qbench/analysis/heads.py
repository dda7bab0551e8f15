"""Dead heads: those whose slice of o_proj's input is next to nothing at nearly all tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from qbench.analysis.texts import batches, checked_texts
from qbench.analysis.watch import run
from qbench.records.analysis import DEAD, AnalysisError

BATCH_TOKENS = 4096


def off_tokens(outputs: Tensor, heads: int, real: Tensor, epsilons: Sequence[float]) -> Tensor:
    """By epsilon, at how many tokens all values of a head are below it: [batch, ε, heads].

    outputs [batch, length, heads · dim]: what o_proj reads; real [batch, length].
    """
    largest = outputs.abs().unflatten(-1, (heads, -1)).amax(-1)  # [batch, length, heads]
    return torch.stack([((largest < epsilon) & real[..., None]).sum(1) for epsilon in epsilons], dim=1)


def dead_heads(
    model: LlamaForCausalLM, texts: Sequence[Tensor], epsilon: float, batch_tokens: int = BATCH_TOKENS
) -> list[tuple[int, int]]:
    """The heads (layer, head) that are off for more than 95% of all tokens of the texts."""
    if not epsilon > 0:
        raise AnalysisError(f"epsilon is {epsilon}; it must be above 0.")
    kept, _ = checked_texts(model, texts, None)
    heads, layers = model.config.num_attention_heads, len(model.model.layers)
    off = torch.zeros(layers, heads, dtype=torch.int64, device=model.model.embed_tokens.weight.device)
    for batch in batches(model, kept, batch_tokens):

        def count(layer: int, outputs: Tensor, real: Tensor = batch.real) -> None:
            off[layer] += off_tokens(outputs, heads, real, [epsilon]).sum((0, 1))

        run(model, batch, on_heads=count)
    dead = off.double() / sum(len(text.ids) for text in kept) > DEAD
    return [(layer, head) for layer, head in dead.nonzero().tolist()]
