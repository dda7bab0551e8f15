"""A process for one piece of work, forked from a server that has imported the heavy packages once.

The fork server must not touch CUDA, which cannot be forked: what it imports depends on the device, and it checks that
CUDA was not started. Children die with the server, and the server dies with the driver, however the driver ends.
"""

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from qbench.gpus import VISIBLE
from qbench.quantizers.options import quantizer
from qbench.runner.hub import OFFLINE_VARIABLES

PR_SET_PDEATHSIG = 1
PRELOAD = "QBENCH_PRELOAD"  # the modules that the fork server imports, separated by commas
PRELOAD_METHODS = "QBENCH_PRELOAD_METHODS"  # the quantizers whose libraries it imports
PARENT = "QBENCH_PARENT"  # the process that this one must not outlive
HEAVY = (
    "pyarrow.parquet",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "qbench.checkpoint.load",
    "qbench.quantizers.quantize",
    "qbench.evaluate.scorer",
    "qbench.evaluate.evaluation",
    "qbench.evaluate.tasks",
    "qbench.evaluate.tokens",
    "qbench.runner.preflight",
    "qbench.runner.analyzing",
)


class Work(Protocol):
    """What a child does; it must be picklable."""

    def __call__(self, send: Callable[[Any], None]) -> None:
        """Do the work; `send` passes messages to the driver."""


def fork_server(methods: set[str], device: str) -> ForkServerContext:
    """A context whose processes start with the packages of these methods imported, and never ask the Hub."""
    # The quantizers' libraries choose their kernels for the GPU at import, and bitsandbytes starts CUDA: cells on CUDA
    # import them themselves.
    os.environ[PRELOAD_METHODS] = "" if device == "cuda" else ",".join(sorted(methods))
    os.environ[PRELOAD] = ",".join(HEAVY)
    os.environ[PARENT] = str(os.getpid())
    # Otherwise torch.cuda.is_available(), which many packages call at import, starts the driver.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["qbench.runner.preload"])
    # Ctrl-C reaches every process of a terminal, but only the driver should act on it. The resource tracker starts
    # first, because starting it unblocks SIGINT. PYTHONSAFEPATH keeps the working folder off the path: a folder called
    # softpick or torch would hide the package. Everything a cell needs was fetched when the run was planned, so cells
    # are offline.
    # The tracker removes the semaphores of killed children; it need not warn about them.
    with _environment(PYTHONSAFEPATH="1", **dict.fromkeys(OFFLINE_VARIABLES, "1")):
        with _environment(PYTHONWARNINGS="ignore:resource_tracker:UserWarning"):
            resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return context


class Child:
    """A process and our end of the pipe it reports through. After `start`, `end` must be called."""

    def __init__(
        self, context: ForkServerContext, work: Work, *, log: Path, threads: int | None = None, gpu: str | None = None
    ) -> None:
        self.connection, self._theirs = context.Pipe(duplex=False)
        # Not a daemon: daemons may not start processes, and some of lm-eval's metrics do.
        self.process = context.Process(target=_main, args=(work, self._theirs, str(log), threads, gpu))

    def start(self) -> None:
        """Fork the process; the first one waits until the server has imported its packages."""
        with _without_main():
            self.process.start()
        self._theirs.close()

    @property
    def ended(self) -> bool:
        """Whether the process has ended; its messages can still be read."""
        return self.process.exitcode is not None

    def messages(self) -> list[Any]:
        """The messages received since the last call."""
        found = []
        with contextlib.suppress(EOFError, OSError):  # the pipe is closed once it has ended
            while self.connection.poll():
                found.append(self.connection.recv())
        return found

    def kill(self) -> None:
        """Kill the process if it is still running, and wait until it is gone."""
        if self.process.pid is not None:
            self.process.kill()
            self.process.join()

    def end(self) -> None:
        """Kill the process if it is still running, and release its resources."""
        self.kill()
        self.process.close()
        self.connection.close()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep multiprocessing from importing the driver's main module in the child.

    It would run a script that calls qbench.run without `if __name__ == "__main__":` once more in every child.
    """
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def how_it_died(code: int | None) -> str:
    """An exit code as a sentence."""
    if code is None or code >= 0:
        return f"The process ended with exit code {code} and no result."
    often = " (often because the machine ran out of memory)" if -code == signal.SIGKILL else ""
    return f"The process was killed by signal {-code}, {signal.strsignal(-code)}{often}."


def _main(work: Work, connection: Connection, log: str, threads: int | None, gpu: str | None) -> None:
    die_with_parent()
    sys.path[:] = without_working_folder(sys.path)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the driver, which ends its children
    try:
        redirect(Path(log))
    except OSError:  # the folder is gone: the driver reports it when it writes the record
        sys.exit(1)
    if gpu is not None:
        # Indices follow NVML and nvidia-smi; CUDA's default order differs if GPUs are of two kinds.
        os.environ.update({VISIBLE: gpu, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    import torch

    if torch.cuda.is_initialized():
        raise RuntimeError("CUDA was initialized before the fork: a preloaded module uses the GPU.")
    if threads:
        torch.set_num_threads(threads)
    work(connection.send)


def without_working_folder(places: Iterable[str]) -> list[str]:
    """sys.path without the working folder, unless PYTHONPATH names it.

    A child inherits the driver's path, which starts with the working folder in notebooks and with `python -m`.
    """
    first, *others = places
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # Python puts it first. If its full path appears later, an editable install added it.
    added = os.path.abspath(first) == os.getcwd() and first not in named
    return [place for place in (others if added else [first, *others]) if place not in ("", ".")]


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, for any reason (Linux)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT]):  # the parent has already ended
        os._exit(1)


def redirect(log: Path) -> None:
    """Send everything this process prints from now on to the log, including output from C libraries."""
    log.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def preload() -> None:
    """In the fork server: import what QBENCH_PRELOAD names, and check that the GPU was not used."""
    die_with_parent()
    os.environ[PARENT] = str(os.getpid())  # for the children
    with _quiet(), _hidden_gpus():
        for name in filter(None, os.environ.get(PRELOAD, "").split(",")):
            importlib.import_module(name)
        for method in filter(None, os.environ.get(PRELOAD_METHODS, "").split(",")):
            if (found := quantizer(method)).is_installed:  # if not, its cells report it
                found.preload()
        import torch
        from torch.utils._triton import has_triton

        if torch.cuda.is_initialized():
            raise RuntimeError("A preloaded module has initialized CUDA, which cannot be forked.")
        has_triton.cache_clear()  # its answer while the GPUs were hidden


@contextlib.contextmanager
def _hidden_gpus() -> Iterator[None]:
    """Hide all GPUs: transformers imports torchao, which starts CUDA at import if there is a GPU.

    torch counts devices again until CUDA is started, so a child sees the ones it is given.
    """
    with _environment(**{VISIBLE: ""}):
        yield


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables, and restore the previous values afterwards."""
    before = {name: os.environ.pop(name, None) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what imports print; if one fails, show all of it."""
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
