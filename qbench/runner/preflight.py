"""Before a long run: load each checkpoint, score a few documents, and quantize one layer with each method."""

import copy
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.files import file_name
from qbench.records.audit import UNQUANTIZED
from qbench.runner.cell import (
    Job,
    cell_scorer,
    failure_of,
    load_cell_tasks,
    load_model,
    load_tokenizer,
    page_reference,
    planned_tasks,
    quantized_for_cell,
)
from qbench.runner.child import Child, how_it_died
from qbench.runner.estimate import expected_seconds, preflight_seconds
from qbench.runner.local import TICK, Slot, server_for
from qbench.runner.lock import RunError
from qbench.runner.plan import Plan
from qbench.runner.speed import Speed

if TYPE_CHECKING:
    from lm_eval.api.task import Task

    from qbench.evaluate.scorer import Scorer

PREFLIGHT = "preflight: trying each checkpoint on a few documents, and each method on one layer"
DOCUMENTS = 8  # per task
LOOKED_AT = 200  # documents of a task of which the shortest are taken: eight whole pages of wikitext have 30,000 tokens
CHARACTERS = 8000  # of a task's documents, unless one alone is longer
SHORT_RUN = 10 * 60  # seconds


OnStep = Callable[[int, int, str], None]  # the steps that are done, how many there are, and what is being tried


def unwatched(done: int, steps: int, trying: str) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class PreflightWork:
    """What a child does for one checkpoint; jobs: one per quantization of it."""

    jobs: Sequence[Job]

    def __call__(self, send: Callable[[int | str], None]) -> None:
        """Send the number of each step as it begins, and one sentence for each thing that will not work."""
        first = self.jobs[0]
        try:
            send(0)
            tokenizer = load_tokenizer(first.cell, first.identity)
            model = load_model(first.cell, first.identity)
            lm, tasks = cell_scorer(first.cell, model, tokenizer), load_cell_tasks(first.cell)
            send(1)
            _try_scoring(first, lm, tasks)
        except Exception as error:
            send(_sentence(first.cell.ref.checkpoint, error))
            return
        model.model.layers = model.model.layers[:1]
        model.config.num_hidden_layers = 1
        for step, job in enumerate(one_of_each_kind(self.jobs), 2):
            try:
                send(step)
                quantized_for_cell(job.cell, copy.deepcopy(model), tokenizer)
            except Exception as error:
                send(_sentence(f"{job.cell.ref.checkpoint}, one layer with {job.cell.ref.label}", error))


def steps_of(jobs: Sequence[Job]) -> list[str]:
    """What is tried of one checkpoint, in the order of PreflightWork; short, to fit beside a bar."""
    name = f"{jobs[0].cell.ref.family}-{jobs[0].cell.variant}"
    methods = [f"{name}: {job.cell.ref.label}" for job in one_of_each_kind(jobs)]
    return [f"{name}: loading", f"{name}: scoring", *methods]


def preflight(jobs: Sequence[Job], out: Path, slot: Slot, timeout: float, on_step: OnStep = unwatched) -> None:
    """Try each checkpoint in its own process; the error lists everything that will not work.

    on_step: called at least every TICK seconds.
    """
    problems = []
    groups = by_checkpoint(jobs)
    steps = sum(len(steps_of(group)) for group in groups.values())
    before = 0
    for name, group in groups.items():
        log = out / f"preflight-{file_name(name)}.log"

        def on_own_step(done: int, own: int, trying: str, before: int = before) -> None:
            on_step(before + done, steps, trying)

        found = try_checkpoint(group, log, slot, timeout, on_own_step)
        before += len(steps_of(group))
        if found:
            problems += [f"{problem} (log: {log})" for problem in found]
        else:
            log.unlink(missing_ok=True)
    if problems:
        raise failed_preflight(problems)


def is_short(plan: Plan, jobs: Sequence[Job], slots: Sequence[Slot]) -> bool:
    """Whether the run takes only minutes and needs no preflight; without an estimate for all cells it does not."""
    expected = expected_seconds(plan.recipe, plan.tasks, [job.cell for job in jobs], slots[0].threads or 1)
    return len(expected) == len(jobs) and sum(sum(own.values()) for own in expected.values()) / len(slots) < SHORT_RUN


def expected_preflight(plan: Plan, jobs: Sequence[Job], speed: Speed) -> float:
    """The estimated seconds of a preflight of these jobs."""
    return sum(
        preflight_seconds(
            [job.cell for job in group],
            [job.cell for job in one_of_each_kind(group)],
            plan.tasks,
            speed,
            CHARACTERS,
        )
        for group in by_checkpoint(jobs).values()
    )


def by_checkpoint(jobs: Sequence[Job]) -> dict[str, list[Job]]:
    """The jobs grouped by checkpoint."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(f"{job.cell.ref.family}-{job.cell.variant}", []).append(job)
    return groups


def try_checkpoint(
    jobs: Sequence[Job], log: Path, slot: Slot, timeout: float, on_step: OnStep = unwatched
) -> list[str]:
    """Try one checkpoint's jobs in a separate process; returns what will not work."""
    child = Child(server_for(jobs), PreflightWork(jobs), log=log, threads=slot.threads, gpu=slot.gpu)
    name, steps, step = jobs[0].cell.ref.checkpoint, steps_of(jobs), 0
    problems: list[str] = []
    deadline = time.monotonic() + timeout
    try:
        on_step(step, len(steps), steps[step])
        child.start()
        while True:
            ended = child.ended  # checked before its last messages are read
            messages = child.messages()
            problems += [message for message in messages if isinstance(message, str)]
            step = max([step, *(message for message in messages if isinstance(message, int))])
            on_step(step, len(steps), steps[step])
            if ended:
                return problems + ([f"{name}: {how_it_died(code)}"] if (code := child.process.exitcode) else [])
            if time.monotonic() > deadline:
                late = f"{name}: the preflight took longer than timeout_minutes ({timeout / 60:g}): {steps[step]}."
                return [*problems, late]
            # Not on its pipe too: a child that has closed it would be waited for without a pause.
            wait([child.process.sentinel], TICK)
    finally:
        child.end()


def failed_preflight(problems: Sequence[str]) -> RunError:
    """All problems as one error."""
    lines = "\n- ".join(problems)
    return RunError(f"The preflight found problems that would fail the run (--no-preflight skips it):\n- {lines}")


def _try_scoring(job: Job, lm: "Scorer", tasks: "Mapping[str, Task]") -> None:
    """Score a few documents, and compare the model with itself."""
    from qbench.evaluate.divergence import compare
    from qbench.evaluate.evaluation import evaluate

    recipe = job.cell.recipe
    planned = planned_tasks(job.cell, lm, tasks, job.identity.what.tasks, limit=1)
    limits = recipe.limits(planned)
    few = {name: with_few_documents(task, limits.get(name)) for name, task in planned.items()}
    reference = page_reference(job.cell, lm, few)
    lm.wanted = reference.counts if reference else {}
    evaluate(lm, few, seed=recipe.seed)
    if reference:
        compare(reference, lm.states, lm.model.lm_head)


def with_few_documents(task: "Task", limit: int | None = None) -> "Task":
    """The same task with a few of its shortest documents. limit: how many it has."""
    documents = list(islice(task.eval_docs, min(LOOKED_AT, limit or LOOKED_AT)))
    sizes = [len(json.dumps(document, default=str)) for document in documents]
    chosen: list[int] = []
    for number in sorted(range(len(documents)), key=sizes.__getitem__)[:DOCUMENTS]:
        if not chosen or sum(sizes[n] for n in (*chosen, number)) <= CHARACTERS:
            chosen.append(number)

    def iterate(**_: Any) -> Iterator[tuple[int, Any]]:
        return iter([(number, documents[number]) for number in sorted(chosen)])

    few = copy.copy(task)
    few.doc_iterator = iterate
    return few


def one_of_each_kind(jobs: Sequence[Job]) -> list[Job]:
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
