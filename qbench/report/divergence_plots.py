"""KL against measured bits per weight: one panel per model, with the noise floor."""

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from qbench.numbers import magnitude
from qbench.report.attentions import kind_title
from qbench.report.delta import ReportData
from qbench.report.divergence import ModelDivergence, divergences
from qbench.report.drawing import (
    METHOD_MARKERS,
    SMALL,
    Z95,
    add_legend,
    load_matplotlib,
    new_figure,
    panel_grid,
    plain_log_ticks,
    side_by_side,
    stacked,
)
from qbench.report.looks import FAINT, INK, Look, looks
from qbench.report.metrics import task_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_ROWS = 3  # models above one another
MAX_FLOOR_DISTANCE = 1e-3  # of the smallest KL: a lower floor is written as text; its line would squeeze the points


def kl_figures(report: ReportData, width: float) -> Iterator[tuple[str, "Figure"]]:
    """One figure per family and task, of quantizations of the weights alone."""
    plain = {about for family in report.results.families for about in report.results.weights_only(family)}
    found = [own for own in divergences(report) if own.quantization in plain]
    for family, task in dict.fromkeys((own.quantization.family, own.task) for own in found):
        models = [own for own in found if (own.quantization.family, own.task) == (family, task)]
        if any(own.bits is not None for own in models):
            name = f"{family}-kl" if len({own.task for own in found}) == 1 else f"{family}-kl-{task}"
            with load_matplotlib().rc_context(SMALL):
                figure = _figure(report, family, task, models, width)
            yield name, figure


def _figure(report: ReportData, family: str, task: str, models: Sequence[ModelDivergence], width: float) -> "Figure":
    kinds = list(dict.fromkeys(own.attention for own in models))
    styles, titles = looks(report.results.all_kinds), report.results.method_titles
    methods = list(dict.fromkeys(own.quantization.method for own in models if own.bits is not None))
    about = f"{family}, {task_name(task)}"
    shape = stacked(len(kinds), width) if len(kinds) <= MAX_ROWS else side_by_side(len(kinds), width)
    rows, columns = shape
    caption = (
        f"KL from the unquantized model against measured bits per weight: {about}. Bars: 95% intervals. Floor: the "
        "unquantized model with different batches."
    )
    figure = new_figure(width, 0.5 + rows * max(1.7, 0.45 * width / columns), caption)
    grid = panel_grid(figure, len(kinds), shape, sharex=True, sharey=True)
    for axes, attention in zip(grid.flat, kinds, strict=False):
        own = [model for model in models if model.attention == attention]
        axes.set_yscale("log")
        for method, marker in zip(methods, cycle(METHOD_MARKERS), strict=False):
            points = [model for model in own if model.quantization.method == method]
            _draw(axes, points, styles[attention], marker, titles[method])
        _draw_floor(axes, own, min(model.mean.value for model in models if model.bits is not None))
        axes.set_title(kind_title(attention))
    figure.supxlabel("bits per weight, measured", fontsize=8)
    for line in grid:
        line[0].set_ylabel("KL (nats per token)")
    plain_log_ticks(figure.axes[0].yaxis)
    add_legend(figure)
    return figure


def _draw(axes: "Axes", models: Sequence[ModelDivergence], look: Look, marker: str, title: str) -> None:
    """A method's points exactly where they were measured, joined in the order of bits."""
    points = sorted((model.bits, model.mean.value, model.mean.stderr or 0.0) for model in models if model.bits)
    if not points:
        return
    bits, values, errors = zip(*points, strict=True)
    line = {**look.line, "marker": marker}
    axes.plot(bits, values, linewidth=0.6, **line)
    axes.plot([], [], color=INK, marker=marker, markersize=4, linestyle="none", label=title)  # for the legend
    lows = [max(value - Z95 * error, value / 10) for value, error in zip(values, errors, strict=True)]
    highs = [value + Z95 * error for value, error in zip(values, errors, strict=True)]
    axes.vlines(bits, lows, highs, look.colour, linewidth=1)


def _draw_floor(axes: "Axes", models: Sequence[ModelDivergence], smallest: float) -> None:
    """The unquantized model with different batches: a line, or its value at the bottom if it is far below."""
    floor = next((model.mean.value for model in models if model.quantization.is_unquantized), None)
    if floor is None:
        return
    if floor >= MAX_FLOOR_DISTANCE * smallest:
        axes.axhline(floor, color=FAINT, linestyle="--", linewidth=1, label="floor: unquantized, different batches")
    else:
        text = f"↓ floor: {magnitude(floor) if floor else 0}"
        axes.text(0.02, 0.02, text, transform=axes.transAxes, fontsize=SMALL["xtick.labelsize"])
