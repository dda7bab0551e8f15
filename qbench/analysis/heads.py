"""Dead heads: those whose slice of o_proj's input is next to nothing at nearly all tokens.

What counts as off is decided in qbench.quantizers.mask_heads, which masks the same heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from qbench.analysis.texts import checked_texts
from qbench.quantizers.mask_heads import is_off, off_share
from qbench.records.analysis import DEAD, AnalysisError


def off_tokens(outputs: Tensor, heads: int, real: Tensor, epsilons: Sequence[float]) -> Tensor:
    """By epsilon, at how many tokens a head is off: [batch, ε, heads].

    outputs [batch, length, heads · dim]: what o_proj reads; real [batch, length].
    """
    return torch.stack([(is_off(outputs, heads, epsilon) & real[..., None]).sum(1) for epsilon in epsilons], dim=1)


def dead_heads(model: LlamaForCausalLM, texts: Sequence[Tensor], epsilon: float) -> list[tuple[int, int]]:
    """The heads (layer, head) that are off for more than 95% of all tokens of the texts."""
    if not epsilon > 0:
        raise AnalysisError(f"epsilon is {epsilon}; it must be above 0.")
    kept, _ = checked_texts(model, texts, None)
    dead = off_share(model, [text.ids[None] for text in kept], epsilon) > DEAD
    return [(layer, head) for layer, head in dead.nonzero().tolist()]
