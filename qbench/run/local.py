"""Cells in processes on this box: one a GPU at a time, or as many as the CPU and the memory take."""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

from qbench.errors import InputError
from qbench.run.cell import Job, now, run_cell
from qbench.run.child import Child, fork_server
from qbench.store import LOG, RECORD, Failure, FailureKind, Record, StoreError, cell_folder, read_record, write_record

LOCK = ".lock"
LOG_TAIL = 4000  # characters of a failed cell's log that go into its record
TICK = 0.25  # seconds between two looks at the clock


class RunError(InputError):
    """A run that cannot go on, in a sentence."""


@dataclass(frozen=True)
class Slot:
    """A place for one cell: a GPU, or a share of the cores."""

    threads: int | None = None
    gpu: str | None = None


class Watcher(Protocol):
    """Who is told how a run goes."""

    def started(self, name: str) -> None:
        """A cell has begun."""

    def progress(self, name: str, phase: str, share: float) -> None:
        """A cell is at this share of a phase."""

    def finished(self, name: str, record: Record) -> None:
        """A cell has its record."""


@dataclass(frozen=True)
class CellWork:
    """What a child does for a cell: run it and write its record."""

    job: Job
    folder: Path

    def __call__(self, send: Any) -> None:
        """Run the cell; a record that cannot be written is a message of its own, for it ends the run."""
        last = 0.0

        def report(phase: str, share: float) -> None:
            nonlocal last
            if share == 0 or share >= 1 or time.monotonic() - last > TICK:
                last = time.monotonic()
                send(("progress", phase, share))

        record, samples = run_cell(self.job, report)
        if record.failure:
            record = with_log_tail(record, self.folder)
        try:
            write_record(self.folder, record, samples)
        except StoreError as error:
            send(("store", str(error)))


@dataclass
class _Active:
    job: Job
    child: Child
    slot: Slot
    folder: Path
    started: str
    deadline: float
    phase: str | None = None


def run_local(jobs: Sequence[Job], out: Path, slots: Sequence[Slot], watcher: Watcher, timeout: float) -> None:
    """Run all jobs; each leaves a record, finished or failed. timeout: seconds a cell may take."""
    context = fork_server({job.cell.ref.method for job in jobs})
    waiting, free = deque(jobs), list(slots)
    active: list[_Active] = []
    try:
        while waiting or active:
            while waiting and free:
                job, slot = waiting.popleft(), free.pop(0)
                active.append(_start(context, job, slot, out, timeout))
                watcher.started(job.name)
            wait([e for a in active for e in (a.child.process.sentinel, a.child.connection)], timeout=TICK)
            for running in list(active):
                if (record := _look_at(running, watcher)) is not None:
                    active.remove(running)
                    free.append(running.slot)
                    watcher.finished(running.job.name, record)
    finally:
        for running in active:
            running.child.kill()


def _start(context: Any, job: Job, slot: Slot, out: Path, timeout: float) -> _Active:
    folder = cell_folder(out, job.cell.ref, job.identity.key)
    (folder / RECORD).unlink(missing_ok=True)  # of an earlier failure: what is found after the cell is its own
    work = CellWork(job, folder)
    try:
        child = Child(context, work, log=folder / LOG, threads=slot.threads, gpu=slot.gpu)
    except (EOFError, ConnectionError, BrokenPipeError) as error:
        raise RunError(
            f"The process that cells are forked from did not start; what it printed is above ({error!r})."
        ) from None
    return _Active(job, child, slot, folder, now(), time.monotonic() + timeout)


def _look_at(running: _Active, watcher: Watcher) -> Record | None:
    """Pass on what a cell has sent; its record once it has ended."""
    ended = running.child.process.exitcode is not None  # before its last messages are read
    for kind, *content in running.child.messages():
        if kind == "store":
            raise RunError(f"{content[0]} Finished cells are as they were; make room, then start the run again.")
        running.phase = content[0]
        watcher.progress(running.job.name, *content)
    if ended:
        return _result(running)
    if time.monotonic() > running.deadline:
        running.child.kill()
        return _fail(running, "timeout", "It took longer than timeout_minutes, and was killed.")
    return None


def _result(running: _Active) -> Record:
    with contextlib.suppress(StoreError):
        record = read_record(running.folder / RECORD)
        if record.key == running.job.identity.key:
            return record
    killed = (running.child.process.exitcode or 0) < 0
    return _fail(running, "killed" if killed else "crashed", running.child.how_it_died())


def _fail(running: _Active, kind: FailureKind, reason: str) -> Record:
    failure = Failure(kind=kind, reason=reason, phase=running.phase)
    record = with_log_tail(running.job.failed(running.started, failure), running.folder)
    write_record(running.folder, record)
    return record


def with_log_tail(record: Record, folder: Path) -> Record:
    """A failed record with the end of its log."""
    try:
        tail = (folder / LOG).read_text(errors="replace")[-LOG_TAIL:]
    except OSError:
        return record
    assert record.failure is not None
    return record.model_copy(update={"failure": record.failure.model_copy(update={"log_tail": tail})})


@contextlib.contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Hold a folder for this run alone; the kernel lets go of it however this process ends."""
    handle = _lock(folder)
    try:
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": now()}
        os.truncate(handle, 0)
        os.pwrite(handle, json.dumps(holder).encode(), 0)
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        os.close(handle)


def _lock(folder: Path) -> int:
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunError(
                f"{folder} cannot be written to ({error.strerror}); give another folder with --out."
            ) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(handle)
            os.close(handle)
            raise RunError(f"{folder} is held by another run: {holder}. Wait for it, or give another --out.") from None
        with contextlib.suppress(FileNotFoundError):
            if os.stat(folder / LOCK).st_ino == os.fstat(handle).st_ino:
                return handle
        os.close(handle)  # the last holder removed the file between our open and our lock


def _holder(handle: int) -> str:
    try:
        holder = json.loads(os.pread(handle, 1000, 0))
        return "process {pid} on {host}, since {since}".format(**holder)
    except (ValueError, KeyError, OSError):
        return "who it is cannot be read"
