"""Updating a baseline: a run's records replace it, all or none, and a log records who did it and why."""

import getpass
import json
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qbench.errors import InputError, first_of
from qbench.files import aside, parse_json, read_content, replacing
from qbench.gate.pairing import CheckError
from qbench.gate.render import score, sentence
from qbench.gate.verdict import GateReport, check, settings_of
from qbench.records.store import (
    CELL_FOLDER,
    LOG,
    RECORD,
    RUN,
    SAMPLES,
    Results,
    StoredRecord,
    holds_records,
    read_record,
    read_results,
    write_plan,
)

CHANGES = "CHANGES.jsonl"
MAX_REASONS = 3  # in the message that rejects a run


def accept(run: Path, baseline: Path, reason: str, report: GateReport | None, not_compared: str = "") -> int:
    """Replace the baseline with the run's records; returns their size in bytes.

    report: of the run against the old baseline; None if they could not be compared, and not_compared says why.
    """
    check_reason(reason)
    results = read_results(run)
    target = baseline.resolve()  # checked and written: a link stays, its target is replaced
    try:
        check_replaceable(target, run)
        _check_whole(results)
        with replacing(target) as new:
            change = _change(results, target, reason, report, not_compared)
            _fill(new, target, results, change)
            _check_usable(run, new)
    except OSError as error:
        problem = f"{baseline}: the baseline cannot be written ({error.strerror or error})."
        raise CheckError(problem + _where_the_old_one_is(target)) from error
    return sum(file.stat().st_size for file in target.rglob("*") if file.is_file())


def check_reason(reason: str) -> None:
    """An error if the reason is empty."""
    if not reason.strip():
        raise CheckError("--reason is empty; it must say why the baseline changes.")


def is_new(baseline: Path) -> bool:
    """Whether there are no records yet, not even ones that a killed accept moved aside."""
    return not holds_records(baseline) and not holds_records(aside(baseline.resolve(), "old"))


def check_replaceable(folder: Path, run: Path) -> None:
    """An error unless the folder is new, or holds a baseline and nothing else that would be lost."""
    if folder.resolve() == run.resolve():
        raise CheckError(f"{run} is the baseline itself; there is nothing to accept.")
    if problem := _why_not_replaceable(folder, run):
        raise CheckError(f"{problem}. {_what_is_right(folder, run)}")


def _why_not_replaceable(folder: Path, run: Path) -> str | None:
    if run.resolve().is_relative_to(folder.resolve()):
        return f"{folder} cannot be the baseline, because it contains the run {run}"
    if folder.resolve().is_relative_to(run.resolve()):
        return f"{folder} cannot be the baseline, because it is inside the run {run}"
    foreign = _first_foreign(folder) if folder.exists() else None
    return f"{folder} cannot be replaced, because {foreign} is not part of a baseline" if foreign else None


def _what_is_right(folder: Path, run: Path) -> str:
    meant = folder / run.name
    if holds_records(meant) and meant.resolve() != run.resolve():
        return f"Did you mean {meant}?"
    return "Name a folder that holds a baseline, or one that does not exist yet."


def _first_foreign(folder: Path) -> Path | None:
    """The first path that is neither a cell nor a file next to cells; the first file if there is no baseline at all."""
    entries = sorted(folder.iterdir())
    files = [entry for entry in entries if _is_plain_file(entry)]
    for entry in entries:
        if entry not in files and (foreign := _foreign_in_cell(entry)):
            return foreign
    is_baseline = len(files) < len(entries) or _is_log(folder / CHANGES) or _is_readable(folder)
    return files[0] if files and not is_baseline else None


def _foreign_in_cell(cell: Path) -> Path | None:
    """The first file in a cell's folder that qbench did not write; the folder itself if it is not a cell's."""
    if cell.is_symlink() or not cell.is_dir():
        return cell
    ours = CELL_FOLDER.search(cell.name) and _is_plain_file(cell / RECORD)
    if not ours and not _has_record(cell):
        return cell
    known = (RECORD, SAMPLES, LOG)
    return next((file for file in sorted(cell.iterdir()) if file.name not in known or not _is_plain_file(file)), None)


def _is_plain_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _has_record(cell: Path) -> bool:
    try:
        read_record(cell / RECORD)
    except InputError:
        return False
    return True


def _is_log(file: Path) -> bool:
    """Whether the file is a log of accepted runs, and not just a file with that name."""
    try:
        lines = [parse_json(line, file) for line in read_content(file).decode().splitlines()]
    except ValueError:
        return False
    return bool(lines) and all(isinstance(line, dict) and {"when", "who", "why"} <= line.keys() for line in lines)


def _is_readable(folder: Path) -> bool:
    try:
        read_results(folder)
    except InputError:
        return False
    return True


def _where_the_old_one_is(baseline: Path) -> str:
    """Where the old baseline is, if it could not be put back; otherwise empty."""
    old = aside(baseline, "old")
    if baseline.exists() or not old.exists():
        return ""
    return f" The old baseline is in {old}; the next `qbench accept` puts it back."


def _check_whole(results: Results) -> None:
    folder = results.folder
    failed = [stored.record.cell.name for stored in results.current if stored.record.state == "failed"]
    if lacking := [cell.cell.name for cell in results.missing] + failed:
        raise CheckError(f"{folder}: {lacking[0]} is missing or failed; only a finished run can become a baseline.")
    if not results.current:
        raise CheckError(f"{folder} has no record of any planned cell; there is nothing to accept.")
    if empty := [stored.folder for stored in results.current if not stored.record.metrics]:
        raise CheckError(f"{empty[0]} has no metrics, so no later run could be compared with it; run the cell again.")
    if settings_of(results).baseline_may_hold_more:
        raise CheckError(
            f"{folder} covers only part of a baseline (gate.baseline_may_hold_more); accept a run of the whole recipe."
        )


def _fill(new: Path, baseline: Path, results: Results, change: dict[str, Any]) -> None:
    """Write the run's records, other files from the old baseline, and the log with one more line."""
    if baseline.exists():
        for file in baseline.iterdir():
            if file.is_file() and file.name != RUN:
                shutil.copy2(file, new / file.name)
    for stored in results.current:
        _copy(stored, new / stored.folder.name)
    if results.plan:
        write_plan(new, results.plan)
    with (new / CHANGES).open("a", encoding="utf-8") as log:
        log.write(json.dumps(change, allow_nan=False) + "\n")


def _check_usable(run: Path, new: Path) -> None:
    """The gate must pass the run against its own copy: if not, every later check would fail too."""
    try:
        report = check(run, new)
    except InputError as error:
        message = str(error).replace(str(new), str(run))  # the copy is gone when this is read
        raise CheckError(f"{run} cannot be a baseline: {message}") from None
    if not report.passed:
        worse = [f"{outcome.hypothesis.name} is worse than itself" for outcome in report.worse]
        reasons = [*_failures(report), *worse, *_missed_margins(report)]
        raise CheckError(
            f"{run} cannot be a baseline, because it fails the gate even against a copy of itself: "
            + " ".join(first_of(reasons, MAX_REASONS))
        )


def _copy(stored: StoredRecord, folder: Path) -> None:
    """Copy a cell without its log, with the record on one line: committed files should be small."""
    folder.mkdir()
    if stored.has_samples:
        (folder / SAMPLES).write_bytes(stored.samples_content())
    content = json.dumps(stored.record.model_dump(mode="json"), separators=(",", ":"), allow_nan=False)
    (folder / RECORD).write_text(content + "\n", encoding="utf-8")


def _change(
    results: Results, baseline: Path, reason: str, report: GateReport | None, not_compared: str
) -> dict[str, Any]:
    try:
        before = {stored.record.cell.name for stored in read_results(baseline).current}
    except InputError:  # there was no baseline that can be read
        before = set()
    after = {stored.record.cell.name for stored in results.current}
    first = results.current[0].record.provenance
    moved = [score(outcome) for outcome in (*report.worse, *report.better)] if report else []
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "who": who(),
        "why": reason.strip(),
        "recipe": first.recipe,
        "commit": first.git_commit,
        "cells": {"now": len(after), "added": sorted(after - before), "removed": sorted(before - after)},
        "verdict": ("pass" if report.passed else "fail") if report else f"not compared: {not_compared}",
        "moved": [
            {k: s[k] for k in ("cell", "task", "metric", "before", "after", "loss", "adjusted_p")} for s in moved
        ],
        "findings": [*_failures(report), *_missed_margins(report)] if report else [],
    }


def _failures(report: GateReport) -> list[str]:
    return [f"{failure.cell.name}: {failure.message}" for failure in report.failures]


def _missed_margins(report: GateReport) -> list[str]:
    return [f"{outcome.hypothesis.cell.name}: {sentence(outcome)}" for outcome in report.not_excluded]


def who() -> str:
    """The user's name and address from git's configuration, or else the login name."""
    try:
        asked = [
            subprocess.run(["git", "config", key], capture_output=True, text=True, timeout=10).stdout.strip()
            for key in ("user.name", "user.email")
        ]
    except (OSError, subprocess.TimeoutExpired):
        asked = ["", ""]
    name, email = asked
    return f"{name} <{email}>" if name and email else name or getpass.getuser()
