"""Damage against its causes: one panel per cause, one point per model and width."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from qbench.report.attentions import kind_name
from qbench.report.causes import CAUSES, WIDTHS, model_causes
from qbench.report.delta import ReportData
from qbench.report.drawing import SMALL, add_legend, load_matplotlib, new_figure, plain_log_ticks, stacked
from qbench.report.looks import FAINT, looks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = dict(zip(WIDTHS, (14, 26, 42), strict=True))  # of markers: fewer bits are larger
LINEAR = 0.01  # nats, below which the axis of damages is linear if some are negative


def cause_figures(report: ReportData, width: float) -> Iterator[tuple[str, "Figure"]]:
    """One figure for all families: the widths of a model are above one another."""
    models = model_causes(report) if report.analyses.models else []
    if not models:
        return
    styles = looks(list(dict.fromkeys(model.attention for model in models)))
    several = len({model.family for model in models}) > 1
    with load_matplotlib().rc_context(SMALL):
        rows, columns = stacked(len(CAUSES), width)
        caption = "Damage and possible causes. From small to large markers: 4, 3 and 2 bits."
        figure = new_figure(width, 0.4 + 1.7 * rows, caption)
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
        for axes, cause in zip(grid, CAUSES, strict=True):
            for model in models:
                look, x = styles[model.attention], model.causes.get(cause.name)
                if x is None:
                    continue
                name = f"{model.family} {kind_name(model.attention)}" if several else kind_name(model.attention)
                bits, damages = list(model.damages), list(model.damages.values())
                axes.vlines(x, min(damages), max(damages), look.colour, linewidth=0.8)
                face = "white" if look.hollow else look.colour
                sizes = [SIZES[b] for b in bits]
                drawn = {"s": sizes, "c": face, "marker": look.marker, "edgecolors": look.colour, "zorder": 3}
                axes.scatter([x] * len(bits), damages, label=name, **drawn)
            if min(damage for model in models for damage in model.damages.values()) > 0:
                axes.set_yscale("log")
            else:
                axes.axhline(0, color=FAINT, linewidth=0.8)
                axes.set_yscale("symlog", linthresh=LINEAR)
            axes.yaxis.set_major_formatter(load_matplotlib().ticker.FuncFormatter(lambda value, _: f"{value:g}"))
            axes.set_ylabel("nats lost per decision")
            axes.set_xlabel(f"{cause.title.removesuffix(' %')}{' (%)' if cause.title.endswith('%') else ''}")
        for axes, cause in zip(figure.axes, CAUSES, strict=True):
            if cause.name != "sink_rate":
                axes.set_xscale("log")
                plain_log_ticks(axes.xaxis)
        add_legend(figure)
    yield "causes", figure
