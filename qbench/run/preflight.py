"""Before the hours start: each checkpoint loaded, scored on a few documents, one layer quantized by each method."""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qbench.run.cell import Job, evaluate_model, failure_of, load_model, load_tokenizer, quantize_model
from qbench.run.child import Child, fork_server
from qbench.run.local import RunError, Slot

DOCUMENTS = 8  # of each task


@dataclass(frozen=True)
class PreflightWork:
    """What a child does for one checkpoint; jobs: those of all its quantizations."""

    jobs: Sequence[Job]

    def __call__(self, send: Any) -> None:
        """Send a sentence for each thing that will not work."""
        first = self.jobs[0]
        try:
            model, tokenizer = load_model(first.cell, first.identity), load_tokenizer(first.cell, first.identity)
            if (first.cell.ref.method, first.cell.ref.bits) != ("bnb", 8):
                evaluate_model(first.cell, model, tokenizer, first.identity.what["tasks"], limit=DOCUMENTS)
        except Exception as error:
            logging.getLogger(__name__).exception("preflight of %s", first.cell.ref.checkpoint)
            send(f"{first.cell.ref.checkpoint}: {failure_of(error, None).reason}")
            return
        model.model.layers = model.model.layers[:1]
        model.config.num_hidden_layers = 1
        methods = {job.cell.ref.method: job for job in self.jobs if job.cell.ref.method != "none"}
        for method, job in methods.items():
            try:
                quantize_model(job.cell, copy.deepcopy(model), tokenizer)
            except Exception as error:
                logging.getLogger(__name__).exception("preflight of %s", job.name)
                send(f"{job.cell.ref.checkpoint}, one layer by {method}: {failure_of(error, None).reason}")


def preflight(jobs: Sequence[Job], out: Path, slot: Slot) -> None:
    """Try each checkpoint in a process of its own; an error tells all that will not work."""
    context = fork_server({job.cell.ref.method for job in jobs})
    by_checkpoint: dict[tuple[str, str], list[Job]] = {}
    for job in jobs:
        by_checkpoint.setdefault((job.cell.ref.family, job.cell.ref.attention), []).append(job)
    problems = []
    log = out / ".preflight.log"
    for group in by_checkpoint.values():
        child = Child(context, PreflightWork(group), log=log, threads=slot.threads, gpu=slot.gpu)
        try:
            child.process.join()
        finally:
            child.kill()
        problems += child.messages()
        if child.process.exitcode:
            problems.append(f"{group[0].cell.ref.checkpoint}: {child.how_it_died()}")
    if problems:
        lines = "\n- ".join(problems)
        raise RunError(
            f"The preflight found what would fail later (its log: {log}; --no-preflight goes on anyway):\n- {lines}"
        )
    log.unlink(missing_ok=True)
