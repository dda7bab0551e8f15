"""What KL adds to a cell: the CPU time of each part of a cell in turn, smallest of several runs; and memory.

    python benchmarks/kl_cost.py RECIPE [LABEL …] [--times N]

Whole cells with and without KL would differ by less than their noise.
"""

import argparse
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from qbench.evaluate.divergence import compare, keep_reference, pages, with_kl
from qbench.recipe.cells import Cell, cells, load_recipe
from qbench.runner.cell import (
    cell_scorer,
    evaluate_model,
    load_cell_tasks,
    load_model,
    load_tokenizer,
    quantized_for_cell,
)

T = TypeVar("T")
Times = dict[str, list[float]]


def timed(times: Times, part: str, work: Callable[[], T]) -> T:
    """Do the work, and note its CPU time."""
    start = time.process_time()
    found = work()
    times[part].append(time.process_time() - start)
    return found


def run(cell: Cell, times: Times) -> int:
    """Run a cell part by part; returns the bytes of the unquantized model's states."""
    identity, recipe = cell.identity(), cell.recipe
    tokenizer, tasks = load_tokenizer(cell, identity), timed(times, "tasks", lambda: load_cell_tasks(cell))
    model = timed(times, "load", lambda: load_model(cell, identity))
    limits = {name: limit for name, limit in recipe.limits(tasks).items() if limit}
    requests = timed(times, "kl: pages", lambda: pages(tasks, limits, recipe.seed))
    first = cell_scorer(cell, model, tokenizer)
    reference = timed(times, "kl: reference", lambda: keep_reference(first, requests))
    model, _ = timed(times, "quantize", lambda: quantized_for_cell(cell, model, tokenizer))
    lm = cell_scorer(cell, model, tokenizer)
    lm.wanted = reference.counts
    found = timed(times, "evaluate", lambda: evaluate_model(cell, lm, tasks, identity.what.tasks))
    timed(times, "kl: compare", lambda: with_kl(found, compare(reference, lm.states, model.lm_head)))
    return reference.bytes


def main() -> None:
    """Print one line per cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("labels", nargs="*")
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for cell in cells(load_recipe(options.recipe)):
        if cell.ref.measured or (cell.ref.draw or 1) > 1 or (options.labels and cell.ref.label not in options.labels):
            continue
        times: Times = defaultdict(list)
        states = [run(cell, times) for _ in range(options.times)][-1]
        least = {part: min(own) for part, own in times.items()}
        added = sum(own for part, own in least.items() if part.startswith("kl"))
        rest = sum(least.values()) - added
        parts = ", ".join(f"{part} {own:.2f}" for part, own in least.items())
        print(
            f"{cell.ref.name}: {added:.2f} s added to {rest:.2f} ({added / rest:+.1%}); {states / 1e6:.1f} MB; {parts}"
        )


if __name__ == "__main__":
    main()
