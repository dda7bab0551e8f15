"""What GitHub's runners show of a command: annotations, and the step's summary."""

import os
import sys
from collections.abc import Iterable
from typing import TextIO

from qbench.output import runner_command

SUMMARY = "GITHUB_STEP_SUMMARY"  # on a runner, this holds the path of a file


def annotation(level: str, title: str, message: str) -> str:
    """A line that a runner shows as an annotation. level: error or warning."""
    return f"::{level} title={_escaped(title).replace(':', '%3A').replace(',', '%2C')}::{_escaped(message)}"


def annotate(lines: Iterable[str], stream: TextIO | None = None) -> None:
    """Print annotations if a runner reads them. stream: default standard output; runners read both."""
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in lines:
            runner_command(line, stream or sys.stdout)


def add_to_summary(markdown: str) -> None:
    """Add a text to the step's summary if there is one."""
    if file := os.environ.get(SUMMARY):
        try:
            with open(file, "a", encoding="utf-8") as out:
                out.write(markdown)
        except OSError as error:
            print(f"qbench: {file}: the step's summary cannot be written ({error.strerror}).", file=sys.stderr)


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
