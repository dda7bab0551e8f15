"""What all commands share: exit codes, and how a command is added.

Each command imports what it needs when it runs: a table must not wait for torch.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qbench.errors import InputError
from qbench.files import write_atomically
from qbench.output import print_styled

DONE, FAILED, WRONG, CRASHED, INTERRUPTED = 0, 1, 2, 3, 130
RECORDS = "a folder of records, as written by `qbench run`"
RESULTS = f"{RECORDS}, or published numbers: a CSV file or a folder of CSV files"

Commands = Any  # argparse's subparsers; their type is private


def add(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], purpose: str, example: str
) -> argparse.ArgumentParser:
    """Add a command; its help shows its purpose and an example."""
    parser = commands.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def count(text: str) -> int:
    """The type of an option that is a number of things."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def write(text: str, file: Path | None, format: str) -> None:
    """Write a text to a file and confirm it, or show it; a table for the terminal has styles."""
    if file is None:
        print_styled(text) if format == "terminal" else sys.stdout.write(text)
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)
    except OSError as error:
        raise InputError(f"{file} cannot be written ({error.strerror or error}).") from None
    print(f"{file} written ({format})", file=sys.stderr)  # as with plots, standard output is for results
