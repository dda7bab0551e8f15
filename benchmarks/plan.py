"""Compare the plan's estimate with the time that cells take, by phase: python benchmarks/plan.py RECIPE [PATTERN…]

Cells run in this process, one after another, on one thread. Times are CPU time, so other work on the machine does not
count.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from qbench.recipe.cells import Cell, cells, load_recipe, recipe_tasks
from qbench.runner.cell import Job, Phases, run_cell
from qbench.runner.child import HEAVY
from qbench.runner.estimate import estimate
from qbench.runner.speed import speed_of


def compare(cell: Cell) -> dict[str, tuple[float, float]]:
    """Estimated and measured seconds by phase."""
    found = estimate(cell, recipe_tasks(cell.recipe), speed_of(cell.recipe, 1))
    assert found is not None
    measured: dict[str, float] = {}
    timed = Phases.phase

    @contextmanager
    def phase(self: Phases, name: str) -> Iterator[None]:
        start = time.process_time()
        with timed(self, name):
            yield
        measured[name] = measured.get(name, 0.0) + time.process_time() - start  # KL has two parts

    cell.quantization.quantizer.preload()  # type: ignore[union-attr]
    Phases.phase = phase  # type: ignore[method-assign]
    try:
        record, _ = run_cell(Job(cell, cell.identity(), None))
    finally:
        Phases.phase = timed  # type: ignore[method-assign]
    if record.failure:
        raise SystemExit(f"{cell.ref.name}: {record.failure.reason}")
    return {name: (found.seconds[name], seconds) for name, seconds in measured.items()}


def main(recipe: str, *patterns: str) -> None:
    """Print one line per cell whose name contains one of the patterns, and the sum."""
    torch.set_num_threads(1)
    for module in HEAVY:  # as the fork server does
        __import__(module)
    chosen = [cell for cell in cells(load_recipe(Path(recipe))) if any(p in cell.ref.name for p in patterns or [""])]
    sums = [0.0, 0.0]
    for cell in chosen:
        found = compare(cell)
        totals = [sum(pair[n] for pair in found.values()) for n in (0, 1)]
        sums = [a + b for a, b in zip(sums, totals, strict=True)]
        phases = ", ".join(f"{name} {planned:.2f} / {taken:.2f}" for name, (planned, taken) in found.items())
        print(
            f"{cell.ref.name}: {totals[0]:.1f} / {totals[1]:.1f} s, {totals[0] / totals[1]:.2f}× ({phases})", flush=True
        )
    print(f"all: {sums[0]:.1f} / {sums[1]:.1f} s, {sums[0] / sums[1]:.2f}×; estimated / measured")


if __name__ == "__main__":
    main(*sys.argv[1:])
