"""A whole run: plan, fetch, preflight, execute what is missing, and print how it went."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qbench.errors import some
from qbench.machine import git_commit, machine
from qbench.numbers import duration
from qbench.recipe.cells import Recipe, cells, load_recipe
from qbench.recipe.check import did_you_mean_folder
from qbench.records.store import ANALYSES, RUN, Results, read_results, remove_unfinished, write_plan
from qbench.runner.cell import Job
from qbench.runner.local import run_local
from qbench.runner.lock import RunError, holding
from qbench.runner.places import make_slots, usable_gpus
from qbench.runner.plan import Plan, PlanEntry, choose, ignored, make_analysis_plan, make_plan
from qbench.runner.preflight import PREFLIGHT, is_short, preflight
from qbench.runner.view import PlainView, view_for


@dataclass(frozen=True)
class RunOptions:
    """How to run, beyond what the recipe says."""

    only: str | None = None
    reuse_stale: bool = False
    executor: str = "local"
    preflight: bool | None = None  # None: unless the run is short
    as_json: bool = False


def run(
    recipe: Path | str,
    out: Path | str | None = None,
    *,
    limit: int | None = None,
    device: str | None = None,
    **how: Any,
) -> Results:
    """Run every cell of a recipe that has no finished record; returns its records. how: as RunOptions."""
    loaded = load_recipe(recipe, limit=limit, device=device)
    folder = Path(out) if out else loaded.out()
    run_matrix(loaded, folder, RunOptions(**how))
    return read_results(folder)


def run_matrix(recipe: Recipe, out: Path, options: RunOptions) -> bool:
    """Run every cell that has no finished record; whether all chosen cells have one now."""
    _check_gpus(recipe, options)
    with _terminable(), holding(out):
        remove_unfinished(out)
        return _run_plan(_fetched_plan(recipe, out, options, make_plan), options, RUN)


def analyze_matrix(recipe: Recipe, out: Path, options: RunOptions) -> bool:
    """Analyze every model that has no finished analysis; whether all chosen ones have one now.

    Once the models are measured, the heads are known in which they differ most: then these are drawn.
    """
    _check_gpus(recipe, options)
    with _terminable(), holding(out):
        remove_unfinished(out)
        plan = _fetched_plan(recipe, out, options, make_analysis_plan)
        done = _run_plan(plan, options, ANALYSES)
        with_maps = make_analysis_plan(recipe, out, reuse_stale=options.reuse_stale)
        known = [entry.cell.ref for entry in plan.entries]
        if any(entry.cell.ref not in known for entry in choose(with_maps.entries, options.only)):
            done = _run_plan(with_maps, options, ANALYSES) and done
        return done


def _check_gpus(recipe: Recipe, options: RunOptions) -> None:
    """Before gigabytes are fetched for nothing: planning downloads datasets that are not here."""
    if options.executor == "local" and recipe.resolved_device == "cuda":
        usable_gpus(recipe)


def _run_plan(plan: Plan, options: RunOptions, file: str) -> bool:
    write_plan(plan.out, plan.to_run_plan(), file)
    chosen = choose(plan.entries, options.only)
    jobs = make_jobs(chosen)
    before = sum(entry.record is not None and entry.state != "failed" for entry in chosen)
    view = view_for([job.name for job in jobs], before=before, as_json=options.as_json)
    view.say(_opening(plan, chosen, jobs))
    for note in dict.fromkeys(entry.checkpoint_note for entry in chosen if entry.checkpoint_note):
        view.say(f"note: {note}")
    try:
        if jobs:
            _execute(plan, jobs, options, view)
    finally:
        remove_unfinished(plan.out)
    _close(view, plan, jobs)
    return not view.failed


def make_jobs(entries: Sequence[PlanEntry]) -> list[Job]:
    """A job for each cell that has no record that counts; failed ones are tried again."""
    commit, here = git_commit(), machine()
    todo = [e for e in entries if e.state in ("to do", "failed") or (e.state == "stale" and e.record is None)]
    return [Job(entry.cell, entry.identity, commit, here) for entry in todo if entry.identity]


def _execute(plan: Plan, jobs: list[Job], options: RunOptions, view: PlainView) -> None:
    timeout = 60 * plan.recipe.timeout_minutes
    if options.executor == "ray":
        from qbench.runner.ray import run_ray

        run_ray(jobs, plan, view, timeout, options.preflight)
        return
    slots = make_slots(plan)
    view.slots = len(slots)
    if options.preflight or (options.preflight is None and not is_short(plan, jobs, slots)):
        view.say(PREFLIGHT)
        preflight(jobs, plan.out, slots[0], timeout)
    with view:
        run_local(jobs, plan.out, slots, view, timeout)


MakePlan = Callable[..., Plan]  # make_plan or make_analysis_plan


def _fetched_plan(recipe: Recipe, out: Path, options: RunOptions, make: MakePlan) -> Plan:
    """The plan, after what it needs is fetched."""
    from qbench.runner.fetch import fetch

    plan = make(recipe, out, reuse_stale=options.reuse_stale)
    if not any(entry.state == "not fetched" for entry in plan.entries):
        return plan
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the run's own lines and events
        missing = [line for here, line in fetch(recipe, to_analyze=plan.analyzes) if not here]
    if missing:
        paths = dict.fromkeys(cell.source.path for cell in cells(recipe))
        missing += [f"{path}:{near}" for path in paths if (near := did_you_mean_folder(path, recipe))]
        raise RunError("Some of what the recipe needs is not on this machine:\n- " + "\n- ".join(missing))
    plan = make(recipe, out, reuse_stale=options.reuse_stale)
    if missing := [entry.note for entry in plan.entries if entry.state == "not fetched"]:
        raise RunError(f"Some of what the recipe needs is not on this machine: {missing[0]}")
    return plan


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM, which is how schedulers and service managers stop a run, stop it as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers in the main thread only
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _opening(plan: Plan, chosen: Sequence[PlanEntry], jobs: Sequence[Job]) -> str:
    counts = {
        state: sum(entry.state == state for entry in chosen) for state in ("done", "stale", "failed", "not offered")
    }
    parts = [f"{len(jobs)} to run", f"{counts['done']} done before"]
    parts += [f"{n} {state}" for state, n in counts.items() if n and state != "done"]
    opening = f"{plan.recipe.file.name}: {len(chosen)} cells ({', '.join(parts)}) into {plan.out}"
    return "; ".join(filter(None, [opening, ignored(plan)]))


def _close(view: PlainView, plan: Plan, jobs: Sequence[Job]) -> None:
    if not jobs:
        view.say("nothing to do")
        return
    out = plan.out
    for note, names in view.notes.items():
        view.say(f"note on {some(names)}: {note}")
    took = duration(time.monotonic() - view.begun)
    done = len(jobs) - view.failed
    view.say(
        f"{done} of {len(jobs)} cells done in {took}"
        + (f", {view.failed} FAILED; run again to retry them" if view.failed else "")
    )
    view.say(f"tables: qbench table {out} --kind {'analysis' if plan.analyzes else 'summary'}")
    view.say(f"as a page: qbench table {out} --format html --out {out / 'report.html'}")
