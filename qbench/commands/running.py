"""`qbench init`, `plan`, `run`, `analyze` and `fetch`."""

import argparse
import os
import shlex
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from qbench.commands.common import DONE, FAILED, INTERRUPTED, Commands, add, count, write
from qbench.errors import InputError
from qbench.numbers import counted

if TYPE_CHECKING:
    from qbench.recipe.schema import Recipe


def add_init(commands: Commands) -> None:
    purpose = "write a starter recipe with two small models and five tasks; it needs no GPU and no network"
    example = "qbench init && qbench run recipes/mine.yaml --limit 20"
    parser = add(commands, "init", _init, purpose, example)
    parser.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        nargs="?",
        default=Path("recipes"),
        help="where to write mine.yaml, mini.yaml and mini/; default: recipes",
    )


def add_plan(commands: Commands) -> None:
    purpose = "list the cells with their state (done, failed, to do, …) and estimated time, without loading a model"
    _add_recipe(add(commands, "plan", _plan, purpose, "qbench plan recipes/mini.yaml"))


def add_run(commands: Commands) -> None:
    purpose = "run every cell of a recipe that has no finished record"
    parser = add(commands, "run", _run, purpose, "qbench run recipes/mini.yaml --only '*softpick*hqq*'")
    _add_recipe(parser)
    _add_running(parser, "'*softpick*hqq-3*'")
    parser.add_argument(
        "--preflight",
        action=argparse.BooleanOptionalAction,
        help="first try each checkpoint on a few documents, and each method on one layer; default: only for long runs",
    )


def add_analyze(commands: Commands) -> None:
    purpose = (
        "measure what may explain the damage to each checkpoint of a recipe: attention sinks, massive activations, "
        "sparsity, dead heads, attention maps, and the sensitivity of each layer"
    )
    example = "qbench analyze recipes/mini.yaml && qbench table results/runs/mini --kind analysis --plots figures"
    parser = add(commands, "analyze", _analyze, purpose, example)
    _add_recipe(parser, limited="texts")
    _add_running(parser, "'*softpick*analysis'")


def _add_running(parser: argparse.ArgumentParser, pattern: str) -> None:
    parser.add_argument("--only", metavar="PATTERN", help=f"only cells whose name matches, such as {pattern}")
    parser.add_argument(
        "--executor",
        choices=["local", "ray"],
        default="local",
        help="local: processes on this machine; ray: a Ray cluster whose nodes have the same installation and paths",
    )
    parser.add_argument(
        "--reuse-stale",
        action="store_true",
        help="keep records made by older code or packages instead of rerunning their cells",
    )
    parser.add_argument("--json", action="store_true", help="print progress as JSON lines")


def add_fetch(commands: Commands) -> None:
    purpose = (
        "download a recipe's checkpoints and datasets into the Hugging Face cache, so that the run needs no network"
    )
    example = "qbench fetch recipes/mini.yaml && HF_HUB_OFFLINE=1 qbench run recipes/mini.yaml"
    parser = add(commands, "fetch", _fetch, purpose, example)
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a recipe (YAML)")
    _add_trust(parser)


def _add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-task-code",
        action="store_true",
        default=None,
        help="run the Python functions that the recipe's own task files name (`!function`)",
    )


def _add_recipe(parser: argparse.ArgumentParser, limited: str = "documents of each task") -> None:
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a recipe (YAML)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for the records; default: results/runs/<recipe>"
    )
    parser.add_argument("--limit", type=count, metavar="N", help=f"use only the first N {limited}, for a trial")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], help="override the recipe's device")
    _add_trust(parser)


def _load(options: argparse.Namespace) -> "tuple[Recipe, Path]":
    from qbench.recipe.cells import load_recipe

    recipe = load_recipe(
        options.recipe, limit=options.limit, device=options.device, trust_task_code=options.trust_task_code
    )
    return recipe, options.out or recipe.out()


def _init(options: argparse.Namespace) -> int:
    from qbench.recipe.starter import write_starter

    mine, mini = write_starter(options.folder)
    print(f"{mine}: a recipe to start from. Try it: qbench run {shlex.quote(str(mine))} --limit 20")
    print(f"{mini}: softpick against softmax with three quantizers; takes about two minutes on 2 cores")
    return DONE


def _plan(options: argparse.Namespace) -> int:
    from qbench.runner.hub import OFFLINE_VARIABLES
    from qbench.runner.plan import make_plan
    from qbench.runner.plan_table import render_plan

    for name in OFFLINE_VARIABLES:  # a plan downloads nothing
        os.environ.setdefault(name, "1")
    from qbench.report.render import default_format

    recipe, out = _load(options)
    format = default_format()
    plan = make_plan(recipe, out)
    write(render_plan(plan, format), None, format)
    if ruled_out := [entry for entry in plan.entries if entry.state == "cannot run"]:
        cells = counted(len(plan.entries), "cell")
        raise InputError(f"{len(ruled_out)} of {cells} cannot run; the plan says why.")
    return DONE


def _run(options: argparse.Namespace) -> int:
    return _execute(options, "run_matrix", preflight=options.preflight)


def _analyze(options: argparse.Namespace) -> int:
    return _execute(options, "analyze_matrix", preflight=False)


def _execute(options: argparse.Namespace, what: str, preflight: bool | None) -> int:
    from qbench.runner.hub import go_offline_if_unreachable

    recipe, out = _load(options)
    go_offline_if_unreachable(recipe, to_analyze=what == "analyze_matrix")
    from qbench.runner import matrix  # after it, since this imports huggingface_hub

    how = matrix.RunOptions(options.only, options.reuse_stale, options.executor, preflight, options.json)
    try:
        return DONE if getattr(matrix, what)(recipe, out, how) else FAILED
    except KeyboardInterrupt:
        print(f"\nStopped. Finished cells are kept in {out}; run the same command to continue.", file=sys.stderr)
        return INTERRUPTED


def _fetch(options: argparse.Namespace) -> int:
    from qbench.recipe.cells import load_recipe
    from qbench.runner.hub import go_offline_if_unreachable

    recipe = load_recipe(options.recipe, trust_task_code=options.trust_task_code)
    go_offline_if_unreachable(recipe)
    from qbench.runner.fetch import fetch  # after it, since this imports huggingface_hub

    missing, seen = 0, set[str]()
    found = [fetch(recipe), *([fetch(recipe, to_analyze=True)] if "analysis" in recipe.model_fields_set else [])]
    for here, line in chain(*found):  # each as soon as it is fetched
        if line not in seen:
            missing += not here
            print(line if here else f"MISSING {line}", flush=True)
            seen.add(line)
    if missing:
        print(f"qbench: {missing} of the files and datasets that {options.recipe} needs are missing.", file=sys.stderr)
    return FAILED if missing else DONE
