"""Plots: what they draw, and that they are files."""

import builtins
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from qbench.errors import InputError
from qbench.report.attentions import TWINS
from qbench.report.delta import ReportData, read_report
from qbench.report.html import page
from qbench.report.looks import FAINT
from qbench.report.plots import damage_panels, figures, inline_svg, score_panels, storage_panels, write_plots

from ..example_records import make_samples, metrics_of
from .examples import cell, write_cell, write_mini


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ReportData:
    """A run with one task: figures of a few panels."""
    return read_report(write_mini(tmp_path_factory.mktemp("runs") / "small", tasks=("arc_easy",)))


def half_width(percent: float, documents: int = 40) -> float:
    """1.96 standard errors of a share of documents."""
    return 1.96 * math.sqrt(percent * (100 - percent) / (documents - 1))


def test_scores_with_error_bars_and_the_unquantized_level(mini_report: ReportData) -> None:
    panels = score_panels(mini_report.deltas, TWINS)
    panel = next(panel for (m, method), panel in panels.items() if (m.metric, method) == ("acc", "hqq"))
    assert [point.quantization.bits for point in panel.points["softpick"]] == [2, 3]
    point = panel.points["softmax"][0]
    assert point.high - point.value == pytest.approx(half_width(point.value))
    assert set(panel.levels) == {"softmax", "softpick"}
    assert all(p.high <= 100 for (m, _), own in panels.items() if m.metric == "acc" for p in own.points["softmax"])
    assert {method for _, method in panels} == {"bnb", "hqq"}


def test_damages_have_their_own_intervals(mini_report: ReportData) -> None:
    for panel in damage_panels(mini_report.damages, TWINS).values():
        for point in (point for points in panel.points.values() for point in points):
            assert point.low <= point.value <= point.high


def test_bits_per_weight_are_the_audits(mini_report: ReportData) -> None:
    cells = next(iter(storage_panels(mini_report, mini_report.deltas).values()))
    assert {(cell.method, cell.bits) for cell in cells} == {("bnb", 4.5), ("hqq", 2.5), ("hqq", 3.5)}
    inside = [cell for cell in cells if cell.high < 100]  # accuracies end there
    assert inside
    assert all(cell.high - cell.low == pytest.approx(2 * half_width((cell.high + cell.low) / 2)) for cell in inside)


def test_bits_per_weight_have_error_bars_and_chance_where_it_is_near(mini_report: ReportData) -> None:
    figure = dict(figures(mini_report))["mini-bits-per-weight"]
    assert figure.get_suptitle().endswith("(dashed: unquantized; grey: chance; bars: 95%)")
    for axes in figure.axes:
        bars = [path for bar in axes.collections for path in bar.get_paths()]  # type: ignore[attr-defined]
        assert len(bars) == 6
        ends = [(path.vertices[:, 1].min(), path.vertices[:, 1].max()) for path in bars]
        inside = [(low, high) for low, high in ends if high < 100]
        assert inside
        assert all(high - low == pytest.approx(2 * half_width((low + high) / 2)) for low, high in inside)
    chances = {axes.get_title().split(",")[0]: levels(axes, FAINT) for axes in figure.axes}
    assert chances == {"Arc Easy": [25.0], "Lambada": [], "Piqa": [50.0], "Sciq": [25.0]}


def test_chance_that_is_far_off_is_not_drawn(tmp_path: Path) -> None:
    for label in ("none-16", "hqq-3-g64"):
        samples = make_samples(40, tasks=["arc_easy"])
        samples["acc_norm"] = samples["acc"] = [0.0] + [1.0] * (len(samples) - 1)
        metrics = [metric.model_copy(update={"stderr": None}) for metric in metrics_of(samples)]
        write_cell(tmp_path, cell("softmax", label), samples, metrics=tuple(metrics))
    figure = dict(figures(read_report(tmp_path)))["mini-bits-per-weight"]
    assert levels(figure.axes[0], FAINT) == []
    assert figure.get_suptitle().endswith("(dashed: unquantized)")


def levels(axes: Axes, colour: str) -> list[float]:
    """The heights of the lines of a colour that go from side to side."""
    lines = (line for line in axes.lines if line.get_color() == colour)
    return [float(np.asarray(line.get_ydata())[0]) for line in lines]


def test_bits_are_written_under_every_panel(mini_report: ReportData) -> None:
    drawn = dict(figures(mini_report))
    for axes in (*drawn["mini-score"].axes, *drawn["mini-damage"].axes):
        assert axes.xaxis.get_tick_params()["labelbottom"]


def test_a_width_without_a_score_is_crossed_unless_it_is_not_offered(troubled_report: ReportData) -> None:
    for panels in (score_panels(troubled_report.deltas, TWINS), damage_panels(troubled_report.damages, TWINS)):
        gaps = {(m.metric, method): panel.gaps for (m, method), panel in panels.items()}
        assert gaps["acc", "hqq"] == {"softmax": [2], "softpick": [2, 3]}
        assert gaps["acc", "bnb"] == {}
    drawn = dict(figures(troubled_report))
    (legend,) = drawn["mini-score"].legends
    assert {"softmax: no score", "softpick: no score"} < {text.get_text() for text in legend.get_texts()}


def test_a_twin_that_does_not_exist_is_not_in_the_legend(tmp_path: Path) -> None:
    for label in ("none-16", "hqq-3-g64"):
        write_cell(tmp_path, cell("softmax", label), make_samples(40, tasks=["arc_easy"]))
    for name, figure in figures(read_report(tmp_path)):
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
        assert not any("softpick" in label for label in labels), name


def test_the_panels_of_a_figure_have_one_axis_of_bits_and_hold_their_points(paper: ReportData) -> None:
    for name, figure in figures(paper):
        assert len({axes.get_xlim() for axes in figure.axes}) == 1, name
        for axes in figure.axes:
            low, high = axes.get_ylim()
            drawn = [np.asarray(line.get_ydata(), float) for line in axes.lines if line.get_marker() in "os"]
            assert all((low < values).all() and (values < high).all() for values in drawn), name
            if axes.get_yscale() == "symlog":
                assert low > -5  # damages: little room below zero


def test_every_figure_is_a_file_in_each_format(small: ReportData, tmp_path: Path) -> None:
    files = write_plots(small, tmp_path / "plots")
    names = ["mini-score", "mini-damage", "mini-bits-per-weight"]
    assert [file.name for file in files] == [f"{name}.{kind}" for name in names for kind in ("png", "svg", "pdf")]
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert all(file.read_bytes().startswith(starts[file.suffix[1:]]) for file in files)


def test_the_same_results_make_the_same_svg_in_the_pages_colours(small: ReportData) -> None:
    first, again = (inline_svg(next(figures(small))[1]) for _ in range(2))
    assert first == again
    assert first.startswith("<svg")
    assert "var(--softmax)" in first
    assert "currentColor" in first
    assert "http" not in first.replace("http://www.w3.org", "")


def test_a_name_is_not_taken_for_math(tmp_path: Path) -> None:
    rows = "a$_b$$,none,16,sciq,acc,80,81\na$_b$$,hqq,3,sciq,acc,70,71\n"
    (tmp_path / "n.csv").write_text("family,method,bits,task,metric,softmax,softpick\n" + rows)
    drawn = [inline_svg(figure) for _, figure in figures(read_report(tmp_path))]
    assert "a$_b$$: score against bits (dashed: unquantized)" in drawn[0]


def test_without_matplotlib_a_sentence_and_a_report(
    small: ReportData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def without(name: str, *others: Any, **named: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *others, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"pip install 'matplotlib>=3\.9'"):
        write_plots(small, tmp_path)
    assert "pip install &#39;matplotlib&gt;=3.9&#39;" in page(small)


def test_a_folder_that_cannot_be_is_a_sentence(mini_report: ReportData, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="plots cannot be written there"):
        write_plots(mini_report, tmp_path / "file")
