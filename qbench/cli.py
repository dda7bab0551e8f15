"""The `qbench` command. Exit codes: 0 fine, 1 a check or a cell failed, 2 a wrong call, recipe or file."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from qbench.command import Commands, add_command
from qbench.doctor.report import add_doctor
from qbench.errors import InputError
from qbench.gate.commands import add_accept, add_check, add_power
from qbench.report.commands import add_audit, add_compare, add_table
from qbench.runner.commands import add_plan, add_run

DONE, FAILED, WRONG = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; each has its arguments and its function in one place below."""
    parser = argparse.ArgumentParser(prog="qbench", description="What quantization costs a model, measured and proved.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    table, gate = (add_table, add_compare, add_audit), (add_check, add_accept, add_power)
    for add in (add_plan, add_run, _add_fetch, *table, *gate, add_doctor):
        add(commands)
    options = parser.parse_args(arguments)
    # lm-eval tells of every default it takes.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        return options.run(options)
    except InputError as error:
        print(f"qbench: {error}", file=sys.stderr)
        return WRONG


def _add_fetch(commands: Commands) -> None:
    parser = add_command(
        commands,
        "fetch",
        "download a recipe's checkpoints and datasets into the Hugging Face cache, for nodes without network",
        example="qbench fetch recipes/paper-340m.yaml && HF_HUB_OFFLINE=1 qbench run recipes/paper-340m.yaml",
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a recipe (YAML)")
    parser.set_defaults(run=_fetch)


def _fetch(options: argparse.Namespace) -> int:
    from qbench.recipe.cells import load_recipe
    from qbench.runner.hub import go_offline_if_unreachable

    recipe = load_recipe(options.recipe)
    go_offline_if_unreachable(recipe)
    from qbench.runner.fetch import fetch  # after it, since this imports the hub's library

    missing = 0
    for here, line in fetch(recipe):
        missing += not here
        print(line if here else f"MISSING {line}", flush=True)
    if missing:
        print(f"qbench: {missing} of what {options.recipe} needs is not here.", file=sys.stderr)
    return FAILED if missing else DONE


if __name__ == "__main__":
    sys.exit(main())
