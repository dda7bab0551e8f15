"""A command as a person sees it: on a terminal of a given width."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path


def on_terminal(*arguments: object, columns: int, cwd: Path | None = None, **environment: str) -> tuple[int, str]:
    """The exit code of a qbench command, and what it shows, with its control sequences."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    unset = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "COLORTERM")
    known = {name: value for name, value in os.environ.items() if name not in unset} | {"TERM": "xterm-256color"}
    command = [sys.executable, "-m", "qbench.cli", *map(str, arguments)]
    shown = b""
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=known | environment, cwd=cwd) as run:
        os.close(theirs)
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # raised once the last process has closed the terminal
                break
            if not part:
                break
            shown += part
    os.close(ours)
    return run.returncode, shown.decode().replace("\r\n", "\n")
