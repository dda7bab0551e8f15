"""Pictures in which colour is the value: sinks by layer and head, attention maps, sensitivities of linear layers.

The colours get darker with the value (cividis, which colour-blind people see alike); white is exactly 0.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qbench.records.analysis import SINK_EPSILONS
from qbench.report.analyses import AnalyzedModel, DrawnMaps
from qbench.report.analysis_plots import COLUMN, PAGE, SMALL, new_figure
from qbench.report.attentions import kind_name
from qbench.report.delta import ReportData
from qbench.report.plots import load_matplotlib
from qbench.report.sensitivity import MILLI, by_quantization

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = "cividis_r"
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MAX_TICKS = 6
MIN_RATIO = 1e-3  # of a logarithmic scale of colours: what is below its largest value by more is drawn as this


def sink_heat_map(models: Sequence[AnalyzedModel]) -> "Figure":
    """One panel per model: how often each head puts more than ε on the first token."""
    columns = min(len(models), 2 if len(models) <= 4 else 5)
    rows = -(-len(models) // columns)
    width = COLUMN if columns <= 2 else PAGE
    epsilon = f"{SINK_EPSILONS[-1]:g}"
    figure = new_figure(width, 0.9 + 1.35 * rows, f"{models[0].cell.family}: sink rate by head (ε={epsilon})")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    image: Any = None
    for axes, model in zip(grid.flat, models, strict=False):
        assert model.analysis
        frame = model.analysis.heads_frame().pivot(index="layer", columns="head", values=f"sink_rate_{epsilon}")
        image = _coloured(axes, frame.to_numpy(), vmin=0, vmax=100)
        axes.set_title(kind_name(model.cell.attention))
    for axes in grid.flat[len(models) :]:
        axes.remove()
    for line in grid:
        line[0].set_ylabel("layer")
    figure.supxlabel("head", fontsize=8)
    figure.colorbar(image, ax=list(grid.flat[: len(models)]), label="texts (%)", aspect=12 * rows)
    return figure


def map_figures(drawn: Sequence[DrawnMaps], reference: str) -> Iterator[tuple[str, "Figure | None"]]:
    """One figure: a line per head, a column per model."""
    if not drawn:
        return
    models = sorted(drawn, key=lambda own: own.cell.attention != reference)
    heads = [(own.layer, own.head) for own in models[0].maps]
    width = COLUMN if len(models) <= 2 else PAGE
    cell = (width - 0.9) / len(models)
    figure = new_figure(width, 0.7 + (cell + 0.12) * len(heads), f"{models[0].cell.family}: attention maps")
    grid = figure.subplots(len(heads), len(models), squeeze=False, sharex=True, sharey=True)
    colours = load_matplotlib().colors
    for row, (layer, head) in zip(grid, heads, strict=True):
        maps = [own.weights for model in models for own in model.maps if (own.layer, own.head) == (layer, head)]
        norm = colours.PowerNorm(0.5, 0, max(float(weights.max()) for weights in maps) or 1.0)
        for axes, weights in zip(row, maps, strict=True):
            image = _coloured(axes, np.where(weights == 0, np.nan, weights), norm=norm)
            axes.invert_yaxis()
        row[0].set_ylabel(f"layer {layer}, head {head}\nquery")
        figure.colorbar(image, ax=list(row), label="weight" if row is grid[0] else "", aspect=14, pad=0.02)
    for axes, model in zip(grid[0], models, strict=True):
        axes.set_title(kind_name(model.cell.attention), fontsize=8 if len(models) <= 4 else 6)
    figure.supxlabel("key (token); white: exactly 0", fontsize=8)
    yield "maps", figure


def sensitivity_figures(report: ReportData) -> Iterator[tuple[str, "Figure"]]:
    """One figure per family and quantization: one panel per model."""
    for models in by_quantization(report):
        with load_matplotlib().rc_context(SMALL):
            cell = models[0][0]
            yield f"{cell.family}-sensitivity-{cell.label}", _sensitivity(models)


def _sensitivity(models: Sequence[Any]) -> "Figure":
    columns = min(len(models), 2 if len(models) <= 4 else 3)
    rows = -(-len(models) // columns)
    width = COLUMN if columns <= 2 else PAGE
    cell = models[0][0]
    figure = new_figure(width, 0.9 + 1.5 * rows, f"{cell.family}: one linear layer alone in {cell.label}")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    largest = max(own.kl for _, damages in models for own in damages) * MILLI or 1.0
    norm = load_matplotlib().colors.LogNorm(largest * MIN_RATIO, largest, clip=True)
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
    for axes in grid.flat[len(models) :]:
        axes.remove()
    figure.supxlabel("layer", fontsize=8)
    figure.colorbar(image, ax=list(grid.flat[: len(models)]), label="KL (millinats per token)", aspect=12 * rows)
    return figure


def _coloured(axes: "Axes", values: np.ndarray, **scale: Any) -> Any:
    """A square per value, with whole numbers along both axes."""
    axes.grid(visible=False)
    image = axes.imshow(values, cmap=COLOURS, interpolation="nearest", origin="lower", aspect="auto", **scale)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(load_matplotlib().ticker.MaxNLocator(MAX_TICKS, integer=True))
    return image
