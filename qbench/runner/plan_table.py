"""`qbench plan` as text: each cell with its state, its estimated cost, and the time that its record reports."""

from collections.abc import Sequence
from dataclasses import dataclass

from qbench.errors import some
from qbench.numbers import count, counted, duration, rough_duration
from qbench.recipe.schema import Recipe
from qbench.report.render import TERMINAL
from qbench.report.tables import Column, Field, Table
from qbench.report.terminal import Screen
from qbench.runner.cell import Job
from qbench.runner.estimate import Estimate, estimate
from qbench.runner.local import Slot
from qbench.runner.lock import RunError
from qbench.runner.places import make_slots
from qbench.runner.plan import Plan, PlanEntry, cannot_be_analyzed, ignored, no_baseline, settings
from qbench.runner.preflight import expected_preflight, is_short
from qbench.runner.speed import Speed, speed_of

MIN_PREFLIGHT = 60  # seconds; a shorter preflight is not worth a word
TO_DO = ("to do", "failed", "stale")
COLUMNS = (
    *(Column(title, "l") for title in ("cell", "state")),
    *(Column(title) for title in ("memory", "work", "estimated", "measured")),
)


@dataclass(frozen=True)
class _Row:
    entry: PlanEntry
    estimate: Estimate | None

    @property
    def measured(self) -> dict[str, float]:
        """Seconds by phase from the record; empty if there is no finished record."""
        record = self.entry.record
        return record.cost.seconds if record and record.cost else {}


def render_plan(plan: Plan, format: str = "text") -> str:
    """The plan as a table, with each note printed once, the total, and the time by phase. format: or terminal."""
    slots, problem = _places(plan)
    speed = speed_of(plan.recipe, slots[0].threads or 1 if slots else 1)
    rows = [_Row(e, estimate(e.cell, plan.tasks, speed) if e.identity else None) for e in plan.entries]
    notes = list(dict.fromkeys(note for entry in plan.entries for note in entry.notes))
    lines = [f"[{number}] {_concerned(note, plan)}{note.splitlines()[0]}" for number, note in enumerate(notes, 1)]
    lines += [] if plan.analyzes else _unfit_for_analysis(plan.recipe)
    states = [entry.state for entry in plan.entries]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    work = sum(row.estimate.work for row in rows if row.estimate and row.entry.state in TO_DO)
    lines.append(f"{counted(len(states), 'cell')}: {counts} ({work / 1e12:,.1f} TFLOP left)")
    lines += _time(rows, speed, slots, _preflight_time(plan, speed, slots)) + (
        [f"cannot run on this machine: {problem}"] if problem else []
    )
    documents = ", ".join(f"{name} {count(facts.documents)}" for name, facts in plan.tasks.items()) or "not fetched"
    lines += [] if plan.analyzes else [f"documents per task: {documents}"]
    lines += [*settings(plan), f"records: {plan.out}", *filter(None, [ignored(plan), no_baseline(plan)])]
    return _drawn(rows, notes, lines) if format == TERMINAL else "\n".join([_grid(rows, notes), "", *lines, ""])


def _grid(rows: Sequence[_Row], notes: list[str]) -> str:
    from tabulate import tabulate

    cells = [_cells(row, notes) for row in rows]
    alignments = ["left" if column.align == "l" else "right" for column in COLUMNS]
    headers = [column.title for column in COLUMNS]
    return tabulate(cells, headers=headers, colalign=alignments, disable_numparse=True)


def _drawn(rows: Sequence[_Row], notes: list[str], lines: Sequence[str]) -> str:
    screen = Screen()
    texts = [_cells(row, notes) for row in rows]
    used = [n for n in range(len(COLUMNS)) if any(own[n] for own in texts)]  # nothing is measured before a first run
    fields = [[Field(own[n]) for n in used] for own in texts]
    screen.grid(Table("plan", "", "", [], [COLUMNS[n] for n in used], heads=0, rows=fields))
    for line in lines:
        screen.paragraph(line)
    return screen.text()


def _concerned(note: str, plan: Plan) -> str:
    """The cells that cannot run because of this; nothing for other notes, which the table refers to."""
    names = [entry.cell.ref.name for entry in plan.entries if entry.state == "cannot run" and entry.note == note]
    return f"{some(names)} cannot run: " if names else ""


def _unfit_for_analysis(recipe: Recipe) -> list[str]:
    """The settings, often inherited, that `qbench analyze` would fail with: where they are, and why."""
    return [
        str(recipe._file.error(("analysis", "sensitivity"), f"`qbench analyze` cannot measure {some(names)}: {why}"))
        for why, names in cannot_be_analyzed(recipe).items()
    ]


def _places(plan: Plan) -> tuple[Sequence[Slot], str]:
    """The slots for cells on this machine; none and the reason if it cannot run them."""
    try:
        return make_slots(plan), ""
    except RunError as error:
        return [], str(error)


def _cells(row: _Row, notes: list[str]) -> list[str]:
    entry, found = row.entry, row.estimate
    state = " ".join([entry.state, *(f"[{notes.index(note) + 1}]" for note in entry.notes)])
    taken = duration(sum(row.measured.values())) if row.measured else ""
    if found is None:
        return [entry.cell.ref.name, state, "", "", "", taken]
    memory, work = f"{found.memory / 2**30:.1f} GiB", f"{found.work / 1e12:,.2f} TFLOP"
    return [entry.cell.ref.name, state, memory, work, duration(found.total) if found.seconds else "", taken]


def _preflight_time(plan: Plan, speed: Speed | None, slots: Sequence[Slot]) -> float:
    """The seconds of the preflight that a run of all cells would begin with; 0 if it has none or it is short."""
    jobs = [Job(e.cell, e.identity, None) for e in plan.entries if e.identity and e.state in TO_DO]
    if plan.analyzes or not speed or not slots or is_short(plan, jobs, slots):
        return 0.0
    seconds = expected_preflight(plan, jobs, speed)
    return seconds if seconds > MIN_PREFLIGHT else 0.0


def _time(rows: Sequence[_Row], speed: Speed | None, slots: Sequence[Slot], preflight: float) -> list[str]:
    """The time left, and for finished cells the time taken and the estimate. preflight: seconds before all cells."""
    todo = [row.estimate for row in rows if row.estimate and row.entry.state in TO_DO]
    lines = []
    if speed and slots and todo and todo[0].seconds:
        total = preflight + sum(found.total for found in todo) / len(slots)
        first = f"preflight {duration(preflight)}, " if preflight else ""
        at_once = f", {len(slots)} cells at once" if len(slots) > 1 else ""
        lines.append(f"time left: about {rough_duration(total)}{at_once} ({first}{_by_phase(todo, len(slots))})")
        lines.append(f"assumed speed: {speed}")
    done = [row for row in rows if row.estimate and row.estimate.seconds and row.measured]
    if done:
        taken = {phase: sum(row.measured.get(phase, 0.0) for row in done) for phase in done[0].measured}
        measured = ", ".join(f"{phase} {duration(seconds)}" for phase, seconds in taken.items())
        estimated = _by_phase([row.estimate for row in done if row.estimate])
        lines.append(f"time of {counted(len(done), 'finished cell')}: {measured} (estimated: {estimated})")
    return lines


def _by_phase(found: Sequence[Estimate], places: int = 1) -> str:
    seconds = {phase: sum(each.seconds[phase] for each in found) / places for phase in found[0].seconds}
    return ", ".join(f"{phase} {duration(taken)}" for phase, taken in seconds.items() if taken)
