"""Dead heads: heads whose slice of o_proj's input is almost zero at nearly all tokens.

qbench.quantizers.mask_heads decides what counts as off, and masks the same heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from qbench.analysis.texts import checked_texts
from qbench.quantizers.mask_heads import is_off, off_share
from qbench.records.analysis import DEAD, AnalysisError


def off_tokens(outputs: Tensor, heads: int, real: Tensor, epsilons: Sequence[float]) -> Tensor:
    """The number of tokens at which each head is off, by epsilon: [batch, ε, heads].

    outputs [batch, length, heads · dim]: the input of o_proj; real [batch, length].
    """
    return torch.stack([(is_off(outputs, heads, epsilon) & real[..., None]).sum(1) for epsilon in epsilons], dim=1)


def dead_heads(model: LlamaForCausalLM, texts: Sequence[Tensor], epsilon: float) -> list[tuple[int, int]]:
    """The heads (layer, head) that are off at more than 95% of the texts' tokens."""
    if not epsilon > 0:
        raise AnalysisError(f"epsilon is {epsilon}; it must be above 0.")
    kept, _ = checked_texts(model, texts, None)
    dead = off_share(model, [text.ids[None] for text in kept], epsilon) > DEAD
    return [(layer, head) for layer, head in dead.nonzero().tolist()]
