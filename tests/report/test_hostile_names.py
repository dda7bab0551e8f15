"""Names in records and failure reasons are data in every format: they are never interpreted."""

import csv
import io
import re
from pathlib import Path

import pytest

from qbench import cli
from qbench.records.schema import Failure
from qbench.report.delta import ReportData, read_report
from qbench.report.latex import latex
from qbench.report.markdown import markdown
from qbench.report.render import render
from qbench.report.tables import Column, Field, Table
from qbench.report.tidy import to_csv

from .examples import cell, samples_of, write_cell, write_mini, write_plan_of

NAME = "=cmd|x\n\\input{/etc/passwd}\n::error::x\x1b[31m<script>alert(1)</script>[a](javascript:b)$x$"
REASON = "no\n\\input{secret}\n::error title=x::y\r\x1b]0;z\x07</script><img src=x onerror=y>"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_mini(tmp_path_factory.mktemp("runs") / "run", labels=("none-16", "hqq-2-g64"), family=NAME)
    failed = Failure(kind="error", reason=REASON, phase="load", log_tail=REASON)
    done = [
        write_cell(folder, cell(kind, label, NAME), samples_of(kind, label))
        for kind in ("softmax", "softpick")
        for label in ("none-16", "hqq-2-g64")
    ]
    bad = write_cell(folder, cell("softpick", "hqq-3-g64", NAME), None, state="failed", failure=failed)
    write_plan_of(folder, [*done, bad], limit=3, checkpoints={NAME: {"softmax": "x"}})
    return folder


@pytest.fixture(scope="module")
def report(hostile: Path) -> ReportData:
    return read_report(hostile)


@pytest.mark.parametrize("kind", ["delta", "summary", "damage"])
def test_latex(report: ReportData, kind: str) -> None:
    text = render(report, "latex", kind)
    assert "\\input" not in text
    assert "input" in text  # it is there, escaped


def test_latex_remarks_stay_remarks() -> None:
    table = Table(NAME, NAME, NAME, [NAME], [Column(NAME)], heads=1, rows=[[Field(NAME)]], footnotes={"a": NAME})
    text = latex([table], [NAME, "a\r\\input{x}", "b\u2028\\input{x}", "c\x0b\\input{x}"], [NAME])
    outside = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    assert "\\input" not in outside
    assert "\\textbackslash{}input" in outside
    for control in "\r\x0b\x1b\u2028":
        assert control not in text


@pytest.mark.parametrize("kind", ["delta", "summary", "damage"])
def test_markdown(report: ReportData, kind: str) -> None:
    text = render(report, "md", kind)
    assert not re.search(r"(?m)^\s*::", text)
    assert "<script" not in text
    assert "<img" not in text
    assert not re.search(r"(?<!\\)\]\(javascript", text)
    assert "\x1b" not in text


def test_markdown_stays_in_its_field() -> None:
    table = Table("a", NAME, NAME, [NAME], [Column("x")], rows=[[Field("a\n\n# b | c")]])
    text = markdown([table], [NAME], [NAME])
    assert not re.search(r"(?m)^(# b|::|\\input)", text)
    assert "a # b \\| c" in text


def test_html(report: ReportData) -> None:
    text = render(report, "html")
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert "alert(1)" in text  # it is there, escaped
    assert text.count("<script") == text.count("</script>")


@pytest.mark.parametrize("kind", ["delta", "damage", "baseline"])
def test_csv(report: ReportData, kind: str) -> None:
    rows = list(csv.DictReader(io.StringIO(render(report, "csv", kind))))
    assert {row["family"] for row in rows} == {f"'{NAME}".replace("\x1b", "\\x1b")}
    for row in rows:
        for value in row.values():
            assert value[:1] not in set("=+-@\t\r\n") or float(value) <= 0


def test_csv_cells() -> None:
    strings = ["=1", "+1", "-1", "@x", "\tx", "\rx", "\nx", "x=1"]
    text = to_csv([{"a": value, "b": -1.5} for value in strings])
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert [row["a"] for row in rows] == ["'=1", "'+1", "'-1", "'@x", "'\tx", "'\\x0dx", "'\nx", "x=1"]
    assert {row["b"] for row in rows} == {"-1.5"}


@pytest.mark.parametrize(
    "command", [["table"], ["table", "--kind", "summary"], ["audit"], ["table", "--format", "csv"]]
)
def test_what_is_printed(hostile: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command[0], str(hostile), *command[1:]]) in (0, 1)
    said = capsys.readouterr()
    for text in (said.out, said.err):
        assert not re.search(r"(?m)^\s*::", text)
        assert "\x1b" not in text
        assert "\x07" not in text
