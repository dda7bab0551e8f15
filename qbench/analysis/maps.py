"""Maps: the full attention matrices of chosen heads on one text, for pictures. Nothing else stores a matrix."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from qbench.analysis.rows import RowBlocks
from qbench.analysis.texts import batches, checked_texts
from qbench.analysis.watch import run
from qbench.records.analysis import AnalysisError, AttentionMap


def attention_maps(model: LlamaForCausalLM, text: Tensor, heads: Sequence[tuple[int, int]]) -> list[AttentionMap]:
    """The attention weights of heads (layer, head), counted from 0, on a text of token ids [length].

    qbench.records.analysis_metrics.differing_heads finds the heads in which two models differ most.
    """
    _check_heads(model, heads)
    kept, _ = checked_texts(model, [text], None)
    (batch,) = batches(model, kept, len(text))
    blocks, length = RowBlocks(model), len(text)
    found = {place: torch.zeros(length, length) for place in heads}

    def draw(layer: int, module: nn.Module, q: Tensor, k: Tensor, scale: float) -> None:
        wanted = [head for number, head in found if number == layer]
        for start, weights in blocks(module, q, k, scale) if wanted else ():
            stop = weights.shape[3]
            for head in wanted:
                found[layer, head][start:stop, :stop] = weights[0, head].float().cpu()

    run(model, batch, on_attention=draw)
    tokens = tuple(text.tolist())
    return [AttentionMap(layer, head, tokens, found[layer, head].numpy()) for layer, head in heads]


def _check_heads(model: LlamaForCausalLM, heads: Sequence[tuple[int, int]]) -> None:
    sizes = {"layer": len(model.model.layers), "head": model.config.num_attention_heads}
    for place in heads:
        for (name, size), number in zip(sizes.items(), place, strict=True):
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < size:
                raise AnalysisError(f"A map asks for {name} {number!r}; the model has {name}s 0 to {size - 1}.")
