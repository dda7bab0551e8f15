"""Pictures of analyses: largest |x| and hidden states by layer, sinks by length and by
head, dead heads by layer and over training, attention maps."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from qbench.numbers import count
from qbench.records.analysis import DEAD_EPSILONS, SINK_EPSILONS
from qbench.report.analyses import AnalyzedModel
from qbench.report.attentions import kind_name
from qbench.report.delta import ReportData
from qbench.report.drawing import (
    SMALL,
    add_legend,
    load_matplotlib,
    new_figure,
    panel_grid,
    plain_log_ticks,
    side_by_side,
    stacked,
)
from qbench.report.looks import Looks, looks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_BOXES = 8  # layers with a box plot; if there are more, evenly spaced ones
MAX_TICKS = 8
MAX_DOTTED = 4  # models that get a second line


def analysis_figures(report: ReportData, width: float) -> Iterator[tuple[str, "Figure"]]:
    """Every picture with its name, family by family."""
    from qbench.report.heat_maps import map_figures, sink_heat_map

    analyses = report.analyses
    kinds = list(dict.fromkeys((*report.results.all_kinds, *(model.cell.attention for model in analyses.models))))
    styles = looks(kinds)
    for family in analyses.families:
        models = [model for model in analyses.of(family) if model.analysis]
        maps = [own for own in analyses.maps if own.cell.family == family]
        steps = [model for model in analyses.steps if model.cell.family == family]
        with load_matplotlib().rc_context(SMALL):
            drawn: list[tuple[str, Figure | None]] = [
                ("largest", _largest(models, styles, width) if models else None),
                ("boxes", _boxes(models, styles, width) if models else None),
                ("sinks-by-length", _by_length(analyses.of(family), styles, width)),
                ("sinks-by-head", sink_heat_map(models, width) if models else None),
                ("dead-heads", _dead_heads(models, styles, width) if models else None),
                ("steps", _over_steps(steps, styles, width) if steps else None),
                *map_figures(maps, report.results.reference, width),
            ]
        yield from ((f"{family}-{name}", figure) for name, figure in drawn if figure)


def _states(model: AnalyzedModel) -> list[int]:
    """The states in the order of computation: the raw output of the last layer comes before the final norm."""
    assert model.analysis
    layers = model.analysis.facts.layers
    return [*range(layers), layers + 1, layers]


def _state_names(model: AnalyzedModel) -> list[str]:
    return ["E", *map(str, range(1, len(_states(model)) - 1)), "N"]


def _state_ticks(axes: "Axes", model: AnalyzedModel) -> None:
    names = _state_names(model)
    layers = len(names) - 2
    step = -(-len(names) // MAX_TICKS)
    shown = sorted({0, *range(step, layers + 1, step), layers + 1})
    axes.set_xticks(shown, [names[place] for place in shown])
    axes.set_xlabel("after layer (E: embedding, N: final norm)")


def _largest(models: Sequence[AnalyzedModel], styles: Looks, width: float) -> "Figure":
    figure = new_figure(width, 2.2, f"Largest |x| by layer: {models[0].cell.family}.")
    axes = figure.subplots()
    for model in models:
        assert model.analysis
        values = np.abs(model.analysis.sums.largest[:, :, 0]).max(0)[_states(model)]
        axes.plot(values, linewidth=1.2, label=kind_name(model.cell.attention), **styles[model.cell.attention].line)
    axes.set_yscale("log")
    plain_log_ticks(axes.yaxis)
    axes.set_ylabel("largest |x|")
    _state_ticks(axes, max(models, key=lambda model: len(_states(model))))
    add_legend(figure)
    return figure


def _boxes(models: Sequence[AnalyzedModel], styles: Looks, width: float) -> "Figure":
    """Quartiles, median, and whiskers from the least value to the greatest; one panel per model."""
    rows, _ = shape = side_by_side(len(models), width)
    caption = f"Hidden states by layer: {models[0].cell.family}. Whiskers: least and greatest value."
    figure = new_figure(width, 0.5 + 1.6 * rows, caption)
    grid = panel_grid(figure, len(models), shape, sharex=True, sharey=True)
    for axes, model in zip(grid.flat, models, strict=False):
        _box_panel(axes, model, styles)
    grid[0, 0].set_xticks(*_box_ticks(models[0]))
    for line in grid:
        line[0].set_ylabel("hidden state")
    figure.supxlabel("after layer (E: embedding, N: final norm)", fontsize=8)
    return figure


def _box_places(model: AnalyzedModel) -> list[int]:
    """Which of the ordered states get a box."""
    last = len(_states(model)) - 1
    return sorted({round(n) for n in np.linspace(0, last, min(MAX_BOXES, last + 1))})


def _box_ticks(model: AnalyzedModel) -> tuple[list[int], list[str]]:
    places, names = _box_places(model), _state_names(model)
    return list(range(1, len(places) + 1)), [names[place] for place in places]


def _box_panel(axes: "Axes", model: AnalyzedModel, styles: Looks) -> None:
    assert model.analysis
    look = styles[model.cell.attention]
    frame = model.analysis.layers_frame().query("part == 'all'").set_index("state")
    order = _states(model)
    boxes = []
    for place in _box_places(model):
        row = frame.loc[order[place]]
        ends = {"whislo": row["min"], "whishi": row["max"], "q1": row["q1"], "med": row["median"], "q3": row["q3"]}
        boxes.append(ends)
    line = {"color": look.colour, "linewidth": 0.9}
    axes.bxp(
        boxes,
        showfliers=False,
        manage_ticks=False,  # panels share one axis
        widths=0.6,
        patch_artist=True,
        boxprops={"edgecolor": look.colour, "facecolor": f"{look.colour}55", "linewidth": 0.9},
        whiskerprops=line,
        capprops=line,
        medianprops={"color": look.colour, "linewidth": 1.4},
    )
    axes.set_yscale("symlog", linthresh=1)
    largest = max(max(abs(box["whislo"]), abs(box["whishi"])) for box in boxes)
    powers = [10.0**n for n in range(int(np.log10(max(largest, 1))) + 1)]
    axes.set_yticks([*(-p for p in reversed(powers)), 0, *powers])
    axes.yaxis.set_major_formatter(load_matplotlib().ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.minorticks_off()
    axes.grid(visible=False, axis="x")
    axes.set_title(kind_name(model.cell.attention))


def _by_length(models: Sequence[AnalyzedModel], styles: Looks, width: float) -> "Figure | None":
    """Raw and normalized weights, one panel each; solid at the larger ε, and dotted at the smaller if there is room."""
    panels = {
        metric: title
        for metric, title in (
            ("sink_rate", "weights as they are"),
            ("sink_rate_normalized", "rows divided by their sums"),
        )
        if any(len(_sweep(model, metric, SINK_EPSILONS[-1])) > 1 for model in models)
    }
    if not panels:
        return None
    small, large = SINK_EPSILONS
    lines = {large: "-"} if len(models) > MAX_DOTTED else {small: ":", large: "-"}
    shown_epsilons = f"ε={large:g}" if len(lines) == 1 else f"solid: ε={large:g}, dotted: {small:g}"
    caption = f"Sink rate by length: {models[0].cell.family} ({shown_epsilons})."
    rows, columns = stacked(len(panels), width)
    figure = new_figure(width, 0.6 + 1.4 * rows, caption)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True).flatten()
    lengths: set[int] = set()
    for axes, (metric, name) in zip(grid, panels.items(), strict=True):
        for model in models:
            look = styles[model.cell.attention]
            for epsilon, style in lines.items():
                points = _sweep(model, metric, epsilon)
                lengths |= {length for length, *_ in points}
                label = kind_name(model.cell.attention) if style == "-" else None
                x, y = [p[0] for p in points], [p[1] for p in points]
                axes.plot(x, y, linestyle=style, linewidth=1.1, label=label, **look.line)
                axes.vlines(x, [p[2] for p in points], [p[3] for p in points], look.colour, linewidth=0.8)
        axes.set_ylabel("sink rate (%)")
        axes.set_title(name)
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    grid[-1].set_xscale("log", base=2)
    step = -(-len(lengths) // MAX_TICKS)
    shown = sorted(lengths, reverse=True)[::step]
    grid[-1].set_xticks(shown, [count(length) for length in shown])
    grid[-1].minorticks_off()
    figure.supxlabel("length of the texts (tokens)", fontsize=8)
    add_legend(figure)
    return figure


def _sweep(model: AnalyzedModel, metric: str, epsilon: float) -> list[tuple[int, float, float, float]]:
    """(length, value, low, high) in ascending order."""
    own = [
        f for f in model.figures if f.metric == metric and f.setting == f"{epsilon:g}" and f.part == "all" and f.length
    ]
    return sorted((f.length, f.value, *(f.interval or (f.value, f.value))) for f in own)


def _percent_axis(axes: "Axes") -> None:
    """From 0 to at least 10%: if all rates are 0, the axis would show rounding errors."""
    top = max(10.0, axes.get_ylim()[1])
    axes.set_ylim(-0.05 * top, top)


def _dead_heads(models: Sequence[AnalyzedModel], styles: Looks, width: float) -> "Figure":
    """One panel per ε."""
    rows, columns = stacked(len(DEAD_EPSILONS), width)
    figure = new_figure(width, 0.6 + 1.3 * rows, f"Dead heads by layer: {models[0].cell.family}.")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for axes, epsilon in zip(grid, DEAD_EPSILONS, strict=True):
        for model in models:
            assert model.analysis
            dead = model.analysis.heads_frame().groupby("layer")[f"dead_{epsilon:g}"].mean() * 100
            line = styles[model.cell.attention].line
            axes.plot(dead.index, dead, linewidth=1.2, label=kind_name(model.cell.attention), **line)
        axes.set_title(f"output below ε={epsilon:g}")
        axes.set_ylabel("dead heads (%)")
    _percent_axis(grid[0])  # shared by all panels
    figure.supxlabel("layer (from 0)", fontsize=8)
    grid[-1].xaxis.set_major_locator(load_matplotlib().ticker.MaxNLocator(MAX_TICKS, integer=True))
    add_legend(figure)
    return figure


def _over_steps(models: Sequence[AnalyzedModel], styles: Looks, width: float) -> "Figure":
    """How a model changes during training."""
    shown: list[tuple[str, str, str, Callable[[Axes], None]]] = [
        ("dead_heads", f"{DEAD_EPSILONS[0]:g}", "dead heads (%)", _percent_axis),
        ("sink_rate", f"{SINK_EPSILONS[-1]:g}", "sink rate (%)", _percent_axis),
        ("kurtosis", "", "kurtosis", lambda axes: axes.set_yscale("log")),
    ]
    epsilons = f"ε={DEAD_EPSILONS[0]:g} for dead heads, {SINK_EPSILONS[-1]:g} for sinks"
    rows, columns = stacked(len(shown), width)
    figure = new_figure(width, 0.6 + 1.2 * rows, f"Over training: {models[0].cell.family} ({epsilons}).")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True).flatten()
    for axes, (metric, setting, label, scale) in zip(grid, shown, strict=True):
        for attention in dict.fromkeys(model.cell.attention for model in models):
            own = [model for model in models if model.cell.attention == attention]
            points = sorted((m.cell.step, f.value) for m in own if (f := m.find(metric, setting)))
            x, y = zip(*points, strict=True)
            axes.plot(x, y, linewidth=1.2, label=kind_name(attention), **styles[attention].line)
        axes.set_ylabel(label)
        scale(axes)
    plain_log_ticks(grid[-1].yaxis)
    figure.supxlabel("training step", fontsize=8)
    add_legend(figure)
    return figure
