"""Compares every figure with the plain way, full matrices of one text at a time, for every kind of attention."""

import pytest
import torch

from qbench import analyze, load_checkpoint
from qbench.attention.kinds import ATTENTIONS
from qbench.records.analysis import Analysis
from qbench.records.analysis_metrics import figures

from .conftest import ROOT, tiny
from .plain import plain

SHARES = ("sink_rate", "sink_rate_normalized", "dead_heads", "mostly_dead_heads", "sparsity", "empty_tiles")


def found(analysis: Analysis, length: int) -> dict:
    return {(f.metric, f.setting, f.part): f.value for f in figures(analysis) if f.length == length}


def compare(analysis: Analysis, length: int, wanted: dict, exact: bool) -> None:
    have = found(analysis, length)
    for (metric, setting, part), value in wanted.items():
        if length != analysis.facts.length and (part != "all" or "dead" in metric):
            continue  # the sweep does not have them
        tolerance = {"abs": 1e-12 if exact else 1e-4, "rel": 0} if metric in SHARES else {"rel": 1e-6, "abs": 0}
        assert have[metric, setting, part] == pytest.approx(value, **tolerance), (metric, setting, part, length)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_equal_to_the_plain_way_in_float64(kind: str, texts) -> None:
    model = tiny(kind)
    analysis = analyze(model, texts, lengths=[])
    compare(analysis, 200, plain(model, texts, kind), exact=True)


def test_an_analysis_has_a_short_repr_and_shows_its_figures(texts) -> None:
    analysis = analyze(tiny("softpick"), texts, lengths=[8])
    assert "softpick" in repr(analysis)
    assert len(repr(analysis)) < 200
    shown = analysis._repr_html_()
    assert all(f"<td>{metric}</td>" in shown for metric in ("sink_rate", "kurtosis"))
    assert "<td>8</td>" not in shown  # the sweep is left to to_frame()


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_the_sweep_is_what_cut_texts_give(kind: str, texts) -> None:
    model = tiny(kind)
    whole = analyze(model, texts, lengths=[8, 33, 150])
    for length in (8, 33, 64, 150):
        compare(whole, length, plain(model, texts, kind, length), exact=True)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k in ("softmax", "softpick") else pytest.mark.slow) for k in ATTENTIONS]
)
def test_the_mini_models(kind: str, pages) -> None:
    for dtype in (torch.float64, torch.float32):
        model = load_checkpoint(ROOT / "recipes/mini" / kind, dtype=dtype)
        analysis = analyze(model, pages[:8], lengths=[16])
        length = analysis.facts.length
        compare(analysis, length, plain(model, pages[:8], kind), exact=dtype is torch.float64)
        compare(analysis, 16, plain(model, pages[:8], kind, 16), exact=dtype is torch.float64)
