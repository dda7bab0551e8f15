"""Each measurement separately: rows, zeros, activations, heads, maps; and watching a model changes nothing."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from qbench import analyze
from qbench.analysis import rows
from qbench.analysis.activations import Histogram
from qbench.analysis.heads import dead_heads
from qbench.analysis.maps import attention_maps
from qbench.analysis.sparsity import ZeroCounter, tile_steps
from qbench.attention.kinds import ATTENTIONS, Attention
from qbench.quantizers.quantize import quantize
from qbench.records.analysis import QUARTILE_ERROR, read_analysis, sums_to_parquet
from qbench.records.analysis_metrics import differing_heads, figures, massive_places, tiles

from .conftest import tiny
from .plain import attention_matrices, plain, states_and_outputs
from .test_analyze import compare

OWN = """
from softpick.reference import visible_keys

def sigmoid_attention(q, k, v, *, scale, causal, key_mask):
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    seen = visible_keys(q.shape[2], k.shape[2], q.device)[None, None]
    seen = seen if key_mask is None else seen & key_mask[:, None, None]
    n = seen.sum(-1, keepdim=True).clamp_min(1).to(q.dtype)
    return (q @ k.transpose(-1, -2) * scale - n.log()).sigmoid() * seen @ v
"""


def test_an_attention_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts) -> None:
    """It has a function and no normalizer: its weights are derived from its outputs."""
    (tmp_path / "my_attention.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "my_attention", None)
    monkeypatch.delitem(sys.modules, "my_attention")
    kind = Attention(name="sigmoid", title="Sigmoid", function="my_attention:sigmoid_attention")
    monkeypatch.setitem(ATTENTIONS, "sigmoid", kind)
    model = tiny("sigmoid")
    compare(analyze(model, texts, lengths=[33]), 33, plain(model, texts, "sigmoid", 33), exact=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_are_rounded_to_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    model = tiny("softmax", dtype)
    q, k = (torch.randn(1, 4, 150, 16, generator=torch.Generator().manual_seed(n)).to(dtype) * 2 for n in (0, 1))
    found = torch.zeros(4, 150, 150)
    for start, weights in rows.RowBlocks(model)(model.model.layers[0].self_attn, q, k, 0.25):
        found[:, start : weights.shape[3], : weights.shape[3]] = weights[0]
    scores = (q.double() @ k.double().mT)[0] * 0.25
    wanted = scores.masked_fill(~torch.ones(150, 150, dtype=torch.bool).tril(), -torch.inf).softmax(-1).to(dtype)
    lower = torch.ones(4, 150, 150, dtype=torch.bool).tril()
    assert ((found == 0) & lower).sum() == ((wanted == 0) & lower).sum()
    assert (((found == 0) & lower).sum() > 0) == (dtype == torch.float16)
    assert torch.allclose(found.double(), wanted.double(), rtol=max(2 * torch.finfo(dtype).eps, 1e-5), atol=1e-7)


@pytest.mark.parametrize("budget", [1, 2**14, 2**30])
def test_zeros_and_empty_tiles_of_any_prefix(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    """For any block size and length, on a matrix with empty tiles, an empty row and tiny weights."""
    length, draw = 300, torch.Generator().manual_seed(0)
    matrix = torch.rand(2, 3, length, length, generator=draw).tril()
    matrix[torch.rand(matrix.shape, generator=draw) < 0.6] = 0
    matrix[torch.rand(matrix.shape, generator=draw) < 0.1] *= 1e-6
    matrix[:, :, 128:256, 64:128] = matrix[0, 1, :, 0:64] = matrix[1, 2, 200:] = matrix[1, 0, :128] = 0
    counter, found, start = ZeroCounter(), [], 0
    step = rows.rows_at_once(length, budget)
    while start < length:
        stop = min(start + step, length)
        found.append(torch.stack(counter.count(start, matrix[:, :, start:stop, :stop])))
        start = stop
    zeros, near, empty = torch.cat(found, dim=-1)
    summed = [values.cumsum(-1) for values in (zeros, near, tile_steps(empty))]
    for end in (1, 2, 63, 64, 65, 127, 128, 129, 192, 255, 256, 257, 300):
        part, lower = matrix[:, :, :end, :end], torch.ones(end, end, dtype=torch.bool).tril()
        none = torch.zeros(2, 3, dtype=torch.int64)
        total = 0
        for i in range(0, end, 128):
            for j in range(0, min(i + 128, end), 64):
                none += (part[:, :, i : i + 128, j : j + 64] == 0).flatten(2).all(-1)
                total += 1
        assert total == tiles(np.array(end))
        assert torch.equal(summed[0][..., end - 1], ((part == 0) & lower).sum((2, 3)).double())
        assert torch.equal(summed[1][..., end - 1], ((part <= 1e-5) & lower).sum((2, 3)).double())
        assert torch.equal(summed[2][..., end - 1], none.double())
    assert none.sum() > 0


def test_activations_by_layer(texts) -> None:
    model = tiny("softmax")
    frame = analyze(model, texts, lengths=[]).layers_frame().set_index(["state", "part"])
    per_text = [states_and_outputs(model, ids)[0] for ids in texts]
    assert list(frame.loc[(slice(None), "all"), "where"]) == [
        "embedding",
        "layer 1",
        "layer 2",
        "final norm",
        "layer 3 (raw)",
    ]
    for state in range(5):
        parts = {"all": [s[state] for s in per_text], "first": [s[state][:1] for s in per_text]}
        parts["others"] = [s[state][1:] for s in per_text]
        for part, arrays in parts.items():
            row, x = frame.loc[state, part], np.concatenate(arrays).ravel()
            assert (row["min"], row["max"]) == pytest.approx((x.min(), x.max()), rel=1e-12)
            centred = x - x.mean()
            assert row["kurtosis"] == pytest.approx((centred**4).mean() / (centred**2).mean() ** 2, rel=1e-9)
            spread = np.abs(x).max() * 1e-9  # a quartile near 0 is accurate to its bin, too
            for name, wanted in zip(("q1", "median", "q3"), np.quantile(x, (0.25, 0.5, 0.75)), strict=True):
                assert row[name] == pytest.approx(wanted, rel=2 * QUARTILE_ERROR, abs=max(spread, 0.02 * x.std()))
            assert row.median_abs == pytest.approx(np.median(np.abs(x)), rel=QUARTILE_ERROR)
        sizes = [np.abs(s[state]) for s in per_text]
        text = int(np.argmax([size.max() for size in sizes]))
        token, channel = np.unravel_index(sizes[text].argmax(), sizes[text].shape)
        row = frame.loc[state, "all"]
        assert (row.largest_text, row.largest_token, row.largest_channel) == (text, token, channel)
        assert row.largest == pytest.approx(per_text[text][state][token, channel], rel=1e-12)
        medians = [np.sort(size.ravel())[(size.size - 1) // 2] for size in sizes]
        for name, limit in (
            ("100", lambda m: 100 * m),
            ("1000", lambda m: 1000 * m),
            ("sun", lambda m: max(100, 1000 * m)),
        ):
            wanted = sum(int((size > limit(m)).sum()) for size, m in zip(sizes, medians, strict=True))
            assert row[f"massive_{name}"] == wanted
    assert frame.loc[(0, "all"), "massive_sun"] == sum(int((ids == 7).sum()) for ids in texts) > 0
    places = massive_places(analyze(model, texts, lengths=[]))
    embedded = places[places.state == 0]
    assert set(embedded.channel) == {5}
    assert embedded.largest.max() == 900


def test_quartiles_of_known_values() -> None:
    histogram, draw = Histogram(1, torch.device("cpu")), torch.Generator().manual_seed(0)
    x = torch.randn(1, 1000, 64, generator=draw) * 3 + 5
    histogram.add(0, x, torch.ones(1, 1000, dtype=torch.bool))
    every = next(q for q in histogram.quartiles() if q.part == "all")
    wanted = np.quantile(x.numpy(), (0.25, 0.5, 0.75))
    assert np.allclose([every.q1, every.median, every.q3], wanted, rtol=QUARTILE_ERROR, atol=0)


@pytest.mark.parametrize("kind", ["softmax", "gated"])
def test_dead_heads_are_listed(kind: str, texts) -> None:
    model = tiny(kind)
    assert dead_heads(model, texts, 1e-6) == [(1, 0), (1, 1)]
    assert dead_heads(model, texts, 1e-2) == [(1, 0), (1, 1), (2, 2), (2, 3)]
    frame = analyze(model, texts).heads_frame()
    dead = frame[frame["dead_0.01"]]
    assert list(zip(dead.layer, dead["head"], strict=True)) == dead_heads(model, texts, 1e-2)


def test_heads_by_layer(texts) -> None:
    model = tiny("softpick")
    frame = analyze(model, texts).heads_frame().set_index(["layer", "head"])
    matrices = [attention_matrices(model, ids, "softpick") for ids in texts]
    for layer, head in ((0, 0), (1, 3), (2, 1)):
        alpha = np.array([m[layer][head, :, 0].mean() for m in matrices])
        row = frame.loc[layer, head]
        assert row.first_weight == pytest.approx(alpha.mean())
        assert row["sink_rate_0.2"] == pytest.approx(100 * (alpha > 0.2).mean())
        lower = [m[layer][head][torch.ones_like(m[layer][head], dtype=torch.bool).tril()] for m in matrices]
        assert row.sparsity == pytest.approx(100 * float((torch.cat(lower) == 0).double().mean()))


def test_maps(texts) -> None:
    model = tiny("scaled_softpick")
    found = attention_maps(model, texts[5], [(2, 3), (0, 1), (2, 0)])
    matrices = attention_matrices(model, texts[5], "scaled_softpick")
    assert [(m.layer, m.head) for m in found] == [(2, 3), (0, 1), (2, 0)]
    for m in found:
        assert m.tokens == tuple(texts[5].tolist())
        assert np.allclose(m.weights, matrices[m.layer][m.head].numpy(), atol=1e-6)


def test_the_heads_that_differ_most(texts) -> None:
    model = tiny("softmax")
    one = analyze(model, texts)
    model.model.layers[1].self_attn.q_proj.weight[32:48] *= -1  # head 2
    assert differing_heads(one, analyze(model, texts), count=1) == [(1, 2)]
    assert len(differing_heads(one, one, count=3)) == 3


@pytest.mark.parametrize("execution", ["dense", "packed"])
def test_quantized_models(execution: str, texts) -> None:
    model = tiny("softpick", torch.float32, odd=False)
    model, _ = quantize(model, "hqq", 4, execution=execution, probe=texts[3][None])
    compare(analyze(model, texts, lengths=[]), 200, plain(model, texts, "softpick"), exact=False)


def test_int8_activations_run_text_by_text(texts) -> None:
    model, _ = quantize(tiny("softmax", torch.float32, odd=False), "bnb", 8, probe=texts[3][None])
    alone, together = (values_of(analyze(model, texts, batch_tokens=n)) for n in (1, 10**6))
    assert alone == together


def values_of(analysis) -> dict:
    return {(f.metric, f.setting, f.part, f.length): f.value for f in figures(analysis)}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_watching_changes_nothing(implementation: str, texts) -> None:
    model = tiny("softmax")
    model.set_attn_implementation(implementation)
    model.train()
    ids = texts[1][None]
    with torch.no_grad():
        before = model(ids).logits
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    analyze(model, texts)
    assert model.training
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert all(layer.self_attn.config is model.config for layer in model.model.layers)
    assert model.config._attn_implementation == implementation
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)


def test_an_analysis_as_a_file(texts) -> None:
    analysis = analyze(tiny("softpick"), texts)
    content = sums_to_parquet(analysis)
    assert sums_to_parquet(analyze(tiny("softpick"), texts)) == content
    facts = type(analysis.facts).model_validate_json(analysis.facts.model_dump_json())
    read = read_analysis(facts, content, "analysis.parquet")
    assert facts == analysis.facts
    for name, array in vars(analysis.sums).items():
        np.testing.assert_array_equal(getattr(read.sums, name), array, err_msg=name)
    assert read.to_frame().equals(analysis.to_frame())
