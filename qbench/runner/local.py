"""Runs cells in processes on this machine: one per GPU at a time, or as many as cores and memory allow."""

import contextlib
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Protocol

from qbench.errors import died_of_memory
from qbench.records.schema import Failure, FailureKind, Record
from qbench.records.store import LOG, RECORD, StoreError, cell_folder, read_record, write_record
from qbench.runner.cell import Job, now, run_cell, with_log_tail
from qbench.runner.child import Child, fork_server, how_it_died
from qbench.runner.cuda import cuda_environment
from qbench.runner.lock import RunError

TICK = 0.25  # seconds between checks of the clock


@dataclass(frozen=True)
class Slot:
    """Where one cell runs: a GPU, or a share of the cores."""

    threads: int | None = None
    gpu: str | None = None


class Watcher(Protocol):
    """Receives the events of a run."""

    def started(self, name: str) -> None:
        """A cell has started."""

    def progress(self, name: str, phase: str, share: float, doing: str) -> None:
        """This share of a cell's phase is done; doing: what is being done in it."""

    def finished(self, name: str, record: Record) -> None:
        """A cell has ended with this record."""


@dataclass(frozen=True)
class CellWork:
    """What a child does for a cell: run it and write its record."""

    job: Job
    folder: Path

    def __call__(self, send: Any) -> None:
        """Run the cell. If its record cannot be written, send a message: that ends the whole run."""
        last = 0.0

        def send_progress(phase: str, share: float, doing: str) -> None:
            nonlocal last
            if share == 0 or share >= 1 or time.monotonic() - last > TICK:
                last = time.monotonic()
                try:
                    send(("progress", phase, share, doing))
                except OSError:
                    os._exit(1)  # the driver is gone; the next run will do this cell

        record, samples = run_cell(self.job, send_progress)
        try:
            write_record(self.folder, with_log_tail(record, self.folder / LOG), samples)
        except StoreError as error:
            send(("store", str(error)))


@dataclass
class _Running:
    job: Job
    slot: Slot
    folder: Path
    child: Child
    started: str
    deadline: float = float("inf")
    phase: str | None = None


def run_local(jobs: Sequence[Job], out: Path, slots: Sequence[Slot], watcher: Watcher, timeout: float) -> None:
    """Run all jobs; each writes a record, finished or failed. timeout: seconds allowed per cell."""
    server = server_for(jobs)
    waiting, free = deque(jobs), list(slots)
    active: list[_Running] = []
    try:
        while waiting or active:
            while waiting and free:
                running = _prepare(server, waiting.popleft(), free.pop(0), out)
                active.append(running)  # listed before it starts, so it is ended whatever happens
                _start(running, timeout)
                watcher.started(running.job.name)
            wait([end for r in active for end in (r.child.process.sentinel, r.child.connection)], timeout=TICK)
            for running in list(active):
                if record := _look_at(running, watcher):
                    running.child.end()
                    active.remove(running)
                    free.append(running.slot)
                    watcher.finished(running.job.name, record)
    finally:
        for running in active:
            running.child.end()


def server_for(jobs: Sequence[Job]) -> ForkServerContext:
    """The fork server for these jobs."""
    methods = {job.cell.ref.method for job in jobs}
    device = jobs[0].cell.recipe.resolved_device if jobs else "cpu"
    if device == "cuda":
        os.environ.update(cuda_environment(tuple(sorted(methods))))  # for all processes started from now on
    return fork_server(methods, device)


def _prepare(server: ForkServerContext, job: Job, slot: Slot, out: Path) -> _Running:
    folder = cell_folder(out, job.cell.ref, job.identity.key)
    child = Child(server, CellWork(job, folder), log=folder / LOG, threads=slot.threads, gpu=slot.gpu)
    return _Running(job, slot, folder, child, now())


def _start(running: _Running, timeout: float) -> None:
    try:
        (running.folder / RECORD).unlink(missing_ok=True)  # left by an earlier failure
        running.child.start()
    except (EOFError, ConnectionError) as error:
        raise RunError(f"The fork server for cells did not start ({error!r}); its output is above.") from None
    except NotADirectoryError as error:
        raise RunError(f"{error.filename} cannot be written ({error.strerror}).") from None
    running.deadline = time.monotonic() + timeout


def _look_at(running: _Running, watcher: Watcher) -> Record | None:
    """Pass on a cell's messages. Returns its record once it has ended."""
    ended = running.child.ended  # checked before its last messages are read
    for kind, *content in running.child.messages():
        if kind == "store":
            raise RunError(f"{content[0]} Finished cells are kept; run the same command to continue.")
        running.phase = content[0]
        watcher.progress(running.job.name, *content)
    late = time.monotonic() > running.deadline
    if late and not ended:
        running.child.kill()
    return _result(running, late) if ended or late else None


def _result(running: _Running, late: bool) -> Record:
    """The record that the cell wrote, or a failed one that says how it died."""
    with contextlib.suppress(StoreError):
        return read_record(running.folder / RECORD)
    code = running.child.process.exitcode
    kind: FailureKind = "timeout" if late else "killed" if code and code < 0 else "crashed"
    reason = "It took longer than timeout_minutes and was killed." if late else how_it_died(code)
    failed = running.job.failed(running.started, Failure(kind=kind, reason=reason, phase=running.phase))
    record = with_log_tail(failed, running.folder / LOG)
    if kind != "timeout" and record.failure and died_of_memory(record.failure.log_tail or ""):
        own = {"kind": "out-of-memory", "reason": f"{reason} Its log says that memory ran out."}
        record = record.model_copy(update={"failure": record.failure.model_copy(update=own)})
    write_record(running.folder, record)
    return record
