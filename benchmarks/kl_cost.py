"""What KL adds to a cell: the CPU time of each part of a cell in turn, smallest of several runs; and memory.

    python benchmarks/kl_cost.py RECIPE [LABEL …] [--times N]

Whole cells with and without KL would differ by less than their noise. The first cell of a checkpoint runs the
unquantized model over the pages; the other cells read the states that it kept.
"""

import argparse
import logging
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from qbench.evaluate.divergence import compare, keep_reference, pages, with_kl
from qbench.evaluate.state_cache import StateCache
from qbench.recipe.cells import Cell, cells, load_recipe
from qbench.runner.cell import (
    cell_scorer,
    evaluate_model,
    load_cell_tasks,
    load_model,
    load_tokenizer,
    quantized_for_cell,
)

FIRST = "kl: states computed"  # by the first cell of a checkpoint
LATER = "kl: states read"  # by its other cells

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
    with tempfile.TemporaryDirectory() as folder:
        for part in (FIRST, LATER):
            cache = StateCache(Path(folder), "")
            reference = timed(times, part, lambda cache=cache: keep_reference(first, requests, cache=cache))
            cache.save()
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
        rest = sum(own for part, own in least.items() if not part.startswith("kl"))
        both = sum(own for part, own in least.items() if part.startswith("kl"))
        shares = ", ".join(
            f"{name} {both - least[other]:.2f} s ({(both - least[other]) / rest:+.1%})"
            for name, other in (("first", LATER), ("later", FIRST))
        )
        parts = ", ".join(f"{part} {own:.2f}" for part, own in least.items())
        print(f"{cell.ref.name}: {rest:.2f} s without KL; added: {shares}; {states / 1e6:.1f} MB; {parts}", flush=True)


if __name__ == "__main__":
    main()
