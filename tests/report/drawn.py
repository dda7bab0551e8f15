"""What a figure shows when it is drawn."""

from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text


def texts_outside(figure: Figure) -> list[str]:
    """The texts that the edges of the figure cut."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    hidden = {id(label) for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for label in _undrawn(axis)}
    shown = [
        text
        for text in figure.findobj(Text)
        if isinstance(text, Text)
        and id(text) not in hidden
        and text.get_visible()
        and text.get_text().strip()
        and (text.axes is None or text.axes.get_visible())
    ]
    assert shown
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in shown]
    left, bottom, right, top = figure.bbox.extents
    return [t for t, box in boxes if box.x0 < left or box.x1 > right or box.y0 < bottom or box.y1 > top]


def ticks(axis: Any) -> list[float]:
    """Where an axis has labelled ticks."""
    low, high = sorted(axis.get_view_interval())
    axis.figure.draw(FigureCanvasAgg(axis.figure).get_renderer())
    return [
        tick.get_loc() for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high and tick.label1.get_text()
    ]


def _undrawn(axis: Any) -> list[Text]:
    """The labels of ticks beyond the ends of an axis."""
    low, high = sorted(axis.get_view_interval())
    slack = 1e-9 * (high - low)
    every = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    outside = [tick for tick in every if not low - slack <= tick.get_loc() <= high + slack]
    return [label for tick in outside for label in (tick.label1, tick.label2)]
