"""Accept replaces only baselines, keeps other people's files in them, and refuses runs that no check could use."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qbench.records.schema import RunPlan
from qbench.records.store import read_results, write_plan, write_record

from ..example_records import make_record
from .accepting import accept, losses, run, snapshot
from .made_up import make_audit


def test_what_is_not_done_is_no_baseline(
    accepted_baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = losses(accepted_baseline)
    folder = run(tmp_path / "run", loss=0.1)
    assert accept(folder, accepted_baseline, "  ") == 2
    said = capsys.readouterr()
    assert "--reason is empty" in said.err
    assert not said.out  # only the error, without a comparison above it
    assert accept(folder, folder) == 2
    said = capsys.readouterr()
    assert "is the baseline itself" in said.err
    assert not said.out
    plan = read_results(folder).plan
    assert plan is not None
    part = {"gate": {"baseline_may_hold_more": True}}
    write_plan(folder, RunPlan(recipe=plan.recipe, resolved_recipe=part, cells=plan.cells))
    assert accept(folder, accepted_baseline) == 2
    assert "accept a run of the whole recipe" in capsys.readouterr().err
    stored = read_results(folder).current[0]
    write_record(stored.folder, make_record(stored.record.cell))
    assert accept(folder, accepted_baseline) == 2
    assert "mini-softmax-hqq-3-g0 is missing or failed" in capsys.readouterr().err
    assert losses(accepted_baseline) == before
    assert not (accepted_baseline / "CHANGES.jsonl").exists()


def test_samples_that_are_not_the_records_are_not_accepted(accepted_baseline: Path, tmp_path: Path) -> None:
    before = losses(accepted_baseline)
    folder = run(tmp_path / "run", loss=0.1)
    next(folder.glob("*/samples.parquet")).write_bytes(b"")
    assert accept(folder, accepted_baseline) == 2
    assert losses(accepted_baseline) == before


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with sources, published numbers, a baseline, and a run that differs from it."""
    folder = tmp_path / "proj"
    for name in (".git/HEAD", "src/main.py", "README.md", "docs/a.md", "results/paper/baseline.csv"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"the content of {name}")
    run(folder / "results" / "mini")
    run(folder / "results" / "runs" / "mini", loss=0.3)
    return folder


def foreign_folder(mini: Path) -> Path:
    (mini / "plots").mkdir()
    return mini / "plots"


def foreign_record(mini: Path) -> Path:
    (mini / "music").mkdir()
    (mini / "music" / "record.json").write_text('{"artist": "Ada"}')
    return mini / "music"


def file_in_a_cell(mini: Path) -> Path:
    file = next(mini.glob("mini-*")) / "notes.md"
    file.write_text("why this cell is odd")
    return file


def folder_in_a_cell(mini: Path) -> Path:
    folder = next(mini.glob("mini-*")) / "samples.parquet"
    folder.unlink()
    folder.mkdir()
    (folder / "part-0").write_text("rows")
    return folder


def link_to_a_folder(mini: Path) -> Path:
    (mini / "mini-softmax-0123456789").symlink_to(mini.parent / "paper")
    return mini / "mini-softmax-0123456789"


def link_to_a_file(mini: Path) -> Path:
    (mini / "README.md").symlink_to(mini.parent.parent / "README.md")
    return mini / "README.md"


def a_pipe(mini: Path) -> Path:
    os.mkfifo(mini / "pipe")
    return mini / "pipe"


ATTACKS = [foreign_folder, foreign_record, file_in_a_cell, folder_in_a_cell, link_to_a_folder, link_to_a_file, a_pipe]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_baseline_with_something_else_in_it_is_not_replaced(
    attack: Callable[[Path], Path], project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = attack(project / "results" / "mini")
    before = snapshot(project)
    assert accept(project / "results" / "runs" / "mini", project / "results" / "mini") == 2
    said = capsys.readouterr().err
    assert f"{foreign} is not part of a baseline" in said
    assert snapshot(project) == before


@pytest.mark.parametrize(
    ("named", "facts"),
    [
        ("results/runs", ["results/runs/mini", "one that does not exist yet"]),
        ("results", ["results/runs/mini", "Did you mean", "results/mini?"]),
        (".", ["results/runs/mini"]),
        ("results/runs/mini/baseline", ["inside the run"]),
        ("docs", ["docs/a.md"]),
        ("results/paper", ["results/paper/baseline.csv"]),
        ("README.md", ["README.md", "Not a directory"]),
        ("linked", ["results/runs/mini"]),
    ],
)
def test_a_folder_that_is_no_baseline_is_not_replaced(
    named: str, facts: list[str], project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "linked").symlink_to("results")
    before = snapshot(project)
    assert accept(project / "results" / "runs" / "mini", project / named) == 2
    said = capsys.readouterr().err
    assert str((project / named).resolve()) in said
    assert all(fact in said for fact in facts), said
    assert snapshot(project) == before


def test_a_repository_that_does_not_contain_the_run_is_not_replaced(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, before = run(tmp_path / "run"), snapshot(project)
    assert accept(folder, project) == 2
    assert str(project / ".git") in capsys.readouterr().err
    assert snapshot(project) == before


@pytest.mark.parametrize("which", ["new", "old", "accept"])
@pytest.mark.parametrize("content", ["records", "notes", "nothing", "link", "file"])
def test_what_others_put_beside_the_baseline_is_kept(
    which: str, content: str, accepted_baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, theirs = run(tmp_path / "run", loss=0.3), accepted_baseline.parent / f".mini.{which}"
    if content == "records":
        shutil.copytree(accepted_baseline, theirs)
    elif content == "link":
        theirs.symlink_to("nowhere")
    elif content == "file":
        theirs.write_text("mine")
    else:
        theirs.mkdir()
        if content == "notes":
            (theirs / "notes.md").write_text("mine")
    before = snapshot(tmp_path)
    assert accept(folder, accepted_baseline) == 2
    assert str(theirs) in capsys.readouterr().err
    assert snapshot(tmp_path) == before


def without_samples(folder: Path) -> str:
    return rewrite_record(folder, samples_sha256=None)


def without_metrics(folder: Path) -> str:
    return rewrite_record(folder, metrics=[])


def with_an_override_of_nothing(folder: Path) -> str:
    plan = read_results(folder).plan
    assert plan is not None
    gate = {"overrides": {"piqa": {"acc_nrm": {"tolerance": 1.0}}}}
    write_plan(folder, plan.model_copy(update={"resolved_recipe": {"gate": gate}}))
    return "acc_nrm"


def with_weights_that_are_not_finite(folder: Path) -> str:
    return rewrite_record(folder, audit=make_audit(finite=False).model_dump(mode="json"))


def rewrite_record(folder: Path, **changes: Any) -> str:
    file = next(folder.glob("*softmax*/record.json"))
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return "mini-softmax-hqq-3-g0"


@pytest.mark.parametrize(
    "spoil", [without_samples, without_metrics, with_an_override_of_nothing, with_weights_that_are_not_finite]
)
def test_a_run_that_no_check_could_use_is_not_accepted(
    spoil: Callable[[Path], str], accepted_baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path / "run", loss=0.3)
    fact = spoil(folder)
    before = snapshot(tmp_path)
    for named in (accepted_baseline, accepted_baseline.with_name("first")):
        assert accept(folder, named) == 2
        said = capsys.readouterr().err
        assert str(folder) in said
        assert fact in said
        assert ".new" not in said
    assert snapshot(tmp_path) == before


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert accept(run(tmp_path / "run"), tmp_path / "file" / "mini") == 2
    assert "cannot be" in capsys.readouterr().err


def test_a_path_through_a_folder_that_does_not_exist_leads_to_the_same_refusal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """typo/../precious is precious, however it is spelled."""
    (tmp_path / "precious" / "sub").mkdir(parents=True)
    (tmp_path / "precious" / "sub" / "thesis.tex").write_text("years")
    assert accept(run(tmp_path / "run"), tmp_path / "typo" / ".." / "precious") == 2
    assert "precious" in capsys.readouterr().err
    assert (tmp_path / "precious" / "sub" / "thesis.tex").read_text() == "years"


@pytest.mark.parametrize("content", ["", "not JSON", '{"version": 1}'])
def test_another_file_called_changes_makes_no_baseline(content: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "CHANGES.jsonl").write_text(content)
    (tmp_path / "docs" / "page.md").write_text("page")
    assert accept(run(tmp_path / "run"), tmp_path / "docs") == 2
    assert (tmp_path / "docs" / "page.md").read_text() == "page"


def test_a_folder_named_like_a_cell_without_a_record_is_not_ours(tmp_path: Path, accepted_baseline: Path) -> None:
    other = accepted_baseline / "data-0123456789"
    other.mkdir()
    (other / "samples.parquet").write_text("not ours")
    assert accept(run(tmp_path / "run"), accepted_baseline) == 2
    assert (other / "samples.parquet").read_text() == "not ours"
