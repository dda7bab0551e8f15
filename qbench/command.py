"""How a command of `qbench` is added: the same help for all of them, with an example."""

import argparse
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]


def add_command(commands: "Commands", name: str, purpose: str, example: str) -> argparse.ArgumentParser:
    """A command's parser; who adds it sets `run`, which takes the options and returns an exit code."""
    return commands.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
