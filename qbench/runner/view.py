"""How a run is shown: live on a terminal, otherwise one line per cell, or JSON lines for programs."""

import json
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from qbench.numbers import duration
from qbench.output import printable, terminal
from qbench.records.schema import Record

BY_CHANCE = ("out-of-memory", "killed", "crashed", "timeout")  # kinds of failures that another try may mend


class PlainView:
    """One line per finished cell."""

    def __init__(self, names: Sequence[str], before: int = 0) -> None:
        self.total, self.done, self.failed = len(names), 0, 0
        self.by_chance = 0  # failures that another try may mend
        self.before = before  # cells that were done when the run started
        self.slots = 1  # cells that run at once
        self.seconds = 0.0  # the sum over all cells that have ended
        self.notes: dict[str, list[str]] = {}  # the cells by the notes of their analyses
        self.begun = time.monotonic()

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def started(self, name: str) -> None:
        """A cell has started."""

    def progress(self, name: str, phase: str, share: float) -> None:
        """This share of a cell's phase is done."""

    def finished(self, name: str, record: Record) -> None:
        """A cell has ended with this record."""
        self.count(record)
        ended, left = outcome(record), self.left()
        self.say(f"[{self.place()}] {name}: {ended.removesuffix('.') if left else ended}{left}")

    def say(self, line: str) -> None:
        """Print a line."""
        print(line, flush=True)

    def count(self, record: Record) -> None:
        """Count a cell that has ended."""
        self.done += 1
        self.failed += record.state == "failed"
        self.by_chance += bool(record.failure and record.failure.kind in BY_CHANCE)
        self.seconds += own_seconds(record)
        for note in record.analysis.notes if record.analysis else ():
            self.notes.setdefault(note, []).append(record.cell.name)

    def place(self) -> str:
        """How many of the recipe's cells are done, such as 3/12."""
        return f"{self.before + self.done}/{self.before + self.total}"

    def left(self) -> str:
        """The time left, estimated from the cells so far; empty if all of them failed."""
        left = self.total - self.done
        if not left or self.failed == self.done:
            return ""
        return f"; about {duration(self.seconds / self.done * left / self.slots)} left"


class LiveView(PlainView):
    """One bar per running cell with its phase, one for the whole run, and the lines of finished cells above."""

    def __init__(self, names: Sequence[str], before: int = 0) -> None:
        super().__init__(names, before)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[note]}"))
        self.bars = Progress(*columns, TimeElapsedColumn(), console=Console(file=terminal()))
        note = f"{self.place()}, importing packages"
        self.whole = self.bars.add_task("all cells", total=before + self.total, completed=before, note=note)
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "LiveView":
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def started(self, name: str) -> None:
        """A cell has started."""
        self.tasks[name] = self.bars.add_task(printable(name), total=1.0, note="starting")

    def progress(self, name: str, phase: str, share: float) -> None:
        """This share of a cell's phase is done."""
        self.bars.update(self.tasks[name], completed=share, note=phase)

    def finished(self, name: str, record: Record) -> None:
        """A cell has ended with this record."""
        if name in self.tasks:
            self.bars.remove_task(self.tasks.pop(name))
        super().finished(name, record)
        note = self.place() + (f", {self.failed} failed" if self.failed else "") + self.left()
        self.bars.update(self.whole, completed=self.before + self.done, note=note)

    def say(self, line: str) -> None:
        """Print a line above the bars."""
        self.bars.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


class JsonView(PlainView):
    """One JSON object per line."""

    def started(self, name: str) -> None:
        """A cell has started."""
        self._print(event="started", cell=name)

    def progress(self, name: str, phase: str, share: float) -> None:
        """This share of a cell's phase is done."""
        self._print(event="progress", cell=name, phase=phase, share=round(share, 4))

    def finished(self, name: str, record: Record) -> None:
        """A cell has ended with this record."""
        self.count(record)
        reason = record.failure.reason if record.failure else None
        self._print(event="finished", cell=name, state=record.state, reason=reason, key=record.key)

    def say(self, line: str) -> None:
        """Print a line."""
        self._print(event="message", text=line)

    def _print(self, **fields: Any) -> None:
        print(json.dumps(fields), flush=True)


def view_for(names: Sequence[str], *, before: int = 0, as_json: bool) -> PlainView:
    """The view for this output; before: how many cells are already done."""
    if as_json:
        return JsonView(names, before)
    return LiveView(names, before) if sys.stdout.isatty() else PlainView(names, before)


def outcome(record: Record) -> str:
    """How a cell ended, in half a line."""
    if record.failure:
        first = record.failure.reason.splitlines()[0]
        where = f" in {record.failure.phase}" if record.failure.phase else ""
        return f"FAILED{where} ({record.failure.kind}): {first}"
    kl = f", KL {record.audit.kl:.3g}" if record.audit and record.audit.layers and record.audit.kl is not None else ""
    return f"done in {duration(own_seconds(record))}{kl}"


def own_seconds(record: Record) -> float:
    """How long a cell took, whether it finished or failed."""
    if record.cost:
        return sum(record.cost.seconds.values())
    began, ended = (datetime.fromisoformat(t) for t in (record.provenance.started, record.provenance.finished))
    return (ended - began).total_seconds()
