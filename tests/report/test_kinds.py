"""A kind of table is one entry: the command line, its help and every format have it."""

import json
from pathlib import Path

import pytest

from qbench.cli import main
from qbench.errors import InputError
from qbench.report.delta import ReportData, read_report
from qbench.report.kinds import KINDS, NoRows, TableKind
from qbench.report.render import FORMATS, render, table
from qbench.report.tables import Column, Field, Table
from qbench.report.tidy import DataRow

from .examples import ALWAYS, PAPER


def counting_tables(report: ReportData) -> list[Table]:
    rows = [[Field("cells"), Field(str(len(report.results.cells)))]]
    return [Table("counts", "Counts", "How many there are.", [], [Column("What", "l"), Column("Count")], rows=rows)]


def counting_rows(report: ReportData) -> list[DataRow]:
    return [{"what": "cells", "count": len(report.results.cells)}]


COUNTS = TableKind("counts", "how many cells there are", "Counted cells", counting_tables, counting_rows)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> TableKind:
    """A new kind: one entry."""
    monkeypatch.setitem(KINDS, COUNTS.name, COUNTS)
    return COUNTS


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ReportData:
    """A part of the published numbers, whose page is made sooner."""
    folder = tmp_path_factory.mktemp("small")
    lines = (PAPER / "quantization.csv").read_text().splitlines()
    (folder / "hqq.csv").write_text("\n".join([lines[0], *(line for line in lines if line.startswith("340M,hqq"))]))
    return read_report(folder)


EXPECTED = {
    "md": "| cells  |      36 |",
    "latex": "cells & 36",
    "csv": "what,count\ncells,36\n",
    "json": '"count": 36',
    "html": "<h2>Counted cells</h2>",
}


@pytest.mark.parametrize("form", FORMATS)
def test_a_new_kind_is_in_every_format(form: str, counts: TableKind, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["table", str(PAPER), "--kind", "counts", "--format", form, "--out", str(out)]) == 0
    assert EXPECTED[form] in out.read_text()


def test_a_new_kind_is_in_the_help_and_on_the_page(
    counts: TableKind, small: ReportData, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["table", "--help"])
    assert "counts: how many cells there are" in " ".join(capsys.readouterr().out.split())
    assert '<section id="counts">' in render(small, "html")


def test_a_kind_may_stay_off_the_page_and_have_no_rows(monkeypatch: pytest.MonkeyPatch, small: ReportData) -> None:
    kind = TableKind("aside", "", "", counting_tables, NoRows("It is for people."), on_page=lambda report: False)
    monkeypatch.setitem(KINDS, "aside", kind)
    assert '<section id="aside">' not in render(small, "html")
    assert '<section id="aside">' in render(small, "html", "aside")
    with pytest.raises(InputError, match=r"aside has no csv. It is for people\."):
        render(small, "csv", "aside")


@pytest.mark.parametrize("kind", [name for name in ALWAYS if not isinstance(KINDS[name].rows, NoRows)])
def test_no_two_kinds_have_the_same_rows(kind: str, paper: ReportData) -> None:
    others = [name for name in ALWAYS if name != kind and not isinstance(KINDS[name].rows, NoRows)]
    rows = json.loads(render(paper, "json", kind))
    assert rows
    assert all(json.loads(render(paper, "json", other)) != rows for other in others)


def test_an_unknown_kind_or_format_is_a_sentence_with_a_suggestion() -> None:
    with pytest.raises(InputError, match=r"kind is 'damages'; it must be one of summary, .* Did you mean damage\?"):
        table(PAPER, kind="damages")
    with pytest.raises(InputError, match=r"kind is 'x'"):
        table(PAPER, "html", "x")
    with pytest.raises(InputError, match=r"format is 'markdown'; it must be one of md, latex, csv, json, html"):
        table(PAPER, "markdown")
