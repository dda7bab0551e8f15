"""The `qbench` command: its exit codes, and what happens if a command fails or is stopped.

Exit codes: 0 success, 1 a check or a cell failed, 2 a wrong call, recipe or file, 3 a bug in qbench, 130 Ctrl-C.
"""

import argparse
import errno
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib.util import find_spec

import qbench
from qbench.arguments import Parser
from qbench.commands.common import CRASHED, DONE, INTERRUPTED, WRONG
from qbench.errors import InputError
from qbench.github import add_to_summary, annotate, annotation
from qbench.output import safe_output


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command."""
    with safe_output() as (out, _):
        code = _main(arguments)
        out.flush()
        if out.lost and code == DONE:
            print(f"qbench: the output could not be written ({out.lost.strerror}).", file=sys.stderr)
            return WRONG
        return code


def _main(arguments: Sequence[str] | None) -> int:
    if not sys.stderr.isatty():
        for library in ("DATASETS", "HUB"):  # in a log, each step of their progress bars would be a line
            os.environ.setdefault(f"HF_{library}_DISABLE_PROGRESS_BARS", "1")
    try:
        options = _parser().parse_args(arguments)
        return options.run(options)
    except KeyboardInterrupt:
        print("\nqbench: stopped.", file=sys.stderr)
        return INTERRUPTED
    except InputError as error:
        return _wrong(str(error))
    except ModuleNotFoundError as error:
        if (package := (error.name or "qbench").partition(".")[0]) == "qbench" or find_spec(package):
            return _crashed()
        return _wrong(
            f"this command needs the package {package}, which is not installed here. A light installation can only "
            "read results; for all commands, install qbench with its dependencies."
        )
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            return _wrong(f"{str(error.filename)[:60]}… is too long for a path; use a shorter one.")
        return _crashed()


def _wrong(message: str) -> int:
    _report(message)
    return WRONG


def _crashed() -> int:
    _report(f"this is a bug in qbench. Please report it with {_crash_log()}.")
    return CRASHED


def _report(message: str) -> None:
    """Say why the command stopped, also to people who do not open the log of a CI job."""
    print(f"qbench: {message}", file=sys.stderr)
    annotate([annotation("error", "qbench", message)], sys.stderr)
    add_to_summary(f"### qbench: error\n\n{message}\n")


def _crash_log() -> str:
    """Where the traceback of the current exception was written, or the traceback itself if that failed."""
    trace = traceback.format_exc()
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="qbench-crash-", suffix=".log", encoding="utf-8", delete=False
        ) as log:
            log.write(f"{shlex.join(sys.argv)}\n\n{trace}")
    except OSError:
        return f"these lines:\n{trace}"
    return f"the traceback in {log.name}"


def _parser() -> argparse.ArgumentParser:
    from qbench.commands import gating, quantizing, reporting, running, upkeep  # here, Ctrl-C is caught

    parser = Parser(
        prog="qbench", description="Measure what quantization costs a model, and prove that it was quantized."
    )
    parser.add_argument("--version", action="version", version=f"qbench {qbench.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (
        running.add_init,
        running.add_plan,
        running.add_run,
        running.add_analyze,
        running.add_fetch,
        quantizing.add_quantize,
        reporting.add_table,
        reporting.add_compare,
        reporting.add_audit,
        gating.add_check,
        gating.add_import,
        gating.add_accept,
        gating.add_power,
        upkeep.add_runs,
        upkeep.add_doctor,
    ):
        add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
