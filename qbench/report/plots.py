"""Plots: score and damage against bits, accuracy against measured bits per weight. One figure of each per family.

Kinds of attention differ in colour, marker and dashes; softmax and softpick also in lightness, so they can be told
apart in black and white.
"""

import io
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, product, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qbench.errors import InputError
from qbench.files import file_name, write_atomically
from qbench.records.metrics import is_nats, is_perplexity, is_share, passkey_length
from qbench.report.attentions import TWINS, kind_name
from qbench.report.delta import DamageRow, DeltaRow, ReportData
from qbench.report.looks import COLUMN, FAINT, INK, STYLE, Look, Looks, looks
from qbench.report.metrics import Measure, in_tables, metric_name, task_name
from qbench.report.passkey import LengthCurve, passkey_curves
from qbench.report.results import NOT_OFFERED, FamilyQuantization, Gap, Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOT_FORMATS = ("png", "svg", "pdf")
LEGEND_COLUMN, METHOD_NAME, LEGEND_LINE = 1.7, 0.5, 0.18  # inches
METHOD_MARKERS = "ovD^PX*"
Z95 = 1.96
CURVE_COLUMNS = 4  # panels side by side
MIN_BAR_END = 1e-3
MAX_CHANCE_DISTANCE = 1 / 3  # of an axis, how far beyond it chance is still shown
MIN_LOG_RATIO = 20  # perplexities that differ by such a factor are drawn on a log axis
RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


class PlotError(InputError):
    """Why plots cannot be made, in a sentence."""


@dataclass(frozen=True)
class Point:
    """A value at a width, with the ends of its error bar."""

    quantization: FamilyQuantization
    value: float
    low: float
    high: float


@dataclass
class Panel:
    """One metric under one method: the points of each kind, a level to compare with, and widths without a score."""

    levels: Mapping[str, float] = field(default_factory=dict)
    points: dict[str, list[Point]] = field(default_factory=lambda: defaultdict(list))
    gaps: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def add_gap(self, attention: str, bits: int, gap: Gap) -> None:
        """Remember a width that should have a score, unless the method does not offer it."""
        if gap.text != NOT_OFFERED:
            self.gaps[attention].append(bits)


class StoredAccuracy(NamedTuple):
    """An accuracy and the bits per weight it was reached with."""

    attention: str
    method: str
    bits: float  # per weight, measured
    value: float
    low: float  # the ends of the error bar
    high: float


Panels = dict[tuple[Measure, str], Panel]  # by metric and method
Levels = Mapping[Measure, Mapping[str, float]]  # by metric and attention


def figures(report: ReportData) -> Iterator[tuple[str, "Figure"]]:
    """Every figure with its name; an error says how to install matplotlib if it is missing."""
    matplotlib = load_matplotlib()
    for family in dict.fromkeys(row.quantization.family for row in report.deltas):
        with matplotlib.rc_context(STYLE):
            drawn = list(_figures_of(report, family))
        yield from drawn


def _figures_of(report: ReportData, family: str) -> Iterator[tuple[str, "Figure"]]:
    weights_only = report.results.weights_only(family)
    rows = _plotted(row for row in report.deltas if row.quantization in weights_only)
    damages = _plotted(row for row in report.damages if row.quantization in weights_only)
    kinds, titles = report.results.kinds_of(family), report.results.method_titles
    styles = looks(report.results.all_kinds)
    if panels := score_panels(rows, kinds):
        title = f"{family}: score against bits (dashed: unquantized{_bars(panels)})"
        yield f"{family}-score", _grid(panels, title, titles, styles)
    if panels := damage_panels(damages, kinds):
        title = f"{family}: damage against bits (quantized − unquantized{_bars(panels)})"
        yield f"{family}-damage", _grid(panels, title, titles, styles, damages=True)
    if curves := [curve for curve in passkey_curves(report) if curve.quantization.family == family]:
        yield f"{family}-passkey", _length_curves(curves, family, styles)
    if storage := storage_panels(report, rows):
        levels, guessing = unquantized_levels(rows), chances(report, rows)
        yield f"{family}-bits-per-weight", _storage(storage, levels, guessing, family, titles, styles)


def _bars(panels: Panels) -> str:
    points = (point for panel in panels.values() for points in panel.points.values() for point in points)
    return "; bars: 95%" if any(point.low < point.high for point in points) else ""


def write_plots(report: ReportData, folder: Path) -> list[Path]:
    """Write every figure as PNG, SVG and PDF; gives the files."""
    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in (*figures(report), *_figures_of_kinds(report)):
            for suffix in PLOT_FORMATS:
                file = folder / f"{file_name(name)}.{suffix}"
                write_atomically(file, _rendered(figure, suffix))
                files.append(file)
    except OSError as error:
        raise PlotError(f"{folder}: plots cannot be written there ({error.strerror or error}).") from None
    return files


def _figures_of_kinds(report: ReportData) -> Iterator[tuple[str, "Figure"]]:
    from qbench.report.kinds import KINDS

    for kind in KINDS.values():
        yield from kind.figures(report)


def inline_svg(figure: "Figure") -> str:
    """A figure to embed in a page: no background, and the page's colours."""
    for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
        patch.set_alpha(0)
    svg = _rendered(figure, "svg").decode()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    if figure.get_size_inches()[0] <= COLUMN:
        svg = svg.replace("<svg", '<svg class="column"', 1)
    for attention, look in looks(TWINS).items():
        svg = svg.replace(look.colour, f"var(--{attention})")
    return svg


def score_panels(rows: Sequence[DeltaRow], kinds: Sequence[str]) -> Panels:
    """Scores of quantized models, with the unquantized ones as levels; kinds: those that should have scores."""
    panels: Panels = {}
    levels = unquantized_levels(rows)
    for row in rows:
        if row.quantization.is_unquantized:
            continue
        panel = Panel(levels=levels.get(row.measure, {}))
        panel = panels.setdefault((row.measure, row.quantization.method), panel)
        for attention in kinds:
            score = row.scores[attention]
            if isinstance(score, Gap):
                panel.add_gap(attention, row.quantization.bits, score)
            else:
                panel.points[attention].append(Point(row.quantization, score.value, *_ends(score, row.measure)))
    return panels


def _ends(score: Score, measure: Measure) -> tuple[float, float]:
    """The ends of a score's error bar; the score itself if its standard error is unknown."""
    error = Z95 * (score.stderr or 0)
    low = max(score.value - error, min(score.value, MIN_BAR_END))  # above zero, for a log scale
    return low, min(score.value + error, 100 if is_share(measure.metric) else math.inf)


def unquantized_levels(rows: Sequence[DeltaRow]) -> Levels:
    """The scores of the unquantized models."""
    baselines = {row.measure: _scores(row) for row in rows if row.quantization.is_unquantized}
    return {m: {attention: score.value for attention, score in scores.items()} for m, scores in baselines.items()}


def damage_panels(rows: Sequence[DamageRow], kinds: Sequence[str]) -> Panels:
    """Damages, with zero as the level; kinds: those that should have damages."""
    panels: Panels = {}
    for row in rows:
        panel = panels.setdefault((row.measure, row.quantization.method), Panel(levels={"none": 0.0}))
        for attention in kinds:
            damage = row.damages[attention].score
            if isinstance(damage, Gap):
                panel.add_gap(attention, row.quantization.bits, damage)
            else:
                ends = damage.shown_interval or (damage.shown, damage.shown)
                panel.points[attention].append(Point(row.quantization, damage.shown, *ends))
    return panels


def storage_panels(report: ReportData, rows: Sequence[DeltaRow]) -> dict[Measure, list[StoredAccuracy]]:
    """The accuracies of each cell that has an audit."""
    found: dict[Measure, list[StoredAccuracy]] = {}
    for row in (row for row in rows if is_share(row.measure.metric)):
        for attention, score in _scores(row).items():
            stored = report.results.twin(row.quantization, attention).parts[0].stored  # draws take the same bits
            audit = stored.record.audit if stored else None
            if audit and audit.weights:
                bits = 8 * (audit.code_bytes + audit.metadata_bytes) / audit.weights
                cell = StoredAccuracy(attention, row.quantization.method, bits, score.value, *_ends(score, row.measure))
                found.setdefault(row.measure, []).append(cell)
    return found


def chances(report: ReportData, rows: Sequence[DeltaRow]) -> dict[Measure, float]:
    """The accuracies of guessing that are known."""
    results = ((row, report.results.twin(row.quantization, attention)) for row in rows for attention in _scores(row))
    known = {row.measure: report.evidence.chance(row.measure, result) for row, result in results}
    return {measure: chance for measure, chance in known.items() if chance is not None}


def _scores(row: DeltaRow) -> dict[str, Score]:
    """The ones that exist, by kind of attention."""
    return {attention: score for attention, score in row.scores.items() if isinstance(score, Score)}


def _plotted(rows: Iterable[Any]) -> list[Any]:
    """One accuracy per task, the normalized one if there is one, and its perplexity.

    Passkey and KL have their own figures.
    """
    rows = [row for row in rows if passkey_length(row.measure.task) is None and not is_nats(row.measure.metric)]
    chosen: dict[tuple[str, bool], Measure] = {}
    for measure in in_tables(dict.fromkeys(row.measure for row in rows)):
        chosen.setdefault((measure.task, is_perplexity(measure.metric)), measure)
    return [row for row in rows if row.measure in chosen.values() and row.measure.metric]


def _length_curves(curves: Sequence[LengthCurve], family: str, styles: Looks) -> "Figure":
    """Accuracy against length: one panel per quantization, one line per kind of attention."""
    panels = list(dict.fromkeys(curve.quantization for curve in curves))
    columns = min(len(panels), CURVE_COLUMNS)
    lines = -(-len(panels) // columns)
    figure = load_matplotlib().figure.Figure(figsize=(1.2 + 2.2 * max(columns, 2), 0.9 + 1.9 * lines))
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for about, axes in zip_longest(panels, grid.flat):
        if about is None:
            axes.set_visible(False)
            continue
        for curve in (curve for curve in curves if curve.quantization == about):
            _draw_curve(axes, curve, styles[curve.attention])
        axes.set_title(about.method_title if about.is_unquantized else about.label)
        axes.set_ylim(-4, 104)
        axes.set_xlabel("length, tokens")
        axes.tick_params(labelbottom=True)
    for axes in grid[:, 0]:
        axes.set_ylabel("accuracy, %")
    _finish(figure, f"{family}: passkey accuracy against length (bars: 95%)", columns=max(2, columns))
    figure.subplots_adjust(hspace=0.6)  # a line for the lengths, and one for the next title
    return figure


def _draw_curve(axes: "Axes", curve: LengthCurve, look: Look) -> None:
    points = [(point, point.score.value) for point in curve.points if isinstance(point.score, Score)]
    lengths = [point.length for point, _ in points]
    axes.plot(lengths, [value for _, value in points], linewidth=1.2, label=kind_name(curve.attention), **look.line)
    for point, _ in points:
        if point.interval:
            axes.vlines(point.length, *point.interval, look.colour, linewidth=1)


def _grid(
    panels: Panels, title: str, method_titles: Mapping[str, str], styles: Looks, damages: bool = False
) -> "Figure":
    """One row per metric, one column per method; damages of perplexities are already on a log scale."""
    measures = list(dict.fromkeys(measure for measure, _ in panels))
    methods = list(dict.fromkeys(method for _, method in panels))
    figure = load_matplotlib().figure.Figure(figsize=(1.2 + 2.2 * len(methods), 1.0 + 1.45 * len(measures)))
    grid = figure.subplots(len(measures), len(methods), squeeze=False, sharex=True, sharey="row")
    for measure, line in zip(measures, grid, strict=True):
        log_ratio = ", log %" if damages and is_perplexity(measure.metric) else ""
        line[0].set_ylabel(f"{task_name(measure.task)}\n{metric_name(measure)}{log_ratio}")
        for method, axes in zip(methods, line, strict=True):
            _draw(axes, panels.get((measure, method), Panel()), styles)
        if is_perplexity(measure.metric) and not damages:
            _rescale(line[0], [panel for (own, _), panel in panels.items() if own == measure])
    for method, top, bottom in zip(methods, grid[0], grid[-1], strict=True):
        top.set_title(method_titles[method])
        bottom.set_xlabel("bits")
    for axes in figure.axes:  # the last row is a page away from the first
        axes.tick_params(labelbottom=True)
    # All methods share an axis: a slope means the same in every panel.
    if widths := sorted(_widths(panels.values())):
        grid[0, 0].set_xticks(widths)
        grid[0, 0].set_xlim(widths[0] - 0.5, widths[-1] + 0.5)
    fitting = int(figure.get_size_inches()[0] / LEGEND_COLUMN)
    return _finish(figure, title, columns=min(len(styles), max(2, fitting)))


def _widths(panels: Iterable[Panel]) -> set[int]:
    every = list(panels)
    drawn = {point.quantization.bits for panel in every for points in panel.points.values() for point in points}
    return drawn | {bits for panel in every for gaps in panel.gaps.values() for bits in gaps}


def _draw(axes: "Axes", panel: Panel, styles: Looks) -> None:
    for attention, look in styles.items():
        points = panel.points.get(attention, [])
        for line in _lines(points):
            bits = [point.quantization.bits + look.offset for point in line]
            values = [point.value for point in line]
            axes.plot(bits, values, linewidth=1.2, label=kind_name(attention), **look.line)
        bars = [point for point in points if point.low < point.high]
        if bars:
            bits = [point.quantization.bits + look.offset for point in bars]
            axes.vlines(bits, [p.low for p in bars], [p.high for p in bars], look.colour, linewidth=1)
        _draw_gaps(axes, attention, look, panel.gaps.get(attention, []))
    _draw_levels(axes, panel.levels, styles)


def _draw_gaps(axes: "Axes", attention: str, look: Look, gaps: Sequence[int]) -> None:
    """A cross at the bottom for each width without a score: a line might pass over it."""
    if gaps:
        bits = [width + 2 * look.offset for width in gaps]
        crosses = {**look.line, "marker": "x", "linestyle": "none", "clip_on": False}
        label = f"{kind_name(attention)}: no score"
        axes.plot(bits, [0.0] * len(bits), transform=axes.get_xaxis_transform(), label=label, **crosses)


def _draw_levels(axes: "Axes", levels: Mapping[str, float], styles: Looks) -> None:
    """A dashed line per kind; grey if it belongs to no kind."""
    for attention, level in levels.items():
        if look := styles.get(attention):
            axes.axhline(level, color=look.colour, linestyle=(0, look.dashes), linewidth=1)
        else:
            axes.axhline(level, color=FAINT, linestyle="-", linewidth=1)


def _rescale(axes: "Axes", panels: Sequence[Panel]) -> None:
    """A logarithmic axis if perplexities differ by orders of magnitude, with ticks at powers of ten."""
    points = [p for panel in panels for own in panel.points.values() for p in own]
    values = [p.value for p in points] + [level for panel in panels for level in panel.levels.values()]
    if not values or max(map(abs, values)) < MIN_LOG_RATIO * max(min(values), 1):
        return
    axes.set_yscale("log")
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    powers = range(first, last + 1, -(-(last - first + 1) // 4))
    labels = {10.0**power: "10" + str(power).translate(RAISED) for power in powers}
    axes.set_yticks(list(labels), list(labels.values()))
    axes.minorticks_off()


def _lines(points: Sequence[Point]) -> list[list[Point]]:
    """The points joined by width: one line, unless a width has several settings; then one line per setting."""
    if len({point.quantization.bits for point in points}) == len(points):
        return [list(points)] if points else []
    lines: dict[str, list[Point]] = {}
    for point in points:
        about = point.quantization
        lines.setdefault(about.label.removeprefix(f"{about.method}-{about.bits}"), []).append(point)
    return list(lines.values())


def _storage(
    panels: Mapping[Measure, Sequence[StoredAccuracy]],
    levels: Levels,
    chances: Mapping[Measure, float],
    family: str,
    method_titles: Mapping[str, str],
    styles: Looks,
) -> "Figure":
    """One panel per accuracy; kinds of attention differ in colour and filling, the methods in marker."""
    methods = list(dict.fromkeys(cell.method for cells in panels.values() for cell in cells))
    drawn = {cell.attention for cells in panels.values() for cell in cells}
    kinds = [attention for attention in styles if attention in drawn]
    width = 1.2 + 2.2 * len(panels)
    if len(kinds) > len(TWINS):  # names get long
        width = max(width, (LEGEND_COLUMN + METHOD_NAME) * len(methods))
    figure = load_matplotlib().figure.Figure(figsize=(width, 2.7))
    guessed = False
    for axes, (measure, cells) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        # The legend is filled column by column: one column per method, one line per kind.
        for (method, marker), attention in product(zip(methods, cycle(METHOD_MARKERS), strict=False), kinds):
            own = [cell for cell in cells if (cell.attention, cell.method) == (attention, method)]
            label = f"{kind_name(attention)}, {method_titles[method]}"
            _draw_stored(axes, own, replace(styles[attention], marker=marker), label)
        _draw_levels(axes, levels.get(measure, {}), styles)
        guessed |= _draw_chance(axes, chances.get(measure))
        axes.set_title(f"{task_name(measure.task)}, {metric_name(measure)}")
        axes.set_xlabel("measured bits per weight")
    bars = any(cell.low < cell.high for cells in panels.values() for cell in cells)
    marks = ["dashed: unquantized"]
    if guessed:
        marks.append("grey: chance")
    if bars:
        marks.append("bars: 95%")
    title = f"{family}: accuracy against measured bits per weight ({'; '.join(marks)})"
    return _finish(figure, title, columns=len(methods))


def _draw_stored(axes: "Axes", cells: Sequence[StoredAccuracy], look: Look, label: str) -> None:
    """Markers with error bars at the measured bits: kinds whose weights take the same bits overlap."""
    bits = [cell.bits for cell in cells]
    axes.plot(bits, [cell.value for cell in cells], linestyle="none", label=label, **look.line)
    axes.vlines(bits, [cell.low for cell in cells], [cell.high for cell in cells], look.colour, linewidth=1)


def _draw_chance(axes: "Axes", chance: float | None) -> bool:
    """Draw a line unless it would squeeze what the panel shows; returns whether it was drawn."""
    low, high = axes.get_ylim()
    reach = MAX_CHANCE_DISTANCE * (high - low)
    if chance is None or not low - reach <= chance <= high + reach:
        return False
    _draw_levels(axes, {"chance": chance}, {})
    return True


def _finish(figure: "Figure", title: str, columns: int) -> "Figure":
    """Add the title, one legend for all panels, and margins; in inches, since figures differ in size."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    rows = -(-len(handles) // columns)
    width, height = figure.get_size_inches()
    width = max(width, _text_width(title) + 0.2)
    height += LEGEND_LINE * max(rows - 2, 0)  # panels keep their size
    figure.set_size_inches(width, height)
    figure.suptitle(title, x=0.1 / width, y=1 - 0.08 / height, ha="left", va="top")
    place = (0.05 / width, 1 - 0.25 / height)
    figure.legend(handles.values(), handles, loc="upper left", bbox_to_anchor=place, borderaxespad=0, ncols=columns)
    top = 1 - (0.55 + LEGEND_LINE * rows) / height
    figure.subplots_adjust(0.75 / width, 0.45 / height, 1 - 0.12 / width, top, wspace=0.25, hspace=0.22)
    return figure


def _text_width(title: str) -> float:
    """The width of a figure's title, in inches."""
    path = load_matplotlib().textpath.TextPath((0, 0), title, size=STYLE["figure.titlesize"])
    return 1.03 * path.get_extents().width / 72  # pixels make letters a little wider


def _rendered(figure: "Figure", suffix: str) -> bytes:
    # Without dates, the same results give the same files; SVG's other entries are links, which a page must not have.
    left_out = {"png": (), "svg": ("Creator", "Date", "Format", "Type"), "pdf": ("CreationDate",)}
    out = io.BytesIO()
    with load_matplotlib().rc_context(STYLE):
        figure.savefig(out, format=suffix, dpi=200, metadata=dict.fromkeys(left_out[suffix]))
    return out.getvalue()


def load_matplotlib() -> Any:
    """The package; an error says how to install it."""
    try:
        import matplotlib.figure
        import matplotlib.textpath
    except ImportError:
        raise PlotError("Plots need matplotlib, which is not installed: pip install 'matplotlib>=3.9'.") from None
    return matplotlib
