"""Before a long run: load each checkpoint, score a few documents, and quantize one layer with each method."""

import copy
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

from qbench.files import file_name
from qbench.records.audit import UNQUANTIZED
from qbench.runner.cell import (
    Job,
    cell_scorer,
    evaluate_model,
    failure_of,
    load_cell_tasks,
    load_model,
    load_tokenizer,
    page_reference,
    quantized_for_cell,
)
from qbench.runner.child import Child, how_it_died
from qbench.runner.estimate import expected_seconds
from qbench.runner.local import Slot, server_for
from qbench.runner.lock import RunError
from qbench.runner.plan import Plan

if TYPE_CHECKING:
    from lm_eval.api.task import Task

    from qbench.evaluate.scorer import Scorer

PREFLIGHT = "preflight: trying each checkpoint on a few documents, and each method on one layer"
DOCUMENTS = 8  # per task
SHORT_RUN = 10 * 60  # seconds


@dataclass(frozen=True)
class PreflightWork:
    """What a child does for one checkpoint; jobs: one per quantization of it."""

    jobs: Sequence[Job]

    def __call__(self, send: Callable[[str], None]) -> None:
        """Send one sentence for each thing that will not work."""
        first = self.jobs[0]
        try:
            tokenizer = load_tokenizer(first.cell, first.identity)
            model = load_model(first.cell, first.identity)
            lm, tasks = cell_scorer(first.cell, model, tokenizer), load_cell_tasks(first.cell)
            _try_scoring(first, lm, tasks)
        except Exception as error:
            send(_sentence(first.cell.ref.checkpoint, error))
            return
        model.model.layers = model.model.layers[:1]
        model.config.num_hidden_layers = 1
        for job in _one_of_each_kind(self.jobs):
            try:
                quantized_for_cell(job.cell, copy.deepcopy(model), tokenizer)
            except Exception as error:
                send(_sentence(f"{job.cell.ref.checkpoint}, one layer with {job.cell.ref.label}", error))


def preflight(jobs: Sequence[Job], out: Path, slot: Slot, timeout: float) -> None:
    """Try each checkpoint in its own process; the error lists everything that will not work."""
    problems = []
    for name, group in by_checkpoint(jobs).items():
        log = out / f"preflight-{file_name(name)}.log"
        if found := try_checkpoint(group, log, slot, timeout):
            problems += [f"{problem} (log: {log})" for problem in found]
        else:
            log.unlink(missing_ok=True)
    if problems:
        raise failed_preflight(problems)


def is_short(plan: Plan, jobs: Sequence[Job], slots: Sequence[Slot]) -> bool:
    """Whether the run takes only minutes and needs no preflight; without an estimate for all cells it does not."""
    expected = expected_seconds(plan.recipe, plan.tasks, [job.cell for job in jobs], slots[0].threads or 1)
    return len(expected) == len(jobs) and sum(sum(own.values()) for own in expected.values()) / len(slots) < SHORT_RUN


def by_checkpoint(jobs: Sequence[Job]) -> dict[str, list[Job]]:
    """The jobs grouped by checkpoint."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(f"{job.cell.ref.family}-{job.cell.ref.attention}", []).append(job)
    return groups


def try_checkpoint(jobs: Sequence[Job], log: Path, slot: Slot, timeout: float) -> list[str]:
    """Try one checkpoint's jobs in a separate process; returns what will not work."""
    child = Child(server_for(jobs), PreflightWork(jobs), log=log, threads=slot.threads, gpu=slot.gpu)
    name = jobs[0].cell.ref.checkpoint
    try:
        child.start()
        if not wait([child.process.sentinel], timeout):
            return [f"{name}: the preflight took longer than timeout_minutes ({timeout / 60:g})."]
        problems: list[str] = child.messages()
        return problems + ([f"{name}: {how_it_died(code)}"] if (code := child.process.exitcode) else [])
    finally:
        child.end()


def failed_preflight(problems: Sequence[str]) -> RunError:
    """All problems as one error."""
    lines = "\n- ".join(problems)
    return RunError(f"The preflight found problems that would fail the run (--no-preflight skips it):\n- {lines}")


def _try_scoring(job: Job, lm: "Scorer", tasks: "Mapping[str, Task]") -> None:
    """Score a few documents, and compare the model with itself."""
    from qbench.evaluate.divergence import compare

    reference = page_reference(job.cell, lm, tasks, limit=DOCUMENTS)
    lm.wanted = reference.counts if reference else {}
    evaluate_model(job.cell, lm, tasks, job.identity.what.tasks, limit=DOCUMENTS)
    if reference:
        compare(reference, lm.states, lm.model.lm_head)


def _one_of_each_kind(jobs: Sequence[Job]) -> list[Job]:
    """One job per method and set of options: a different width alone would fail the same way."""
    kinds: dict[str, Job] = {}
    for job in jobs:
        what = job.identity.what
        if job.cell.ref.label != UNQUANTIZED:
            kinds.setdefault(json.dumps([what.method, what.options, what.parts], sort_keys=True), job)
    return list(kinds.values())


def _sentence(what: str, error: Exception) -> str:
    logging.getLogger(__name__).error("preflight of %s", what, exc_info=error)
    return f"{what}: {failure_of(error, None).reason[:1000]}"  # more would not fit into the pipe
