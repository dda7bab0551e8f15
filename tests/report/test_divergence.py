"""KL in reports: its table, its rows, its plot, and the metric in the other tables."""

import csv
import io
from pathlib import Path

import numpy as np
import pytest

from qbench.errors import InputError
from qbench.gate.hypotheses import hypotheses
from qbench.gate.settings import GateSettings
from qbench.records.findings.record import altered
from qbench.records.metrics import KL
from qbench.records.paired import PairedDocuments, pair_documents
from qbench.records.samples import WEIGHT
from qbench.records.schema import Divergence
from qbench.records.store import read_results
from qbench.report.delta import ReportData, read_report
from qbench.report.divergence import divergences
from qbench.report.divergence_plots import kl_figures
from qbench.report.looks import COLUMN, PAGE
from qbench.report.render import render, table

from ..example_records import make_record, metrics_of
from .drawn import texts_outside, ticks
from .examples import LABELS, LOSSES, cell, samples_of, write_cell, write_plan_of

TOKENS = 25  # of each page


def write_kl_run(folder: Path, floor: float = 1e-13) -> Path:
    """A run of mini whose pages have KL: twice a quantization's loss, half of that with softpick."""
    planned = []
    for attention in ("softmax", "softpick"):
        for label in LABELS:
            samples, own = samples_of(attention, label), cell(attention, label)
            mean = (2 if attention == "softmax" else 1) * LOSSES[label] or floor
            pages = (samples["task"] == "wikitext").to_numpy()
            each = mean * np.linspace(0.5, 1.5, pages.sum())
            samples[KL], samples[KL + WEIGHT] = np.nan, np.nan
            samples.loc[pages, KL], samples.loc[pages, KL + WEIGHT] = TOKENS * each, float(TOKENS)
            figures = Divergence(
                **{"task": "wikitext", "documents": int(pages.sum()), "tokens": int(TOKENS * pages.sum())},
                **{"median": mean / 2, "p99": 5 * mean, "p999": 9 * mean, "same_top": 1 - mean / 2},
                **{"rms_change": mean / 3, "nats_before": 2.5, "log_ratio": mean / 4, "correlation": 0.9},
            )
            changes = {"metrics": metrics_of(samples), "divergences": (figures,)}
            planned.append(write_cell(folder, own, samples, **changes))
    write_plan_of(folder, planned)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kl_run(tmp_path_factory.mktemp("kl"))


def test_records_keep_their_figures(run: Path) -> None:
    """Written and read, they agree with their documents."""
    records = read_results(run).current
    assert len(records) == 8
    for stored in records:
        (own,) = stored.record.divergences
        assert (own.tokens, own.nats_before) == (1000, 2.5)
        assert altered(stored) == []


def test_rows_have_every_figure_unrounded(run: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(table(run, "csv", "kl"))))
    assert len(rows) == 2 * len(LABELS)
    (row,) = (row for row in rows if (row["attention"], row["label"]) == ("softpick", "hqq-3-g64"))
    expected = {"mean": 0.1, "median": 0.05, "p99": 0.5, "p999": 0.9, "same_top": 0.95, "log_ratio": 0.025}
    assert {name: float(row[name]) for name in expected} == pytest.approx(expected)
    assert (row["task"], row["tokens"], float(row["bits_per_weight"])) == ("wikitext", "1000", 3.5)
    assert {row["bits_per_weight"] for row in rows if row["label"] == "none-16"} == {""}


def test_the_table_and_the_page(run: Path) -> None:
    text = table(run, "md", "kl")
    for part in ("0.4", "1e-13", "95.00%", "nats per token", "noise floor"):
        assert part in text
    assert "KL" in table(run, "latex", "kl")
    page = render(read_report(run), "html")
    assert '<section id="kl">' in page
    assert "measured bits per weight" in page[page.index('<section id="kl">') :]


def test_it_is_a_metric_of_the_other_tables(run: Path) -> None:
    """With its damage, whose interval is paired by documents; lower is better."""
    report = read_report(run)
    (row,) = (r for r in report.damages if r.measure.metric == KL and r.quantization.label == "hqq-3-g64")
    damages = {attention: damage.score for attention, damage in row.damages.items()}
    assert {attention: score.value for attention, score in damages.items()} == pytest.approx(
        {"softmax": 0.2, "softpick": 0.1}
    )
    assert all(score.significant and score.tone(row.measure) == "worse" for score in damages.values())
    assert "1e-13" in table(run, "md", "delta")  # not 0.00


def test_points_are_where_they_were_measured(run: Path) -> None:
    ((name, figure),) = kl_figures(read_report(run), PAGE)
    assert name == "mini-kl"
    assert [axes.get_title() for axes in figure.axes] == ["Softmax", "Softpick"]
    for axes, factor in zip(figure.axes, (2, 1), strict=True):
        assert axes.get_yscale() == "log"
        drawn = {tuple(point) for line in axes.lines for point in np.asarray(line.get_xydata()).round(9).tolist()}
        assert drawn == {(2.5, 0.4 * factor), (3.5, 0.1 * factor), (4.5, 0.02 * factor)}
        assert "1e-13" in axes.texts[0].get_text()  # far below: written, not drawn


def test_a_floor_of_exactly_zero_is_written_as_0(tmp_path: Path) -> None:
    ((_, figure),) = kl_figures(read_report(write_kl_run(tmp_path, floor=0.0)), COLUMN)
    assert [axes.texts[0].get_text().split()[-1] for axes in figure.axes] == ["0", "0"]


@pytest.mark.parametrize("width", [COLUMN, PAGE])
def test_no_text_is_cut_by_the_edge_of_the_figure(run: Path, width: float) -> None:
    ((_, figure),) = kl_figures(read_report(run), width)
    assert texts_outside(figure) == []
    assert all(len(ticks(axis)) > 1 for axis in (figure.axes[-1].xaxis, figure.axes[0].yaxis))


def test_a_floor_near_the_points_is_a_line(tmp_path: Path) -> None:
    ((_, figure),) = kl_figures(read_report(write_kl_run(tmp_path, floor=1e-3)), PAGE)
    assert len(figure.axes) == 2
    for axes in figure.axes:
        levels = [float(line.get_ydata()[0]) for line in axes.lines if len(line.get_ydata())]
        assert min(levels) == pytest.approx(1e-3)
        assert not axes.texts


def test_results_without_kl_say_why(mini: Path, mini_report: ReportData, mini_page: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--kind kl.*wikitext.*run the recipe again"):
        table(mini, "md", "kl")
    assert '<section id="kl">' not in mini_page
    samples = samples_of("softmax", "none-16")
    samples = samples[samples["task"] == "arc_easy"].drop(columns=["word_perplexity", "word_perplexity" + WEIGHT])
    planned = [write_cell(tmp_path / "few", cell("softmax", "none-16"), samples)]
    write_plan_of(tmp_path / "few", planned)
    with pytest.raises(InputError, match=r"whole pages.*arc_easy"):
        table(tmp_path / "few", "md", "kl")
    assert divergences(mini_report) == []


def test_more_kl_is_a_loss_for_the_gate(run: Path) -> None:
    by_label = {s.record.cell.label: s for s in read_results(run).current if s.record.cell.attention == "softmax"}
    assert make_record(cell("softmax", "none-16")).divergences == ()  # older records have none
    before, after = by_label["hqq-3-g64"], by_label["hqq-2-g64"]
    (paired,) = (own for own in pair_documents((before, after)) if own.task == "wikitext")
    assert isinstance(paired, PairedDocuments)
    metrics = tuple(m for m in before.record.metrics if m.task == "wikitext")
    (kl,) = (h for h in hypotheses(before.record.cell, paired, metrics, GateSettings()) if h.metric == KL)
    assert kl.kind == "kl"
    assert kl.loss == pytest.approx(0.8 - 0.2)
