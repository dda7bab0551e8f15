"""Passkey by length: a table like the paper's, rows with intervals, and one curve per model."""

import csv
import io
import math
from pathlib import Path

import pytest

from qbench.cli import main
from qbench.report.delta import ReportData, read_report
from qbench.report.looks import COLUMN, PAGE
from qbench.report.passkey import has_passkey, passkey_curves, passkey_tables
from qbench.report.plots import figures
from qbench.report.render import render
from qbench.report.results import ReportError

from .drawn import texts_outside

# The paper's: softmax and three others.
LENGTHS = (890, 1983, 3075, 4167, 4986)
PUBLISHED = {
    "softmax": (95.5, 97.0, 73.0, 70.5, 0.0),
    "softpick": (94.0, 91.0, 75.0, 66.5, 0.0),
    "rectified": (95.5, 68.0, 57.5, 24.5, 0.0),
}


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The paper's figures, the lengths out of order, and a made-up quantization."""
    file = tmp_path / "passkey.csv"
    lines = ["family,method,bits,label,task,metric,attention,value,reference,documents"]
    for label, lost in (("none-16", 0.0), ("hqq-2-g64", 50.0)):
        method, bits, *_ = label.split("-")
        for attention in ("softpick", "rectified"):
            for length, value, reference in reversed(
                list(zip(LENGTHS, PUBLISHED[attention], PUBLISHED["softmax"], strict=True))
            ):
                numbers = f"{max(value - lost, 0)},{max(reference - lost, 0)}"
                lines.append(f"340M,{method},{bits},{label},passkey_{length},acc,{attention},{numbers},200")
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture
def report(published: Path) -> ReportData:
    return read_report(published)


def test_one_curve_per_model_by_length(report: ReportData) -> None:
    curves = passkey_curves(report)
    assert [(curve.quantization.label, curve.attention) for curve in curves] == [
        (label, attention) for label in ("none-16", "hqq-2-g64") for attention in ("softmax", "softpick", "rectified")
    ]
    first = curves[0]
    assert [point.length for point in first.points] == list(LENGTHS)
    assert [point.score.value for point in first.points] == list(PUBLISHED["softmax"])


def test_the_table_has_one_line_per_model_and_one_column_per_length(report: ReportData) -> None:
    (table,) = passkey_tables(report)
    assert [column.title for column in table.columns[3:]] == ["890", "1,983", "3,075", "4,167", "4,986"]
    assert [[field.text for field in row][2:] for row in table.rows][:2] == [
        ["Softmax", "95.50", "97.00", "73.00", "70.50", "0.00"],
        ["Softpick", "94.00", "91.00", "75.00", "66.50", "0.00"],
    ]
    assert table.rows[3][1].text == "2-bit g64"


def test_rows_have_intervals_even_where_all_trials_agree(report: ReportData) -> None:
    rows = list(csv.DictReader(io.StringIO(render(report, "csv", "passkey"))))
    assert len(rows) == 2 * 3 * 5
    none = next(row for row in rows if row["length"] == "4986")
    assert (none["attention"], none["accuracy"], none["trials"]) == ("softmax", "0.0", "200")
    # Wilson at 0 of n: from 0 to z² / (n + z²)
    assert float(none["low"]) == pytest.approx(0, abs=1e-9)
    assert float(none["high"]) == pytest.approx(100 * 1.96**2 / (200 + 1.96**2))
    half = next(row for row in rows if row["length"] == "4167")
    assert float(half["low"]) < 70.5 < float(half["high"])
    assert float(half["high"]) - float(half["low"]) == pytest.approx(2 * 196 * math.sqrt(0.705 * 0.295 / 200), rel=0.02)


def test_the_figure_has_one_panel_per_quantization_and_one_line_per_kind(report: ReportData, tmp_path: Path) -> None:
    drawn = dict(figures(report))
    assert [cut for width in (COLUMN, PAGE) for _, own in figures(report, width) if (cut := texts_outside(own))] == []
    assert list(drawn) == ["340M-passkey"]  # not among the plots against bits
    panels = [axes for axes in drawn["340M-passkey"].axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == ["unquantized", "hqq-2-g64"]
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in panels[0].lines}
    assert lines["softmax"] == (list(LENGTHS), list(PUBLISHED["softmax"]))
    assert len(lines) == 3
    assert "tokens" in drawn["340M-passkey"].get_supxlabel()


def test_the_page_and_the_command_have_both(published: Path, tmp_path: Path) -> None:
    assert '<section id="passkey">' in render(read_report(published), "html")
    assert main(["table", str(published), "--kind", "passkey", "--plots", str(tmp_path / "plots")]) == 0
    assert (tmp_path / "plots" / "340M-passkey.png").stat().st_size > 10_000


def test_results_without_passkey_say_so(paper: ReportData, paper_page: str) -> None:
    assert not has_passkey(paper)
    assert '<section id="passkey">' not in paper_page
    with pytest.raises(ReportError, match="passkey"):
        render(paper, "md", "passkey")
