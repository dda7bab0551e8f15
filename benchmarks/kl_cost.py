"""What KL adds to a cell: CPU time with and without it, in turns, and the memory of the states that are kept.

python benchmarks/kl_cost.py RECIPE [LABEL …] [--times N]
"""

import argparse
import logging
import time
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

from qbench.evaluate import divergence
from qbench.recipe.cells import cells, load_recipe
from qbench.records.schema import Record
from qbench.runner.cell import Job, run_cell


def seconds(job: Job, with_kl: bool) -> tuple[float, Record]:
    """CPU seconds of one run of a cell in this process, and its record."""
    without = patch.object(divergence, "pages", lambda *_: [])
    start = time.process_time()
    if with_kl:
        record, _ = run_cell(job)
    else:
        with without:
            record, _ = run_cell(job)
    assert record.state == "done", record.failure
    return time.process_time() - start, record


def main() -> None:
    """Print one line per cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("labels", nargs="*")
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    kept: list[int] = []
    keep = divergence.keep_reference
    divergence.keep_reference = lambda *given: kept.append((found := keep(*given)).bytes) or found
    for cell in cells(load_recipe(options.recipe)):
        if cell.ref.measured or (options.labels and cell.ref.label not in options.labels):
            continue
        job = Job(cell, cell.identity(), None)
        seconds(job, with_kl=True)  # imports, caches
        pairs = [(seconds(job, with_kl=False)[0], seconds(job, with_kl=True)) for _ in range(options.times)]
        without, both = median(a for a, _ in pairs), median(b for _, (b, _) in pairs)
        added = median(b / a - 1 for a, (b, _) in pairs)
        record = pairs[-1][1][1]
        tokens = sum(own.tokens for own in record.divergences)
        print(
            f"{cell.ref.name}: {without:.2f} s without, {both:.2f} s with KL ({added:+.1%}); "
            f"{tokens} tokens, {kept[-1] / 1e6:.1f} MB of states for each of the two models",
            flush=True,
        )


if __name__ == "__main__":
    main()
