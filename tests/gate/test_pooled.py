"""The pooled loss of a cell, and KL in the gate."""

import json
from pathlib import Path

import numpy as np
import pytest

from qbench.gate.pairing import CheckError
from qbench.gate.render import sentence, to_json, to_text
from qbench.gate.settings import GateSettings, Override, Tolerances
from qbench.gate.verdict import check

from .made_up import Population, make_cells, write_cells

CELLS = make_cells(2)


def test_small_losses_that_all_point_one_way_are_found_together(tmp_path: Path) -> None:
    """Every accuracy loses four answers of 150, and none gains one: four coins alone never give a p below 1/16."""
    tasks = ["arc_easy", "piqa", "sciq"]
    before, after = (Population(150, tasks).samples() for _ in range(2))
    for task in tasks:
        (first,) = np.flatnonzero(before["task"] == task)[:1]
        for metric, rows in (("acc", slice(first, first + 3)), ("acc_norm", slice(first + 4, first + 7))):
            before.loc[rows, metric], after.loc[rows, metric] = 1.0, 0.0
    folders = [write_cells(tmp_path / name, {CELLS[0]: own}) for name, own in (("before", before), ("after", after))]
    report = check(folders[1], folders[0])
    (found,) = report.worse
    assert found.hypothesis.kind == "pooled"
    assert found.p < 1e-5  # 24 coins
    assert min(o.p for o in report.tested if o is not found) == 2.0**-4
    text = to_text(report)
    assert "sciq acc_norm: +5.33 tolerances" in text  # the parts of the pooled loss
    assert text.startswith("FAIL: the pooled loss of 1 cell")
    assert "id: before" not in text  # it is about metrics, not documents
    assert "9 scores" in sentence(found)
    (fields,) = (s for s in json.loads(to_json(report))["scores"] if s["verdict"] == "worse")
    assert np.mean(list(fields["in_tolerances"].values())) == pytest.approx(fields["loss"])


def test_a_document_has_one_sign_for_all_its_metrics(tmp_path: Path) -> None:
    """One document that lost in all of its metrics is one change, not one per metric."""
    population = Population(50, tasks=["piqa"])
    before, after = population.samples(), population.samples()
    columns = ["acc", "acc_norm"]
    before.loc[:2, columns], after.loc[:2, columns] = 1.0, 0.0
    folders = [write_cells(tmp_path / name, {CELLS[0]: own}) for name, own in (("before", before), ("after", after))]
    outcomes = check(folders[1], folders[0]).tested
    (pooled,) = (o.hypothesis for o in outcomes if o.hypothesis.kind == "pooled")
    assert np.count_nonzero(pooled.losses) == 3
    units = {"acc": 0.005, "acc_norm": 0.005}
    expected = (
        sum((before[c] - after[c]).to_numpy() / units[c] for c in columns) / 50 / 3
    )  # and gold_logprob, unchanged
    np.testing.assert_allclose(np.sort(pooled.losses), np.sort(expected), atol=1e-12)


def test_below_one_tolerance_it_passes_however_sure_it_is(tmp_path: Path) -> None:
    population = Population(200)
    baseline = write_cells(tmp_path / "baseline", {CELLS[0]: population.samples()})
    run = write_cells(tmp_path / "run", {CELLS[0]: population.samples(loss=0.005)})
    (pooled,) = (o for o in check(run, baseline).tested if o.hypothesis.kind == "pooled")
    assert 0 < pooled.hypothesis.loss < 1
    assert pooled.verdict == "same"
    strict = GateSettings(tolerances=Tolerances(pooled=0.01))
    assert "pooled" in {o.hypothesis.kind for o in check(run, baseline, strict).worse}


# --- KL


def with_kl(*values: float | None, noise: float = 0.1) -> dict:
    """Both cells, with KL where a value is given."""
    population = Population(120)
    return {
        cell: population.samples(kl=kl, kl_noise=noise, seed=i)
        for i, (cell, kl) in enumerate(zip(CELLS, values, strict=True))
    }


def test_a_loss_in_kl_alone_is_found(tmp_path: Path) -> None:
    baseline = write_cells(tmp_path / "baseline", with_kl(0.05, 0.05))
    report = check(write_cells(tmp_path / "run", with_kl(0.06, 0.05)), baseline)
    assert {(o.hypothesis.cell, o.hypothesis.metric) for o in report.worse} >= {(CELLS[0], "kl")}
    assert not report.failures


@pytest.mark.parametrize("lacking", ["baseline", "run"])
def test_kl_missing_on_one_side_is_reported_once_and_the_rest_is_checked(lacking: str, tmp_path: Path) -> None:
    sides = {"baseline": (0.05, 0.05), "run": (0.05, 0.05), lacking: (None, None)}
    folders = {name: write_cells(tmp_path / name, with_kl(*values)) for name, values in sides.items()}
    report = check(folders["run"], folders["baseline"])
    assert report.passed
    (note,) = (note for note in report.notes if "KL" in note)
    assert str(folders[lacking]) in note
    assert len(report.tested) == 2 * 13
    assert ("accept" in note) == (lacking == "baseline")
    worse = write_cells(
        tmp_path / "worse", {cell: Population(120).samples(loss=0.3, seed=i) for i, cell in enumerate(CELLS)}
    )
    assert check(worse, folders["baseline"]).worse


def test_a_cell_that_lost_its_kl_fails(tmp_path: Path) -> None:
    baseline = write_cells(tmp_path / "baseline", with_kl(0.05, 0.05))
    report = check(write_cells(tmp_path / "run", with_kl(0.05, None)), baseline)
    assert any("kl" in failure.message and failure.cell == CELLS[1] for failure in report.failures)
    assert not any("KL was not compared" in note for note in report.notes)


def test_an_override_of_kl_is_no_typo_where_the_baseline_has_none(tmp_path: Path) -> None:
    baseline = write_cells(tmp_path / "baseline", with_kl(None, None))
    gate = {"overrides": {"wikitext": {"kl": {"tolerance": 20}}}}
    assert check(write_cells(tmp_path / "run", with_kl(0.05, 0.05), gate=gate), baseline).passed


def test_a_margin_for_kl_of_one_metric_needs_kl_on_both_sides(tmp_path: Path) -> None:
    """Without an error, the check would pass although nothing was compared with the margin."""
    baseline, run = write_cells(tmp_path / "b", with_kl(None, None)), write_cells(tmp_path / "r", with_kl(0.05, 0.05))
    gate = GateSettings(overrides={"wikitext": {"kl": Override(noninferiority=3)}})
    with pytest.raises(CheckError, match=r"overrides\.wikitext\.kl\.noninferiority is 3, but only one .* has KL"):
        check(run, baseline, gate)
    with pytest.raises(CheckError, match=r"noninferiority is 3"):
        check(baseline, run, gate)
    typo = GateSettings(overrides={"wikitexts": {"kl": Override(tolerance=20)}})
    with pytest.raises(CheckError, match=r"wikitexts\.kl is not a tested metric"):
        check(run, baseline, typo)
