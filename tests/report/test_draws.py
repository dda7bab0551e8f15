"""Draws of calibration in reports: one row per quantization, means over draws, and notes on missing ones."""

import csv
import io
import json
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from scipy.stats import t

from qbench.records.schema import CellRef
from qbench.report.delta import DamageRow, Difference, ReportData, read_report
from qbench.report.evidence import common_draws
from qbench.report.plots import figures
from qbench.report.render import audit, render, table
from qbench.report.results import ReportError

from ..example_records import PROVENANCE, cell_ref, make_samples
from ..messages import states
from ..replicates import LABEL, gptq, numbered, twins, unquantized, write_cells

LOSSES = {"softmax": numbered([0.30, 0.42, 0.25, 0.36, 0.33]), "softpick": numbered([0.10, 0.16, 0.07, 0.13, 0.12])}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ReportData:
    """Five draws of two twins."""
    return read_report(write_cells(tmp_path_factory.mktemp("draws"), twins(LOSSES)))


def damage(report: ReportData, task: str = "wikitext", metric: str = "word_perplexity") -> DamageRow:
    """The row of a metric."""
    (row,) = (row for row in report.damages if (row.measure.task, row.measure.metric) == (task, metric))
    return row


def own(row: DamageRow, attention: str) -> Difference:
    """A damage that is not a gap."""
    found = row.damages[attention].score
    assert isinstance(found, Difference)
    return found


def values_of(report: ReportData, attention: str, task: str, metric: str) -> list[float]:
    """The scores of the draws, from their records."""
    assert report.results.records
    records = [s.record for s in report.results.records.current]
    draws = [r for r in records if r.cell.attention == attention and r.cell.draw]
    return [m.value for r in draws for m in r.metrics if (m.task, m.metric) == (task, metric)]


def test_a_cell_says_its_draw_and_one_without_says_nothing() -> None:
    draw, alone = gptq("softmax", 2), gptq("softmax", None)
    assert draw.name == f"mini-softmax-{LABEL}-draw-2"
    assert alone.name == f"mini-softmax-{LABEL}"
    assert "draw" not in alone.model_dump()
    assert "draw" not in json.loads(alone.model_dump_json())
    assert CellRef.model_validate_json(draw.model_dump_json()) == draw != alone
    assert draw.of_all_draws == alone


def test_draws_are_one_row_with_the_mean_of_their_scores(report: ReportData) -> None:
    assert [q.label for q in report.results.quantizations()] == ["none-16", LABEL]
    result = report.results.get("mini", "softmax", LABEL)
    assert result
    assert result.calibration_draws == 5
    assert len(report.results.parts) == 12
    accuracies = values_of(report, "softmax", "piqa", "acc")
    assert result.scores["piqa", "acc"].value == pytest.approx(100 * fmean(accuracies))
    perplexities = np.array(values_of(report, "softmax", "wikitext", "word_perplexity"))
    assert len(perplexities) == 5
    assert result.scores["wikitext", "word_perplexity"].value == pytest.approx(np.exp(np.log(perplexities).mean()))
    assert result.scores["wikitext", "word_perplexity"].documents == 40


def test_the_documents_of_each_draw_are_there(report: ReportData) -> None:
    result, plain = (report.results.get("mini", "softpick", label) for label in (LABEL, "none-16"))
    assert result
    assert plain
    assert common_draws(result, plain) == [1, 2, 3, 4, 5]
    assert common_draws(plain) == [None]
    by_draw = [report.evidence.documents[result.of_draw(draw).cell]["wikitext"] for draw in common_draws(result)]
    totals = [documents.metrics["word_perplexity"].values.sum() for documents in by_draw]
    losses = list(LOSSES["softpick"].values())
    assert np.argsort(totals).tolist() == np.argsort(losses)[::-1].tolist()
    assert plain.of_draw(3) is plain


def test_draws_that_are_not_there_are_stated_and_differences_use_what_both_have(tmp_path: Path) -> None:
    cells = twins(LOSSES)
    cells[gptq("softpick", 2)] = None
    report = read_report(write_cells(tmp_path, cells))
    row = damage(report)
    assert any("4 of 5 calibration draws" in note and "draw-2 failed" in note for note in own(row, "softpick").notes)
    assert not any("calibration draws" in note for note in own(row, "softmax").notes)
    difference = row.differences["softpick"]
    assert difference
    assert any("1, 3, 4, 5" in note for note in difference.notes)
    fewer = {kind: {draw: loss for draw, loss in losses.items() if draw != 2} for kind, losses in LOSSES.items()}
    same = damage(read_report(write_cells(tmp_path / "fewer", twins(fewer)))).differences["softpick"]
    assert same
    assert difference.value == pytest.approx(same.value)
    assert difference.interval
    assert same.interval
    assert difference.interval.low == pytest.approx(same.interval.low)


@pytest.mark.parametrize("format", ["md", "latex", "terminal", "html"])
def test_the_summary_names_the_device_and_the_calibration_text(format: str, tmp_path: Path) -> None:
    settings = {"source": "<b>.txt", "samples": 64, "length": 1024, "seeds": 3}
    provenance = PROVENANCE.model_copy(update={"resolved_recipe": {"calibration": settings}})
    cells = twins({"softmax": numbered([0.30, 0.42, 0.25])}) | {gptq("softmax", 3): None}
    report = read_report(write_cells(tmp_path, cells, provenance=provenance))
    shown = " ".join(render(report, format, "summary").split())
    assert "Measured on cpu in float32." in shown
    source = {"md": "&lt;b>", "latex": "b", "terminal": "<b>", "html": "&lt;b&gt;"}[format]
    assert states(shown, f"Calibration text of GPTQ: …{source}…2 draws of 64 samples…1,024 tokens.")  # one failed
    assert "Measured" not in render(report, "md", "damage")


def test_records_without_their_recipe_name_no_text(report: ReportData) -> None:
    assert "Calibration text of GPTQ: not in the records." in render(report, "md", "summary")


def test_a_draw_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    losses = {"softmax": {1: 0.3, 2: 0.4, 3: 0.5}}
    copied = {gptq("softmax", 3): "windows 2"}
    report = read_report(write_cells(tmp_path, twins(losses), copied))
    result = report.results.get("mini", "softmax", LABEL)
    assert result
    assert result.calibration_draws == 2
    assert "draw-3 was calibrated on the same windows as" in result.caveat


def test_if_all_draws_failed_the_row_says_why(tmp_path: Path) -> None:
    cells = twins({"softmax": numbered([0.1, 0.2])}) | {gptq("softmax", draw): None for draw in (1, 2)}
    (damage,) = {row.damages["softmax"].score for row in read_report(write_cells(tmp_path, cells)).damages}
    assert not isinstance(damage, Difference)
    assert "draw-1 failed" in damage.reason


def test_one_cell_with_draws_and_without_is_an_error(tmp_path: Path) -> None:
    folder = write_cells(tmp_path, twins({"softmax": {None: 0.1, 1: 0.2, 2: 0.3}}))
    with pytest.raises(ReportError, match=f"mini-softmax-{LABEL} .*several calibration draws"):
        read_report(folder)


def test_draws_of_other_documents_have_no_interval(tmp_path: Path) -> None:
    cells = twins({"softmax": numbered([0.1, 0.2, 0.3])})
    cells[gptq("softmax", 2)] = twins({"softmax": {2: 0.2}}, documents=30)[gptq("softmax", 2)]
    found = own(damage(read_report(write_cells(tmp_path, cells))), "softmax")
    assert found.interval is None
    assert any("did not see the same documents" in note and "draw-2" in note for note in found.notes)


def test_the_unquantized_cell_is_in_the_plan_once(report: ReportData) -> None:
    assert [part.cell for part in report.results.parts][:2] == [unquantized("softmax"), unquantized("softpick")]


def test_the_interval_has_the_documents_and_the_draws_chance(report: ReportData) -> None:
    """half-width² = t²(n − 1)·V + t²(R − 1)·s²/R, computed from the documents of the records themselves."""
    by_draw, plain = documents_of(report, "softmax"), documents_of(report, "softmax", quantized=False)[0]
    words = report.evidence.documents[unquantized("softmax")]["wikitext"].metrics["word_perplexity"].weights
    losses = np.stack([plain - own for own in by_draw])  # [draws, documents] in nats
    thetas = losses.sum(axis=1) / words.sum()
    residuals = losses.mean(axis=0) - thetas.mean() * words
    over_documents = 40 / 39 * (residuals**2).sum() / words.sum() ** 2  # of a ratio, linearized
    reach = np.sqrt(t.ppf(0.975, 39) ** 2 * over_documents + t.ppf(0.975, 4) ** 2 * np.var(thetas, ddof=1) / 5)
    found = own(damage(report), "softmax").interval
    assert found
    assert found.estimate
    assert found.estimate.value == pytest.approx(thetas.mean())
    assert [source.freedom for source in found.estimate.sources] == [39, 4]
    assert found.estimate.sources[1].variance == pytest.approx(np.var(thetas, ddof=1) / 5)
    assert found.estimate.half_width() == pytest.approx(reach, rel=0.02)  # V is that of 2,000 resamples
    assert found.tested == pytest.approx(
        (thetas.mean() - found.estimate.half_width(), thetas.mean() + found.estimate.half_width())
    )


def documents_of(report: ReportData, attention: str, quantized: bool = True) -> list[np.ndarray]:
    """The log-likelihoods of the pages, of each draw or of the unquantized model."""
    cells = [gptq(attention, draw) for draw in LOSSES[attention]] if quantized else [unquantized(attention)]
    return [report.evidence.documents[cell]["wikitext"].metrics["word_perplexity"].values for cell in cells]


def test_twins_share_their_draws_so_a_draws_effect_on_both_cancels(tmp_path: Path) -> None:
    """Paired by draw, and by document: the difference of damages is significant although neither damage is."""
    shared = np.array([0.1, -0.1, 0.05, -0.04, 0.0])
    losses = {"softmax": numbered((0.40 + shared).tolist()), "softpick": numbered((0.30 + shared).tolist())}
    row = damage(read_report(write_cells(tmp_path / "shared", twins(losses))))
    difference = row.differences["softpick"]
    assert difference
    assert difference.interval
    assert difference.interval.estimate
    assert own(row, "softmax").interval.estimate.sources[1].variance > 1e-4
    assert difference.interval.estimate.sources[1].variance < 1e-12
    assert difference.significant
    shuffled = {**losses, "softpick": numbered((0.30 + shared[[1, 0, 3, 2, 4]]).tolist())}
    other = damage(read_report(write_cells(tmp_path / "shuffled", twins(shuffled)))).differences["softpick"]
    assert other
    assert other.value == pytest.approx(difference.value, rel=0.05)
    assert not other.significant


def test_with_one_draw_there_is_no_star_and_a_note_says_why(tmp_path: Path) -> None:
    folder = write_cells(tmp_path, twins({"softmax": {None: 0.6}, "softpick": {None: 0.1}}))
    report = read_report(folder)
    row = damage(report)
    for found in (own(row, "softmax"), row.differences["softpick"]):
        assert found
        assert found.interval
        assert not found.significant
        assert found.p is None
        assert any("one calibration draw" in note.lower() for note in found.notes)
    text = table(folder, kind="damage")
    assert "one calibration draw" in text.lower()
    rows = "".join(line for line in text.splitlines() if line.startswith("|"))
    assert "wikitext" in rows.lower()
    assert not set("▲▼*") & set(rows)
    assert {row["significant"] for row in json.loads(table(folder, kind="damage", format="json"))} == {False}
    assert {row["draws"] for row in json.loads(table(folder, kind="damage", format="json"))} == {1}


def test_uncalibrated_rows_are_as_ever(tmp_path: Path) -> None:
    cells = {unquantized("softmax"): make_samples(40), cell_ref(): make_samples(40, 0.5)}
    found = own(damage(read_report(write_cells(tmp_path, cells))), "softmax")
    assert found.significant
    assert found.interval.estimate.sources[0].freedom == 39
    assert len(found.interval.estimate.sources) == 1
    assert found.p < 1e-4


@pytest.mark.parametrize("kind", ["summary", "delta", "damage"])
@pytest.mark.parametrize("format", ["md", "latex", "html"])
def test_tables_for_people_say_how_many_draws_there_are(report: ReportData, format: str, kind: str) -> None:
    assert "means over 5 calibration draws" in render(report, format, kind)


@pytest.mark.parametrize("kind", ["delta", "damage"])
def test_tables_for_programs_have_a_column_of_draws(report: ReportData, kind: str) -> None:
    objects = json.loads(render(report, "json", kind))
    assert {row["draws"] for row in objects if row["label"] == LABEL} == {5}
    assert {row["draws"] for row in objects if row["label"] != LABEL} <= {None}
    rows = list(csv.DictReader(io.StringIO(render(report, "csv", kind))))
    assert {row["draws"] for row in rows if row["label"] == LABEL} == {"5"}
    assert list(rows[0])[-1] == "draws"


def test_audits_and_plots_have_every_draw(report: ReportData, tmp_path: Path) -> None:
    text, suspicious = audit(report.results.source)
    assert text.count("-draw-") == 10
    assert "12 cells" in text
    assert not suspicious, text
    assert list(figures(report))
