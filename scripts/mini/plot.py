"""The training curves of the mini models."""

import csv
from collections.abc import Mapping
from pathlib import Path

from qbench.attention.kinds import ATTENTIONS
from qbench.report.looks import looks

WINDOW = 50  # steps averaged in one point of a curve
MARKED = 6  # points between markers
MEASURED = {"loss": "training loss", "gradient_norm": "gradient norm before clipping"}


def plot_training(logs: Mapping[str, Path], out: Path) -> None:
    """Plot losses and gradient norms of training logs as an SVG file; the same logs give the same file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": "mini", "svg.fonttype": "none"}):
        figure, panels = pyplot.subplots(1, len(MEASURED), figsize=(10, 4), layout="constrained")
        for kind, look in looks(list(logs)).items():
            with logs[kind].open(newline="") as file:
                rows = list(csv.DictReader(file))
            for axes, column in zip(panels, MEASURED, strict=True):
                means = [sum(part) / len(part) for part in _parts([float(row[column]) for row in rows])]
                axes.plot(
                    [WINDOW * (i + 0.5) for i in range(len(means))],
                    means,
                    label=ATTENTIONS[kind].title,
                    linewidth=1.2,
                    markevery=MARKED,
                    **look.line,
                )
        for axes, title in zip(panels, MEASURED.values(), strict=True):
            axes.set(xlabel="step", ylabel=f"{title}, mean of {WINDOW} steps", yscale="log")
            axes.grid(alpha=0.3, which="both")
        panels[0].legend(fontsize="small")
        figure.savefig(out, metadata={"Date": None})
        pyplot.close(figure)


def _parts(values: list[float]) -> list[list[float]]:
    return [values[i : i + WINDOW] for i in range(0, len(values), WINDOW)]
