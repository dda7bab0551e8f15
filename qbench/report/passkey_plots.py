"""Passkey accuracy against length: one panel per quantization, one line per kind of attention."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from qbench.report.attentions import kind_name
from qbench.report.delta import ReportData
from qbench.report.drawing import SMALL, add_legend, load_matplotlib, new_figure, panel_grid, side_by_side
from qbench.report.looks import Look, Looks, looks
from qbench.report.passkey import LengthCurve, passkey_curves
from qbench.report.results import Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def passkey_figures(report: ReportData, width: float) -> "Iterator[tuple[str, Figure]]":
    """One figure per family."""
    curves = passkey_curves(report)
    for family in dict.fromkeys(curve.quantization.family for curve in curves):
        own = [curve for curve in curves if curve.quantization.family == family]
        with load_matplotlib().rc_context(SMALL):
            figure = _figure(own, family, looks(report.results.all_kinds), width)
        yield f"{family}-passkey", figure


def _figure(curves: Sequence[LengthCurve], family: str, styles: Looks, width: float) -> "Figure":
    panels = list(dict.fromkeys(curve.quantization for curve in curves))
    rows, _ = shape = side_by_side(len(panels), width)
    figure = new_figure(width, 0.5 + 1.3 * rows, f"Passkey accuracy against length: {family}. Bars: 95% intervals.")
    grid = panel_grid(figure, len(panels), shape, sharex=True, sharey=True)
    for about, axes in zip(panels, grid.flat, strict=False):
        for curve in (curve for curve in curves if curve.quantization == about):
            _draw_curve(axes, curve, styles[curve.attention])
        axes.set_title(about.method_title if about.is_unquantized else about.label)
        axes.set_ylim(-4, 104)
    for axes in grid[:, 0]:
        axes.set_ylabel("accuracy (%)")
    figure.supxlabel("length (tokens)", fontsize=8)
    add_legend(figure)
    return figure


def _draw_curve(axes: "Axes", curve: LengthCurve, look: Look) -> None:
    points = [(point, point.score.value) for point in curve.points if isinstance(point.score, Score)]
    lengths = [point.length for point, _ in points]
    axes.plot(lengths, [value for _, value in points], linewidth=1.2, label=kind_name(curve.attention), **look.line)
    for point, _ in points:
        if point.interval:
            axes.vlines(point.length, *point.interval, look.colour, linewidth=1)
