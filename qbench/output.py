"""What commands print, made safe: no name in a record can act on the terminal or on GitHub's runner, and work goes on
if the reader closes the pipe."""

import contextlib
import io
import logging
import os
import re
import sys
from collections.abc import Iterator
from typing import TextIO

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline: ESC starts commands of a terminal
BUT_FOR_BARS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # progress bars return to the start of the line
# GitHub's runner obeys lines that begin with ::error::, and ##[error] anywhere in a line.
RUNNER_COMMAND = re.compile(r"^(?P<indent>\s*):(?=:)|##\[", re.M)
# For terminals that can show ASCII only.
ASCII = str.maketrans(
    {
        "Δ": "delta",
        "−": "-",
        "–": "-",
        "▲": "^",
        "▼": "v",
        "↑": "(higher)",
        "↓": "(lower)",
        "≤": "<=",
        "≥": ">=",
        "→": "->",
    }
    | {"×": "x", "±": "+/-", "…": "...", "·": "*", "ε": "epsilon", "█": "#", "│": "|", "─": "-"}
    | {raised: f"^{digit}" for digit, raised in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
)


class SafeOutput(io.TextIOBase):
    """A text stream that escapes control characters, and that does not raise if the pipe is closed."""

    def __init__(self, stream: TextIO) -> None:
        """Print to this stream."""
        self.stream = stream
        self.lost: OSError | None = None  # why output could not be written, except for a closed pipe
        self._at_line_start = True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's encoding."""
        return self.stream.encoding or "utf-8"

    def isatty(self) -> bool:
        """Whether a person is reading."""
        return self.stream.isatty()

    def fileno(self) -> int:
        """The stream's file descriptor."""
        return self.stream.fileno()

    def write(self, text: str) -> int:
        """Print a text."""
        self._put(printable(text, self._at_line_start, BUT_FOR_BARS if self.isatty() else CONTROL))
        self._at_line_start = text.endswith("\n") if text else self._at_line_start
        return len(text)

    def write_command(self, line: str) -> None:
        """Print one line that GitHub's runner is meant to obey."""
        self._put(CONTROL.sub(_escaped, line) + "\n")
        self._at_line_start = True

    def write_styled(self, text: str) -> None:
        """Print a text with control sequences for colours; names in it must have been made printable."""
        self._put(text)
        self._at_line_start = text.endswith("\n")

    def flush(self) -> None:
        """Pass on what is buffered."""
        with self._losses_noted():
            self.stream.flush()

    def _put(self, text: str) -> None:
        with self._losses_noted():
            self.stream.write(encodable(text, self.encoding))

    @contextlib.contextmanager
    def _losses_noted(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # `| head -1`: go on without output
            self._silence()
        except OSError as error:  # a full disk
            self.lost = error
            self._silence()

    def _silence(self) -> None:
        """What is still buffered must go somewhere, or Python complains when it ends."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)


def printable(text: str, at_line_start: bool = True, control: re.Pattern[str] = CONTROL) -> str:
    """A text whose control characters are escaped, and in which no line is a command to GitHub's runner."""
    safe = control.sub(_escaped, text)
    if at_line_start:
        return RUNNER_COMMAND.sub(_disarmed, safe)
    return RUNNER_COMMAND.sub(_disarmed, f"|{safe}")[1:]  # nothing before the first line break begins a line


def on_one_line(text: str) -> str:
    """A text without line breaks, for places that a line break would end; its control characters are escaped."""
    return escaped(" ".join(text.split()))


def escaped(text: str) -> str:
    """A text whose control characters are escaped, all but tab and newline."""
    return CONTROL.sub(_escaped, text)


def encodable(text: str, encoding: str) -> str:
    """A text that this encoding has: similar ASCII characters in place of those that it does not have."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(ASCII).encode(encoding, "backslashreplace").decode(encoding)
    return text


def runner_command(line: str, stream: TextIO) -> None:
    """Print one line that GitHub's runner is meant to obey."""
    stream.write_command(line) if isinstance(stream, SafeOutput) else print(line, file=stream)


def print_styled(text: str) -> None:
    """Print a text with control sequences for colours; names in it must have been made printable."""
    sys.stdout.write_styled(text) if isinstance(sys.stdout, SafeOutput) else sys.stdout.write(text)


def terminal() -> TextIO:
    """Standard output for what draws on a terminal; names must be made printable before they are drawn."""
    return sys.stdout.stream if isinstance(sys.stdout, SafeOutput) else sys.stdout


@contextlib.contextmanager
def safe_output() -> Iterator[tuple[SafeOutput, SafeOutput]]:
    """Make standard output and error safe; a closed one becomes /dev/null."""
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nothing:
        out, err = (SafeOutput(stream if stream is not None else nothing) for stream in before)
        sys.stdout, sys.stderr = out, err
        try:
            yield out, err
        finally:
            out.flush()
            err.flush()
            sys.stdout, sys.stderr = before


def _disarmed(found: re.Match[str]) -> str:
    return "# #[" if found["indent"] is None else f"{found['indent']}: "


def _escaped(found: re.Match[str]) -> str:
    return f"\\x{ord(found[0]):02x}"


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Hide what a package prints and logs while it is imported; if the import fails, print it to stderr.

    The root logger stays as it is: gptqmodel sets it to INFO, and then every library in the process logs.
    """
    root, printed = logging.getLogger(), io.StringIO()
    level, handlers = root.level, root.handlers[:]
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield
    except BaseException:
        sys.stderr.write(printed.getvalue())
        raise
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
