"""Observes what a model computes, without changing it.

Queries and keys are the arguments of the registered attention function: rotated, from packed or dense layers.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from qbench.analysis.texts import Batch

_WATCHED = "qbench_watched"  # an attn_implementation that calls the model's own and watches it

# (layer, its attention module, queries [batch, heads, length, dim], keys [batch, kv_heads, length, dim], scale)
OnAttention = Callable[[int, nn.Module, Tensor, Tensor, float], None]
OnHeads = Callable[[int, Tensor], None]  # (layer, the input of o_proj [batch, length, heads · dim])
OnState = Callable[[int, Tensor], None]  # (state as in qbench.records.analysis, its values [batch, length, hidden])


@torch.no_grad()
def run(
    model: LlamaForCausalLM,
    batch: Batch,
    *,
    on_attention: OnAttention | None = None,
    on_heads: OnHeads | None = None,
    on_state: OnState | None = None,
) -> None:
    """Run the model on a batch, without computing logits."""
    hooks: list[Any] = []
    try:
        if on_heads:
            hooks += _watch_heads(model, on_heads)
        if on_state:
            hooks += _watch_states(model, on_state)
        with _watched_attention(model, on_attention):
            model.model(input_ids=batch.ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()


def _watch_heads(model: LlamaForCausalLM, on_heads: OnHeads) -> list[Any]:
    return [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args, number=number: on_heads(number, args[0]))
        for number, layer in enumerate(model.model.layers)
    ]


def _watch_states(model: LlamaForCausalLM, on_state: OnState) -> list[Any]:
    layers = len(model.model.layers)
    places = {0: model.model.embed_tokens, layers: model.model.norm}
    for number, layer in enumerate(model.model.layers, start=1):
        places[number if number < layers else layers + 1] = layer
    return [
        module.register_forward_hook(lambda _, args, output, state=state: on_state(state, output))
        for state, module in places.items()
    ]


def _dispatch(module: Any, *args: Any, **options: Any) -> Any:
    return module.qbench_watch(module, *args, **options)


@contextmanager
def _watched_attention(model: LlamaForCausalLM, on_attention: OnAttention | None) -> Iterator[None]:
    """While the model runs, its attention modules call `watched`, which calls their real attention function.

    Only the modules' view of the config changes, so this model and others build their masks as usual.
    """
    if on_attention is None:
        yield
        return
    config, numbers = model.config, {layer.self_attn: n for n, layer in enumerate(model.model.layers)}
    function = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager_attention_forward)
    pretended = copy.copy(config)
    pretended._attn_implementation = _WATCHED

    def watched(module: Any, query: Tensor, key: Tensor, *args: Any, scaling: float, **options: Any) -> Any:
        module.config = config  # some functions read it
        on_attention(numbers[module], module, query, key, scaling)
        return function(module, query, key, *args, scaling=scaling, **options)

    def pretend(module: Any, _: Any) -> None:
        module.config = pretended

    AttentionInterface.register(_WATCHED, _dispatch)
    hooks = [module.register_forward_pre_hook(pretend) for module in numbers]
    for module in numbers:
        object.__setattr__(module, "qbench_watch", watched)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in numbers:
            module.config = config
            object.__delattr__(module, "qbench_watch")
