"""Heat maps: sinks by layer and head, attention maps, sensitivities of linear layers.

Colours get darker with the value (cividis, which is safe for colour-blind readers); white is exactly 0.
"""

from collections.abc import Iterator, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from qbench.records.analysis import SINK_EPSILONS
from qbench.report.analyses import AnalyzedModel, DrawnMaps
from qbench.report.attentions import kind_name
from qbench.report.delta import ReportData
from qbench.report.drawing import SMALL, load_matplotlib, new_figure, panel_grid, plain_log_ticks, side_by_side
from qbench.report.sensitivity import MILLI, by_quantization

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = "cividis_r"
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MAX_TICKS = 6
MAX_SIDE = 1.5  # inches, of a map
LETTER = 0.055  # inches: the width of a letter of its names
MIN_RATIO = 1e-3  # of a logarithmic colour scale to its largest value: smaller values are drawn as this


def sink_heat_map(models: Sequence[AnalyzedModel], width: float) -> "Figure":
    """One panel per model: how often each head puts more than ε on the first token."""
    rows, _ = shape = side_by_side(len(models), width)
    epsilon = f"{SINK_EPSILONS[-1]:g}"
    figure = new_figure(width, 0.9 + 1.35 * rows, f"Sink rate by head: {models[0].cell.family} (ε={epsilon}).")
    grid = panel_grid(figure, len(models), shape, sharex=True, sharey=True)
    image: Any = None
    for axes, model in zip(grid.flat, models, strict=False):
        assert model.analysis
        frame = model.analysis.heads_frame().pivot(index="layer", columns="head", values=f"sink_rate_{epsilon}")
        image = _coloured(axes, _without_zeros(frame.to_numpy()), vmin=0, vmax=100)
        axes.spines[["top", "right"]].set_visible(True)
        axes.set_title(kind_name(model.cell.attention))
    for line in grid:
        line[0].set_ylabel("layer")
    figure.supxlabel("head (from 0; white: 0%)", fontsize=8)
    figure.colorbar(image, ax=list(grid.flat[: len(models)]), label="texts (%)", aspect=12 * rows)
    return figure


def map_figures(drawn: Sequence[DrawnMaps], reference: str, width: float) -> Iterator[tuple[str, "Figure | None"]]:
    """One figure: two models side by side, one line per head; with more models, one line per model."""
    if not drawn:
        return
    models = sorted(drawn, key=lambda own: own.cell.attention != reference)
    names = [kind_name(model.cell.attention) for model in models]
    heads = [f"layer {own.layer}, head {own.head}" for own in models[0].maps]
    grid = [[own.weights for own in model.maps] for model in models]  # by model and head
    if len(models) <= 2:
        figure = _map_grid([list(own) for own in zip(*grid, strict=True)], heads, names, width)
    else:
        figure = _map_grid(grid, names, heads, width)
    figure.set_label(f"Attention maps: {models[0].cell.family}. White: exactly 0.")
    yield "maps", figure


def _map_grid(
    maps: Sequence[Sequence[np.ndarray]], rows: Sequence[str], columns: Sequence[str], width: float
) -> "Figure":
    """Maps with the names of rows and columns, on one scale of colours."""
    side = min((width - 1.1) / len(columns), MAX_SIDE)
    figure = new_figure(width, 0.75 + (side + 0.1) * len(rows), "")
    grid = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True, sharey=True)
    largest = max(float(weights.max()) for line in maps for weights in line) or 1.0
    norm = load_matplotlib().colors.PowerNorm(0.5, 0, largest)
    image: Any = None
    for line, own in zip(grid, maps, strict=True):
        for axes, weights in zip(line, own, strict=True):
            image = _coloured(axes, _without_zeros(weights), norm=norm)
            axes.tick_params(labelsize=6)
    grid[0, 0].invert_yaxis()
    grid[0, 0].locator_params(nbins=max(2, int(4 * side)), integer=True)
    letters = max(1, int(side / LETTER))
    for axes, name in zip(grid[:, 0], rows, strict=True):
        axes.set_ylabel(fill(name, letters, break_long_words=False), fontsize=7)
    for axes, name in zip(grid[0], columns, strict=True):
        axes.set_title(fill(name, letters, break_long_words=False), fontsize=7)
    figure.supxlabel("key (token)", fontsize=8)
    figure.supylabel("query (token)", fontsize=8)
    figure.colorbar(image, ax=list(grid.flat), label="attention weight", aspect=14 * len(rows), pad=0.02)
    return figure


def sensitivity_figures(report: ReportData, width: float) -> Iterator[tuple[str, "Figure"]]:
    """One figure per family and quantization: one panel per model."""
    for models in by_quantization(report):
        with load_matplotlib().rc_context(SMALL):
            cell = models[0][0]
            yield f"{cell.family}-sensitivity-{cell.label}", _sensitivity(models, width)


def _sensitivity(models: Sequence[Any], width: float) -> "Figure":
    rows, _ = shape = side_by_side(len(models), width)
    cell = models[0][0]
    caption = f"What quantizing one linear layer alone with {cell.label} costs: {cell.family}."
    figure = new_figure(width, 0.9 + 1.5 * rows, caption)
    grid = panel_grid(figure, len(models), shape, sharex=True, sharey=True)
    largest = max(own.kl for _, damages in models for own in damages) * MILLI or 1.0
    least = min(own.kl for _, damages in models for own in damages) * MILLI
    norm = load_matplotlib().colors.LogNorm(min(max(least, largest * MIN_RATIO), largest / 2), largest, clip=True)
    image: Any = None
    for axes, (ref, damages) in zip(grid.flat, models, strict=False):
        names = [name for name in LINEARS if any(own.linear == name for own in damages)]
        names += sorted({own.linear for own in damages} - set(names))
        values = np.full((len(names), 1 + max(own.layer for own in damages)), np.nan)
        for own in damages:
            values[names.index(own.linear), own.layer] = MILLI * own.kl
        image = _coloured(axes, values, norm=norm)
        axes.set_yticks(range(len(names)), [name.removesuffix("_proj") for name in names])
        axes.set_title(kind_name(ref.attention))
    grid[0, 0].invert_yaxis()
    figure.supxlabel("layer (from 0)", fontsize=8)
    bar = figure.colorbar(image, ax=list(grid.flat[: len(models)]), label="KL (millinats per token)", aspect=12 * rows)
    plain_log_ticks(bar.ax.yaxis)
    return figure


def _without_zeros(values: np.ndarray) -> np.ndarray:
    """Replace 0 by NaN, which is drawn white."""
    return np.where(values == 0, np.nan, values)


def _coloured(axes: "Axes", values: np.ndarray, **scale: Any) -> Any:
    """A square per value, with whole numbers along both axes."""
    axes.grid(visible=False)
    image = axes.imshow(values, cmap=COLOURS, interpolation="nearest", origin="lower", aspect="auto", **scale)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(load_matplotlib().ticker.MaxNLocator(MAX_TICKS, integer=True))
    return image
