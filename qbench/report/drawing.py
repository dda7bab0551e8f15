"""What all plots share: figures of a given width, legends, logarithmic axes, and figures as files.

A figure has no title: its label (`figure.get_label()`) is its caption, which is written beside it.
"""

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.errors import InputError
from qbench.files import file_name, write_atomically
from qbench.numbers import RAISED
from qbench.report.attentions import TWINS
from qbench.report.latex import escape
from qbench.report.looks import COLUMN, INK, STYLE, looks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from matplotlib.figure import Figure

PLOT_FORMATS = ("png", "svg", "pdf")
METHOD_MARKERS = "ovD^PX*"
Z95 = 1.96
PANEL = 1.5  # inches: of one model's panel, at least
WIDE = 4.5  # inches: in wider figures, panels stand side by side
SMALL = {
    **STYLE,
    "axes.titlesize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
}
LEGEND_LETTERS, MARKER_LETTERS = 48, 6  # per legend line in a column, and the width of a marker
LEGEND_LINE = 0.16  # inches


class PlotError(InputError):
    """Why plots cannot be made, in a sentence."""


def load_matplotlib() -> Any:
    """The package; an error says how to install it."""
    try:
        import matplotlib.figure
        import matplotlib.ticker
    except ImportError:
        raise PlotError("Plots need matplotlib, which is not installed: pip install 'matplotlib>=3.9'.") from None
    return matplotlib


def new_figure(width: float, height: float, caption: str) -> "Figure":
    """An empty figure, in inches, with its caption."""
    figure = load_matplotlib().figure.Figure(figsize=(width, height), layout="constrained")
    figure.set_label(caption)
    return figure


def stacked(panels: int, width: float) -> tuple[int, int]:
    """Rows and columns of a few panels: above one another in a column of a paper, else side by side."""
    return (1, panels) if width > WIDE else (panels, 1)


def side_by_side(panels: int, width: float) -> tuple[int, int]:
    """Rows and columns of one panel per model: as few rows as fit, filled evenly."""
    rows = -(-panels // max(1, int(width / PANEL)))
    return rows, -(-panels // rows)


def panel_grid(
    figure: "Figure", panels: int, shape: tuple[int, int], *, sharex: bool = False, sharey: bool = False
) -> Any:
    """The axes [rows, columns]. Places without a panel are left empty; the panels above them have numbers of x."""
    rows, columns = shape
    grid = figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey)
    for place in range(panels, rows * columns):
        grid.flat[place].remove()
        if rows > 1:
            grid[-2, place % columns].tick_params(labelbottom=True)
    return grid


def add_legend(figure: "Figure", handles: dict[str, Any] | None = None) -> None:
    """One legend above all panels; the panels keep their size. handles: by label; default: those of all panels."""
    if handles is None:
        handles = {}
        for axes in figure.axes:
            handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if len(handles) < 2:
        return
    width, height = figure.get_size_inches()
    fitting = int(width / COLUMN * LEGEND_LETTERS) // (MARKER_LETTERS + max(map(len, handles)))
    columns = max(1, min(len(handles), fitting))
    rows = -(-len(handles) // columns)
    figure.set_size_inches(width, height + LEGEND_LINE * (rows - 1))
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=columns, columnspacing=1.2)


def plain_log_ticks(axis: Any) -> None:
    """At least two numbers as people write them: 1, 2 and 5 of each decade, powers of ten if there are many."""
    ticker = load_matplotlib().ticker
    low, high = sorted(axis.get_view_interval())
    low = max(low, 1e-300)
    subs = (1, 2, 5) if high / low < 100 else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    if sum(low <= sub * 10.0**decade <= high for decade in decades for sub in subs) > 1:
        axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=6))
    else:
        axis.set_major_locator(ticker.MaxNLocator(3, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: log_tick(value)))
    axis.set_minor_locator(ticker.NullLocator())


def log_tick(value: float) -> str:
    """A tick of a logarithmic axis: 0.5, 1,000, 10⁴."""
    power = f"{value:.0e}"
    if value >= 1e4 and power.startswith("1e"):
        return "10" + str(int(power[2:])).translate(RAISED)
    return f"{value:,g}"


def write_drawings(drawn: "Iterable[tuple[str, Figure]]", folder: Path) -> list[Path]:
    """Write figures as PNG, SVG and PDF, and their captions as text and LaTeX; gives the pictures."""
    if folder.exists() and not folder.is_dir():
        raise PlotError(f"{folder} is a file; give a folder for the plots.")
    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in drawn:
            for suffix in PLOT_FORMATS:
                file = folder / f"{file_name(name)}.{suffix}"
                write_atomically(file, _rendered(figure, suffix))
                files.append(file)
            caption = str(figure.get_label())
            write_atomically(folder / f"{file_name(name)}.txt", f"{caption}\n")
            write_atomically(folder / f"{file_name(name)}.tex", f"{escape(caption)}%\n")  # no space after \input
    except OSError as error:
        raise PlotError(f"{folder}: plots cannot be written there ({error.strerror or error}).") from None
    return files


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


def _rendered(figure: "Figure", suffix: str) -> bytes:
    # Without dates, the same results give the same files; SVG's other entries are links, which a page must not have.
    left_out = {"png": (), "svg": ("Creator", "Date", "Format", "Type"), "pdf": ("CreationDate",)}
    out = io.BytesIO()
    with load_matplotlib().rc_context(STYLE):
        figure.savefig(out, format=suffix, dpi=300, metadata=dict.fromkeys(left_out[suffix]))
    return out.getvalue()
