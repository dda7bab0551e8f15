"""Ours beside published numbers."""

from pathlib import Path

import pytest

from qbench.errors import InputError
from qbench.report.compare import compare, comparison_remarks, comparison_rows, comparison_tables
from qbench.report.delta import ReportData, read_report
from qbench.report.markdown import markdown

from .examples import cell, samples_of, write_cell, write_mini
from .golden import check


@pytest.fixture
def ours(tmp_path: Path) -> ReportData:
    """Two settings of HQQ at 3 bits, and the unquantized models."""
    write_mini(tmp_path, labels=("none-16", "hqq-3-g64"), tasks=("arc_easy",), family="340M")
    (tmp_path / "run.json").unlink()
    samples = samples_of("softmax", "hqq-2-g64")
    write_cell(tmp_path, cell("softmax", "hqq-3-g128", "340M"), samples[samples["task"] == "arc_easy"])
    return read_report(tmp_path)


def test_each_of_our_settings_stands_beside_the_published_number(ours: ReportData, paper: ReportData) -> None:
    rows = [row for row in comparison_rows(compare(ours, paper)) if (row["task"], row["metric"]) == ("arc_easy", "acc")]
    assert {row["label"] for row in rows if row["bits"] == 3 and row["method"] == "hqq"} == {"hqq-3-g64", "hqq-3-g128"}
    row = next(row for row in rows if (row["label"], row["number"]) == ("hqq-3-g64", "softpick"))
    assert row["published"] == 57.95
    assert row["difference"] == pytest.approx(row["ours"] - 57.95)
    assert row["within"] == (row["low"] <= 57.95 <= row["high"])
    delta = next(row for row in rows if (row["label"], row["number"]) == ("none-16", "delta"))
    assert delta["published"] == 0.76
    assert {row["family"] for row in rows} == {"340M"}


def test_what_is_published_and_not_run_is_shown_as_missing(ours: ReportData, paper: ReportData) -> None:
    rows = comparison_rows(compare(ours, paper))
    assert len(rows) == 3 * (81 + 9)  # each published row, HQQ's at 3 bits twice
    not_run = next(row for row in rows if row["label"] == "gptq-4")
    assert not_run["ours"] is not_run["difference"] is not_run["within"] is None
    assert not_run["note"] == "There is no record of 340M-softmax-gptq-4."


def test_the_table(ours: ReportData, paper: ReportData) -> None:
    found = [
        c for c in compare(ours, paper) if c.measure.task == "arc_easy" and c.quantization.method in ("none", "hqq")
    ]
    check("compare.md", markdown(comparison_tables(found), comparison_remarks(found, paper)))


def test_published_within_itself(paper: ReportData) -> None:
    found = compare(paper, paper)
    assert len(found) == 3 * 162
    assert all(c.difference == 0 and c.within is None for c in found)


def test_nothing_in_common_is_a_sentence(mini_report: ReportData, paper: ReportData) -> None:
    with pytest.raises(InputError, match=r"no family in common: there are mini here and 340M, 1\.8B there"):
        compare(mini_report, paper)
