"""Captures what qbench says about the frozen inputs, as data. `python -m tests.frozen.numbers --write` renews them.

The command line is asked, in this process. Besides it: `read_report` and `render`, which `qbench table` calls, because
a folder is then read once for all kinds; `power`, because the command rounds; and parquet files, for the digest of the
inputs. If these move, only the lines that call them change.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

import numpy as np
import pyarrow.parquet as pq

from qbench.cli import main
from qbench.errors import InputError
from qbench.gate.power import power
from qbench.records.store import read_record
from qbench.report.delta import ReportData, read_report
from qbench.report.render import render

from .folders import MAKERS, Input
from .rules import rule, rules_of_notes

EXPECTED = Path(__file__).parent / "expected"
KINDS = ("summary", "headline", "damage", "delta", "baseline")
KINDS += ("passkey", "kl", "analysis", "causes", "lowbit", "sensitivity")
SHOWN = ("summary", "damage")  # tables with numbers that no row has: frozen as shown
WRONG = 2  # the exit code of a wrong call, recipe or file
# The columns that say what a row is about.
ABOUT = ("family", "attention", "reference_attention", "label", "bits", "task", "metric", "number", "setting", "length")
ABOUT += ("draw", "part", "step", "layer", "linear", "reference", "unit")
TESTED = ("kind", "verdict", "before", "after", "loss", "interval", "not_worse_by_more_than", "tolerance")
TESTED += ("noninferiority", "alpha", "documents", "documents_needed", "changed_documents")
TESTED += ("calibration_draws", "in_tolerances", "most_changed")


def called(*arguments: object) -> tuple[int, str, str]:
    """A command's exit code, output and error."""
    out, error = io.StringIO(), io.StringIO()
    plain = {name: own for name, own in os.environ.items() if not name.startswith("GITHUB_")}  # no annotations
    with patch.dict(os.environ, plain, clear=True), contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = main([str(own) for own in arguments])
    return code, out.getvalue(), error.getvalue()


def refused(code: int, error: str) -> dict[str, Any]:
    """Exit code 2 and why."""
    (sentence,) = (line for line in error.splitlines() if line.startswith("qbench: "))
    return {"exit": code, "rule": rule(sentence.removeprefix("qbench: "))}


def captured(inputs: Input) -> dict[str, Any]:
    """All that is frozen about an input."""
    return {
        "documents": {name: digest(folder) for name, folder in inputs.tables.items()},
        "tables": {name: tables(folder) for name, folder in inputs.tables.items()},
        "audit": {name: audit(folder) for name, folder in inputs.tables.items()},
        "power": {name: powers(folder) for name, folder in inputs.tables.items()}
        | {f"{name} another": powers(*folders) for name, folders in inputs.powers.items()},
        "compare": {name: compare(*folders) for name, folders in inputs.compares.items()},
        "check": {name: check(arguments) for name, arguments in inputs.checks.items()},
        "accept": {name: accept(folder) for name, folder in inputs.tables.items()},
    }


# --- the inputs


def digest(folder: Path) -> str:
    """A hash of all documents' values, whatever the format of the files and the order of rows."""
    lines = [line for file in sorted(folder.glob("*.csv")) for line in file.read_text(encoding="utf-8").splitlines()]
    for file in folder.glob("*/record.json"):
        lines += _documents(read_record(file).cell.name, file.with_name("samples.parquet"))
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


NOT_VALUES = ("task", "doc_id", "doc_hash", "target", "response", "is_greedy", "bytes", "tokens")


def _documents(cell: str, samples: Path) -> list[str]:
    if not samples.exists():
        return []
    table = pq.read_table(samples)
    lines = [f"{cell} {task} {text}" for task, text in zip(table["task"], table["doc_hash"], strict=True)]
    for name in sorted(set(table.column_names) - set(NOT_VALUES)):
        lines = [f"{line} {_digits(own)}" for line, own in zip(lines, table[name].to_pylist(), strict=True)]
    return lines


def _digits(value: Any) -> str:
    """A number or several with 12 digits: the last bits may differ between machines."""
    if isinstance(value, list):
        return ",".join(map(_digits, value))
    return "-" if value is None else f"{value:.12g}"


# --- tables


def tables(folder: Path) -> dict[str, Any]:
    """Every kind: its rows, and the cells and marks of its tables."""
    try:
        report = read_report(folder)
    except InputError as error:
        return {"exit": WRONG, "rule": rule(f"{error}")}
    found = {}
    for kind in KINDS:
        found[kind] = _rendered(report, "json", kind, lambda text: rows(json.loads(text)))
        found[f"{kind} shown"] = _rendered(report, "md", kind, lambda text, kind=kind: shown(text, kind))
    return found


def _rendered(report: ReportData, format: str, kind: str, read: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    try:
        return read(render(report, format, kind))
    except InputError as error:
        return {"exit": WRONG, "rule": rule(f"{error}")}


def rows(table: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows by what they are about: a header and lists."""
    names = [name for name in table[0] if name not in ABOUT] if table else []
    found: dict[str, Any] = {}
    for row in table:
        key = " ".join(f"{row[name]}" for name in ABOUT if row.get(name) not in (None, ""))
        while key in found:  # one figure of two experiments
            key += " again"
        found[key] = [rules_of_notes(row[n] or "") if n == "note" else row[n] for n in names]
    return {"columns": names, "rows": found}


MARK = re.compile(r"<sup>.*?</sup>")
COUNT = re.compile(r"(?:Starred: (\d+) of (\d+)|Of the (\d+) .*?, (\d+) ha).*\(▲▼\): (\d+)\.")


def shown(text: str, kind: str) -> dict[str, Any]:
    """The tables of a kind: their cells, or only the marks of those; how many are marked; and the rules of remarks."""
    text = re.sub(r"\\(.)", r"\1", text)
    blocks = [block.strip() for block in text.split("\n\n")]
    grids = [block.splitlines() for block in blocks if block.startswith("|")]
    last = max(i for i, block in enumerate(blocks) if block.startswith("|"))
    counts = [[int(own) for own in found.groups() if own] for block in blocks if (found := COUNT.search(block))]
    after = [block for block in blocks[last + 1 :] if not COUNT.search(block) and not block.startswith("<sup>")]
    cells = [line for grid in grids for line in _cells(grid, kind)]
    remarks = sorted(map(rule, after[1:]))  # the first says how to read the tables
    return {"tables": len(grids), "cells": cells, "marked": counts, "remarks": remarks}


def _cells(grid: Sequence[str], kind: str) -> Iterable[str]:
    """The cells of each row that has any mark; of some kinds, all rows as shown."""
    for line in grid[2:]:
        row = " | ".join(MARK.sub("", cell).strip() for cell in line.strip("|").split("|"))
        if kind in SHOWN or any(mark in row for mark in ("*", "▲", "▼")):
            yield row if kind in SHOWN else re.sub(r"[^|*▲▼]+(?=[|*▲▼]|$)", _kept_words, row)


def _kept_words(found: re.Match[str]) -> str:
    """Names, but no numbers: those are in the rows."""
    return found[0].strip() if re.search(r"[A-Za-z]{2}", found[0]) else ""


# --- audits, power, comparisons


def audit(folder: Path) -> dict[str, Any]:
    """The table of audits as shown, each finding by its rule, and how much was judged."""
    code, out, error = called("audit", folder)
    if code == 2:
        return refused(code, error)
    lines = out.strip().splitlines()
    grid = [line for line in lines if line.startswith("|")]
    start = next((i for i, line in enumerate(lines) if line.startswith("Quantized: share of")), -2) + 2
    *findings, verdict = [line for line in lines[start:] if line]
    named = [line.partition(": ") for line in findings]
    return {
        "exit": code,
        "cells": list(_cells(grid, SHOWN[0])),
        "findings": sorted(f"{where}: {rule(_unescaped(why))}" for where, _, why in named),
        "counted": [int(own.replace(",", "")) for own in re.findall(r"\b\d[\d,]*", verdict.split(" in ")[0])],
    }


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def powers(folder: Path, against: Path | None = None) -> dict[str, Any]:
    """Detectable losses and documents needed, unrounded."""
    try:
        found = power(folder, against)
    except InputError as error:
        return {
            "exit": called("power", folder, *(("--against", against) if against else ()))[0],
            "rule": rule(f"{error}"),
        }
    return {
        f"{own.task} {own.metric}": [own.kind, own.documents, list(own.found.values()), *map(list, own.needed.items())]
        for own in found
    }


def compare(ours: Path, published: Path) -> dict[str, Any]:
    """Ours next to published numbers."""
    code, out, error = called("compare", ours, "--with", published, "--format", "json")
    return {"exit": code, **rows(json.loads(out))} if code == 0 else refused(code, error)


# --- the gate


def check(arguments: Sequence[Path | str]) -> dict[str, Any]:
    """The verdict: each hypothesis, each finding by its rule, and the same in JUnit."""
    with tempfile.TemporaryDirectory() as place:
        files = {name: Path(place) / f"report.{name}" for name in ("json", "junit")}
        options = [part for name, file in files.items() for part in (f"--{name}", file)]
        code, _, error = called("check", *arguments, *options)
        suite = ElementTree.parse(files["junit"]).getroot()
        if code == 2:
            (found,) = suite.iter("error")
            return refused(code, error) | {"junit": [*_counts(suite), rule(found.attrib["message"])]}
        report = json.loads(files["json"].read_text(encoding="utf-8"))
    return {"exit": code, **_verdict(report), "junit": _junit(suite, report)}


def _verdict(report: Mapping[str, Any]) -> dict[str, Any]:
    names = {name: [_finding(own) for own in report[name]] for name in ("failures", "warnings")}
    tested = {_tested(own): [own.get(name) for name in TESTED] for own in report["scores"]}
    assert len(tested) == len(report["scores"])
    return {
        "passed": report["passed"],
        "statement": report["statement"],
        "columns": list(TESTED),
        "tested": tested,
        "p": {_tested(own): [own["p"], own["adjusted_p"]] for own in report["scores"]},
        **{name: sorted(found) for name, found in names.items()},
        "changed": sorted(map(rule, report["changed"])),
        "notes": sorted(map(rule, report["notes"])),
        "differences": {
            cell: sorted(line.partition(":")[0] for line in own) for cell, own in report["differences"].items()
        },
        "settings": report["settings"],
    }


def _tested(own: Mapping[str, Any]) -> str:
    return f"{own['cell']} {own['task']} {own['metric']}" + (" damage" if own["compared_with"] == "unquantized" else "")


def _finding(own: Mapping[str, str]) -> str:
    return f"{own['cell']} ({own['found_by']}): {rule(own['message'])}"


def _counts(suite: ElementTree.Element) -> list[int]:
    return [int(suite.attrib[name]) for name in ("tests", "failures", "errors")]


def _junit(suite: ElementTree.Element, report: Mapping[str, Any]) -> list[Any]:
    """How many cases and failures there are, and those that failed. Each hypothesis and failure must have a case."""
    cases = list(suite.iter("testcase"))
    failed = [(own.attrib, failure.attrib) for own in cases for failure in own.iter("failure")]
    scores = [f"{case['classname']} {case['name']}" for case, why in failed if why["type"] == "scores"]
    others = [
        f"{case['classname']} ({why['type']}): {rule(why['message'])}"
        for case, why in failed
        if why["type"] != "scores"
    ]
    passed = {f"{own.attrib['classname']} {own.attrib['name']}".replace("(damage)", "damage") for own in cases}
    assert passed >= {_tested(own) for own in report["scores"]}
    return [*_counts(suite), sorted(scores), sorted(others)]


def accept(folder: Path) -> dict[str, Any]:
    """Whether the folder may become a baseline."""
    with tempfile.TemporaryDirectory() as place:
        code, _, error = called("accept", folder, "--baseline", Path(place) / "new", "--reason", "frozen")
    return {"exit": code} if code == 0 else refused(code, error)


# --- files


def rounded(value: Any) -> Any:
    """Numbers with 12 significant digits; NaN and infinity as text."""
    if isinstance(value, Mapping):
        return {str(key): rounded(own) for key, own in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [rounded(own) for own in value]
    if isinstance(value, float):
        return float(f"{value:.12g}") if math.isfinite(value) else str(value)
    return value


def compute(name: str) -> dict[str, Any]:
    """What is frozen of one input, computed again."""
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
        return rounded(captured(MAKERS[name](Path(place).resolve())))


def as_text(content: Mapping[str, Any]) -> str:
    """JSON with one line per row: small, and readable in a diff."""

    def lines(value: Any, indent: str) -> str:
        if isinstance(value, dict) and any(isinstance(own, dict | list) for own in value.values()):
            inner = [
                f"{indent} {json.dumps(key, ensure_ascii=False)}: {lines(own, indent + ' ')}"
                for key, own in sorted(value.items())
            ]
            return "{\n" + ",\n".join(inner) + f"\n{indent}}}"
        return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))

    return lines(content, "") + "\n"


def renew(names: Iterable[str]) -> None:
    """Write the expected numbers."""
    EXPECTED.mkdir(exist_ok=True)
    for name in names:
        (EXPECTED / f"{name}.json").write_text(as_text(compute(name)), encoding="utf-8")
        print(name)


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"] or not set(sys.argv[2:]) <= set(MAKERS):
        sys.exit(f"python -m tests.frozen.numbers --write [NAME …]; the names are {', '.join(MAKERS)}")
    renew(sys.argv[2:] or MAKERS)
