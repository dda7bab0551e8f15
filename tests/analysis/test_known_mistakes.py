"""Typical mistakes in measuring code, and input that cannot be measured."""

import warnings

import pytest
import torch

from qbench import analyze
from qbench.analysis.heads import dead_heads
from qbench.analysis.maps import attention_maps
from qbench.records.analysis import AnalysisError
from qbench.records.analysis_metrics import figures

from .conftest import VOCAB, tiny


def values(analysis) -> dict:
    return {(f.metric, f.setting, f.part, f.length): f.value for f in figures(analysis)}


@pytest.mark.parametrize("kind", ["softmax", "scaled_softpick"])
def test_batches_and_padding_change_nothing(kind: str, texts) -> None:
    model = tiny(kind)
    alone = analyze(model, texts, lengths=[8, 33], batch_tokens=1)
    for tokens in (300, 10**6):
        together = analyze(model, texts, lengths=[8, 33], batch_tokens=tokens)
        assert values(together) == pytest.approx(values(alone), rel=1e-9, abs=1e-12)
        for name in ("zeros", "near_zeros", "empty_tiles", "off", "massive", "largest_token", "largest_channel"):
            assert (getattr(together.sums, name) == getattr(alone.sums, name)).all(), name


def test_texts_are_pooled_by_their_own_indicators(texts) -> None:
    """The mean of indicators, not the indicator of a mean; a text that occurs twice counts twice."""
    model = tiny("softmax")
    one, two = (values(analyze(model, [text], lengths=[])) for text in (texts[0], texts[3]))
    both = values(analyze(model, [texts[0], texts[3], texts[0]], lengths=[]))
    key = ("sink_rate", "0.2", "all")
    assert both[*key, 64] == pytest.approx((2 * one[*key, 9] + two[*key, 64]) / 3)
    assert one[*key, 9] != two[*key, 64]


def test_an_empty_text_is_left_out_and_reported(texts) -> None:
    model = tiny("softmax")
    empty, single = torch.tensor([], dtype=torch.int64), torch.tensor([3])
    with pytest.warns(UserWarning, match="2 texts .*fewer than 2 tokens.* 0, 2 "):
        analysis = analyze(model, [empty, texts[0], single, texts[3]], lengths=[])
    assert list(analysis.sums.number) == [1, 3]
    assert "2 texts" in analysis.facts.notes[0]
    assert values(analysis) == values(analyze(model, [texts[0], texts[3]], lengths=[]))
    with pytest.raises(AnalysisError, match="2 tokens"):
        analyze(model, [empty])


def test_the_order_of_texts_does_not_matter(texts) -> None:
    model = tiny("softpick")
    there, back = analyze(model, texts), analyze(model, texts[::-1])
    assert values(back) == pytest.approx(values(there), rel=1e-12)
    assert list(back.sums.tokens) == [len(text) for text in texts[::-1]]


def test_lengths_that_no_text_has_are_reported(texts) -> None:
    model = tiny("softmax", max_position_embeddings=100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        analysis = analyze(model, texts, length=150, lengths=[16, 300])
    notes = " ".join(analysis.facts.notes)
    assert [str(w.message) for w in caught] == list(analysis.facts.notes)
    assert "5 of 6 texts shorter than length 150" in notes
    assert "shortest has 2" in notes
    assert "100 positions" in notes
    assert "length 300" in notes
    assert (analysis.facts.length, analysis.facts.lengths) == (150, (16, 64))
    assert analysis.sums.tokens.max() == 150


@pytest.mark.parametrize("place", [0, 2])
def test_nan_activations_are_an_error_that_says_where(texts, place: int) -> None:
    model = tiny("softmax", torch.float32)
    model.model.layers[place].mlp.down_proj.weight[0, 0] = torch.nan
    before = model.model.layers[0].self_attn.config
    where = "layer 1" if place == 0 else r"layer 3 \(raw\)"
    with pytest.raises(AnalysisError, match=f"text 1 .*NaN.*{where} output.*float32"):
        analyze(model, texts)
    assert model.model.layers[0].self_attn.config is before


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (torch.ones(2, 5, dtype=torch.int64), "texts is a Tensor"),
        ("some words", "texts is a str"),
        (["some words"], "Text 0 is a str"),
        ([torch.ones(2, 5, dtype=torch.int64)], r"Text 0 is torch.int64 \[2, 5\]"),
        ([torch.ones(5)], "Text 0 is torch.float32"),
        ([torch.tensor([1, 2]), torch.tensor([1, VOCAB])], f"Text 1 has the token id {VOCAB}.*0 to {VOCAB - 1}"),
        ([torch.tensor([1, -2])], "token id -2"),
    ],
)
def test_invalid_texts(texts, words: str) -> None:
    with pytest.raises(AnalysisError, match=words):
        analyze(tiny("softmax"), texts)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"length": 1}, "length is 1"),
        ({"lengths": [16, 1]}, "lengths has 1"),
        ({"lengths": [True]}, "lengths has True"),
    ],
)
def test_invalid_lengths(options: dict, words: str, texts) -> None:
    with pytest.raises(AnalysisError, match=words):
        analyze(tiny("softmax"), texts, **options)


def test_an_invalid_model(texts) -> None:
    with pytest.raises(AnalysisError, match="model is a Linear"):
        dead_heads(torch.nn.Linear(2, 2), texts, 1e-6)


@pytest.mark.parametrize(("head", "words"), [((3, 0), "layer 3; .* 0 to 2"), ((0, 4), "head 4; .* 0 to 3")])
def test_a_head_that_does_not_exist(head: tuple[int, int], words: str, texts) -> None:
    with pytest.raises(AnalysisError, match=words):
        attention_maps(tiny("softmax"), texts[0], [(0, 0), head])
