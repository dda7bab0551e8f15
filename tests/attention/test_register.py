"""Softpick inside transformers' Llama: caches and padding change nothing, and unsupported arguments are refused."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.masking_utils import create_sliding_window_causal_mask

from qbench.attention.register import attention_kind, register_all

VOCAB, PAD = 61, 7


def tiny_model(attention: str = "softpick", **fields: object) -> LlamaForCausalLM:
    register_all()
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None}
    config = LlamaConfig(**{**sizes, **heads, **fields}, attn_implementation=attention)
    config.initializer_range = 0.15  # scores large enough for attention to matter
    return LlamaForCausalLM(config).eval()


def prompts(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB, (length,), generator=generator) for length in lengths]


def pad(rows: list[torch.Tensor], side: str = "left") -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of one length and their mask. The padding is a token like any other: only the mask identifies it."""
    length = max(map(len, rows))
    ids, mask = torch.full((len(rows), length), PAD), torch.zeros(len(rows), length, dtype=torch.long)
    for n, row in enumerate(rows):
        real = slice(length - len(row), None) if side == "left" else slice(len(row))
        ids[n, real], mask[n, real] = row, 1
    return ids, mask


@torch.no_grad()
def full_logits(model: LlamaForCausalLM, row: torch.Tensor) -> torch.Tensor:
    """[length, vocab] of one sequence: no padding, no cache."""
    return model(row[None], use_cache=False).logits[0]


@pytest.mark.parametrize("cache", [None, "static"])
def test_generate_with_a_cache_and_left_padding_gives_what_a_full_forward_gives(cache):
    model, rows = tiny_model(), prompts(3, 11, 7)
    ids, mask = pad(rows)
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=PAD,
        cache_implementation=cache,
        disable_compile=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    steps = torch.stack(out.logits, dim=1)  # [batch, new, vocab]
    for row, new, logits in zip(rows, out.sequences[:, ids.shape[1] :], steps, strict=True):
        full = full_logits(model, torch.cat([row, new]))[len(row) - 1 : -1]
        torch.testing.assert_close(logits, full, atol=1e-4, rtol=0)
        assert new.tolist() == full.argmax(-1).tolist()
    assert len(set(out.sequences[:, ids.shape[1] :].flatten().tolist())) > 5  # the model's predictions vary


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_a_row(side):
    model, rows = tiny_model(), prompts(2, 9)
    ids, mask = pad(rows, side)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp_min(0)).logits
    assert logits.isfinite().all()
    for row, keep, got in zip(rows, mask.bool(), logits, strict=True):
        torch.testing.assert_close(got[keep], full_logits(model, row), atol=1e-4, rtol=0)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_a_sequence_in_chunks_through_the_cache_is_the_whole_sequence(static, masked):
    model, (row,) = tiny_model(), prompts(12)
    cache = StaticCache(config=model.config, max_cache_len=20) if static else DynamicCache(config=model.config)
    logits, done = [], 0
    for chunk in row.split([5, 4, 1, 2]):
        done += len(chunk)
        mask = torch.ones(1, done, dtype=torch.long) if masked else None
        logits.append(model(chunk[None], attention_mask=mask, past_key_values=cache, use_cache=True).logits[0])
    torch.testing.assert_close(torch.cat(logits), full_logits(model, row), atol=1e-4, rtol=0)


def test_softpick_is_not_softmax():
    softpick, (row,) = tiny_model(), prompts(12)
    softmax = tiny_model("sdpa")
    softmax.load_state_dict(softpick.state_dict())
    assert (full_logits(softpick, row) - full_logits(softmax, row)).abs().max() > 0.1


def test_the_models_own_scale_is_used():
    model, (row,) = tiny_model(), prompts(12)
    expected = full_logits(model, row)
    for layer in model.model.layers:
        layer.self_attn.scaling /= 4
        layer.self_attn.q_proj.weight.data *= 4
    torch.testing.assert_close(full_logits(model, row), expected, atol=1e-4, rtol=0)


def test_gradients_flow_through_a_padded_batch():
    model = tiny_model().train()
    ids, mask = pad(prompts(3, 8))
    model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"attention_mask": torch.ones(1, 1, 6, 6, dtype=torch.bool)},
            r"attention_mask.*\[1, 1, 6, 6\].*\[batch, length\]",
        ),
        ({"attention_mask": torch.ones(1, 9, dtype=torch.long)}, r"attention_mask.* \[1, 9\].*\[1, 6\]"),
        ({"attention_mask": torch.ones(1, 4, dtype=torch.long)}, r"attention_mask.* \[1, 4\].*\[1, 6\]"),
        ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]), "use_cache": False}, "packed sequences"),
        ({"output_attentions": True}, "softpick.*output_attentions"),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 6])}, "softpick.*cu_seq_lens_q"),
        ({"softcap": 30.0}, "softpick.*softcap"),
    ],
)
def test_what_softpick_cannot_do_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        tiny_model()(torch.ones(1, 6, dtype=torch.long), **arguments)


def test_dropout_is_refused_in_training_only():
    model, ids = tiny_model(attention_dropout=0.1), torch.ones(1, 6, dtype=torch.long)
    model(ids)
    with pytest.raises(ValueError, match=r"attention_dropout.*0\.1"):
        model.train()(ids)


def test_a_model_that_is_not_causal_is_refused():
    model = tiny_model()
    model.config.is_causal = False
    with pytest.raises(ValueError, match=r"softpick.*causal"):
        model(torch.ones(1, 6, dtype=torch.long))


def test_sliding_windows_are_refused():
    config = tiny_model().config
    config.sliding_window = 4
    with pytest.raises(ValueError, match="sliding window"):
        create_sliding_window_causal_mask(config, torch.zeros(1, 6, 0), None, None)
    # A cache that drops keys, with a model that does not know about it.
    model, cache = tiny_model(), DynamicCache(config=config)
    model(torch.ones(1, 6, dtype=torch.long), past_key_values=cache)
    with pytest.raises(ValueError, match="sliding window"):
        model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)


def test_a_softpick_model_that_was_switched_to_softmax_is_noticed():
    model = tiny_model()
    assert attention_kind(model) == "softpick"
    assert attention_kind(tiny_model("eager")) == attention_kind(tiny_model("sdpa")) == "softmax"
    model.config.attn_implementation = "softpick"  # what load_checkpoint leaves on a softpick checkpoint
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"softpick.*'sdpa'.*set_attn_implementation"):
        attention_kind(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_gives_the_logits_of_the_cpu():
    model, rows = tiny_model(hidden_size=128), prompts(5, 40)
    ids, mask = pad(rows)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        got = model.cuda()(ids.cuda(), attention_mask=mask.cuda()).logits.cpu()
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], atol=1e-3, rtol=0)
