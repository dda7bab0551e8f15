"""Plots of scores: score and damage against bits, and score against measured bits per weight.

One compact figure shows all tasks and methods, with several families side by side. Kinds of attention differ in colour
and filling (softmax and softpick also in lightness, so they can be told apart in black and white), methods in marker.
"""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qbench.records.metrics import is_perplexity, is_share
from qbench.report.attentions import kind_name
from qbench.report.delta import ReportData
from qbench.report.drawing import (
    METHOD_MARKERS,
    SMALL,
    add_legend,
    load_matplotlib,
    new_figure,
    plain_log_ticks,
    write_drawings,
)
from qbench.report.looks import FAINT, INK, PAGE, Look, Looks, looks
from qbench.report.metrics import Measure, metric_name, task_name
from qbench.report.passkey_plots import passkey_figures
from qbench.report.score_panels import (
    LEAST_PERPLEXITY,
    Panel,
    Panels,
    Point,
    damage_panels,
    score_panels,
    storage_panels,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_FAMILIES = 3  # side by side; if there are more, they are split into several figures
MAX_KINDS = 3  # with more kinds of attention there is one figure per method: too many lines could not be told apart
LABEL, NARROWEST = 0.45, 0.8  # inches: the labels left of a panel, and the least a panel may have
MAX_PER_ROW = 4  # metrics in a row
HEIGHTS, HEIGHT_RATIO = (0.85, 1.7), 0.7  # inches: the least and the most of a panel; its height to its width
LETTER, TITLE_LETTER = 0.062, 0.07  # inches, of a letter of a label and of a title
NUMBERS, TITLE_LINE = 0.15, 0.14  # inches: what the numbers of an axis take of a panel, and each line of a title
MAX_CHANCE_DISTANCE = 1 / 3  # of an axis, how far beyond it chance is still shown
MARGIN = 0.4  # bits, beyond the least and the most
CROSS: Any = {"marker": "x", "markersize": 4, "linestyle": "none"}  # a width without a score
NOMINAL, MEASURED = "bits per weight, nominal", "bits per weight, measured"


def figures(report: ReportData, width: float = PAGE) -> "Iterator[tuple[str, Figure]]":
    """Every figure of scores with its name, this many inches wide; its label is its caption."""
    matplotlib = load_matplotlib()
    families = list(dict.fromkeys(row.quantization.family for row in report.deltas))
    for start in range(0, len(families), MAX_FAMILIES):
        with matplotlib.rc_context(SMALL):
            drawn = list(_figures_of(report, families[start : start + MAX_FAMILIES], width))
        yield from drawn
    yield from passkey_figures(report, width)


def write_plots(report: ReportData, folder: Path, width: float = PAGE) -> list[Path]:
    """Write every figure as PNG, SVG and PDF, with its caption; gives the pictures."""
    return write_drawings(all_figures(report, width), folder)


def all_figures(report: ReportData, width: float = PAGE) -> "Iterator[tuple[str, Figure]]":
    """The figures of scores, and those of the kinds of tables."""
    from qbench.report.kinds import KINDS

    yield from figures(report, width)
    for kind in KINDS.values():
        yield from kind.figures(report, width)


def _figures_of(report: ReportData, families: Sequence[str], width: float) -> "Iterator[tuple[str, Figure]]":
    styles = looks(report.results.all_kinds)
    named, written = "-".join(families), " and ".join(families)
    wanted = (
        ("score", score_panels(report, families), f"Score against nominal bits: {written}."),
        ("damage", damage_panels(report, families), f"Quantized − unquantized against nominal bits: {written}."),
        ("bits-per-weight", storage_panels(report, families), f"Score against measured bits per weight: {written}."),
    )
    for name, panels, caption in wanted:
        for suffix, own in _by_method(panels):
            title = f"{caption.removesuffix('.')}, {suffix}." if suffix else caption
            yield f"{named}-{name}{f'-{suffix}' if suffix else ''}", _figure(own, families, title, styles, name, width)


def _by_method(panels: Panels) -> "Iterator[tuple[str, Panels]]":
    """All methods in one figure; one figure each if there are many kinds of attention."""
    every = [series for panel in panels.values() for series in panel.points]
    methods = list(dict.fromkeys(series.method for series in every))
    if not methods:
        return
    if len({series.attention for series in every}) <= MAX_KINDS or len(methods) == 1:
        yield "", panels
        return
    for method in methods:
        own = {
            key: Panel(panel.levels, {s: p for s, p in panel.points.items() if s.method == method}, chance=panel.chance)
            for key, panel in panels.items()
        }
        yield method, own


def _figure(panels: Panels, families: Sequence[str], caption: str, styles: Looks, name: str, width: float) -> "Figure":
    """One block of panels per metric: its families side by side, on one axis."""
    measures = list(dict.fromkeys(measure for measure, _ in panels))
    shown = [family for family in families if any((measure, family) in panels for measure in measures)]
    fitting = int(width / (LABEL + NARROWEST * len(shown)))
    per_row = max(1, min(fitting, MAX_PER_ROW, len(measures)))
    rows = -(-len(measures) // per_row)
    per_row = -(-len(measures) // rows)
    side = (width / per_row - LABEL) / len(shown)
    height = min(max(HEIGHT_RATIO * side, HEIGHTS[0]), HEIGHTS[1])
    titles = _titles(measures, shown, max(1, int((side - NUMBERS) / TITLE_LETTER)))
    above = 0.2 + TITLE_LINE * max(title.count("\n") for title in titles) + (0 if len(shown) > 1 else 0.12)
    figure = new_figure(width, 0.55 + (height + above) * rows, "")
    grid = figure.subplots(rows, per_row * len(shown), squeeze=False)
    markers = dict(zip(_methods(panels), cycle(METHOD_MARKERS), strict=False))
    blocks = grid.reshape(rows * per_row, len(shown))  # by metric
    guessed = False
    for axes in blocks[len(measures) :].flat:
        axes.set_visible(False)
    for measure, block in zip(measures, blocks, strict=False):
        for family, axes in zip(shown, block, strict=True):
            if axes is not block[0]:
                axes.sharey(block[0])
                axes.tick_params(labelleft=False)
            guessed |= _draw(axes, panels.get((measure, family), Panel()), styles, markers)
        block[0].set_ylabel(_axis_name(measure, len(shown) > 1, height, damage=name == "damage"), fontsize=7)
        if is_perplexity(measure.metric) and name != "damage":
            block[0].set_yscale("log")
            block[0].set_ylim(bottom=max(block[0].get_ylim()[0], LEAST_PERPLEXITY))
            plain_log_ticks(block[0].yaxis)
    _name_panels(blocks[: len(measures)], titles, per_row)
    _set_bits(figure, grid, name)
    figure.set_label(f"{caption} {_how_to_read(panels, name, guessed)}")
    add_legend(figure, _legend(panels, styles, markers))
    return figure


def _axis_name(measure: Measure, with_task: bool, height: float, *, damage: bool) -> str:
    """The metric with its unit, on as many lines as it takes; the task if the title has the family."""
    unit = _unit(measure, damage)
    lines = [task_name(measure.task)] if with_task else []
    lines += [metric_name(measure), f"({unit})"] if len(unit) > 1 else [f"{metric_name(measure)} {unit}".strip()]
    return "\n".join(part for line in lines for part in textwrap.wrap(_unbroken(line), int(height / LETTER)))


def _unbroken(text: str) -> str:
    """Arrows stay on the line of their metric's name."""
    return text.replace(" ↑", "\u00a0↑").replace(" ↓", "\u00a0↓")


def _titles(measures: Sequence[Measure], families: Sequence[str], letters: int) -> list[str]:
    """The task of each panel, or the families if there are several; on as many lines as it takes."""
    names = [task_name(measure.task) for measure in measures] if len(families) == 1 else families
    return [textwrap.fill(name, letters) for name in names]


def _name_panels(blocks: Any, titles: Sequence[str], per_row: int) -> None:
    """The task over each panel; with several families, their names over the first row."""
    if blocks.shape[1] == 1:
        blocks = blocks.reshape(1, -1)
    for block in blocks[:per_row]:
        for title, axes in zip(titles, block, strict=True):
            axes.set_title(title)


def _unit(measure: Measure, damage: bool) -> str:
    if is_perplexity(measure.metric):
        return "%" if damage else ""  # as in the tables; the caption says of what
    if is_share(measure.metric):
        return "points" if damage else "%"
    return ""


def _set_bits(figure: "Figure", grid: Any, name: str) -> None:
    """One axis of bits for all panels, with numbers where no panel follows below."""
    shown = [axes for axes in grid.flat if axes.get_visible()]
    marked = (*METHOD_MARKERS, CROSS["marker"])  # the cells without a score too: outside, their crosses hit labels
    drawn = [line for axes in shown for line in axes.lines if line.get_marker() in marked]
    widths = sorted({float(x) for line in drawn for x in line.get_xdata()})
    low, high = widths[0] - MARGIN, widths[-1] + MARGIN
    ticks = widths if name != "bits-per-weight" else _even_ticks(low, high)
    if len(ticks) == 1:  # a lone width says nothing about the scale
        ticks, low, high = [ticks[0] - 1, ticks[0], ticks[0] + 1], low - 1, high + 1
    for (row, column), axes in np.ndenumerate(grid):
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xlim(low, high)
        axes.tick_params(labelbottom=row + 1 == len(grid) or not grid[row + 1, column].get_visible())
    figure.supxlabel(MEASURED if name == "bits-per-weight" else NOMINAL, fontsize=8)


def _even_ticks(low: float, high: float) -> list[float]:
    """Round numbers, at least two, as far apart as possible."""
    found: list[float] = []
    for step in (2.0, 1.0, 0.5, 0.2):
        found = [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
        if len(found) > 1:
            break
    return found


def _draw(axes: "Axes", panel: Panel, styles: Looks, markers: Mapping[str, str]) -> bool:
    """Draw a panel; returns whether chance is shown."""
    for series, points in panel.points.items():
        _draw_line(axes, sorted(points), styles[series.attention], markers[series.method])
    for attention, level in panel.levels.items():
        look = styles.get(attention)
        dashes = (0, look.dashes) if look else "-"  # grey if it belongs to no kind
        axes.axhline(level, color=look.colour if look else FAINT, linestyle=dashes, linewidth=0.8, zorder=1)
    for attention, gaps in panel.gaps.items():  # a line might pass over them
        crosses: dict[str, Any] = {
            "color": styles[attention].colour,
            "marker": "x",
            "linestyle": "none",
            "clip_on": False,
        }
        axes.plot(gaps, [0.0] * len(gaps), transform=axes.get_xaxis_transform(), markersize=4, **crosses)
    return _draw_chance(axes, panel.chance)


def _draw_line(axes: "Axes", points: Sequence[Point], look: Look, marker: str) -> None:
    """A method's points exactly where they were measured, joined in the order of bits, with their error bars."""
    line: dict[str, Any] = {**look.line, "marker": marker, "markersize": 3.5, "markeredgewidth": 0.8}
    axes.plot([p.bits for p in points], [p.value for p in points], linewidth=0.9, **line)
    bars = [p for p in points if p.low < p.high]
    axes.vlines([p.bits for p in bars], [p.low for p in bars], [p.high for p in bars], look.colour, linewidth=0.8)


def _draw_chance(axes: "Axes", chance: float | None) -> bool:
    """Draw a line unless it would squeeze what the panel shows; returns whether it was drawn."""
    low, high = axes.get_ylim()
    reach = MAX_CHANCE_DISTANCE * (high - low)
    if chance is None or not low - reach <= chance <= high + reach:
        return False
    axes.axhline(chance, color=FAINT, linestyle="-", linewidth=0.8, zorder=1)
    return True


def _methods(panels: Panels) -> list[str]:
    return list(dict.fromkeys(series.method for panel in panels.values() for series in panel.points))


def _legend(panels: Panels, styles: Looks, markers: Mapping[str, str]) -> dict[str, Any]:
    """Kinds of attention by colour and filling, methods by marker."""
    line2d = load_matplotlib().lines.Line2D
    kinds = {series.attention for panel in panels.values() for series in panel.points}
    gaps = {attention for panel in panels.values() for attention in panel.gaps}
    found = {
        kind_name(kind): line2d([], [], linewidth=1.2, **{**look.line, "marker": "o"})
        for kind, look in styles.items()
        if kind in kinds
    }
    found |= {
        method: line2d([], [], color=INK, marker=marker, markersize=4, linestyle="none")
        for method, marker in markers.items()
    }
    for kind, look in styles.items():
        if kind in gaps:
            found[f"{kind_name(kind)}: no score"] = line2d([], [], color=look.colour, **CROSS)
    return found


def _how_to_read(panels: Panels, name: str, guessed: bool) -> str:
    """The part of a caption that explains lines and bars."""
    points = [point for panel in panels.values() for points in panel.points.values() for point in points]
    parts = ["grey: no change" if name == "damage" else "dashed or dotted: unquantized"]
    if name == "damage" and any(is_perplexity(measure.metric) for measure, _ in panels):
        parts.append("perplexities: 100 × ln(quantized / unquantized), %")
    if guessed:
        parts.append("grey: chance")
    if any(point.low < point.high for point in points):
        parts.append("bars: 95% intervals")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."
