"""A real `qbench run` in a separate process: start it, read its output, and check what it leaves."""

import contextlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from qbench.cli import main
from qbench.records.store import read_results

from ..example_records import stored_samples

QBENCH = str(Path(sysconfig.get_path("scripts"), "qbench"))  # the command that people call


class Driver:
    """A running `qbench run --json`, or analyze, in its own session; memory: bytes allowed per process."""

    def __init__(
        self,
        recipe: Path,
        out: Path,
        *options: str,
        command: str = "run",
        memory: int = resource.RLIM_INFINITY,
        cwd: Path | None = None,
    ) -> None:
        called = [sys.executable, QBENCH, command, str(recipe), "--out", str(out), "--json", *options]

        def limits() -> None:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored if the tests run in the background

        self.process = subprocess.Popen(
            called,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=limits,
        )
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> "Driver":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def follow(self) -> Iterator[dict[str, Any]]:
        """Its events as they come, until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))
            yield self.events[-1]

    def until(self, event: str) -> dict[str, Any]:
        """The next event of this kind."""
        return next(found for found in self.follow() if found["event"] == event)

    def end(self) -> tuple[int, str]:
        """Wait until it ends; returns the exit code and stderr."""
        list(self.follow())
        assert self.process.stderr is not None
        return self.process.wait(), self.process.stderr.read()

    def processes(self) -> list[psutil.Process]:
        """It and every process it has started: they share its session, whatever their parent is now."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return found

    def workers(self) -> list[psutil.Process]:
        """The processes that run cells: children of the fork server, which is a child of the driver."""
        try:
            servers = psutil.Process(self.process.pid).children()
            return [worker for server in servers for worker in server.children()]
        except psutil.NoSuchProcess:
            return []

    def gone(self, seconds: float = 10) -> bool:
        """Whether all its processes end within a short time."""
        deadline = time.monotonic() + seconds
        while self.processes():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


def run(recipe: Path, out: Path, *options: str, cwd: Path | None = None) -> tuple[int, list[dict[str, Any]], str]:
    """Run to the end; returns the exit code, the events and stderr."""
    with Driver(recipe, out, *options, cwd=cwd) as driver:
        code, errors = driver.end()
        return code, driver.events, errors


def run_here(recipe: Path, out: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Run to the end in this process, whose fork server the tests share; returns the exit code and the events."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(["run", str(recipe), "--out", str(out), "--json", *options])
    return code, [json.loads(line) for line in printed.getvalue().splitlines()]


def events_of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The events of one kind."""
    return [event for event in events if event["event"] == kind]


def results(out: Path) -> dict[str, Any]:
    """The results by cell, without the fields that may differ between two runs: cost, times and provenance."""
    found = {}
    for stored in read_results(out).current:
        record = stored.record
        kept = record.model_dump(mode="json", exclude={"cost", "provenance"})
        # Reading checks the digest in the record, and the same rows are written as the same bytes.
        found[record.cell.name] = kept | {"samples": stored_samples(stored).to_json() if stored.has_samples else None}
    return found


def finished(out: Path) -> dict[str, tuple[int, int]]:
    """The inode and time of each finished record: a change means that it was written again."""
    records = (file for file in out.glob("*/record.json") if json.loads(file.read_text())["state"] == "done")
    return {str(file): (file.stat().st_ino, file.stat().st_mtime_ns) for file in records}


def left_behind(out: Path) -> list[str]:
    """Files that should not be in a folder of records."""
    whole = {"record.json", "samples.parquet", "analysis.parquet", "maps.parquet", "log.txt"}
    strange = [path for path in out.iterdir() if not path.is_dir() and path.name not in ("run.json", "analysis.json")]
    for cell in (path for path in out.iterdir() if path.is_dir()):
        names = {path.name for path in cell.iterdir()}
        strange += [cell / name for name in names - whole] + ([cell] if "record.json" not in names else [])
    return [str(path) for path in strange]
