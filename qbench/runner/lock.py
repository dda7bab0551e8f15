"""One run per folder at a time. The kernel releases the lock however its holder ends."""

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from qbench.errors import InputError
from qbench.runner.cell import now

LOCK = ".lock"


class RunError(InputError):
    """A run cannot start or continue; the message says why."""


@contextlib.contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Lock a folder for this run; the lock file names the holder and is removed at the end."""
    try:
        handle = _lock(folder)
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"{folder} is not writable ({reason}); choose another folder with --out.") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the folder may be gone
            (folder / LOCK).unlink(missing_ok=True)
        os.close(handle)


def _lock(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_current(handle, folder / LOCK):
                holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": now()}
                os.truncate(handle, 0)
                os.pwrite(handle, json.dumps(holder).encode(), 0)
                return handle
        except BlockingIOError:
            holder_now = _holder(handle)
            os.close(handle)
            raise RunError(
                f"{folder} is in use by another run: {holder_now}. Wait for it to end, or choose another --out."
            ) from None
        except OSError:
            os.close(handle)
            raise
        os.close(handle)


def _is_current(handle: int, file: Path) -> bool:
    """Whether the file still exists: the last holder may have removed it between our open and our lock."""
    try:
        return os.stat(file).st_ino == os.fstat(handle).st_ino
    except FileNotFoundError:
        return False


def _holder(handle: int) -> str:
    try:
        holder = json.loads(os.pread(handle, 1000, 0))
        return "process {pid} on {host}, since {since}".format(**holder)
    except (ValueError, KeyError, OSError, TypeError, IndexError, AttributeError, RecursionError):
        return "the lock file does not say which"
