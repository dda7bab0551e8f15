"""The kinds of attention inside transformers' own models.

`register_all` makes each kind that has a function an `attn_implementation`: the attention function with transformers'
AttentionInterface, and beside it the mask function that hands it the padding and nothing else.
"""

import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import causal_mask_function

from qbench.attention.kinds import ATTENTIONS, Attention

# Arguments of transformers that change what attention computes or returns: to ignore one would be silently wrong.
_UNSUPPORTED = ("output_attentions", "softcap", "sliding_window", "position_bias", "s_aux", "cu_seq_lens_q", "cache")


def attention_function(kind: Attention) -> Callable[..., Tensor]:
    """The function of a kind that is not transformers' own."""
    assert kind.function is not None
    return pkgutil.resolve_name(kind.function)


def register_all() -> None:
    """Make every kind that has a function known to transformers; `build_model` calls it."""
    for kind in ATTENTIONS.values():
        if kind.function:
            AttentionInterface.register(kind.name, partial(_forward, kind, attention_function(kind)))
            AttentionMaskInterface.register(kind.name, partial(_key_mask, kind.name))


def set_attention(config: LlamaConfig, kind: Attention) -> None:
    """Make the models of a config run a kind of attention, and the config.json that is written from it say so."""
    config._attn_implementation = kind.runs_as
    if kind.function:
        # As a plain attribute it is serialized, so that the model's own save_pretrained keeps it too.
        config.attn_implementation = kind.name


def build_model(config: LlamaConfig) -> LlamaForCausalLM:
    """A new model with the attention of its config; extra tensors are zeros."""
    register_all()
    model = LlamaForCausalLM(config)
    for name, shape in config_kind(config).extra_shapes(config).items():
        for layer in model.model.layers:
            layer.self_attn.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    return model


def config_kind(config: PreTrainedConfig) -> Attention:
    """The attention that models of a config run: all of transformers' own implementations are softmax."""
    return ATTENTIONS.get(config._attn_implementation, ATTENTIONS["softmax"])


def attention_kind(model: PreTrainedModel) -> str:
    """The name of the attention that a model runs; an error if its weights are for another one."""
    kind = config_kind(model.config).name
    trained = getattr(model.config, "attn_implementation", kind)
    if trained != kind:
        raise ValueError(
            f"The model's weights are for {trained} attention, but its attn_implementation was set to "
            f"{model.config._attn_implementation!r}, which runs {kind}: "
            f"call model.set_attn_implementation({trained!r})."
        )
    return kind


def _forward(
    kind: Attention,
    function: Callable[..., Tensor],
    module: nn.Module,
    query: Tensor,  # [batch, heads, q_len, dim]
    key: Tensor,  # [batch, kv_heads, length, dim]
    value: Tensor,
    attention_mask: Tensor | None,  # [batch, k_len], from `_key_mask`
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    name = kind.name
    for argument in _UNSUPPORTED:
        if kwargs.get(argument) is not None and kwargs[argument] is not False:
            raise ValueError(f"{name} attention does not support {argument}; leave it out.")
    if dropout:
        raise ValueError(f"{name} attention has no dropout, and attention_dropout is {dropout}; train with 0.")
    if attention_mask is not None:
        # Only masks that somebody prepared by hand come here without having passed `_key_mask`.
        if attention_mask.ndim != 2:
            raise ValueError(
                f"attention_mask has shape {list(attention_mask.shape)}; {name} attention takes [batch, length], "
                "0 where a token is padding, and masks the future by itself."
            )
        # A static cache is longer than what has been written to it; the mask has the written length.
        key, value = key[:, :, : attention_mask.shape[1]], value[:, :, : attention_mask.shape[1]]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    extra = {tensor: getattr(module, tensor) for tensor in kind.extra_tensors}
    out = function(query, key, value, scale=scaling, causal=causal, key_mask=attention_mask, **extra)
    return out.transpose(1, 2), None  # [batch, q_len, heads, dim]


def _key_mask(
    name: str,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor | None:
    """The padding as [batch, k_len] bool, False = padding, or None if every key counts."""
    if mask_function is not causal_mask_function or kv_offset:
        raise ValueError(
            f"{name} attention is causal over everything before a token: it takes no sliding window, no packed "
            "sequences (position_ids that start anew, without an attention_mask) and no other mask function."
        )
    written = int(q_offset) + q_length  # what the cache holds, and the new tokens
    if attention_mask is not None and list(attention_mask.shape) != [batch_size, written]:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}; it must be [batch, cached + new tokens] = "
            f"[{batch_size}, {written}], 0 where a token is padding."
        )
    if kv_length > written:  # a static cache: `_forward` reads the written length from the mask
        every_key = torch.ones(batch_size, written, dtype=torch.bool, device=device)
        return every_key if attention_mask is None else attention_mask
    if attention_mask is None or torch.compiler.is_compiling():  # a graph cannot branch on what a mask holds
        return attention_mask
    return None if attention_mask.all() else attention_mask
