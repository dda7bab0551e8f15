"""How a command of `qbench` is declared: its purpose and an example, in one place with its arguments."""

import argparse
from typing import Any

Commands = Any  # argparse's subparsers, whose type it keeps to itself


def add_command(commands: Commands, name: str, purpose: str, example: str) -> argparse.ArgumentParser:
    """A command's parser, whose help shows its purpose and an example."""
    return commands.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
