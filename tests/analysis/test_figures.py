"""Pooled figures: their intervals over texts, and paired intervals of differences."""

import numpy as np
import pytest

from qbench import analyze
from qbench.records.analysis import AnalysisError, read_analysis, sums_to_parquet
from qbench.records.analysis_metrics import Figure, difference, figures, kurtosis, same_texts

from .conftest import tiny


def by_name(analysis) -> dict[tuple, Figure]:
    return {(f.metric, f.setting, f.part, f.length): f for f in figures(analysis)}


@pytest.fixture(scope="module")
def analyses(texts) -> list:
    return [analyze(tiny(kind), texts * 3) for kind in ("softmax", "softpick")]


def test_draws_are_figures_of_resampled_texts(analyses) -> None:
    """The same resamples, drawn as the module documents and pooled text by text."""
    analysis = analyses[1]
    sums, found = analysis.sums, by_name(analysis)
    count = len(sums.tokens)
    drawn = np.random.default_rng([0, count]).integers(count, size=(250, count))
    for n in (0, 7, 249):
        chosen = drawn[n]
        tokens = sums.tokens[chosen]
        pairs = 12 * (tokens * (tokens + 1) / 2).sum()
        assert found["sparsity", "", "all", 200].draws[n] == pytest.approx(100 * sums.zeros[chosen].sum() / pairs)
        alpha = sums.first[chosen] / tokens[:, None, None]
        assert found["sink_rate", "0.3", "all", 200].draws[n] == pytest.approx(100 * (alpha > 0.3).mean())
        off = sums.off[chosen, 1].sum(0) / tokens.sum()
        assert found["dead_heads", "0.01", "all", 200].draws[n] == pytest.approx(100 * (off > 0.95).mean())
        has = tokens >= 64
        swept = sums.sweep_zeros[chosen, analysis.facts.lengths.index(64)].sum() / (has.sum() * 12 * 64 * 65 / 2)
        assert found["sparsity", "", "all", 64].draws[n] == pytest.approx(100 * swept)


def test_an_interval_contains_its_value_and_extremes_have_none(analyses) -> None:
    for figure in figures(analyses[0]):
        if figure.metric in ("min", "max"):
            assert figure.interval is None
        elif figure.interval:
            low, high = figure.interval
            assert low <= figure.value + 1e-9
            assert high >= figure.value - 1e-9
    frame = analyses[0].to_frame()
    assert frame["low"].isna().sum() >= (frame.metric.isin(["min", "max"])).sum()


def test_the_frame_starts_with_all_tokens_at_the_length_of_the_analysis(analyses) -> None:
    frame = analyses[0].to_frame()
    main = (frame.length == 200) & (frame.part == "all")
    first = int((~main).idxmax())
    assert main[:first].all()
    assert not main[first:].any()
    names = {"sink_rate", "sink_rate_normalized", "row_sum", "kurtosis", "min", "max", "sparsity", "dead_heads"}
    assert names | {"empty_tiles", "mostly_dead_heads", "massive"} == set(frame[:first].metric)
    assert list(frame[frame.metric == "sink_rate"].setting[:2]) == ["0.2", "0.3"]
    assert list(frame[frame.metric == "dead_heads"].setting[:2]) == ["1e-06", "0.01"]


def test_differences_are_paired(analyses) -> None:
    softmax, softpick = (by_name(analysis) for analysis in analyses)
    assert same_texts(*analyses)
    key = ("sparsity", "", "all", 200)
    assert difference(softmax[key], softmax[key]) == (0.0, (0.0, 0.0))
    value, interval = difference(softpick[key], softmax[key])
    assert value == softpick[key].value - softmax[key].value
    assert interval[0] < value < interval[1]
    other = analyze(tiny("softmax"), [analysis_text(n) for n in (20, 30)])
    assert not same_texts(analyses[0], other)
    with pytest.raises(AnalysisError, match=r"18 texts.*2"):
        difference(softmax[key], by_name(other)["sparsity", "", "all", 30])


def analysis_text(length: int):
    import torch

    return torch.arange(length) % 61


def test_a_single_text_has_no_interval() -> None:
    analysis = analyze(tiny("softmax"), [analysis_text(20)])
    assert all(figure.interval is None for figure in figures(analysis))
    assert analysis.to_frame().value.notna().all()


def test_kurtosis_by_power_sums() -> None:
    x = np.random.default_rng(0).standard_t(5, size=10_000) * 3 + 2
    sums = np.array([len(x), *((x**power).sum() for power in (1, 2, 3, 4))])
    centred = x - x.mean()
    assert kurtosis(sums) == pytest.approx((centred**4).mean() / (centred**2).mean() ** 2, rel=1e-12)
    assert np.isnan(kurtosis(np.zeros(5)))


def test_a_file_that_does_not_fit_its_facts(analyses) -> None:
    analysis = analyses[0]
    content = sums_to_parquet(analysis)
    with pytest.raises(AnalysisError, match=r"here\.parquet .*Parquet"):
        read_analysis(analysis.facts, content[:100], "here.parquet")
    other = analysis.facts.model_copy(update={"layers": 5})
    with pytest.raises(AnalysisError, match=r"here\.parquet.* first "):
        read_analysis(other, content, "here.parquet")
