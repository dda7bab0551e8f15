"""argparse whose errors suggest the name that was probably meant."""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from qbench.errors import InputError, did_you_mean
from qbench.github import annotate, annotation

INVALID_CHOICE = re.compile(r"invalid choice: '(?P<given>.*)' \(choose from (?P<known>.*)\)$")
MISSING = re.compile(r"one of the arguments (.*) is required$")
FEW = 4  # choices; below that a guess misleads: `--device gpu` does not mean cpu


def named_values(text: str, option: str, example: str) -> dict[str, str]:
    """The values of an option like accuracy=0.5,perplexity=1, by their names."""
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = map(str.strip, part.partition("="))
        if not equals or not name:
            raise InputError(f"{option} has {part!r}; it must be a list of NAME=VALUE, such as {example}.")
        if name in found:
            raise InputError(f"{option} {text} gives {name} twice.")
        found[name] = value
    return found


class Parser(argparse.ArgumentParser):
    """A parser that answers a misspelled command, option or choice with the nearest known one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.known_options: list[str] = []  # before argparse adds --help
        super().__init__(*args, **kwargs)

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """The same, and remember the option's names."""
        action = super().add_argument(*args, **kwargs)
        self.known_options += action.option_strings
        return action

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """The same; an unknown option is an error here, where this command's options are known."""
        found, rest = super().parse_known_args(args, namespace)
        if unknown := [name for name in rest if name.startswith("-")]:
            name = unknown[0].partition("=")[0]
            self.error(f"unknown option {name}.{did_you_mean(name, self.known_options)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with 2."""
        if choice := INVALID_CHOICE.search(message):
            known = re.findall(r"[\w-]+", choice["known"])
            message += "." if len(known) < FEW else f".{did_you_mean(choice['given'], known)}"
        if missing := MISSING.match(message):
            message = f"{' or '.join(missing[1].split())} is required."
        annotate([annotation("error", self.prog, message)], sys.stderr)
        super().error(message)
