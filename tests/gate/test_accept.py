"""Replacing a baseline: what it contains afterwards, and the log of reasons."""

import os
import shutil
from pathlib import Path

import pytest

from qbench.gate import accept as accept_module
from qbench.gate.verdict import check
from qbench.records.store import read_results, write_record

from ..example_records import make_record
from .accepting import CELLS, POPULATION, accept, changes, losses, run
from .made_up import Population, make_cells, write_cells


def test_the_run_takes_the_baselines_place(
    accepted_baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worse = run(tmp_path / "worse", loss=0.3)
    (accepted_baseline / "README.md").write_text("what this is")
    assert not check(worse, accepted_baseline).passed
    assert accept(worse, accepted_baseline, " the old one was wrong ") == 0
    said = capsys.readouterr().out
    assert said.startswith("FAIL: ")
    assert "now has the records of" in said
    report = check(worse, accepted_baseline)
    assert report.passed
    assert {outcome.p for outcome in report.tested} == {1.0}
    assert not list(accepted_baseline.rglob("log.txt"))
    assert (accepted_baseline / "README.md").read_text() == "what this is"
    assert sorted(p.name for p in accepted_baseline.parent.iterdir()) == ["mini"]
    (change,) = changes(accepted_baseline)
    assert change["why"] == "the old one was wrong"
    assert change["who"]
    assert change["when"].endswith("+00:00")
    assert change["verdict"] == "fail"
    assert {"wikitext", "piqa", "all_tasks"} == {moved["task"] for moved in change["moved"]}
    assert accept(run(tmp_path / "third"), accepted_baseline, "back again") == 0
    assert [change["why"] for change in changes(accepted_baseline)] == ["the old one was wrong", "back again"]
    assert changes(accepted_baseline)[1]["verdict"] == "pass"


def test_a_first_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert accept(run(tmp_path / "run"), tmp_path / "results" / "mini") == 0
    said = capsys.readouterr().out
    assert "Not compared: " in said
    assert "results/mini is a new baseline" in said.splitlines()[-1]
    assert str(tmp_path / "run") in said.splitlines()[-1]
    (change,) = changes(tmp_path / "results" / "mini")
    assert change["cells"]["added"] == sorted(cell.name for cell in CELLS)
    assert change["verdict"].startswith("not compared: ")


def test_a_misspelt_baseline_is_reported_as_a_new_one(
    accepted_baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, misspelt = run(tmp_path / "run"), accepted_baseline.with_name("mni")
    assert accept(folder, misspelt) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert f"{misspelt} " in first
    assert f"Did you mean {accepted_baseline}?" in first
    assert last.startswith(f"{misspelt} ")
    assert "new baseline" in last
    assert str(folder) in last
    assert accept(folder, misspelt) == 0
    assert "mni now has" in capsys.readouterr().out


def test_other_documents_can_be_accepted(accepted_baseline: Path, tmp_path: Path) -> None:
    other = Population(30, tasks=["piqa"], seed=3)
    folder = write_cells(tmp_path / "run", {cell: other.samples() for cell in CELLS})
    assert accept(folder, accepted_baseline) == 0
    assert losses(accepted_baseline) == losses(folder)


def test_superseded_records_stay_behind(accepted_baseline: Path, tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    samples = POPULATION.samples()
    write_record(folder / "old", make_record(CELLS[0], samples, key="0" * 64), samples)
    assert accept(folder, accepted_baseline) == 0
    assert not read_results(accepted_baseline).superseded


def test_a_baseline_whose_records_cannot_be_read_is_renewed(accepted_baseline: Path, tmp_path: Path) -> None:
    """Otherwise nothing could repair one; its folders still have the names of cells."""
    next(accepted_baseline.glob("*/record.json")).write_text("{")
    folder = run(tmp_path / "run", loss=0.3)
    assert accept(folder, accepted_baseline) == 0
    assert losses(accepted_baseline) == losses(folder)


def test_the_log_of_a_baseline_without_cells_is_kept(accepted_baseline: Path, tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    assert accept(folder, accepted_baseline, "first") == 0
    for cell in accepted_baseline.glob("mini-*"):
        shutil.rmtree(cell)
    assert accept(folder, accepted_baseline, "second") == 0
    assert [change["why"] for change in changes(accepted_baseline)] == ["first", "second"]


def test_an_empty_folder_becomes_a_baseline(tmp_path: Path) -> None:
    (tmp_path / "mini").mkdir()
    folder = run(tmp_path / "run")
    assert accept(folder, tmp_path / "mini") == 0
    assert losses(tmp_path / "mini") == losses(folder)


def test_a_linked_baseline_stays_a_link(accepted_baseline: Path, tmp_path: Path) -> None:
    link, folder = tmp_path / "link", run(tmp_path / "run", loss=0.3)
    link.symlink_to(accepted_baseline)
    assert accept(folder, link) == 0
    assert link.is_symlink()
    assert losses(accepted_baseline) == losses(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "results", "run"]


def test_who_is_asked_of_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("[user]\n name = Ada\n email = ada@example.org\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    assert accept_module.who() == "Ada <ada@example.org>"
    config.write_text("")
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("LOGNAME", "ada")
    assert accept_module.who() == "ada"


def test_the_committed_reference_is_below_5_mb() -> None:
    mini = Path(__file__).parents[2] / "results" / "mini"
    assert sum(file.stat().st_size for file in mini.rglob("*") if file.is_file()) < 5_000_000


def test_a_cell_of_a_baseline_is_below_100_kb(tmp_path: Path) -> None:
    """5 tasks × 400 documents, with 28 layers in its audit; made-up numbers compress worse than measured ones."""
    (cell,) = make_cells(1)
    folder = write_cells(tmp_path / "run", {cell: Population(400).samples(noise=0.05)})
    assert accept(folder, tmp_path / "mini") == 0
    size = sum(file.stat().st_size for file in (tmp_path / "mini").rglob("*") if file.is_file())
    assert size < 100_000
    assert not os.path.exists(tmp_path / ".mini.new")


def test_a_missed_margin_is_logged(tmp_path: Path) -> None:
    """Otherwise the log says that the check failed, and not why."""
    baseline = tmp_path / "baseline"
    assert accept(run(tmp_path / "first"), baseline, "first") == 0
    gate = {"noninferiority": {"perplexity": 1}}
    worse = {cell: POPULATION.samples(noise=0.01, loss=0.03) for cell in CELLS}
    second = write_cells(tmp_path / "second", worse, gate=gate)
    report = check(second, baseline)
    missed = {o.hypothesis.cell.name for o in report.not_excluded}
    assert missed
    assert accept(second, baseline, "second") == 0
    last = changes(baseline)[-1]
    assert last["verdict"] == "fail"
    assert {found.partition(":")[0] for found in last["findings"]} == missed
    assert all("1% is required" in found for found in last["findings"])
