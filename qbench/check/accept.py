"""Renewing a baseline: a run's records take its place, all of them or none, and a log says who did it and why."""

import getpass
import json
import os
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qbench.check.as_json import score
from qbench.check.baseline import holds_records
from qbench.check.gate import Report, settings_of
from qbench.check.join import CheckError
from qbench.errors import InputError
from qbench.store import RECORD, RUN, SAMPLES, Results, StoredRecord, read_results, write_plan

CHANGES = "CHANGES.jsonl"


def accept(run: Path, baseline: Path, reason: str, report: Report | None, why_none: str = "") -> int:
    """Put the run's records in the baseline's place; returns the bytes that they take.

    report: of the run against the baseline as it was; None where there is none to compare with, and why_none says why.
    """
    if not reason.strip():
        raise CheckError("--reason is empty; it must say why the baseline changes.")
    results = read_results(run)
    _check_whole(results, baseline)
    new, old = _aside(baseline, "new"), _aside(baseline, "old")
    try:
        _recover(baseline, new, old)
        change = _change(results, baseline, reason, report, why_none)
        new.mkdir(parents=True)
        _keep_files(baseline, new)
        for stored in results.current:
            _copy(stored, new / stored.folder.name)
        if results.plan:
            write_plan(new, results.plan)
        with (new / CHANGES).open("a", encoding="utf-8") as log:
            log.write(json.dumps(change, allow_nan=False) + "\n")
        _swap(baseline, new, old)
    except OSError as error:
        raise CheckError(f"{baseline}: the baseline cannot be written ({error.strerror or error}).") from error
    return sum(file.stat().st_size for file in baseline.rglob("*") if file.is_file())


def is_new(baseline: Path) -> bool:
    """Whether there are no records yet, nor any that a killed accept put aside."""
    return not holds_records(baseline) and not holds_records(_aside(baseline, "old"))


def _aside(baseline: Path, which: str) -> Path:
    return baseline.parent / f".{baseline.name}.{which}"


def _check_whole(results: Results, baseline: Path) -> None:
    folder = results.folder
    if baseline.resolve() == folder.resolve():
        raise CheckError(f"{folder} is the baseline itself; there is nothing to accept.")
    failed = [stored.record.cell.name for stored in results.current if stored.record.state == "failed"]
    if lacking := [cell.cell.name for cell in results.missing] + failed:
        raise CheckError(f"{folder}: {lacking[0]} is missing or failed; only a run that is done becomes a baseline.")
    if not results.current:
        raise CheckError(f"{folder} holds no record of its plan's cells; there is nothing to accept.")
    if settings_of(results).baseline_may_hold_more:
        raise CheckError(
            f"{folder} is a part of a baseline (gate.baseline_may_hold_more); accept a run of the whole recipe."
        )


def _recover(baseline: Path, new: Path, old: Path) -> None:
    """Undo what a killed accept left: the old baseline comes back if the new one had not taken its place."""
    if old.exists() and not baseline.exists():
        old.rename(baseline)
    for unfinished in (new, old):
        if unfinished.exists():
            shutil.rmtree(unfinished)


def _keep_files(baseline: Path, new: Path) -> None:
    """What people put beside the cells, and the log, stay."""
    if baseline.is_dir():
        for file in baseline.iterdir():
            if file.is_file() and file.name != RUN:
                shutil.copy2(file, new / file.name)


def _copy(stored: StoredRecord, folder: Path) -> None:
    """A cell without its log, and the record on one line: what is committed should be small."""
    folder.mkdir()
    if stored.has_samples:
        (folder / SAMPLES).write_bytes(stored.samples_content())
    content = json.dumps(stored.record.model_dump(mode="json"), separators=(",", ":"), allow_nan=False)
    (folder / RECORD).write_text(content + "\n", encoding="utf-8")


def _swap(baseline: Path, new: Path, old: Path) -> None:
    """Rename twice: never a mixture. Killed in between, there is no baseline, and _recover finds the old one."""
    os.sync()
    if baseline.exists():
        baseline.rename(old)
    new.rename(baseline)
    if old.exists():
        shutil.rmtree(old)


def _change(results: Results, baseline: Path, reason: str, report: Report | None, why_none: str) -> dict[str, Any]:
    try:
        before = {stored.record.cell.name for stored in read_results(baseline).current}
    except InputError:  # there was no baseline that can be read
        before = set()
    after = {stored.record.cell.name for stored in results.current}
    first = results.current[0].record.provenance
    moved = [score(outcome) for outcome in (*report.worse, *report.better)] if report else []
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "who": _who(),
        "why": reason.strip(),
        "recipe": first.recipe,
        "commit": first.git_commit,
        "cells": {"now": len(after), "added": sorted(after - before), "removed": sorted(before - after)},
        "verdict": ("pass" if report.passed else "fail") if report else f"not compared: {why_none}",
        "moved": [
            {k: s[k] for k in ("cell", "task", "metric", "before", "after", "loss", "adjusted_p")} for s in moved
        ],
        "findings": [f"{f.cell.name}: {f.message}" for f in report.failures] if report else [],
    }


def _who() -> str:
    """The person as git knows them, or else the machine's user."""
    try:
        asked = [
            subprocess.run(["git", "config", key], capture_output=True, text=True, timeout=10).stdout.strip()
            for key in ("user.name", "user.email")
        ]
    except (OSError, subprocess.TimeoutExpired):
        asked = ["", ""]
    name, email = asked
    return f"{name} <{email}>" if name and email else name or getpass.getuser()
