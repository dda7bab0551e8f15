"""What `qbench analyze` found, in every format and picture, and next to published numbers."""

import csv
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from qbench.cli import main
from qbench.records.analysis import sums_to_parquet
from qbench.records.analysis_metrics import difference
from qbench.records.schema import RunPlan
from qbench.records.store import ANALYSES, read_analyses, read_results, write_plan
from qbench.report.causes import model_causes, nats_lost
from qbench.report.delta import ReportData, read_report
from qbench.report.kinds import KINDS
from qbench.report.latex import latex
from qbench.report.looks import COLUMN, PAGE
from qbench.report.markdown import markdown
from qbench.report.render import comparison, render, table
from qbench.report.results import ReportError

from . import analyzed
from .analyzed import analysis_of, write_analyses, write_measured
from .drawn import texts_outside, ticks
from .examples import PAPER, write_mini
from .golden import check

COLUMNS = ["family", "attention", "label", "metric", "setting", "value", "low", "high"]
COLUMNS += ["length", "tokens", "dtype", "part"]
PICTURES = ("largest", "boxes", "sinks-by-length", "sinks-by-head", "dead-heads", "maps", "sensitivity-hqq-3-g64")
FIGURES = {
    "sink_rate": {"0.2", "0.3"},
    "sink_rate_normalized": {"0.2", "0.3"},
    "row_sum": {""},
    "kurtosis": {""},
    "min": {""},
    "max": {""},
    "sparsity": {"", "1e-05"},
    "dead_heads": {"1e-06", "0.01"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scores and analyses of twins."""
    out = write_mini(tmp_path_factory.mktemp("runs") / "analyzed", labels=("none-16", "hqq-2-g64", "hqq-3-g64"))
    return write_analyses(out)


@pytest.fixture(scope="module")
def report(folder: Path) -> ReportData:
    """The same, as a report."""
    return read_report(folder)


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.mark.parametrize("kind", ["analysis", "causes", "sensitivity"])
def test_golden(kind: str, report: ReportData) -> None:
    tables = KINDS[kind].tables(report)
    check(f"{kind}.md", markdown(tables, KINDS[kind].remarks(report)))
    check(f"{kind}.tex", latex(tables, KINDS[kind].remarks(report)))


def test_the_columns_of_the_csv_and_its_figures(report: ReportData) -> None:
    rows = rows_of(render(report, "csv", "analysis"))
    assert list(rows[0]) == COLUMNS
    for metric, settings in FIGURES.items():
        for attention in ("softmax", "softpick"):
            own = [r for r in rows if (r["metric"], r["attention"], r["part"]) == (metric, attention, "all")]
            assert {r["setting"] for r in own} == settings
            assert own[0]["length"] == "32"
    whole = [n for n, row in enumerate(rows) if row["length"] == "32" and row["part"] == "all"]
    assert whole == list(range(len(whole)))
    assert json.loads(render(report, "json", "analysis"))[0]["metric"] == rows[0]["metric"]


def test_the_csv_has_the_figures_of_the_analysis_and_their_intervals(report: ReportData) -> None:
    frame = analysis_of("softmax").to_frame()
    rows = [row for row in rows_of(render(report, "csv", "analysis")) if row["attention"] == "softmax"]
    assert len(rows) == len(frame)
    by_name = {(r["metric"], r["setting"], r["part"], int(r["length"])): r for r in rows}
    for own in frame.itertuples():
        row = by_name[own.metric, own.setting, own.part, own.length]
        assert float(row["value"]) == own.value
        assert row["low"] == "" if own.low != own.low else float(row["low"]) == own.low


def test_scores_and_analyses_are_kept_apart(folder: Path) -> None:
    scores, analyses = read_results(folder), read_analyses(folder)
    assert {stored.record.cell.measured for stored in scores.current} == {None}
    assert not scores.superseded
    assert {stored.record.cell.measured for stored in analyses.current} == {"analysis", "maps", "sensitivity"}
    assert not analyses.superseded


def test_differences_of_twins_are_paired(report: ReportData) -> None:
    softmax, softpick = report.analyses.of("mini")
    first, second = softmax.find("kurtosis"), softpick.find("kurtosis")
    assert first is not None
    assert second is not None
    value, interval = difference(second, first)
    assert interval is not None
    text = markdown(KINDS["analysis"].tables(report))
    line = next(line for line in text.splitlines() if line.startswith("| Kurtosis "))
    assert f"{value:+.2f}" in line
    assert f"{interval[0]:+.2f}, {interval[1]:+.2f}" in line


@pytest.mark.parametrize(("shift", "starred"), [(1e-7, False), (1e-3, True)])
def test_rounding_is_no_difference(shift: float, starred: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """Rows of float32 weights sum to one except for the last digits, and that is not chance."""
    own = {kind: analysis_of(kind) for kind in ("softmax", "softpick")}
    for kind, sums in {"softmax": 1.0, "softpick": 1.0 + shift}.items():
        own[kind].sums.row_sums[:] = sums * own[kind].sums.tokens[:, None, None]
    monkeypatch.setattr(analyzed, "analysis_of", lambda kind, *_: own[kind])
    text = markdown(KINDS["analysis"].tables(read_report(write_analyses(tmp_path))))
    line = next(line for line in text.splitlines() if line.startswith("| Row sum "))
    assert ("\\*" in line) is starred


def test_figures_that_all_models_share_are_not_among_the_differences(report: ReportData) -> None:
    text = markdown(KINDS["analysis"].tables(report))
    assert "| Empty tiles " not in text
    assert "| Sparsity, ≤ 1e-05 " in text


def test_a_folder_of_analyses_alone(tmp_path: Path) -> None:
    write_analyses(tmp_path)
    assert "Attention sinks" in table(tmp_path, kind="analysis")
    assert '<section id="analysis">' in table(tmp_path, "html")
    with pytest.raises(ReportError, match=r"--kind delta.*analysis"):
        table(tmp_path)


def test_failures_and_missing_analyses_are_listed_next_to_the_results(tmp_path: Path) -> None:
    good = analysis_of("softmax")
    planned = [
        write_measured(tmp_path, "softmax", "analysis", good.facts, sums_to_parquet(good)),
        write_measured(tmp_path, "softpick", "analysis", None, None),
    ]
    ref = planned[0].cell.model_copy(update={"attention": "gated"})
    planned.append(planned[0].model_copy(update={"cell": ref, "key": "0" * 64}))
    write_plan(tmp_path, RunPlan(recipe="r.yaml", resolved_recipe={}, cells=tuple(planned)), ANALYSES)
    text = table(tmp_path, kind="analysis")
    assert re.search(r"\| mini +\| Softmax", text)
    assert "mini-softpick-none-16-analysis failed" in text
    assert "text 3 are NaN" in text
    assert "mini-gated-none-16-analysis is planned" in text.replace("\\", "")


def test_an_altered_analysis_is_not_shown(tmp_path: Path) -> None:
    write_analyses(tmp_path)
    (changed,) = tmp_path.glob("mini-softpick-none-16-analysis-*")
    text = (changed / "record.json").read_text()
    (changed / "record.json").write_text(text.replace('"tokens":192', '"tokens":193'))
    rows = rows_of(table(tmp_path, "csv", "analysis"))
    assert {row["attention"] for row in rows} == {"softmax"}
    assert "does not match what was measured" in table(tmp_path, kind="analysis")


def test_damage_beside_its_cause(report: ReportData) -> None:
    softmax, softpick = model_causes(report)
    assert set(softmax.damages) == {3, 2}
    assert softmax.causes["sink_rate"] > softpick.causes["sink_rate"]
    documents = report.evidence.documents
    quantized, before = (report.results.get("mini", "softmax", label) for label in ("hqq-2-g64", "none-16"))
    assert quantized
    assert before
    losses = []
    for task in documents[quantized.cell]:
        after, first = (documents[result.cell][task].decisions for result in (quantized, before))
        assert after
        assert first
        losses.append((first.values.sum() - after.values.sum()) / first.weights.sum())
    assert nats_lost(report, "mini", "softmax", 2) == pytest.approx(sum(losses) / len(losses), rel=1e-12)
    assert nats_lost(report, "mini", "softmax", 8) is None


def test_the_losses_are_those_of_the_headline(report: ReportData) -> None:
    (line,) = [own for own in report.headlines if own.bits == 2]
    softmax, softpick = (nats_lost(report, "mini", kind, 2) for kind in ("softmax", "softpick"))
    assert softmax is not None
    assert softpick is not None
    assert line.value == pytest.approx(softmax - softpick, rel=1e-9)


@pytest.mark.slow  # the files of other figures are in test_plots.py
def test_every_picture_is_written_in_every_format(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert (
        main(["table", str(folder), "--kind", "analysis", "--plots", str(tmp_path), "--out", str(tmp_path / "t.md")])
        == 0
    )
    names = [*(f"mini-{name}" for name in PICTURES), "causes"]
    for name in names:
        assert all((tmp_path / f"{name}.{suffix}").stat().st_size > 1000 for suffix in ("png", "svg", "pdf")), name


def test_pictures_are_as_wide_as_asked_and_have_units_and_captions(report: ReportData) -> None:
    pytest.importorskip("matplotlib")
    names = []
    for kind in ("analysis", "causes", "sensitivity"):
        for (name, figure), (_, wide) in zip(
            KINDS[kind].figures(report, COLUMN), KINDS[kind].figures(report, PAGE), strict=True
        ):
            names.append(name)
            assert figure.get_size_inches()[0] == pytest.approx(COLUMN), name
            assert wide.get_size_inches()[0] == pytest.approx(PAGE), name
            assert figure.get_suptitle() == "", name
            assert figure.get_label() == wide.get_label() != "", name
            figure.canvas.draw() if figure.canvas else None
            assert (texts_outside(figure), texts_outside(wide)) == ([], []), name
            if "sensitivity" in name:
                assert len(ticks(figure.axes[-1].yaxis)) > 1  # of the scale of colours
            labels = [axes.get_xlabel() + axes.get_ylabel() for axes in figure.axes]
            labels.append(figure.get_supxlabel() + figure.get_supylabel())
            assert any(labels), name
    assert set(names) == {*(f"mini-{name}" for name in PICTURES), "causes"}


def test_over_training_steps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_analyses(tmp_path)
    plan = read_analyses(tmp_path).plan
    assert plan
    planned = list(plan.cells)
    for step in (1000, 2000):
        own = analysis_of("softpick", seed=step)
        planned.append(write_measured(tmp_path, "softpick", "analysis", own.facts, sums_to_parquet(own), step=step))
    write_plan(tmp_path, plan.model_copy(update={"cells": tuple(planned)}), ANALYSES)
    found = read_report(tmp_path)
    assert "mini-steps" in dict(KINDS["analysis"].figures(found, COLUMN))
    rows = rows_of(render(found, "csv", "analysis"))
    assert list(rows[0]) == [*COLUMNS, "step"]
    assert {row["step"] for row in rows} == {"", "1000", "2000"}
    assert len(found.analyses.of("mini")) == 2


def test_nine_models_have_one_panel_each(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = read_report(write_analyses(tmp_path, ("softmax", "softpick", "gated")))
    pictures = dict(KINDS["analysis"].figures(found, COLUMN))
    assert len(pictures["mini-boxes"].axes) == 3
    assert len(pictures["mini-maps"].axes) == 3 * 2 + 1  # and the scale of colours


# --- next to published numbers


def test_the_published_figures_are_those_of_the_paper(paper: ReportData) -> None:
    rows = rows_of(render(paper, "csv", "analysis"))
    assert list(rows[0]) == COLUMNS

    def value(family: str, attention: str, metric: str, setting: str = "", length: str = "") -> float:
        name = (family, attention, metric, setting, length)
        keys = ("family", "attention", "metric", "setting", "length")
        (found,) = [row for row in rows if tuple(row[key] for key in keys) == name]
        return float(found["value"])

    assert value("340M", "softmax", "sink_rate", "0.3") == 63.41
    assert value("340M", "softmax", "sink_rate", "0.3", "16") == 89.465625
    assert value("1.8B", "softpick", "kurtosis") == 2193.27
    assert value("340M-10k", "gated", "min") == -49.09
    assert value("340M", "softpick", "sparsity", "", "4096") == 94.46302
    scores = {
        (s.source, s.cell.family, s.cell.attention, s.cell.label, s.task, s.metric): s.value
        for s in paper.analyses.scores
    }
    assert scores["paper: passkey", "340M", "scalable_softmax", "none-16", "passkey_1983", "acc"] == 96.9
    assert scores["paper: masked heads", "1.8B", "softpick", "none-16-mask0.01", "wikitext", "word_perplexity"] == 21.43
    assert scores["paper: other experiments", "340M", "rectified", "none-16", "arc_easy", "acc_norm"] == 51.52
    assert len(scores) == 20 + 18 + 36


def test_latex_of_the_published_figures_is_in_the_papers_form(paper: ReportData) -> None:
    text = latex(KINDS["analysis"].tables(paper)[:2])
    assert r"\multirow{2}{*}{340M} & Softmax & 68.28 & 63.41 \\" in text
    assert r"Softmax & 33510.81 & $-$207.55 & 240.27 & 4.53" in text


def test_compare_puts_ours_beside_the_published_figures(tmp_path: Path) -> None:
    """A folder with only analyses is enough; figures are at the published length, or else at the recipe's."""
    write_analyses(tmp_path, family="340M")
    rows = [row for row in json.loads(comparison(tmp_path, PAPER, "json")) if not row["task"]]
    by_name = {(row["number"], row["metric"], row["setting"], row["length"]): row for row in rows}
    ours = {
        row["metric"] + row["setting"] + row["length"]: row
        for row in rows_of(table(tmp_path, "csv", "analysis"))
        if row["attention"] == "softmax" and row["part"] == "all"
    }
    at_16, at_all = by_name["softmax", "sink_rate", "0.3", 16], by_name["softmax", "sink_rate", "0.3", None]
    assert at_16["ours"] == float(ours["sink_rate0.316"]["value"])
    assert at_16["published"] == 89.465625
    assert at_all["ours"] == float(ours["sink_rate0.332"]["value"])
    assert at_all["published"] == 63.41
    assert at_all["difference"] == at_all["ours"] - at_all["published"]
    assert ("softmax", "sink_rate", "0.3", 4096) not in by_name
    assert "340M, analysis: ours and published" in comparison(tmp_path, PAPER)


def test_compare_puts_scores_next_to_those_published_with_analyses(tmp_path: Path) -> None:
    write_mini(tmp_path, labels=("none-16",), tasks=("arc_easy", "wikitext"), family="340M")
    text = comparison(tmp_path, PAPER)
    assert "340M, analysis: ours and published" in text
    rows = [row for row in json.loads(comparison(tmp_path, PAPER, "json")) if row["published"] == 24.41]
    assert [(row["task"], row["metric"], row["number"]) for row in rows] == [
        ("wikitext", "word_perplexity", "softpick")
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("family,attention,metric,setting\n", "missing columns: value"),
        ("family,attention,label,metric,setting,value\na,softmax,x,min,,1\n", "label is 'x'"),
        ("family,attention,metric,setting,value\na,softmax,min,,one\n", "value is 'one'"),
        ("family,attention,metric,setting,value\na,softmax,min,,1\na,softmax,min,,2\n", "line 3"),
    ],
)
def test_bad_files_of_figures_are_sentences(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "analysis.csv").write_text(content)
    with pytest.raises(ReportError, match=said) as error:
        table(tmp_path, kind="analysis")
    assert "analysis.csv" in str(error.value)


def test_a_baseline_may_have_analyses_beside_its_scores(folder: Path, tmp_path: Path) -> None:
    """Old folders have none, and can still be read."""
    shutil.copytree(
        folder, tmp_path / "old", ignore=shutil.ignore_patterns("*-analysis-*", "*-maps-*", "*sensitivity-*", ANALYSES)
    )
    with_them, without = (rows_of(table(place, "csv")) for place in (folder, tmp_path / "old"))
    assert with_them == without
