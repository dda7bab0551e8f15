"""The damage of activations and KV cache in few bits: one panel per task, one line per quantization."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from qbench.records.metrics import is_perplexity
from qbench.report.attentions import kind_name
from qbench.report.delta import ReportData
from qbench.report.looks import FAINT, STYLE, Looks, looks
from qbench.report.lowbit import LowBitFamily, low_bit_families, shown_damages
from qbench.report.metrics import Measure, metric_name, task_name
from qbench.report.plots import load_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPREAD = 0.7  # of the height of a line, over the kinds of attention


def low_bit_figures(report: ReportData) -> Iterator[tuple[str, "Figure"]]:
    """One figure per family."""
    families = low_bit_families(report)
    if not families:
        return
    for own in families:
        with load_matplotlib().rc_context(STYLE):
            figure = _figure(own, looks(report.results.all_kinds))
        yield f"{own.family}-lowbit", figure


def _figure(own: LowBitFamily, styles: Looks) -> "Figure":
    lines = len(own.quantizations)
    size = (1.5 + 1.9 * len(own.measures), 1.1 + lines * (0.16 + 0.05 * len(own.kinds)))
    figure = load_matplotlib().figure.Figure(figsize=size, layout="constrained")
    grid = figure.subplots(1, len(own.measures), squeeze=False, sharey=True)[0]
    labels = [about.label for about in own.quantizations]
    for axes, measure in zip(grid, own.measures, strict=True):
        _panel(axes, own, measure, styles)
        axes.set_title(task_name(measure.task))
        axes.set_xlabel("100 × ln ratio, %" if is_perplexity(measure.metric) else f"{metric_name(measure)}, points")
    grid[0].set_yticks(range(lines), labels)
    grid[0].set_ylim(lines - 0.5, -0.5)
    handles = {label: handle for handle, label in zip(*grid[0].get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(5, len(handles)))
    figure.suptitle(f"{own.family}: damage of few bits, simulated (quantized − unquantized; bars: 95%)")
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
