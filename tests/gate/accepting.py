"""Made-up runs to accept as a baseline, and what an accept leaves on disk."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qbench.cli import main
from qbench.records.store import read_results

from .made_up import Population, make_cells, write_cells

CELLS = make_cells(2)
POPULATION = Population(60, tasks=["piqa", "wikitext"])


def run(folder: Path, loss: float = 0.0) -> Path:
    write_cells(folder, {cell: POPULATION.samples(loss=loss) for cell in CELLS})
    for cell in folder.iterdir():
        if cell.is_dir():
            (cell / "log.txt").write_text("a log")
    return folder


def accept(folder: Path, baseline: Path, reason: str = "a new kernel") -> int:
    return main(["accept", str(folder), "--baseline", str(baseline), "--reason", reason])


def changes(baseline: Path) -> list[dict]:
    return [json.loads(line) for line in (baseline / "CHANGES.jsonl").read_text().splitlines()]


def losses(folder: Path) -> set[float]:
    """Which run's numbers a folder has."""
    return {metric.value for stored in read_results(folder).current for metric in stored.record.metrics}


def snapshot(folder: Path) -> dict[str, bytes | str | None]:
    """Every path below a folder with its content: a file's bytes, a link's target, None for a folder."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = content
    return found


def interrupt(before: Callable[[int], None], setattr_: Callable[[object, str, object], None]) -> None:
    """Call a function with the number of the step before each step of an accept that writes."""
    steps = iter(range(1000))

    def interrupted(function: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            before(next(steps))
            return function(*args, **options)

        return call

    of_paths = [(Path, name) for name in ("rename", "mkdir", "write_text", "unlink")]
    for owner, name in (*of_paths, (os, "replace"), (os, "sync"), (shutil, "copy2"), (shutil, "rmtree")):
        setattr_(owner, name, interrupted(getattr(owner, name)))
