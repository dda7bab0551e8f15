"""The twins' loss curves."""

import csv
from collections.abc import Mapping
from pathlib import Path

WINDOW = 50  # steps that a point of the curve is the mean of


def plot_losses(logs: Mapping[str, Path], out: Path) -> None:
    """Draw the losses of training logs into an SVG file, the same for the same logs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": "mini", "svg.fonttype": "none"}):
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        for name, log in logs.items():
            with log.open(newline="") as file:
                losses = [float(row["loss"]) for row in csv.DictReader(file)]
            means = [sum(part) / len(part) for part in _parts(losses)]
            axes.plot([WINDOW * (i + 0.5) for i in range(len(means))], means, label=name)
        axes.set(xlabel="step", ylabel=f"training loss, mean of {WINDOW} steps", yscale="log")
        axes.legend()
        axes.grid(alpha=0.3, which="both")
        figure.savefig(out, metadata={"Date": None})
        pyplot.close(figure)


def _parts(losses: list[float]) -> list[list[float]]:
    return [losses[i : i + WINDOW] for i in range(0, len(losses), WINDOW)]
