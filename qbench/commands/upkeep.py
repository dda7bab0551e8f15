"""`qbench runs` and `doctor`."""

import argparse
from pathlib import Path

from qbench.commands.common import DONE, FAILED, RECORDS, Commands, add, write


def add_runs(commands: Commands) -> None:
    purpose = "list the records of a folder with their age and size; --prune removes those that newer ones replaced"
    parser = add(commands, "runs", _runs, purpose, "qbench runs results/runs/mini --prune")
    parser.add_argument("folder", type=Path, metavar="DIR", help=RECORDS)
    prune = "remove superseded records (newer ones replaced them) without confirmation, and list them"
    parser.add_argument("--prune", action="store_true", help=prune)


def _runs(options: argparse.Namespace) -> int:
    from qbench.report.render import FOR_PEOPLE, default_format
    from qbench.runner.old_records import kept_records, prune, records_table

    if options.prune:
        for line in prune(options.folder):
            print(line)
        return DONE
    format = default_format()
    write(FOR_PEOPLE[format]([records_table(options.folder, kept_records(options.folder))]), None, format)
    return DONE


def add_doctor(commands: Commands) -> None:
    purpose = "show what this machine has, what it can run, and why it cannot run the rest"
    parser = add(commands, "doctor", _doctor, purpose, "qbench doctor --checks\n  qbench doctor recipes/mini.yaml")
    parser.add_argument("recipe", type=Path, nargs="?", metavar="RECIPE", help="check only what this recipe uses")
    parser.add_argument(
        "--checks",
        action=argparse.BooleanOptionalAction,
        help="try each kernel and each quantizer on a small case; default: only if there is a GPU",
    )
    parser.add_argument("--packages", action="store_true", help="list all packages, not just mismatched ones")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--report",
        action="store_true",
        help="write checks, tracebacks and timings to qbench-doctor.md, a file that you can send to others",
    )


def _doctor(options: argparse.Namespace) -> int:
    from qbench.doctor.report import doctor
    from qbench.recipe.cells import load_recipe

    works = doctor(
        options.checks,
        load_recipe(options.recipe) if options.recipe else None,
        all_packages=options.packages,
        as_json=options.json,
        report_wanted=options.report,
    )
    return DONE if works else FAILED
