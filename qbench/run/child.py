"""A process for one piece of work: forked from a server that has imported the heavy packages once.

The fork server must not have touched CUDA, which cannot be forked: what it imports is chosen for the machine, and
asserted. Children die with the server, and the server with the driver.
"""

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Protocol

from qbench.recipe import has_cuda

PR_SET_PDEATHSIG = 1
PRELOAD = "QBENCH_PRELOAD"  # the modules that the fork server imports, separated by commas
HEAVY = (
    "qbench.checkpoint",
    "qbench.quantize.model",
    "qbench.evaluate.scorer",
    "qbench.evaluate.evaluation",
    "qbench.evaluate.tasks",
    "qbench.evaluate.tokens",
)
OF_METHODS = {"hqq": "hqq.core.quantize", "gptq": "qbench.quantize.gptq", "bnb": "qbench.quantize.bnb"}


class Work(Protocol):
    """What a child does; it is pickled to get there."""

    def __call__(self, send: Callable[[Any], None]) -> None:
        """Do it; send messages to the driver on the way."""


def fork_server(methods: set[str]) -> ForkServerContext:
    """A context whose processes have the packages of these methods imported already."""
    # The quantizers' libraries look at the GPU when they are imported, and bitsandbytes initialises CUDA.
    own = [] if has_cuda() else [OF_METHODS[method] for method in sorted(methods) if method in OF_METHODS]
    os.environ[PRELOAD] = ",".join([*HEAVY, *own])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["qbench.run.preload"])
    return context


class Child:
    """A running process, and the end of the pipe that it reports to."""

    def __init__(
        self, context: ForkServerContext, work: Work, *, log: Path, threads: int | None = None, gpu: str | None = None
    ) -> None:
        self.connection, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_main, args=(work, theirs, str(log), threads, gpu), daemon=True)
        self.process.start()
        theirs.close()

    def messages(self) -> list[Any]:
        """What it has sent since the last call."""
        found = []
        try:
            while self.connection.poll():
                found.append(self.connection.recv())
        except (EOFError, OSError):
            pass  # it has ended; the sentinel tells
        return found

    def kill(self) -> None:
        """End it now."""
        self.process.kill()
        self.process.join()

    def how_it_died(self) -> str:
        """The exit code as a sentence."""
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"The process ended with exit code {code} and no result."
        name = signal.Signals(-code).name
        often = " (often the kernel's answer to a machine out of memory)" if -code == signal.SIGKILL else ""
        return f"The process was killed by {name}{often}."


def _main(work: Work, connection: Connection, log: str, threads: int | None, gpu: str | None) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the driver, which ends its children
    _redirect(log)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    import torch

    if torch.cuda.is_initialized():
        raise RuntimeError("CUDA was initialised before the fork: a preloaded module touches the GPU.")
    if threads:
        torch.set_num_threads(threads)
    try:
        work(connection.send)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends (Linux)."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended just now
        os._exit(1)


def _redirect(log: str) -> None:
    """Everything that is printed from here on, by libraries in C too, goes into the log."""
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def preload() -> None:
    """In the fork server: import what QBENCH_PRELOAD names, and make sure that the GPU was left alone."""
    with _quiet():
        for name in filter(None, os.environ.get(PRELOAD, "").split(",")):
            importlib.import_module(name)
        if "qbench.quantize.gptq" in sys.modules:
            sys.modules["qbench.quantize.gptq"].solver()
        import torch

        if torch.cuda.is_initialized():
            raise RuntimeError("A preloaded module has initialised CUDA, which cannot be forked.")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep banners and warnings of imports to ourselves, unless one fails: then all that was printed is shown."""
    with tempfile.TemporaryFile() as printed:
        kept = os.dup(2), os.dup(1)
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        try:
            yield
        except BaseException:
            printed.seek(0)
            os.write(kept[0], printed.read())
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(kept[0], 2)
            os.dup2(kept[1], 1)
            os.close(kept[0])
            os.close(kept[1])
