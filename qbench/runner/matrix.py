"""A whole run: plan, fetch, preflight, run what is missing, and print the outcome."""

import contextlib
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from qbench.errors import some
from qbench.machine import git_commit, machine
from qbench.numbers import counted, duration
from qbench.recipe.cells import Recipe, cells, load_recipe
from qbench.recipe.check import did_you_mean_folder
from qbench.records.schema import Failure, Record
from qbench.records.store import (
    ANALYSES,
    RUN,
    Results,
    cell_folder,
    read_results,
    remove_unfinished,
    write_plan,
    write_record,
)
from qbench.report.delta import ReportData, read_report
from qbench.report.looks import PAGE
from qbench.report.notebook import Pictures, Tables, frame_of, pictures_of
from qbench.report.render import render
from qbench.runner.cell import Job, now
from qbench.runner.estimate import expected_seconds
from qbench.runner.local import run_local
from qbench.runner.lock import RunError, holding
from qbench.runner.places import make_slots, usable_gpus
from qbench.runner.plan import Plan, PlanEntry, choose, ignored, make_analysis_plan, make_plan, no_baseline, settings
from qbench.runner.preflight import PREFLIGHT, is_short, preflight
from qbench.runner.view import PlainView, view_for

if TYPE_CHECKING:
    import pandas as pd


EXECUTORS = ("local", "ray")


@dataclass(frozen=True)
class RunOptions:
    """How to run; what to run is in the recipe."""

    only: str | None = None
    reuse_stale: bool = False
    executor: str = "local"
    preflight: bool | None = None  # None: unless the run is short
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.executor not in EXECUTORS:
            raise RunError(f"executor is {self.executor!r}; it must be one of {', '.join(EXECUTORS)}.")


@dataclass(frozen=True)
class Run(Results):
    """The records of a run, with their tables and plots."""

    @cached_property
    def report(self) -> ReportData:
        """The records as tables read them."""
        return read_report(self.folder)

    def to_frame(self, kind: str | None = None) -> "pd.DataFrame":
        """The numbers of a kind of table, unrounded; by default delta."""
        return frame_of(self.report, kind)

    def table(self, kind: str = "summary", format: str = "md") -> Tables:
        """The tables of a kind."""
        return Tables.of(render(self.report, format, kind), self.report, format, kind)

    def figures(self, width: float | str = PAGE) -> Pictures:
        """All plots. width: inches, "column" or "page" (of a paper)."""
        return pictures_of(self.report, width)

    def __repr__(self) -> str:
        """How much there is, and where."""
        done = sum(stored.record.state == "done" for stored in self.current)
        return f"Run({done} of {counted(len(self.current) + len(self.missing), 'cell')} finished in {self.folder})"

    def _repr_markdown_(self) -> str:
        return f"{self.table()}"


def run(
    recipe: Path | str,
    out: Path | str | None = None,
    *,
    limit: int | None = None,
    device: str | None = None,
    trust_task_code: bool | None = None,
    only: str | None = RunOptions.only,
    executor: str = RunOptions.executor,
    reuse_stale: bool = RunOptions.reuse_stale,
    preflight: bool | None = RunOptions.preflight,
) -> Run:
    """Run every cell of a recipe that has no finished record, and return all records, with their tables and plots.

        done = run("recipes/mini.yaml", only="*hqq-3*")

    The arguments are the options of `qbench run`.
    """
    loaded = load_recipe(recipe, limit=limit, device=device, trust_task_code=trust_task_code)
    folder = Path(out) if out else loaded.out()
    run_matrix(loaded, folder, RunOptions(only, reuse_stale, executor, preflight))
    found = read_results(folder)
    return Run(**{field.name: getattr(found, field.name) for field in fields(found)})


def run_matrix(recipe: Recipe, out: Path, options: RunOptions) -> bool:
    """Run every cell that has no finished record. Returns whether all chosen cells have one now."""
    _check_gpus(recipe, options)
    with _terminable(), holding(out):
        remove_unfinished(out)
        plan = fetched_plan(recipe, out, options, make_plan)
        return _close(plan, [_run_plan(plan, options, RUN)])


def analyze_matrix(recipe: Recipe, out: Path, options: RunOptions) -> bool:
    """Analyze every model that has no finished analysis. Returns whether all chosen ones have one now.

    The heads to draw are known only after the models are measured, so maps are a second plan.
    """
    _check_gpus(recipe, options)
    with _terminable(), holding(out):
        remove_unfinished(out)
        plan = fetched_plan(recipe, out, options, make_analysis_plan)
        views = [_run_plan(plan, options, ANALYSES)]
        with_maps = make_analysis_plan(recipe, out, reuse_stale=options.reuse_stale)
        known = [entry.cell.ref for entry in plan.entries]
        if any(entry.cell.ref not in known for entry in choose(with_maps.entries, options.only)):
            views.append(_run_plan(with_maps, options, ANALYSES, tried=views[0].cells))
        return _close(plan, views)


def _check_gpus(recipe: Recipe, options: RunOptions) -> None:
    """Checked before planning, which may download gigabytes."""
    if options.executor == "local" and recipe.resolved_device == "cuda":
        usable_gpus(recipe)


def _run_plan(plan: Plan, options: RunOptions, file: str, tried: Collection[str] = ()) -> PlainView:
    """Run the chosen cells that need it; the view has counted how they ended. tried: names of cells to leave alone."""
    write_plan(plan.out, plan.to_run_plan(), file)
    chosen = choose(plan.entries, options.only)
    new = [entry for entry in chosen if entry.cell.ref.name not in tried]
    jobs, ruled_out = make_jobs(new), [entry for entry in new if entry.state == "cannot run"]
    before = len(chosen) - len(new) + sum(entry.record is not None and entry.state != "failed" for entry in new)
    names = [entry.cell.ref.name for entry in ruled_out] + [job.name for job in jobs]
    expected = expected_seconds(plan.recipe, plan.tasks, [job.cell for job in jobs])
    view = view_for(names, before=before, expected=expected, as_json=options.as_json)
    for line in (opening(plan, chosen, jobs), *settings(plan)):
        view.say(line)
    if warning := no_baseline(plan):
        view.say(warning)
    for note in dict.fromkeys(entry.doubt for entry in chosen if entry.doubt):
        view.say(f"note: {note}")
    _fail_at_once(ruled_out, plan.out, view)
    try:
        if jobs:
            _execute(plan, jobs, options, view)
    finally:
        remove_unfinished(plan.out)
    return view


def make_jobs(entries: Sequence[PlanEntry]) -> list[Job]:
    """One job per cell without a valid record; failed cells are tried again."""
    return _jobs(e for e in entries if e.state in ("to do", "failed") or (e.state == "stale" and e.record is None))


def _jobs(entries: Iterable[PlanEntry]) -> list[Job]:
    commit, here = git_commit(), machine()
    return [Job(entry.cell, entry.identity, commit, here) for entry in entries if entry.identity]


def _fail_at_once(entries: Sequence[PlanEntry], out: Path, view: PlainView) -> None:
    """Write a failed record for each cell that its config rules out, without loading anything."""
    by_reason: dict[str, dict[str, Record]] = {}
    for entry, job in zip(entries, _jobs(entries), strict=True):
        record = job.failed(now(), Failure(kind="error", reason=entry.note))
        write_record(cell_folder(out, record.cell, record.key), record)
        by_reason.setdefault(entry.note, {})[job.name] = record
    for reason, records in by_reason.items():
        view.ruled_out(reason, records)


def _execute(plan: Plan, jobs: list[Job], options: RunOptions, view: PlainView) -> None:
    timeout = 60 * plan.recipe.timeout_minutes
    if options.executor == "ray":
        from qbench.runner.ray import run_ray

        run_ray(jobs, plan, view, timeout, options.preflight)
        return
    slots = make_slots(plan)
    view.slots = len(slots)
    with view:
        if options.preflight or (options.preflight is None and not is_short(plan, jobs, slots)):
            view.preflight(PREFLIGHT)
            preflight(jobs, plan.out, slots[0], timeout, view.trying)
            view.tried()
        run_local(jobs, plan.out, slots, view, timeout)


MakePlan = Callable[..., Plan]  # make_plan or make_analysis_plan


def fetched_plan(recipe: Recipe, out: Path, options: RunOptions, make: MakePlan) -> Plan:
    """Fetch what the recipe needs, and return the plan."""
    from qbench.runner.fetch import fetch

    plan = make(recipe, out, reuse_stale=options.reuse_stale)
    if incomplete := [entry.note for entry in plan.entries if entry.state == "cannot run" and entry.identity is None]:
        raise RunError(incomplete[0])
    if not any(entry.state == "not fetched" for entry in choose(plan.entries, options.only)):
        return plan
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the run's lines and events
        missing = [line for here, line in fetch(recipe, to_analyze=plan.analyzes) if not here]
    if missing:
        paths = dict.fromkeys(cell.source.path for cell in cells(recipe))
        missing += [f"{path}:{near}" for path in paths if (near := did_you_mean_folder(path, recipe))]
        raise RunError("The recipe needs files that are not on this machine:\n- " + "\n- ".join(missing))
    plan = make(recipe, out, reuse_stale=options.reuse_stale)
    if missing := [entry.note for entry in choose(plan.entries, options.only) if entry.state == "not fetched"]:
        raise RunError(f"The recipe needs files that are not on this machine: {missing[0]}")
    return plan


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Treat SIGTERM, which schedulers and service managers send, like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers in the main thread only
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def opening(plan: Plan, chosen: Sequence[PlanEntry], jobs: Sequence[Job]) -> str:
    """The first line of a run: how many cells it has, and how many of them it will run."""
    counts = {
        state: sum(entry.state == state for entry in chosen)
        for state in ("done", "stale", "failed", "cannot run", "not offered")
    }
    parts = [f"{len(jobs)} to run", f"{counts['done']} already done"]
    parts += [f"{n} {state}" for state, n in counts.items() if n and state != "done"]
    line = f"{plan.recipe.file.name}: {counted(len(chosen), 'cell')} ({', '.join(parts)}); records go to {plan.out}"
    return "; ".join(filter(None, [line, ignored(plan)]))


def _close(plan: Plan, views: Sequence[PlainView]) -> bool:
    """Print how a run of one or more plans went, once. Returns whether no cell failed."""
    say, out = views[-1].say, plan.out
    say_command = views[-1].say_command
    total, failed, by_chance = (sum(getattr(view, name) for view in views) for name in ("total", "failed", "by_chance"))
    if not total:
        say("nothing to do")
        return True
    for view in views:
        for note, names in view.notes.items():
            say(f"note on {some(names)}: {note}")
    took = duration(time.monotonic() - views[0].begun)
    retry = f", {failed} FAILED" + ("; run again to retry" if by_chance else "") if failed else ""
    say(f"{total - failed} of {counted(total, 'cell')} done in {took}{retry}")
    if failed == total and not any(stored.record.state == "done" for stored in read_results(out).current):
        return False  # there is nothing to show
    folder, page = shlex.quote(str(out)), shlex.quote(str(out / "report.html"))
    say_command(f"tables: qbench table {folder} --kind {'analysis' if plan.analyzes else 'summary'}")
    say_command(f"as a page: qbench table {folder} --format html --out {page}")
    return not failed
