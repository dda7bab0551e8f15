"""Plots: what they draw, and that they are files."""

import builtins
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg

from qbench.errors import InputError
from qbench.report.attentions import TWINS
from qbench.report.delta import ReportData, read_report
from qbench.report.drawing import inline_svg, new_figure, panel_grid, plain_log_ticks, side_by_side
from qbench.report.html import page
from qbench.report.looks import COLUMN, FAINT, PAGE
from qbench.report.metrics import Measure
from qbench.report.plots import all_figures, figures, write_plots
from qbench.report.results import Score
from qbench.report.score_panels import (
    Panel,
    Panels,
    Series,
    damage_panels,
    score_ends,
    score_panels,
    storage_panels,
)

from ..example_records import make_samples, metrics_of
from .drawn import texts_outside, ticks
from .examples import cell, write_cell, write_mini


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ReportData:
    """A run with one task: figures of a few panels."""
    return read_report(write_mini(tmp_path_factory.mktemp("runs") / "small", tasks=("arc_easy",)))


def half_width(percent: float, documents: int = 40) -> float:
    """1.96 standard errors of a share of documents."""
    return 1.96 * math.sqrt(percent * (100 - percent) / (documents - 1))


def panel_of(panels: Panels, task: str, family: str = "mini") -> Panel:
    """The accuracy of a task."""
    (found,) = [own for (m, name), own in panels.items() if (m.task, name) == (task, family) and "acc" in m.metric]
    return found


def test_scores_with_error_bars_and_the_unquantized_level(mini_report: ReportData) -> None:
    panels = score_panels(mini_report, ["mini"])
    panel = panel_of(panels, "arc_easy")
    assert set(panel.points) == {(kind, method) for kind in TWINS for method in ("BNB", "HQQ")}
    assert [point.bits for point in panel.points[Series("softpick", "HQQ")]] == [2, 3]
    point = panel.points[Series("softmax", "HQQ")][0]
    assert point.high - point.value == pytest.approx(half_width(point.value))
    assert set(panel.levels) == {"softmax", "softpick"}
    every = [point for own in panel_of(panels, "sciq").points.values() for point in own]
    assert all(point.high <= 100 for point in every)


def test_damages_have_their_own_intervals(mini_report: ReportData) -> None:
    for panel in damage_panels(mini_report, ["mini"]).values():
        for point in (point for points in panel.points.values() for point in points):
            assert point.low <= point.value <= point.high


def test_bits_per_weight_are_the_audits(mini_report: ReportData) -> None:
    panel = panel_of(storage_panels(mini_report, ["mini"]), "arc_easy")
    assert {(series.method, point.bits) for series, own in panel.points.items() for point in own} == {
        ("BNB", 4.5),
        ("HQQ", 2.5),
        ("HQQ", 3.5),
    }


@pytest.mark.parametrize("width", [COLUMN, PAGE, 11.0])
def test_points_are_drawn_where_they_were_measured_and_joined(mini_report: ReportData, width: float) -> None:
    """No point is moved so that twins do not overlap, whatever the axis."""
    expected = {"mini-score": {2.0, 3.0, 4.0}, "mini-damage": {2.0, 3.0, 4.0}, "mini-bits-per-weight": {2.5, 3.5, 4.5}}
    drawn = dict(figures(mini_report, width))
    assert drawn.keys() == expected.keys()
    for name, figure in drawn.items():
        assert figure.get_size_inches()[0] == pytest.approx(width)
        for axes in (axes for axes in figure.axes if axes.get_visible()):
            lines = [line for line in axes.lines if line.get_marker() in "ov"]
            assert {float(x) for line in lines for x in np.asarray(line.get_xdata())} == expected[name], name
            assert len(lines) == 4  # two methods, two kinds
            assert all(line.get_linestyle() == "-" for line in lines)


def test_perplexities_are_on_a_logarithmic_axis_and_axes_have_units(mini_report: ReportData) -> None:
    drawn = dict(figures(mini_report))
    for name, share in (("mini-score", "%"), ("mini-bits-per-weight", "%"), ("mini-damage", "(points)")):
        assert "bits per weight" in drawn[name].get_supxlabel()
        for axes in (axes for axes in drawn[name].axes if axes.get_visible()):
            perplexity = "Perplexity" in axes.get_ylabel()
            assert perplexity or share in axes.get_ylabel()
            assert (axes.get_yscale() == "log") == (perplexity and name != "mini-damage")


def test_no_title_is_baked_in_and_the_caption_says_what_lines_and_bars_are(mini_report: ReportData) -> None:
    for name, figure in figures(mini_report):
        assert figure.get_suptitle() == ""
        assert "mini" in figure.get_label(), name
        assert figure.get_label().endswith("bars: 95% intervals.")
        assert ("dotted: unquantized" in figure.get_label()) == (name != "mini-damage")  # softpick's level is dotted
    assert "grey: chance" in dict(figures(mini_report))["mini-bits-per-weight"].get_label()


def test_chance_is_drawn_where_it_is_near(mini_report: ReportData) -> None:
    figure = dict(figures(mini_report))["mini-bits-per-weight"]
    chances = {axes.get_title(): levels(axes, FAINT) for axes in figure.axes if axes.get_yscale() == "linear"}
    assert chances == {"Arc Easy": [25.0], "Lambada": [], "Piqa": [50.0], "Sciq": [25.0]}


def test_chance_that_is_far_off_is_not_drawn(tmp_path: Path) -> None:
    for label in ("none-16", "hqq-3-g64"):
        samples = make_samples(40, tasks=["arc_easy"])
        samples["acc_norm"] = samples["acc"] = [0.0] + [1.0] * (len(samples) - 1)
        metrics = [metric.model_copy(update={"stderr": None}) for metric in metrics_of(samples)]
        write_cell(tmp_path, cell("softmax", label), samples, metrics=tuple(metrics))
    figure = dict(figures(read_report(tmp_path)))["mini-bits-per-weight"]
    assert levels(figure.axes[0], FAINT) == []
    assert "chance" not in figure.get_label()


def levels(axes: Axes, colour: str) -> list[float]:
    """The heights of the lines of a colour that go from side to side."""
    lines = (line for line in axes.lines if line.get_color() == colour)
    return [float(np.asarray(line.get_ydata())[0]) for line in lines]


def test_a_width_without_a_score_is_crossed_unless_it_is_not_offered(troubled_report: ReportData) -> None:
    for panels in (score_panels(troubled_report, ["mini"]), damage_panels(troubled_report, ["mini"])):
        assert panel_of(panels, "arc_easy").gaps == {"softmax": [2], "softpick": [2, 3]}  # not 3 bits of bnb
    drawn = dict(figures(troubled_report))
    (legend,) = drawn["mini-score"].legends
    assert {"softmax: no score", "softpick: no score"} < {text.get_text() for text in legend.get_texts()}
    for axes in (axes for name in ("mini-score", "mini-damage") for axes in drawn[name].axes if axes.get_visible()):
        crosses = [float(x) for line in axes.lines if line.get_marker() == "x" for x in line.get_xdata()]
        low, high = axes.get_xlim()
        assert all(low < x < high for x in crosses), axes.get_title()  # outside they would lie on other panels


def test_a_twin_that_does_not_exist_is_not_in_the_legend(tmp_path: Path) -> None:
    for label in ("none-16", "hqq-3-g64"):
        write_cell(tmp_path, cell("softmax", label), make_samples(40, tasks=["arc_easy"]))
    drawn = dict(figures(read_report(tmp_path)))
    assert drawn.keys() >= {"mini-score", "mini-damage"}
    for name, figure in drawn.items():
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
        assert labels == ["softmax", "HQQ"], name


def test_settings_of_one_width_are_lines_of_their_own(tmp_path: Path) -> None:
    rows = "A,none,16,none-16,acc,80,81\nA,bnb,4,bnb-4-nf4,acc,70,71\nA,bnb,4,bnb-4-fp4,acc,60,61\n"
    rows = rows.replace(",acc,", ",sciq,acc,")
    (tmp_path / "n.csv").write_text("family,method,bits,label,task,metric,softmax,softpick\n" + rows)
    (panel,) = score_panels(read_report(tmp_path), ["A"]).values()
    assert {series.method for series in panel.points} == {"BNB nf4", "BNB fp4"}


@pytest.mark.parametrize("width", [COLUMN, PAGE])
def test_the_papers_figure_has_all_tasks_and_methods_with_families_side_by_side(
    paper: ReportData, width: float
) -> None:
    figure = dict(figures(paper, width))["340M-1.8B-score"]
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert len(shown) == 2 * 6
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["softmax", "softpick", "BNB", "GPTQ", "HQQ"]
    for small, large in zip(shown[::2], shown[1::2], strict=True):
        assert small.get_ylim() == large.get_ylim()
    for axes in shown:
        low, high = axes.get_ylim()
        drawn = [np.asarray(line.get_ydata(), float) for line in axes.lines if line.get_marker() in "ovD"]
        assert len(drawn) == 6
        assert all((low < values).all() and (values < high).all() for values in drawn)
        assert axes.get_xlim() == shown[0].get_xlim()


@pytest.mark.parametrize("width", [COLUMN, PAGE])
def test_no_label_runs_into_another(paper: ReportData, width: float) -> None:
    drawn = dict(figures(paper, width))
    assert drawn.keys() >= {"340M-1.8B-score"}
    for name, figure in drawn.items():
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
        shown = [axes for axes in figure.axes if axes.get_visible()]
        boxes = [axes.yaxis.label.get_window_extent(renderer) for axes in shown if axes.get_ylabel()]
        boxes += [axes.title.get_window_extent(renderer) for axes in shown if axes.get_title()]
        boxes += [legend.get_window_extent(renderer) for legend in figure.legends]
        assert not any(first.overlaps(second) for first, second in combinations(boxes, 2)), name
        assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes), name


@pytest.mark.parametrize("width", [COLUMN, PAGE])
@pytest.mark.parametrize("source", ["mini_report", "troubled_report", "paper", "long_names"])
def test_no_text_is_cut_by_the_edge_of_a_figure(source: str, width: float, request: pytest.FixtureRequest) -> None:
    drawn = dict(all_figures(request.getfixturevalue(source), width))
    assert drawn
    assert {name: cut for name, figure in drawn.items() if (cut := texts_outside(figure))} == {}


@pytest.fixture
def long_names(tmp_path: Path) -> ReportData:
    """Tasks and metrics with long names."""
    tasks = ("mini_arc_challenge", "openbookqa_additional", "wikitext_of_all_pages", "c4")
    rows = [
        f"A,{method},{bits},{task},{'word_perplexity' if n > 1 else 'acc_norm'},{60 + bits},{61 + bits}"
        for method, bits in (("none", 16), ("hqq", 3), ("hqq", 2))
        for n, task in enumerate(tasks)
    ]
    text = "\n".join(["family,method,bits,task,metric,softmax,softpick", *rows])
    (tmp_path / "n.csv").write_text(text)
    return read_report(tmp_path)


@pytest.mark.parametrize("width", [COLUMN, PAGE])
def test_no_axis_of_perplexities_goes_below_1(width: float, tmp_path: Path) -> None:
    """Neither a bar nor the axis, if the error is larger than the score or the score is near 1."""
    for label, scale, error in (("none-16", 0.01, 0.1), ("hqq-4-g64", 0.01, 0.5), ("hqq-2-g64", 1.0, 90.0)):
        samples = make_samples(40, tasks=["wikitext"])
        samples["word_perplexity"] *= scale  # log-likelihoods
        metrics = [metric.model_copy(update={"stderr": error}) for metric in metrics_of(samples)]
        write_cell(tmp_path, cell("softmax", label), samples, metrics=tuple(metrics))
    report = read_report(tmp_path)
    ((_, panel),) = score_panels(report, ["mini"]).items()
    ends = {point.bits: (point.value, point.low, point.high) for own in panel.points.values() for point in own}
    assert ends.keys() == {2, 4}
    assert all(1 <= low <= value < high for value, low, high in ends.values())
    assert ends[4][1] == 1  # cut
    for name in ("mini-score", "mini-bits-per-weight"):
        (axes,) = dict(figures(report, width))[name].axes
        assert axes.get_yscale() == "log"
        assert axes.get_ylim()[0] >= 1


def test_a_perplexitys_bar_is_the_interval_on_the_log_scale() -> None:
    measure = Measure("wikitext", "word_perplexity", "lower")
    low, high = score_ends(Score(20.0, 1.0), measure)
    assert 20 / low == pytest.approx(high / 20)
    assert math.log(high / 20) == pytest.approx(1.96 * 0.05, rel=2e-3)


@pytest.mark.parametrize(("low", "high"), [(1.1, 1.3), (3.0, 6.0), (2.1, 4.9), (0.3, 20.0), (1e-5, 3.0), (11.0, 19.0)])
def test_a_logarithmic_axis_has_at_least_two_numbers(low: float, high: float) -> None:
    axes = new_figure(COLUMN, 2, "").subplots()
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    plain_log_ticks(axes.yaxis)
    assert 2 <= len(ticks(axes.yaxis)) <= 8


@pytest.mark.parametrize("labels", [("bnb-4-nf4",), ("hqq-3-g64",), ("hqq-3-g64", "bnb-4-nf4")])
def test_an_axis_of_bits_has_at_least_two_numbers(labels: tuple[str, ...], tmp_path: Path) -> None:
    report = read_report(write_mini(tmp_path, labels=("none-16", *labels), tasks=("arc_easy",)))
    drawn = dict(figures(report, COLUMN))
    assert drawn.keys() == {"mini-score", "mini-damage", "mini-bits-per-weight"}
    for name, figure in drawn.items():
        shown = ticks(figure.axes[0].xaxis)
        low, high = figure.axes[0].get_xlim()
        assert len(shown) >= 2, name
        assert low < min(shown), name
        assert max(shown) < high, name


@pytest.mark.parametrize(
    ("width", "shapes"),
    [
        (COLUMN, {1: (1, 1), 2: (1, 2), 3: (2, 2), 5: (3, 2), 9: (5, 2)}),
        (PAGE, {1: (1, 1), 3: (1, 3), 4: (1, 4), 5: (2, 3), 6: (2, 3), 9: (3, 3)}),
        (1.0, {1: (1, 1), 3: (3, 1)}),  # narrower than a panel
    ],
)
def test_panels_fill_as_few_rows_as_fit_evenly(width: float, shapes: dict[int, tuple[int, int]]) -> None:
    assert {panels: side_by_side(panels, width) for panels in shapes} == shapes


@pytest.mark.parametrize(
    ("panels", "shape", "numbered"),
    [
        (1, (1, 1), {0}),
        (3, (2, 2), {1, 2}),
        (4, (2, 2), {2, 3}),
        (5, (1, 6), {0, 1, 2, 3, 4}),
        (7, (3, 3), {4, 5, 6}),
    ],
)
def test_a_place_without_a_panel_is_empty_and_the_panel_above_it_has_the_numbers_of_x(
    panels: int, shape: tuple[int, int], numbered: set[int]
) -> None:
    figure = new_figure(PAGE, 3, "")
    grid = panel_grid(figure, panels, shape, sharex=True, sharey=True)
    assert grid.shape == shape
    assert figure.axes == list(grid.flat[:panels])
    shown = [any(tick.label1.get_visible() for tick in axes.xaxis.get_major_ticks()) for axes in figure.axes]
    assert {place for place, numbers in enumerate(shown) if numbers} == numbered


def test_every_figure_is_a_file_in_each_format(small: ReportData, tmp_path: Path) -> None:
    files = write_plots(small, tmp_path / "plots")
    names = ["mini-score", "mini-damage", "mini-bits-per-weight"]
    assert [file.name for file in files] == [f"{name}.{kind}" for name in names for kind in ("png", "svg", "pdf")]
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert all(file.read_bytes().startswith(starts[file.suffix[1:]]) for file in files)
    assert all("mini" in (tmp_path / "plots" / f"{name}.txt").read_text() for name in names)


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
    rows = rows.replace("a$_b$$", "c$_d$$") + rows  # with several families, their names are drawn
    (tmp_path / "n.csv").write_text("family,method,bits,task,metric,softmax,softpick\n" + rows)
    assert ">a$_b$$<" in inline_svg(next(figures(read_report(tmp_path)))[1])


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
    with pytest.raises(InputError, match=r"file is a file.*folder"):
        write_plots(mini_report, tmp_path / "file")
