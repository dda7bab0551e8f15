"""`qbench runs`: the records of a folder, and which of them newer ones have replaced; these pile up."""

import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from qbench.errors import some
from qbench.numbers import byte_size, counted, duration
from qbench.records.store import (
    ANALYSES,
    CELL_FOLDER,
    LOG,
    PARQUET,
    RECORD,
    RUN,
    StoredRecord,
    StoreError,
    read_analyses,
    read_results,
)
from qbench.report.tables import Column, Field, Table
from qbench.runner.lock import holding

OURS = (RECORD, LOG, *PARQUET)  # the files of a record's folder


@dataclass(frozen=True)
class Kept:
    """A record, and whether the plan of the last run names it."""

    stored: StoredRecord
    current: bool

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.stat().st_size for file in self.stored.folder.iterdir() if file.is_file())

    @property
    def age(self) -> float:
        """Seconds since it was finished."""
        finished = datetime.fromisoformat(self.stored.record.provenance.finished)
        return (datetime.now(UTC) - finished).total_seconds()


def kept_records(folder: Path) -> list[Kept]:
    """The records of a folder, scores and analyses, the current ones first."""
    found = [
        read(folder) for plan, read in ((RUN, read_results), (ANALYSES, read_analyses)) if (folder / plan).exists()
    ]
    if not found:
        found = [read_results(folder)]  # without a plan, all of them count; or it says that there are none
    current = [Kept(stored, True) for results in found for stored in results.current]
    return current + [Kept(stored, False) for results in found for stored in results.superseded]


def records_table(folder: Path, records: list[Kept]) -> Table:
    """One line per record."""
    columns = [*(Column(title, "l") for title in ("Record", "Cell", "State")), Column("Age"), Column("Size")]
    table = Table("records", f"Records of {folder}", _totals(folder, records), [], columns, heads=1)
    for kept in records:
        record, size = kept.stored.record, kept.size
        which = "current" if kept.current else "superseded"
        texts = [Field(which), Field(record.cell.name), Field(record.state)]
        table.rows.append([*texts, Field(_ago(kept.age), kept.age), Field(byte_size(size), size)])
    return table


def _totals(folder: Path, records: list[Kept]) -> str:
    old = [kept for kept in records if not kept.current]
    text = f"{len(records) - len(old)} current ({byte_size(sum(kept.size for kept in records if kept.current))})"
    if not old:
        return f"{text}, none superseded."
    size = byte_size(sum(kept.size for kept in old))
    command = f"qbench runs {shlex.quote(str(folder))} --prune"
    return f"{text}, {len(old)} superseded ({size}): `{command}` removes those."


def prune(folder: Path) -> list[str]:
    """Remove the superseded records of a folder; returns what was done, one line each.

    Only files that qbench writes are removed. A folder with anything else in it is left alone.
    """
    kept_records(folder)  # an error before the lock makes a folder
    lines, freed = [], 0
    with holding(folder):
        for kept in kept_records(folder):
            if kept.current:
                continue
            place, size = kept.stored.folder, kept.size
            if reason := _why_kept(place):
                lines.append(f"kept {place}: {reason}")
                continue
            try:
                for name in (LOG, *PARQUET, RECORD):  # the record last: without it, the next run removes the rest
                    (place / name).unlink(missing_ok=True)
                place.rmdir()
            except OSError as error:
                raise StoreError(f"{place} cannot be removed ({error.strerror or error}).") from None
            lines.append(f"removed {place} ({byte_size(size)})")
            freed += size
    removed = sum(line.startswith("removed") for line in lines)
    return [*lines, f"{counted(removed, 'superseded record')} removed, {byte_size(freed)}"]


def _why_kept(place: Path) -> str:
    """Why a record's folder must not be removed; empty if it may be."""
    if place.is_symlink() or not CELL_FOLDER.search(place.name):
        return "it is not a folder that `qbench run` made"
    others = sorted(file.name for file in place.iterdir() if file.name not in OURS or not file.is_file())
    return f"it also has {some(others)}" if others else ""


def _ago(seconds: float) -> str:
    """12 min, 5.0 h, 3 days."""
    days = seconds / 86400
    return f"{days:.0f} days" if days >= 2 else duration(max(seconds, 0.0))
