"""Run the kinds of attention inside transformers' models.

`register_all` makes each kind an `attn_implementation`: the attention function with transformers' AttentionInterface,
and a mask function that passes it only the padding. A gate also needs its own module, `GatedAttention`. Softmax models
run transformers' own implementation unless `attend_through` is used.
"""

import pkgutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import softpick
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
from transformers.cache_utils import Cache
from transformers.masking_utils import causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from qbench.attention.kinds import Attention, AttentionError, attentions
from qbench.errors import one_line

# Arguments of transformers that change what attention computes or returns: ignoring one would give wrong results.
_UNSUPPORTED = ("output_attentions", "softcap", "sliding_window", "position_bias", "s_aux", "cu_seq_lens_q", "cache")

_WRAPPER = "qbench_attention_wrapper"  # an attribute of attention modules, see `attend_through`


def attention_function(kind: Attention) -> Callable[..., Tensor]:
    """The function that computes a kind, from rotated queries up to (not including) its gate.

    f(q, k, v, *, scale, causal, key_mask), the arguments of `softpick.normalized_attention`, and the extra tensors; a
    kind that has a normalizer also takes `backend`.
    """
    if kind.normalizer is None:
        return _with_factors(kind, _own_function(kind))
    return _with_factors(kind, partial(softpick.normalized_attention, normalizer=kind.normalizer))


def attention_weights(kind: Attention) -> Callable[..., Tensor]:
    """The weights that this function multiplies the values with: [batch, heads, q_len, k_len], in float32 or float64.

    f(q, k, *, scale, causal, key_mask) and the extra tensors.
    """
    if kind.normalizer is None:
        function: Callable[..., Tensor] = partial(_own_weights, _own_function(kind))
    else:
        function = partial(_weights, kind.normalizer)
    with_factors = _with_factors(kind, function)
    return lambda q, k, **options: with_factors(q, k, k, **options)


def _with_factors(kind: Attention, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function of a kind with the constants and factors that the kind declares."""
    if kind.normalizer == "sink_softmax" and "sinks" not in kind.extra_tensors:
        function = partial(_plus_one, function)
    return partial(_scaled, function) if kind.scaled else function


def _weights(normalizer: str, q: Tensor, k: Tensor, _: Tensor, **options: Any) -> Tensor:
    return softpick.attention_weights(q, k, normalizer=normalizer, **options)


def _own_weights(function: Callable[..., Tensor], q: Tensor, k: Tensor, _: Tensor, **options: Any) -> Tensor:
    """Get weights from a function of values: pass columns of the identity as values, head_dim columns at a time."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(wide), k.to(wide)
    k_len, width = k.shape[2:]
    columns = []
    for start in range(0, k_len, width):
        v = k.new_zeros(k_len, width)
        v[start : start + width].fill_diagonal_(1)
        columns.append(function(q, k, v.expand_as(k), **options))
    return torch.cat(columns, dim=-1)[..., :k_len]


def _own_function(kind: Attention) -> Callable[..., Tensor]:
    assert kind.function is not None
    try:
        return pkgutil.resolve_name(kind.function)
    except (ImportError, AttributeError, ValueError) as error:
        raise AttentionError(
            f"{kind.name} attention's function is {kind.function!r}, which cannot be imported ({one_line(error)}); "
            "it must be 'module:function'."
        ) from error


def _plus_one(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Sinks that are not learned: e^0 = 1."""
    return function(q, k, v, sinks=q.new_zeros(q.shape[1]), **options)


def _scaled(
    function: Callable[..., Tensor],
    q: Tensor,  # [batch, heads, q_len, dim]
    k: Tensor,
    v: Tensor,
    *,
    s: Tensor,  # [heads, 1]
    key_mask: Tensor | None = None,  # [batch, k_len]
    **options: Any,
) -> Tensor:
    """Attention with scores x · s_h · ln(t + 2); t counts the real tokens before a query, including cached ones."""
    q_len, k_len = q.shape[2], k.shape[2]
    if key_mask is None:
        t = torch.arange(k_len - q_len, k_len, device=q.device)[None]  # [1, q_len]
    else:
        t = (key_mask.cumsum(1)[:, k_len - q_len :] - 1).clamp_min(0)  # [batch, q_len]
    wide = torch.promote_types(q.dtype, torch.float32)
    factor = s.to(wide)[None, :, :, None] * (t + 2).to(wide).log()[:, None, :, None]  # [batch or 1, heads, q_len, 1]
    return function((q * factor).to(q.dtype), k, v, key_mask=key_mask, **options)


def register_all() -> None:
    """Register every kind with transformers; `build_model` calls it."""
    for kind in attentions().values():
        AttentionInterface.register(kind.name, partial(_forward, kind, attention_function(kind)))
        AttentionMaskInterface.register(kind.name, partial(_key_mask, kind.name))


def attend_through(model: LlamaForCausalLM, wrappers: Sequence[Callable[..., Tensor]]) -> None:
    """Make each layer of a model call wrapper(function, q, k, v, **options) instead of its attention function.

    wrappers: one per layer. function: as from `attention_function`; the options are its keywords.
    """
    register_all()
    model.set_attn_implementation(config_kind(model.config).name)
    for layer, wrapper in zip(model.model.layers, wrappers, strict=True):
        setattr(layer.self_attn, _WRAPPER, wrapper)


def set_attention(config: LlamaConfig, kind: Attention) -> None:
    """Make models with this config run a kind of attention, and save it in their config.json."""
    config._attn_implementation = kind.runs_as
    if not kind.is_softmax:
        # A plain attribute is serialized, so the model's save_pretrained keeps it too.
        config.attn_implementation = kind.name


class ShownFacts(dict[str, str]):
    """What a model's repr says first: attention=softpick, quantization=hqq-3-g64. A copy of the model has its own."""

    def __call__(self) -> str:
        """The facts as torch's `extra_repr` gives them."""
        return ", ".join(f"{name}={value}" for name, value in self.items())


def show(model: nn.Module, **facts: str) -> None:
    """Add facts to a model's repr."""
    known = model.extra_repr if isinstance(model.extra_repr, ShownFacts) else {}
    model.extra_repr = ShownFacts(known | facts)  # type: ignore[method-assign]


def build_model(config: LlamaConfig) -> LlamaForCausalLM:
    """A new model with the attention of its config; extra tensors have their initial values."""
    register_all()
    model, kind = LlamaForCausalLM(config), config_kind(config)
    for number, layer in enumerate(model.model.layers):
        if kind.gated:
            layer.self_attn = GatedAttention(config, number)
            layer.self_attn.apply(model._init_weights)
        for name, shape in kind.extra_shapes(config).items():
            initial = torch.full(shape, kind.initial.get(name, 0.0))
            layer.self_attn.register_parameter(name, nn.Parameter(initial))
    show(model, attention=kind.name, quantization="none")
    return model


def config_kind(config: PreTrainedConfig) -> Attention:
    """The attention that models with this config run: all of transformers' implementations are softmax."""
    known = attentions()
    return known.get(config._attn_implementation, known["softmax"])


def attention_kind(model: PreTrainedModel) -> str:
    """The name of the attention that a model runs; an error if its weights were trained with another one."""
    kind = config_kind(model.config).name
    trained = getattr(model.config, "attn_implementation", kind)
    if trained != kind:
        raise ValueError(
            f"The model's weights were trained with {trained} attention, but its attn_implementation is "
            f"{model.config._attn_implementation!r}, which runs {kind}: "
            f"call model.set_attn_implementation({trained!r})."
        )
    return kind


class GatedAttention(LlamaAttention):
    """Llama's attention with the heads' outputs multiplied by σ(g); q_proj has the rows of q, then those of g."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        """As in Llama, with twice the rows in q_proj."""
        super().__init__(config, layer_idx)
        rows = 2 * config.num_attention_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, rows, bias=config.attention_bias)

    def forward(  # type: ignore[override]  # transformers' keywords are a TypedDict
        self,
        hidden_states: Tensor,  # [batch, q_len, hidden]
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As in Llama; the gate is not rotated."""
        flat, gate = self.q_proj(hidden_states).chunk(2, dim=-1)  # [batch, q_len, heads · dim] each
        query, key, value = (
            projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [batch, heads or kv_heads, q_len, dim]
            for projected in (flat, self.k_proj(hidden_states), self.v_proj(hidden_states))
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(out.flatten(2) * gate.sigmoid()), weights


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
        raise ValueError(f"{name} attention does not support dropout, but attention_dropout is {dropout}; set it to 0.")
    if attention_mask is not None:
        # Only masks prepared by hand get here without passing through `_key_mask`.
        if attention_mask.ndim != 2:
            raise ValueError(
                f"attention_mask has shape {list(attention_mask.shape)}; {name} attention takes [batch, length], "
                "with 0 for padding tokens; it masks the future itself."
            )
        # A static cache is longer than its written part; the mask has the written length.
        key, value = key[:, :, : attention_mask.shape[1]], value[:, :, : attention_mask.shape[1]]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    extra = {tensor: getattr(module, tensor) for tensor in kind.extra_tensors}
    wrapper = getattr(module, _WRAPPER, None)
    attend = partial(wrapper, function) if wrapper else function
    out = attend(query, key, value, scale=scaling, causal=causal, key_mask=attention_mask, **extra)
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
            f"{name} attention is causal over all tokens before a query: it does not support a sliding window, packed "
            "sequences (position_ids that restart, without an attention_mask) or another mask function."
        )
    written = int(q_offset) + q_length  # what the cache holds, and the new tokens
    if attention_mask is not None and list(attention_mask.shape) != [batch_size, written]:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}; it must be [batch, cached + new tokens] = "
            f"[{batch_size}, {written}], with 0 for padding tokens."
        )
    if kv_length > written:  # a static cache: `_forward` reads the written length from the mask
        every_key = torch.ones(batch_size, written, dtype=torch.bool, device=device)
        return every_key if attention_mask is None else attention_mask
    if attention_mask is None or torch.compiler.is_compiling():  # a graph cannot branch on what a mask holds
        return attention_mask
    return None if attention_mask.all() else attention_mask
