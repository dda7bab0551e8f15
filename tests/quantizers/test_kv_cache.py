"""A quantized KV cache: against a token-by-token loop that stores codes, the same however tokens are read, audited."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from qbench import quantize
from qbench.attention.kinds import attentions
from qbench.attention.register import attention_function, build_model, set_attention
from qbench.quantizers import kv_cache
from qbench.quantizers.axis_options import KvCacheOptions
from qbench.quantizers.declaration import QuantizeError
from qbench.quantizers.kv_cache import QuantizedCache, RoundedCache
from qbench.quantizers.options import quantization
from qbench.quantizers.quantize import audit_after_scoring
from qbench.records.audit import AuditError

from . import tiny
from .conftest import logits

HEADS, KV_HEADS, DIM, LENGTH = 4, 2, 32, 29
SETTINGS: list[dict[str, Any]] = [
    {"bits": 4, "group_size": 8},
    {"bits": 2, "group_size": 6, "keep_first": 3},
    {"bits": 2, "group_size": 8, "channels": 16},
    {"bits": 8, "keys": "token"},
    {"bits": 2, "keys": "token", "channels": 8, "keep_first": 1},
]
# Every kind and every setting; all combinations are slow.
IN_TURN = [(kind, SETTINGS[n % len(SETTINGS)]) for n, kind in enumerate(attentions())]
in_turn = pytest.mark.parametrize(("kind", "settings"), IN_TURN)
all_pairs = pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param(*pair, marks=() if pair in IN_TURN else pytest.mark.slow)
        for pair in product(attentions(), SETTINGS)
    ],
)


class Codes:
    """Values of a group as a cache would store them: whole numbers, their step, and the smallest value."""

    def __init__(self, x: Tensor, bits: int) -> None:
        self.low, high = x.min(), x.max()
        self.step = (high - self.low) / (2**bits - 1)
        steps = (x - self.low) / self.step if self.step > 0 else torch.zeros_like(x)
        self.codes = steps.round().to(torch.uint8)
        assert int(self.codes.max()) < 2**bits

    def read(self) -> Tensor:
        return self.codes.to(self.low.dtype) * self.step + self.low


class LoopCache:
    """The cache of one head of one text, token by token; whole groups are stored as codes and the rest exactly."""

    def __init__(self, options: KvCacheOptions) -> None:
        self.options = options
        self.keys: list[Tensor] = []  # what a later query sees, [dim] each
        self.values: list[Tensor] = []

    def append(self, k: Tensor, v: Tensor) -> None:
        self.keys.append(k)
        self.values.append(v)
        own = self.options
        if own.keys == "token":
            self._store(len(self.keys) - 1)

    def after(self) -> None:
        """A query has been answered: if it was the last of its group, the group is stored."""
        size = self.options.group_size
        if self.options.keys == "channel" and len(self.keys) % size == 0:
            group = [t for t in range(len(self.keys) - size, len(self.keys)) if t >= self.options.keep_first]
            if group:
                stacked = torch.stack([self.keys[t] for t in group])  # [size, dim]
                columns = [Codes(column, self.options.bits).read() for column in stacked.T]
                for t, key in zip(group, torch.stack(columns, 1), strict=True):
                    self.keys[t] = key
                    self.values[t] = self._by_channels(self.values[t])

    def _store(self, t: int) -> None:
        if t >= self.options.keep_first:
            self.keys[t], self.values[t] = self._by_channels(self.keys[t]), self._by_channels(self.values[t])

    def _by_channels(self, x: Tensor) -> Tensor:
        return torch.cat([Codes(part, self.options.bits).read() for part in x.split(self.options.channels)])


def loop(function: Any, options: KvCacheOptions, q: Tensor, k: Tensor, v: Tensor, **extra: Any) -> Tensor:
    """Attention of one text [1, heads, length, dim], one query at a time."""
    caches, found = [LoopCache(options) for _ in range(k.shape[1])], []
    for t in range(q.shape[2]):
        for head, cache in enumerate(caches):
            cache.append(k[0, head, t], v[0, head, t])
        keys, values = (torch.stack([torch.stack(getattr(c, n)) for c in caches])[None] for n in ("keys", "values"))
        found.append(function(q[:, :, t : t + 1], keys, values, causal=True, **extra))
        for cache in caches:
            cache.after()
    return torch.cat(found, dim=2)


def extra_tensors(kind: str) -> dict[str, Tensor]:
    shapes = {"sinks": (HEADS,), "s": (HEADS, 1)}
    return {name: torch.rand(shapes[name], dtype=torch.float64) + 0.2 for name in attentions()[kind].extra_tensors}


@all_pairs
def test_attention_is_that_of_a_loop_with_stored_codes(kind: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    options, function, extra = KvCacheOptions(**settings), attention_function(attentions()[kind]), extra_tensors(kind)
    q = torch.randn(1, HEADS, LENGTH, DIM, dtype=torch.float64)
    k, v = torch.randn(2, 1, KV_HEADS, LENGTH, DIM, dtype=torch.float64)
    found = RoundedCache(options)(function, q, k, v, causal=True, scale=0.3, **extra)
    assert found == pytest.approx(loop(function, options, q, k, v, scale=0.3, **extra), abs=1e-9)
    exact = function(q, k, v, causal=True, scale=0.3, **extra)
    assert (found - exact).abs().max() > 1e-4
    single = RoundedCache(options)(function, *(x.float() for x in (q, k, v)), causal=True, scale=0.3, **_float(extra))
    assert single.double() == pytest.approx(found, abs=1e-5)


def _float(extra: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: own.float() for name, own in extra.items()}


def quantized_model(kind: str, settings: dict[str, Any], **axes: Any) -> LlamaForCausalLM:
    """A small model with random weights in float64: a float32 rounding error could become a whole step."""
    torch.manual_seed(0)
    config = tiny.config(num_hidden_layers=2, hidden_size=64, intermediate_size=64, head_dim=DIM)
    set_attention(config, attentions()[kind])
    model = build_model(config).double().eval().requires_grad_(False)
    return quantize(model, "none", 16, kv_cache=settings, **axes)[0]


@in_turn
def test_it_does_not_matter_how_tokens_are_read(kind: str, settings: dict[str, Any]) -> None:
    model, ids = quantized_model(kind, settings), tiny.held_out_ids(3, LENGTH)
    whole = logits(model, ids)
    # With a cached prefix, and token by token.
    for cuts in ([11], list(range(1, LENGTH))):
        past, parts = None, []
        for start, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
            out = model(input_ids=ids[:, start:end], past_key_values=past, use_cache=True)
            past, parts = out.past_key_values, [*parts, out.logits]
        assert torch.cat(parts, 1) == pytest.approx(whole, abs=1e-7)
    # Padded on the left, in another order, in a larger batch.
    lengths = [LENGTH, 12, 21]
    padded, mask = torch.zeros(3, LENGTH, dtype=torch.long), torch.zeros(3, LENGTH, dtype=torch.long)
    for row, (text, length) in enumerate(zip(ids.flip(0), lengths, strict=True)):
        padded[row, LENGTH - length :], mask[row, LENGTH - length :] = text[:length], 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    found = model(input_ids=padded, attention_mask=mask, position_ids=positions).logits
    for row, length in enumerate(lengths):
        assert found[row, LENGTH - length :] == pytest.approx(whole.flip(0)[row, :length], abs=1e-7)


@in_turn
def test_a_future_token_changes_nothing(kind: str, settings: dict[str, Any]) -> None:
    model, ids = quantized_model(kind, settings), tiny.held_out_ids(1, LENGTH)
    before = logits(model, ids)
    for t in (1, 9, 16, LENGTH - 1):  # within groups and at their borders
        changed = ids.clone()
        changed[0, t] = (ids[0, t] + 1) % tiny.VOCAB
        after = logits(model, changed)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.equal(after[:, t:], before[:, t:])


@pytest.mark.parametrize("kind", ["softmax", "softpick"])
def test_generated_text_is_the_same_alone_and_padded_in_a_batch(kind: str) -> None:
    model, ids = quantized_model(kind, {"bits": 2, "group_size": 4}, activations={"bits": 8}), tiny.held_out_ids(1, 9)
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    alone = [model.generate(text, attention_mask=torch.ones_like(text), **how)[0, -12:] for text in (ids, ids[:, :4])]
    batch = torch.cat([ids, torch.cat([torch.zeros(1, 5, dtype=torch.long), ids[:, :4]], 1)])
    mask = torch.ones_like(batch)
    mask[1, :5] = 0
    together = model.generate(batch, attention_mask=mask, **how)[:, -12:]
    assert torch.equal(together, torch.stack(alone))
    # Its next logits equal those of one pass over the whole text.
    text = torch.cat([ids[0], alone[0]])[None]
    assert torch.equal(logits(model, text)[0, 8:-1].argmax(-1), alone[0])


def test_keeping_all_tokens_exact_is_the_unquantized_model() -> None:
    torch.manual_seed(0)
    function = attention_function(attentions()["softpick"])
    q, k, v = torch.randn(3, 2, HEADS, LENGTH, DIM, dtype=torch.float64)
    for settings in ({"keys": "token"}, {"group_size": 8}):
        cache = RoundedCache(KvCacheOptions(bits=2, keep_first=LENGTH, **settings))
        assert cache(function, q, k, v, causal=True) == pytest.approx(function(q, k, v, causal=True), abs=1e-12)


# The audit ---------------------------------------------------------------------------------------


def test_the_share_of_quantized_pairs_is_counted() -> None:
    def counted(options: KvCacheOptions, start: int, length: int) -> tuple[int, int]:
        size, pairs = options.group_size, [(t, j) for t in range(start, start + length) for j in range(t + 1)]
        seen = [j for t, j in pairs if options.keys == "token" or j // size < t // size]
        return sum(j >= options.keep_first for j in seen), len(pairs)

    for settings in SETTINGS:
        options = KvCacheOptions(**settings)
        spans = Counter({(0, 30): 2, (17, 9): 3})
        found = [(times, counted(options, *span)) for span, times in spans.items()]
        expected = sum(n * own[0] for n, own in found) / sum(n * own[1] for n, own in found)
        assert options.quantized_pairs(spans) == pytest.approx(expected)
    assert KvCacheOptions().quantized_pairs({}) is None


def test_the_audit_counts_caches_levels_and_pairs(untrained: LlamaForCausalLM) -> None:
    model, audit = quantize(untrained, "none", 16, kv_cache={"bits": 2, "group_size": 8})
    said = " ".join(audit.parts[0].details)
    assert all(fact in said for fact in ("2 layers", "simulated", "86.2%", "at most 4 levels"))
    scored = audit_after_scoring(audit, quantization("none", 16, kv_cache={"bits": 2, "group_size": 8}), {(0, 16): 1})
    assert scored.parts[0].quantized_pairs == pytest.approx(8 * 8 / 136)
    assert model.config._attn_implementation == "softmax"


@pytest.mark.parametrize("kept", [1, 4, 31, 32, 40])
def test_exact_tokens_do_not_disturb_the_audit(untrained: LlamaForCausalLM, kept: int) -> None:
    _, audit = quantize(untrained, "none", 16, kv_cache={"bits": 2, "keep_first": kept})
    assert f"first {kept} tokens" in " ".join(audit.parts[0].details)


def test_short_tasks_may_be_equal_without_the_quantized_cache(untrained: LlamaForCausalLM) -> None:
    """Texts shorter than a group stay exact, so equal scores do not show that the wrong model was measured."""
    _, audit = quantize(untrained, "none", 16, kv_cache={"bits": 2, "group_size": 8})
    assert audit.parts[0].may_change_nothing


def test_groups_longer_than_the_texts_fail_the_audit(untrained: LlamaForCausalLM) -> None:
    _, audit = quantize(untrained, "none", 16, kv_cache={"bits": 2, "group_size": 64})
    with pytest.raises(AuditError, match="longer than the texts"):
        audit_after_scoring(audit, quantization("none", 16, kv_cache={"bits": 2, "group_size": 64}), {(0, 64): 5})


def never(self: QuantizedCache, model: LlamaForCausalLM) -> None:
    self.caches = [RoundedCache(self.options) for _ in model.model.layers]


def one_layer_lost(self: QuantizedCache, model: LlamaForCausalLM) -> None:
    _APPLY(self, model)
    del model.model.layers[1].self_attn.qbench_attention_wrapper


def another_attention(self: QuantizedCache, model: LlamaForCausalLM) -> None:
    _APPLY(self, model)
    model.set_attn_implementation("sdpa")


def exact_on_the_first_pass(self: QuantizedCache, model: LlamaForCausalLM) -> None:
    """As transformers' quantized caches do."""
    _APPLY(self, model)
    for layer, cache in zip(model.model.layers, self.caches, strict=True):
        layer.self_attn.qbench_attention_wrapper = lambda function, q, k, v, cache=cache, **own: (
            function(q, k, v, **own) if q.shape[2] == k.shape[2] else cache(function, q, k, v, **own)
        )


def more_bits(self: QuantizedCache, model: LlamaForCausalLM) -> None:
    right, self.options = self.options, KvCacheOptions(bits=4, group_size=8)
    _APPLY(self, model)
    self.options = right


def its_own_group_too(self: QuantizedCache, model: LlamaForCausalLM) -> None:
    """Every whole group rounded for all queries, so scales come from later tokens."""
    _APPLY(self, model)
    for cache in self.caches:
        cache._group_by_group = lambda attend, q, exact, rounded: attend(0, q.shape[2], *rounded)


_APPLY = QuantizedCache.apply


@pytest.mark.parametrize(
    ("sabotage", "reason"),
    [
        (never, "not quantized is 2"),
        (one_layer_lost, "not quantized is 1"),
        (another_attention, "not quantized is 2"),
        (exact_on_the_first_pass, "not quantized is 2"),
        (more_bits, "levels in a group of keys"),
        (its_own_group_too, "largest share of pairs"),
    ],
)
def test_a_cache_that_is_not_quantized_fails_the_audit(
    untrained: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, sabotage: Any, reason: str
) -> None:
    monkeypatch.setattr(QuantizedCache, "apply", sabotage)
    with pytest.raises(AuditError) as caught:
        quantize(untrained, "none", 16, kv_cache={"bits": 2, "group_size": 8})
    assert any(own.startswith("kv2-g8: ") and reason in own for own in caught.value.reasons), caught.value.reasons


@pytest.mark.parametrize(("part", "reason"), [("keys", "keys of a layer"), ("values", "values of a layer")])
def test_keys_and_values_are_audited_each(
    untrained: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, part: str, reason: str
) -> None:
    monkeypatch.setattr(RoundedCache, f"_rounded_{part}", lambda self, x, first: x.clone())
    with pytest.raises(AuditError, match=reason):
        quantize(untrained, "none", 16, kv_cache={"bits": 4, "group_size": 8})


def test_rounding_that_does_nothing_fails_the_audit(
    untrained: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "min_max", lambda bits, x, dim, exact=None: x)
    with pytest.raises(AuditError, match="not quantized is 2"):
        quantize(untrained, "none", 16, kv_cache={"keys": "token"})


def wider(bits: int, x: Tensor, dim: int, exact: Tensor | None = None) -> Tensor:
    """A step that is 3% too large."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = 1.03 * (high - low) / (2**bits - 1)
    return ((x - low) / step).round() * step + low


def of_the_last_group(bits: int, x: Tensor, dim: int, exact: Tensor | None = None) -> Tensor:
    """Scales that a later token helped to set."""
    low, high = x[:, :, -1:].amin(dim, keepdim=True), x[:, :, -1:].amax(dim, keepdim=True)
    step = (high - low) / (2**bits - 1)
    return ((x.clamp(low, high) - low) / step).round() * step + low


@pytest.mark.parametrize("sabotage", [wider, of_the_last_group])
@pytest.mark.parametrize(
    "settings", [{"bits": b, **how} for b in (8, 4, 2) for how in ({"group_size": 8}, {"keys": "token"})]
)
def test_a_wrong_scale_fails_the_audit(
    untrained: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], sabotage: Any
) -> None:
    monkeypatch.setattr(kv_cache, "min_max", sabotage)
    with pytest.raises(AuditError, match="do not explain"):
        quantize(untrained, "none", 16, kv_cache=settings)


@pytest.mark.parametrize("kept", [64, 100, 127])
def test_tokens_after_many_exact_ones_are_audited(untrained: LlamaForCausalLM, kept: int) -> None:
    _, audit = quantize(untrained, "none", 16, kv_cache={"keys": "token", "keep_first": kept})
    assert f"first {kept} tokens" in " ".join(audit.parts[0].details)


# Bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"bits": 3}, ["kv_cache", "bits", "3", "8, 4, 2"]),
        ({"keys": "head"}, ["keys", "head", "channel, token"]),
        ({"group_size": 2}, ["group_size", "2", "4 or more"]),
        ({"group_size": 8, "keys": "token"}, ["group_size", "8", "token"]),
        ({"group_size": 128}, ["group_size", "128", "ever"]),
        ({"channels": 24}, ["channels", "24", "divide", "32"]),
        ({"keep_first": 96}, ["keep_first 96", "group_size 32", "128", "ever"]),
        ({"keep_first": 128, "keys": "token"}, ["keep_first 128", "ever"]),
        ({"keep_first": -1}, ["keep_first", "-1", "0 or more"]),
        ({"group": 8}, ["group", "group_size"]),
    ],
)
def test_wrong_options_are_a_sentence(untrained: LlamaForCausalLM, given: Any, facts: list[str]) -> None:
    with pytest.raises(QuantizeError) as caught:
        quantize(untrained, "none", 16, kv_cache=given)
    assert all(fact in str(caught.value) for fact in facts), str(caught.value)
