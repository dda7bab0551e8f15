"""The damage of low-bit activations and KV cache: one panel per task, one line per quantization."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from qbench.records.metrics import is_perplexity
from qbench.report.attentions import kind_name
from qbench.report.delta import ReportData
from qbench.report.drawing import SMALL, add_legend, load_matplotlib, new_figure, panel_grid, side_by_side
from qbench.report.looks import FAINT, Looks, looks
from qbench.report.lowbit import LowBitFamily, low_bit_families, shown_damages
from qbench.report.metrics import Measure, metric_name, task_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = 1.0  # inches, left of the panels
SPREAD = 0.7  # of the height of a line, over the kinds of attention


def low_bit_figures(report: ReportData, width: float) -> Iterator[tuple[str, "Figure"]]:
    """One figure per family."""
    families = low_bit_families(report)
    if not families:
        return
    for own in families:
        with load_matplotlib().rc_context(SMALL):
            figure = _figure(own, looks(report.results.all_kinds), width)
        yield f"{own.family}-lowbit", figure


def _figure(own: LowBitFamily, styles: Looks, width: float) -> "Figure":
    lines = len(own.quantizations)
    rows, _ = shape = side_by_side(len(own.measures), width - LABELS)
    caption = (
        f"Damage of low-bit activations and KV cache (simulated): {own.family}. Quantized − unquantized; "
        "bars: 95% intervals."
    )
    figure = new_figure(width, 0.4 + rows * (0.5 + lines * (0.14 + 0.05 * len(own.kinds))), caption)
    grid = panel_grid(figure, len(own.measures), shape, sharey=True)
    labels = [about.label for about in own.quantizations]
    for axes, measure in zip(grid.flat, own.measures, strict=False):
        _panel(axes, own, measure, styles)
        axes.set_title(task_name(measure.task))
        axes.set_xlabel("100 × ln ratio, %" if is_perplexity(measure.metric) else f"{metric_name(measure)}, points")
    grid[0, 0].set_yticks(range(lines), labels)
    grid[0, 0].set_ylim(lines - 0.5, -0.5)
    add_legend(figure)
    return figure


def _panel(axes: "Axes", own: LowBitFamily, measure: Measure, styles: Looks) -> None:
    places = {about.label: place for place, about in enumerate(own.quantizations)}
    axes.axvline(0, color=FAINT, linewidth=1)
    for label, attention, damage in shown_damages(own, measure):
        shift = (own.kinds.index(attention) + 0.5) / len(own.kinds) - 0.5
        y, look = places[label] + SPREAD * shift, styles[attention]
        axes.plot([damage.shown], [y], linestyle="none", label=kind_name(attention), **look.line)
        if damage.shown_interval:
            axes.hlines(y, *damage.shown_interval, look.colour, linewidth=1)
    if is_perplexity(measure.metric):
        axes.set_xscale("symlog", linthresh=1)
        axes.xaxis.set_major_formatter(load_matplotlib().ticker.FuncFormatter(lambda value, _: f"{value:g}"))
