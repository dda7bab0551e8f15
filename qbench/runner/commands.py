"""`qbench plan` and `qbench run`."""

import argparse
import os
import sys
from pathlib import Path

from qbench.command import Commands, add_command
from qbench.recipe.cells import Recipe, load_recipe
from qbench.runner.hub import OFFLINE, go_offline_if_unreachable
from qbench.runner.plan import Plan, ignored, plan

INTERRUPTED = 130  # what shells expect after Ctrl-C


def add_plan(commands: Commands) -> None:
    """`qbench plan RECIPE`."""
    parser = add_command(
        commands,
        "plan",
        "the matrix cell by cell: done, failed, to do, not offered by the method; loads no model",
        example="qbench plan recipes/mini.yaml",
    )
    _add_recipe(parser)
    parser.set_defaults(run=_plan)


def add_run(commands: Commands) -> None:
    """`qbench run RECIPE`."""
    parser = add_command(
        commands,
        "run",
        "run every cell of a recipe that has no finished record",
        example="qbench run recipes/mini.yaml --only '*softpick*hqq*'",
    )
    _add_recipe(parser)
    parser.add_argument("--only", metavar="PATTERN", help="cells whose name matches, such as '*softpick*hqq-3*'")
    parser.add_argument(
        "--executor",
        choices=["local", "ray"],
        default="local",
        help="processes here, or a Ray cluster whose nodes have the same installation and paths",
    )
    parser.add_argument("--reuse-stale", action="store_true", help="keep records of older code or packages")
    parser.add_argument("--preflight", action=argparse.BooleanOptionalAction, help="by default unless the run is short")
    parser.add_argument("--json", action="store_true", help="progress as JSON lines")
    parser.set_defaults(run=_run)


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a recipe (YAML)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the records; by default results/runs/<recipe>"
    )
    parser.add_argument(
        "--limit", type=_count, metavar="N", help="only the first N documents of each task: for a trial"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], help="in place of the recipe's")


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be a whole number above 0.")
    return int(text)


def _load(options: argparse.Namespace) -> tuple[Recipe, Path]:
    recipe = load_recipe(options.recipe, limit=options.limit, device=options.device)
    return recipe, options.out or recipe.out()


def _plan(options: argparse.Namespace) -> int:
    os.environ.setdefault(OFFLINE, "1")  # a plan downloads nothing
    recipe, out = _load(options)
    print(render_plan(plan(recipe, out)))
    return 0


def _run(options: argparse.Namespace) -> int:
    recipe, out = _load(options)
    go_offline_if_unreachable(recipe)
    from qbench.runner.matrix import RunOptions, run_matrix  # after it, since this imports the hub's library

    how = RunOptions(options.only, options.reuse_stale, options.executor, options.preflight, options.json)
    try:
        return 0 if run_matrix(recipe, out, how) else 1
    except KeyboardInterrupt:
        print(f"\nStopped. Finished cells are kept in {out}; the same command goes on from there.", file=sys.stderr)
        return INTERRUPTED


def render_plan(planned: Plan) -> str:
    """The plan as a table, what is to be said of its cells, each once, and the total."""
    from tabulate import tabulate

    from qbench.runner.estimate import estimate

    notes = list(dict.fromkeys(entry.note for entry in planned.entries if entry.note))
    rows, work = [], 0.0
    for entry in planned.entries:
        found = estimate(entry.cell, planned) if entry.identity else None
        todo = entry.state in ("to do", "failed", "stale")
        work += found.work if found and todo else 0.0
        memory = f"{found.memory / 2**30:.1f} GiB" if found else ""
        operations = f"{found.work / 1e12:,.2f} TFLOP" if found else ""
        state = f"{entry.state} [{notes.index(entry.note) + 1}]" if entry.note else entry.state
        rows.append([entry.cell.ref.name, state, memory, operations])
    table = tabulate(rows, headers=["cell", "state", "memory", "work"], colalign=("left", "left", "right", "right"))
    documents = ", ".join(f"{name} {facts['documents']:,}" for name, facts in planned.tasks.items()) or "not fetched"
    states = [entry.state for entry in planned.entries]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    lines = [table, "", *(f"[{number}] {note.splitlines()[0]}" for number, note in enumerate(notes, 1))]
    lines += [f"{len(states)} cells: {counts}; {work / 1e12:,.1f} TFLOP to do", f"documents: {documents}"]
    lines += [f"records: {planned.out}", *filter(None, [ignored(planned)])]
    return "\n".join(lines)
