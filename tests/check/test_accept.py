"""Renewing a baseline: all of it or nothing, and a log of why."""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qbench.check import accept as accept_module
from qbench.check.gate import check
from qbench.cli import main
from qbench.store import RunPlan, read_results, write_plan, write_record

from ..records import make_record
from .made_up import Population, make_cells, write_cells

CELLS = make_cells(2)
POPULATION = Population(60, tasks=["piqa", "wikitext"])


def run(folder: Path, loss: float = 0.0) -> Path:
    write_cells(folder, {cell: POPULATION.samples(loss=loss) for cell in CELLS})
    for cell in folder.iterdir():
        if cell.is_dir():
            (cell / "log.txt").write_text("a log")
    return folder


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    return run(tmp_path / "results" / "mini")


def accept(folder: Path, baseline: Path, reason: str = "a new kernel") -> int:
    return main(["accept", str(folder), "--baseline", str(baseline), "--reason", reason])


def changes(baseline: Path) -> list[dict]:
    return [json.loads(line) for line in (baseline / "CHANGES.jsonl").read_text().splitlines()]


def losses(folder: Path) -> set[float]:
    """Which run's numbers a folder holds."""
    return {metric.value for stored in read_results(folder).current for metric in stored.record.metrics}


def test_the_run_takes_the_baselines_place(baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    worse = run(tmp_path / "worse", loss=0.3)
    (baseline / "README.md").write_text("what this is")
    assert not check(worse, baseline).passed
    assert accept(worse, baseline, " the old one was wrong ") == 0
    said = capsys.readouterr().out
    assert said.startswith("FAIL: ")
    assert "is now what" in said
    report = check(worse, baseline)
    assert report.passed
    assert {outcome.p for outcome in report.outcomes} == {1.0}
    assert not list(baseline.rglob("log.txt"))
    assert (baseline / "README.md").read_text() == "what this is"
    assert sorted(p.name for p in baseline.parent.iterdir()) == ["mini"]
    (change,) = changes(baseline)
    assert change["why"] == "the old one was wrong"
    assert change["who"]
    assert change["when"].endswith("+00:00")
    assert change["verdict"] == "fail"
    assert {"wikitext", "piqa"} == {moved["task"] for moved in change["moved"]}
    assert accept(run(tmp_path / "third"), baseline, "back again") == 0
    assert [change["why"] for change in changes(baseline)] == ["the old one was wrong", "back again"]
    assert changes(baseline)[1]["verdict"] == "pass"


def test_a_first_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert accept(run(tmp_path / "run"), tmp_path / "results" / "mini") == 0
    said = capsys.readouterr().out
    assert "Not compared: " in said
    assert f"results/mini is a new baseline: what {tmp_path / 'run'} was (" in said.splitlines()[-1]
    (change,) = changes(tmp_path / "results" / "mini")
    assert change["cells"]["added"] == sorted(cell.name for cell in CELLS)
    assert change["verdict"].startswith("not compared: ")


def test_a_misspelt_baseline_is_a_new_one_and_said_to_be(
    baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, misspelt = run(tmp_path / "run"), baseline.with_name("mni")
    assert accept(folder, misspelt) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == f"Not compared: There is no folder {misspelt}. Did you mean {baseline}?"
    assert last.startswith(f"{misspelt} is a new baseline: what {folder} was (")
    assert accept(folder, misspelt) == 0
    assert "mni is now what" in capsys.readouterr().out


def test_other_documents_can_be_accepted(baseline: Path, tmp_path: Path) -> None:
    other = Population(30, tasks=["piqa"], seed=3)
    folder = write_cells(tmp_path / "run", {cell: other.samples() for cell in CELLS})
    assert accept(folder, baseline) == 0
    assert losses(baseline) == losses(folder)


def test_superseded_records_stay_behind(baseline: Path, tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    samples = POPULATION.samples()
    write_record(folder / "old", make_record(CELLS[0], samples, key="0" * 64), samples)
    assert accept(folder, baseline) == 0
    assert not read_results(baseline).superseded


def test_what_is_not_done_is_no_baseline(baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = losses(baseline)
    folder = run(tmp_path / "run", loss=0.1)
    assert accept(folder, baseline, "  ") == 2
    assert "--reason is empty" in capsys.readouterr().err
    assert accept(folder, folder) == 2
    assert "is the baseline itself" in capsys.readouterr().err
    plan = read_results(folder).plan
    assert plan is not None
    part = {"gate": {"baseline_may_hold_more": True}}
    write_plan(folder, RunPlan(recipe=plan.recipe, resolved_recipe=part, cells=plan.cells))
    assert accept(folder, baseline) == 2
    assert "accept a run of the whole recipe" in capsys.readouterr().err
    stored = read_results(folder).current[0]
    write_record(stored.folder, make_record(stored.record.cell))
    assert accept(folder, baseline) == 2
    assert "mini-softmax-hqq-3-g0 is missing or failed" in capsys.readouterr().err
    assert losses(baseline) == before
    assert not (baseline / "CHANGES.jsonl").exists()


def test_samples_that_are_not_the_records_are_not_accepted(baseline: Path, tmp_path: Path) -> None:
    before = losses(baseline)
    folder = run(tmp_path / "run", loss=0.1)
    next(folder.glob("*/samples.parquet")).write_bytes(b"")
    assert accept(folder, baseline) == 2
    assert losses(baseline) == before


class Killed(BaseException):
    """What nothing catches."""


def die_at(step: int, how: Callable[[], None], setattr_: Callable[[object, str, object], None]) -> None:
    """Die before this step of an accept."""
    steps = iter(range(100))

    def dying(function: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            if next(steps) == step:
                how()
            return function(*args, **options)

        return call

    for owner, name in ((Path, "rename"), (Path, "mkdir"), (Path, "write_text"), (accept_module.shutil, "rmtree")):
        setattr_(owner, name, dying(getattr(owner, name)))


def die() -> None:
    raise Killed


def killed_by_exception(step: int, folder: Path, baseline: Path) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        die_at(step, die, patch.setattr)
        try:
            return accept(folder, baseline, "killed") != 0
        except Killed:
            return True


def killed_by_signal(step: int, folder: Path, baseline: Path) -> bool:
    process = multiprocessing.get_context("fork").Process(target=_accept_and_die, args=(step, folder, baseline))
    process.start()
    process.join()
    return process.exitcode == -signal.SIGKILL


def _accept_and_die(step: int, folder: Path, baseline: Path) -> None:
    die_at(step, lambda: os.kill(os.getpid(), signal.SIGKILL), setattr)
    sys.exit(accept(folder, baseline, "killed"))


@pytest.mark.parametrize("killed", [killed_by_exception, pytest.param(killed_by_signal, marks=pytest.mark.slow)])
def test_a_killed_accept_leaves_no_mixture(
    killed: Callable[[int, Path, Path], bool], baseline: Path, tmp_path: Path
) -> None:
    """Killed before each of its steps in turn, a baseline is the old or the new one; the next accept works."""
    first, second = run(tmp_path / "first"), run(tmp_path / "second", loss=0.3)
    old, new = losses(first), losses(second)
    for step in range(100):
        assert accept(first, baseline) == 0
        if not killed(step, second, baseline):
            break
        if baseline.exists():
            assert losses(baseline) in (old, new)
        else:
            assert losses(baseline.parent / ".mini.old") == old
    assert step >= 5
    assert losses(baseline) == new
    assert {change["why"] for change in changes(baseline)} == {"a new kernel", "killed"}


def test_who_is_asked_of_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("[user]\n name = Ada\n email = ada@example.org\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    assert accept_module._who() == "Ada <ada@example.org>"
    config.write_text("")
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("LOGNAME", "ada")
    assert accept_module._who() == "ada"


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert accept(run(tmp_path / "run"), tmp_path / "file" / "mini") == 2
    assert "cannot be" in capsys.readouterr().err


def test_a_baseline_of_mini_is_below_2_mb(tmp_path: Path) -> None:
    """22 cells × 5 tasks × 400 documents: one cell measured, with 28 layers in its audit."""
    (cell,) = make_cells(1)
    folder = write_cells(tmp_path / "run", {cell: Population(400).samples(noise=0.05)})
    assert accept(folder, tmp_path / "mini") == 0
    size = sum(file.stat().st_size for file in (tmp_path / "mini").rglob("*") if file.is_file())
    assert 22 * size < 2_000_000
    assert not os.path.exists(tmp_path / ".mini.new")
