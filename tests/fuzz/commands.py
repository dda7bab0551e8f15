"""A command run in process under a time limit, and what was wrong with how it ended."""

import contextlib
import io
import signal
from collections.abc import Iterator, Sequence
from typing import Any

from qbench import cli
from qbench.commands.common import DONE, FAILED, WRONG

SECONDS = 20  # for a case; most take milliseconds


class _Hung(BaseException):
    """Not an Exception: nothing on the way may catch it."""


def complaint(arguments: Sequence[str]) -> str:
    """What is wrong with how a command ended; nothing if it ended with 0, 1 or 2 and without a traceback."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _time_limit():
            code = cli.main(list(arguments))
    except _Hung:
        return f"hung for {SECONDS} s"
    except SystemExit as ended:
        code = ended.code
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    text = out.getvalue() + err.getvalue()
    if code not in (DONE, FAILED, WRONG) or "Traceback" in text:
        return f"exit code {code}: {text[-300:]}"
    if code == WRONG and not err.getvalue().strip():
        return "exit code 2 without a sentence"
    if any(line.lstrip().startswith("::") for line in text.splitlines()):
        return f"a command to GitHub's runner: {text[-300:]}"
    return ""


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _Hung

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
