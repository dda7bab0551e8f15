"""How a run is shown: live on a terminal, otherwise one line per cell, or JSON lines for programs."""

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from qbench.numbers import duration, rough_duration
from qbench.output import printable, terminal
from qbench.records.schema import Failure, Record
from qbench.report.terminal import wrapped

SILENCE = 60  # seconds without a line of a running cell in a log
ALMOST = 0.999  # a bar that is full would stop its clock
FEW_SECONDS = 8  # as time left; an estimate cannot say more
WIDE = 100  # columns of a terminal that has room for long bars
MAX_WORDS = 26  # letters of what a cell is doing
Expected = Mapping[str, Mapping[str, float]]  # estimated seconds by cell and phase
BY_CHANCE = ("out-of-memory", "killed", "crashed", "timeout")  # kinds of failures that may not recur on a retry


class PlainView:
    """One line per cell that ends, and a few while it runs, so a log shows that something happens."""

    def __init__(self, names: Sequence[str], before: int = 0, expected: Expected = MappingProxyType({})) -> None:
        self.total, self.done, self.failed = len(names), 0, 0
        self.by_chance = 0  # failures that may not recur on a retry
        self.before = before  # cells that were done when the run started
        self.slots = 1  # cells that run at once
        self.seconds = 0.0  # the sum over all cells that have ended
        self.notes: dict[str, list[str]] = {}  # the cells by the notes of their analyses
        self.first_with: dict[tuple[str, str], str] = {}  # the first cell that failed so, by how and why
        self.begun = time.monotonic()
        typical = sum(sum(own.values()) for own in expected.values()) / max(1, len(expected))
        self.cells = {name: CellProgress(expected.get(name, {}), typical or 1.0) for name in names}
        self.spoken: dict[str, float] = {}  # when each running cell last had a line
        self.trial_spoken = self.begun  # when the preflight last had a line
        self.tried_last = ""  # what the preflight was last said to try

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def preflight(self, line: str) -> None:
        """The preflight begins; line: what it does."""
        self.trial_spoken = time.monotonic()
        self.say(line)

    def trying(self, done: int, steps: int, what: str) -> None:
        """What the preflight is trying, after this many of its steps. Called all the time while it runs."""
        if time.monotonic() - self.trial_spoken > SILENCE:
            self.trial_spoken = time.monotonic()
            self.say(f"preflight {done}/{steps} done, now {what}")

    def tried(self) -> None:
        """The preflight has ended."""

    def started(self, name: str) -> None:
        """A cell has started."""
        self.spoken[name] = time.monotonic()

    def progress(self, name: str, phase: str, share: float, doing: str) -> None:
        """This share of a cell's phase is done; doing: what is being done in it."""
        self.cells[name].reached(phase, share)
        if time.monotonic() - self.spoken[name] > SILENCE:
            self.spoken[name] = time.monotonic()
            self.say(f"[{self.place()}] {name}: {f'{phase} {doing}'.rstrip()} {share:.0%}")

    def finished(self, name: str, record: Record) -> None:
        """A cell has ended with this record."""
        self.count(name, record)
        ended, left = self.outcome_once(name, record), self.left()
        self.say(f"[{self.place()}] {name}: {ended.removesuffix('.') if left else ended}{left}")

    def ruled_out(self, reason: str, records: Mapping[str, Record]) -> None:
        """These cells cannot run; records: by their names."""
        for name, record in records.items():
            self.count(name, record)
        self.say(f"[{self.place()}] {', '.join(records)} cannot run: {reason}")

    def outcome_once(self, name: str, record: Record) -> str:
        """How a cell ended; a reason that an earlier cell had refers to that cell."""
        if record.failure is None:
            return outcome(record)
        how, reason = how_it_failed(record.failure), first_line(record.failure)
        first = self.first_with.setdefault((how, reason), name)
        return f"{how}: {reason}" if first == name else f"{how}: as {first}"

    def say(self, line: str) -> None:
        """Print a line."""
        print(line, flush=True)

    def say_command(self, line: str) -> None:
        """Print a line with a command, which can be copied: it has no line breaks."""
        self.say(line)

    def count(self, name: str, record: Record) -> None:
        """Count a cell that has ended."""
        self.done += 1
        self.failed += record.state == "failed"
        self.by_chance += bool(record.failure and record.failure.kind in BY_CHANCE)
        self.seconds += own_seconds(record)
        self.cells[name].end(own_seconds(record) if record.cost else None)
        for note in record.analysis.notes if record.analysis else ():
            self.notes.setdefault(note, []).append(record.cell.name)

    def place(self) -> str:
        """How many of the recipe's cells are done, such as 3/12."""
        return f"{self.before + self.done}/{self.before + self.total}"

    def left(self) -> str:
        """The time left: the estimated work of what is left, at the speed of the cells that finished."""
        ended = [cell for cell in self.cells.values() if cell.seconds is not None]
        work = sum(cell.work for cell in ended)
        if self.done == self.total or not work:
            return ""
        speed = sum(cell.seconds or 0.0 for cell in ended) / work
        left = sum(cell.work * (1 - cell.share) for cell in self.cells.values() if not cell.ended) * speed / self.slots
        return f"; about {rough_duration(left)} left" if left >= FEW_SECONDS else "; a few seconds left"


class CellProgress:
    """How far a cell is, over all its phases; each phase counts as much as its share of the estimated time."""

    def __init__(self, expected: Mapping[str, float], typical: float) -> None:
        self.expected = dict(expected)  # seconds by phase; empty if there is no estimate
        self.work = sum(expected.values()) or typical
        self.share = 0.0
        self.ended = False
        self.seconds: float | None = None  # that it took, if it finished
        self._phases: list[str] = []

    def reached(self, phase: str, share: float) -> None:
        """A share of a phase is done. A cell's progress never decreases."""
        if phase not in self._phases:
            self._phases.append(phase)
        before = sum(self.expected.get(name, 0.0) for name in self._phases[: self._phases.index(phase)])
        reached = (before + self.expected.get(phase, 0.0) * share) / self.work if self.expected else share
        self.share = max(self.share, min(reached, ALMOST))

    def end(self, seconds: float | None) -> None:
        """The cell has ended."""
        self.ended, self.share, self.seconds = True, 1.0, seconds


class LiveView(PlainView):
    """One bar per running cell with its phase, one for the whole run, and the lines of finished cells above."""

    def __init__(self, names: Sequence[str], before: int = 0, expected: Expected = MappingProxyType({})) -> None:
        super().__init__(names, before, expected)
        columns = (TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),)
        console = Console(file=terminal())
        bar = BarColumn(bar_width=8 if console.width < WIDE else 24)
        self.bars = Progress(
            *columns, bar, TextColumn("{task.fields[note]}"), TimeElapsedColumn(), console=console, expand=True
        )
        note = f"{self.place()}, importing packages"
        self.whole = self.bars.add_task("all cells", total=before + self.total, completed=before, note=note)
        self.tasks: dict[str, TaskID] = {}
        self.trial: TaskID | None = None

    def __enter__(self) -> "LiveView":
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def preflight(self, line: str) -> None:
        """The preflight begins; line: what it does."""
        self.say(line)
        self.trial = self.bars.add_task("preflight", total=None, note="importing packages")
        self.bars.update(self.whole, note=f"{self.place()}, preflight first")

    def trying(self, done: int, steps: int, what: str) -> None:
        """What the preflight is trying, after this many of its steps."""
        if self.trial is not None:
            self.bars.update(
                self.trial, description=printable(what), total=steps, completed=done, note=f"{done}/{steps}"
            )

    def tried(self) -> None:
        """The preflight has ended."""
        if self.trial is not None:
            self.bars.remove_task(self.trial)
        self.bars.update(self.whole, note=f"{self.place()}, starting")

    def started(self, name: str) -> None:
        """A cell has started."""
        self.tasks[name] = self.bars.add_task(printable(name), total=1.0, note="starting")

    def progress(self, name: str, phase: str, share: float, doing: str) -> None:
        """This share of a cell's phase is done; doing: what is being done in it."""
        self.cells[name].reached(phase, share)
        self.bars.update(self.tasks[name], completed=self.cells[name].share, note=where(phase, printable(doing)))
        self._show_whole()

    def finished(self, name: str, record: Record) -> None:
        """A cell has ended with this record."""
        if name in self.tasks:
            self.bars.remove_task(self.tasks.pop(name))
        super().finished(name, record)
        self._show_whole()

    def ruled_out(self, reason: str, records: Mapping[str, Record]) -> None:
        """These cells cannot run; records: by their names."""
        super().ruled_out(reason, records)
        self._show_whole()

    def say(self, line: str) -> None:
        """Print a line above the bars, broken at spaces; a terminal would break it inside words."""
        for own in printable(line).splitlines():
            for part in wrapped(own, self.bars.console.width):
                self.say_command(part)

    def say_command(self, line: str) -> None:
        """Print a line above the bars, broken by the terminal: it is copied as one line."""
        self.bars.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    def _show_whole(self) -> None:
        """Show how many cells have ended, and the time left by the progress of those that run."""
        note = self.place() + (f", {self.failed} failed" if self.failed else "") + self.left()
        self.bars.update(self.whole, completed=self.before + self.done, note=note)


class JsonView(PlainView):
    """One JSON object per line."""

    def trying(self, done: int, steps: int, what: str) -> None:
        """What the preflight is trying, after this many of its steps."""
        if what != self.tried_last:
            self.tried_last = what
            self._print(event="preflight", done=done, steps=steps, trying=what)

    def started(self, name: str) -> None:
        """A cell has started."""
        self._print(event="started", cell=name)

    def progress(self, name: str, phase: str, share: float, doing: str) -> None:
        """This share of a cell's phase is done; doing: what is being done in it."""
        said = {"doing": doing} if doing else {}
        self._print(event="progress", cell=name, phase=phase, share=round(share, 4), **said)

    def finished(self, name: str, record: Record) -> None:
        """A cell has ended with this record."""
        self.count(name, record)
        reason = record.failure.reason if record.failure else None
        self._print(event="finished", cell=name, state=record.state, reason=reason, key=record.key)

    def ruled_out(self, reason: str, records: Mapping[str, Record]) -> None:
        """These cells cannot run; one event for each."""
        for name, record in records.items():
            self.finished(name, record)

    def say(self, line: str) -> None:
        """Print a line."""
        self._print(event="message", text=line)

    def _print(self, **fields: Any) -> None:
        print(json.dumps(fields), flush=True)


def view_for(
    names: Sequence[str], *, before: int = 0, expected: Expected = MappingProxyType({}), as_json: bool
) -> PlainView:
    """The view for this output; before: how many cells are already done; expected: estimates of those to run."""
    kind = JsonView if as_json else LiveView if sys.stdout.isatty() else PlainView
    return kind(names, before, expected)


def where(phase: str, doing: str) -> str:
    """What a cell is doing, in a few words: evaluate piqa. Tasks that are scored together are counted if they are too
    many to name: their batches are mixed.
    """
    words = f"{phase} {doing}".rstrip()
    if len(words) > MAX_WORDS and "," in doing:
        more = re.search(r" and (\d+) more$", doing)
        words = f"{phase} {doing.count(',') + 1 + (int(more[1]) if more else 0)} tasks"
    return words if len(words) <= MAX_WORDS else words[: MAX_WORDS - 1] + "…"


def outcome(record: Record) -> str:
    """How a cell ended, in half a line."""
    if record.failure:
        return f"{how_it_failed(record.failure)}: {first_line(record.failure)}"
    audit = record.audit  # its KL is on random tokens, unlike that of the tables
    kl = f", probe KL {audit.kl:.3g}" if audit and audit.layers and audit.kl is not None else ""
    return f"done in {duration(own_seconds(record))}{kl}"


def how_it_failed(failure: Failure) -> str:
    """FAILED in load (error)."""
    where = f" in {failure.phase}" if failure.phase else ""
    return f"FAILED{where} ({failure.kind})"


def first_line(failure: Failure) -> str:
    """The first line of the reason."""
    return failure.reason.splitlines()[0]


def own_seconds(record: Record) -> float:
    """How long a cell took, whether it finished or failed."""
    if record.cost:
        return sum(record.cost.seconds.values())
    began, ended = (datetime.fromisoformat(t) for t in (record.provenance.started, record.provenance.finished))
    return (ended - began).total_seconds()
