"""Tables on a terminal: complete, no wider than it, and in colour only if it supports colours."""

import re
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

from qbench.cli import main
from qbench.report.delta import ReportData
from qbench.report.kinds import KINDS
from qbench.report.render import TERMINAL, audit, comparison, default_format, render
from qbench.report.tables import Column, Field, Table
from qbench.report.terminal import terminal, wrapped

from ..pseudo_terminal import on_terminal
from .examples import PAPER

MARKUP = ("\\*", "<sup>", "###", "|:--", "&lt;")
SEQUENCE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A terminal with colours, 80 columns wide."""
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    return monkeypatch


def one(*rows: list[Field], heads: int = 1, columns: tuple[Column, ...] = ()) -> Table:
    named = columns or (Column("Task", "l"), *(Column(f"n{n}") for n in range(1, len(rows[0]))))
    return Table("one", "One", "A table.", [], named, heads, list(rows))


def plain(text: str) -> str:
    return SEQUENCE.sub("", text)


@pytest.mark.parametrize("columns", [50, 80, 120])
@pytest.mark.parametrize("results", ["mini_report", "troubled_report", "paper"])
def test_every_kind_fits_and_lacks_nothing(
    results: str, columns: int, screen: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    screen.setenv("COLUMNS", str(columns))
    report: ReportData = request.getfixturevalue(results)
    for kind in KINDS.values():
        tables = kind.tables(report)
        if not tables:
            continue
        text = plain(render(report, TERMINAL, kind.name))
        assert max(map(cell_len, text.splitlines())) <= columns
        assert not [mark for mark in MARKUP if mark in text]
        numbers = {
            word
            for t in tables
            for row in t.rows
            for field, column in zip(row, t.columns, strict=True)
            if column.align == "r" or columns == 120
            for word in field.text.split()
        }
        assert not [word for word in numbers if word not in text]
        assert all(f"[{letter}]" in text for t in tables for letter in t.footnotes)


def test_on_a_real_terminal_and_in_a_pipe(two_rows: Path) -> None:
    code, shown = on_terminal("table", two_rows, "--kind", "damage", columns=60)
    assert code == 0
    assert "\x1b[" in shown
    lines = plain(shown).splitlines()
    assert max(map(len, lines)) <= 60
    assert any(re.match("Sciq +Acc ↑ +3-bit +-10.00 ", line) for line in lines)
    code, shown = on_terminal("table", two_rows, "--kind", "damage", "--format", "md", columns=60)
    assert (code, shown.startswith("### S, HQQ")) == (0, True)


@pytest.fixture
def two_rows(tmp_path: Path) -> Path:
    """Published numbers of one model, unquantized and at 3 bits."""
    rows = "S,none,16,sciq,acc,80,81\nS,hqq,3,sciq,acc,70,71\n"
    (tmp_path / "two.csv").write_text("family,method,bits,task,metric,softmax,softpick\n" + rows)
    return tmp_path / "two.csv"


def test_tones_are_signs_and_colours(screen: pytest.MonkeyPatch) -> None:
    table = one([Field("a"), Field("+1", 1, "better", starred=True)], [Field("b"), Field("-1", -1, "worse")])
    shown = terminal([table])
    assert re.search(r"\x1b\[32m *\+1\* ▲", shown)
    assert re.search(r"\x1b\[31m *-1 ▼", shown)
    screen.setenv("NO_COLOR", "1")
    shown = terminal([table])
    assert "+1* ▲" in shown
    assert not re.search(r"\x1b\[(3\d|38;)", shown)
    screen.setenv("TERM", "dumb")
    assert "\x1b" not in terminal([table])
    screen.setattr(sys.stdout, "isatty", lambda: False)
    screen.setenv("TERM", "xterm")
    assert "\x1b" not in terminal([table])
    assert default_format() == "md"


def test_equal_neighbours_are_one_cell(screen: pytest.MonkeyPatch) -> None:
    rows = [[Field("long name of a block"), Field(str(n))] for n in (1, 2)]
    screen.setenv("COLUMNS", "14")
    lines = plain(terminal([one(*rows, [Field("other"), Field("3")])])).splitlines()
    start = next(n for n, line in enumerate(lines) if "1" in line and "n1" not in line)
    # The name of the block goes on beside its second row; a line separates the next block.
    body = [" ".join(line.split()) for line in lines[start:]]
    assert body[:2] == ["long name 1", "of a block 2"]
    assert set(body[2]) == {"─"}
    assert body[3] == "other 3"


def test_a_wide_table_is_drawn_in_parts_and_groups_stay_together(screen: pytest.MonkeyPatch) -> None:
    columns = (
        Column("Task", "l"),
        *(Column(f"{group.lower()}{n}", group=group) for group in ("A", "B") for n in range(3)),
    )
    screen.setenv("COLUMNS", "40")
    row = [Field("name"), *(Field(f"{n:07d}") for n in range(6))]
    lines = plain(terminal([one(row, columns=columns)])).splitlines()
    groups = [line for line in lines if re.search("─ [AB] ─", line)]
    assert len(groups) == 2  # not both in one line
    assert [line.split() for line in lines if "name" in line] == [
        ["name", "0000000", "0000001", "0000002"],
        ["name", "0000003", "0000004", "0000005"],
    ]


def test_columns_stay_aligned_in_ascii(two_rows: Path) -> None:
    """↑ is (higher) there, which is wider."""
    _, shown = on_terminal("table", two_rows, "--kind", "damage", columns=80, TERM="dumb", PYTHONIOENCODING="ascii")
    (header,) = [line for line in shown.splitlines() if line.startswith("Task")]
    (row,) = [line for line in shown.splitlines() if line.startswith("Sciq")]
    assert "(higher)" in row
    assert header.index("Quantization") == row.index("3-bit")


def test_names_cannot_act_on_the_terminal(screen: pytest.MonkeyPatch) -> None:
    table = one([Field("\x1b]0;title\x07 [red]x[/red]"), Field("1\x1b[2J")])
    table.title = table.caption = "\x1b[2Jgone"
    table.footnotes["a"] = "\x9b2J"
    shown = plain(terminal([table], ["\x1b[1A"], ["\rlead"]))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", shown)
    assert "[red]x[/red]" in shown


@pytest.mark.parametrize("text", ["", "one", "one two three", "a" * 30, "日本語の文 と words " * 3])
def test_wrapping_keeps_every_letter(text: str) -> None:
    lines = wrapped(text, 10)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert max(map(cell_len, lines)) <= 10


def test_audits_and_comparisons_too(troubled: Path, screen: pytest.MonkeyPatch) -> None:
    text, found = audit(troubled, TERMINAL)
    assert found
    assert "[a] model.layers.0.mlp.up_proj was not quantized." in plain(text)
    for shown in (text, comparison(PAPER, PAPER, TERMINAL)):
        assert max(map(cell_len, plain(shown).splitlines())) <= 80
        assert not [mark for mark in MARKUP if mark in shown]


def test_plots_alone_print_no_tables(
    two_rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qbench.report.plots.write_plots", lambda report, folder, width: [folder])  # they take seconds
    assert main(["table", str(two_rows), "--plots", str(tmp_path / "plots")]) == 0
    assert capsys.readouterr().out == ""
    assert main(["table", str(two_rows), "--plots", str(tmp_path / "plots"), "--kind", "damage"]) == 0
    assert "-10.00" in capsys.readouterr().out
