"""Renewing a baseline: all of it or nothing, and a log of why."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qbench import files
from qbench.cli import main
from qbench.gate import accept as accept_module
from qbench.gate.verdict import check
from qbench.records.schema import RunPlan
from qbench.records.store import read_results, write_plan, write_record

from ..example_records import make_record
from .made_up import Population, make_audit, make_cells, write_cells

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
    """Which run's numbers a folder has."""
    return {metric.value for stored in read_results(folder).current for metric in stored.record.metrics}


def snapshot(folder: Path) -> dict[str, bytes | str | None]:
    """Every path below a folder with its content: a file's bytes, a link's target, None for a folder."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = content
    return found


def test_the_run_takes_the_baselines_place(baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    worse = run(tmp_path / "worse", loss=0.3)
    (baseline / "README.md").write_text("what this is")
    assert not check(worse, baseline).passed
    assert accept(worse, baseline, " the old one was wrong ") == 0
    said = capsys.readouterr().out
    assert said.startswith("FAIL: ")
    assert "now has the records of" in said
    report = check(worse, baseline)
    assert report.passed
    assert {outcome.p for outcome in report.tested} == {1.0}
    assert not list(baseline.rglob("log.txt"))
    assert (baseline / "README.md").read_text() == "what this is"
    assert sorted(p.name for p in baseline.parent.iterdir()) == ["mini"]
    (change,) = changes(baseline)
    assert change["why"] == "the old one was wrong"
    assert change["who"]
    assert change["when"].endswith("+00:00")
    assert change["verdict"] == "fail"
    assert {"wikitext", "piqa", "all_tasks"} == {moved["task"] for moved in change["moved"]}
    assert accept(run(tmp_path / "third"), baseline, "back again") == 0
    assert [change["why"] for change in changes(baseline)] == ["the old one was wrong", "back again"]
    assert changes(baseline)[1]["verdict"] == "pass"


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
    baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, misspelt = run(tmp_path / "run"), baseline.with_name("mni")
    assert accept(folder, misspelt) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert f"{misspelt} " in first
    assert f"Did you mean {baseline}?" in first
    assert last.startswith(f"{misspelt} ")
    assert "new baseline" in last
    assert str(folder) in last
    assert accept(folder, misspelt) == 0
    assert "mni now has" in capsys.readouterr().out


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
    said = capsys.readouterr()
    assert "--reason is empty" in said.err
    assert not said.out  # one error, and no comparison before it
    assert accept(folder, folder) == 2
    said = capsys.readouterr()
    assert "is the baseline itself" in said.err
    assert not said.out
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
    """An exception that nothing catches."""


def die_at(step: int, how: Callable[[], None], setattr_: Callable[[object, str, object], None]) -> None:
    """Die before this step of an accept, and before all later ones: a killed process does not tidy up."""
    interrupt(lambda count: how() if count >= step else None, setattr_)


def interrupt(before: Callable[[int], None], setattr_: Callable[[object, str, object], None]) -> None:
    """Call a function with the number of the step before each step of an accept that writes."""
    steps = iter(range(1000))

    def interrupted(function: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            before(next(steps))
            return function(*args, **options)

        return call

    of_paths = [(Path, name) for name in ("rename", "mkdir", "write_text", "unlink")]
    for owner, name in (*of_paths, (os, "replace"), (os, "sync"), (shutil, "copy2"), (shutil, "rmtree")):
        setattr_(owner, name, interrupted(getattr(owner, name)))


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
    (baseline / "README.md").write_text("what this is")
    old, new = losses(first), losses(second)
    for step in range(100):
        assert accept(first, baseline) == 0
        if not killed(step, second, baseline):
            break
        if baseline.exists():
            assert losses(baseline) in (old, new)
        else:
            assert losses(baseline.parent / ".mini.old") == old
    assert step >= 10
    assert losses(baseline) == new
    assert (baseline / "README.md").read_text() == "what this is"
    assert [path.name for path in baseline.parent.iterdir()] == ["mini"]
    assert {change["why"] for change in changes(baseline)} == {"a new kernel", "killed"}


@pytest.mark.parametrize("lasts", [1, 2, 1000])
def test_nothing_is_lost_when_a_step_fails(
    lasts: int, baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step in turn fails, alone or with those after it, such as the one that puts the old baseline back."""
    (baseline / "README.md").write_text("what this is")
    old, folder = losses(baseline), run(tmp_path / "run", loss=0.3)
    before = snapshot(baseline)
    for step in range(100):

        def fail(count: int, step: int = step) -> None:
            if step <= count < step + lasts:
                raise OSError(28, "No space left on device")

        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            interrupt(fail, patch.setattr)
            code = accept(folder, baseline)
        if code == 0:  # the new baseline is in place: only what tidies up could still fail
            break
        said = capsys.readouterr().err
        assert code == 2
        assert str(baseline.parent) in said
        assert "No space left on device" in said
        if not baseline.exists():
            assert lasts > 1
            assert str(baseline.parent / ".mini.old") in said
            (baseline.parent / ".mini.old").rename(baseline)
        assert snapshot(baseline) == before
    assert step >= 10
    assert losses(baseline) == losses(folder) != old
    assert accept(folder, baseline) == 0
    assert [path.name for path in baseline.parent.iterdir()] == ["mini"]


def test_what_took_the_baselines_place_meanwhile_is_kept(
    baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, before, rename = run(tmp_path / "run", loss=0.3), snapshot(baseline), Path.rename

    def renamed(path: Path, target: Path) -> Path:
        done = rename(path, target)
        if path == baseline:
            run(baseline, loss=0.1)
        return done

    monkeypatch.setattr(Path, "rename", renamed)
    assert accept(folder, baseline) == 2
    assert str(baseline.parent / ".mini.old") in capsys.readouterr().err
    assert snapshot(baseline.parent / ".mini.old") == before
    assert losses(baseline) == losses(run(tmp_path / "other", loss=0.1))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs to mount a file system, and cannot: {error}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_and_a_read_only_one_lose_nothing(
    disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, baseline = run(tmp_path / "run", loss=0.3), run(disk / "mini")
    with (disk / "other").open("wb") as other:
        other.write(bytes(shutil.disk_usage(disk).free - 10_000))
    before = snapshot(disk)
    assert accept(folder, baseline) == 2
    assert str(baseline) in capsys.readouterr().err
    assert snapshot(disk) == before
    (disk / "other").unlink()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    before = snapshot(disk)
    assert accept(folder, baseline) == 2
    assert str(baseline) in capsys.readouterr().err
    assert snapshot(disk) == before
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    assert accept(folder, baseline) == 0


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


def test_a_baseline_whose_records_cannot_be_read_is_renewed(baseline: Path, tmp_path: Path) -> None:
    """Otherwise nothing could repair one; its folders still have the names of cells."""
    next(baseline.glob("*/record.json")).write_text("{")
    folder = run(tmp_path / "run", loss=0.3)
    assert accept(folder, baseline) == 0
    assert losses(baseline) == losses(folder)


def test_the_log_of_a_baseline_without_cells_is_kept(baseline: Path, tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    assert accept(folder, baseline, "first") == 0
    for cell in baseline.glob("mini-*"):
        shutil.rmtree(cell)
    assert accept(folder, baseline, "second") == 0
    assert [change["why"] for change in changes(baseline)] == ["first", "second"]


def test_an_empty_folder_becomes_a_baseline(tmp_path: Path) -> None:
    (tmp_path / "mini").mkdir()
    folder = run(tmp_path / "run")
    assert accept(folder, tmp_path / "mini") == 0
    assert losses(tmp_path / "mini") == losses(folder)


def test_a_linked_baseline_stays_a_link(baseline: Path, tmp_path: Path) -> None:
    link, folder = tmp_path / "link", run(tmp_path / "run", loss=0.3)
    link.symlink_to(baseline)
    assert accept(folder, link) == 0
    assert link.is_symlink()
    assert losses(baseline) == losses(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "results", "run"]


@pytest.mark.parametrize("which", ["new", "old", "accept"])
@pytest.mark.parametrize("content", ["records", "notes", "nothing", "link", "file"])
def test_what_others_put_beside_the_baseline_is_kept(
    which: str, content: str, baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, theirs = run(tmp_path / "run", loss=0.3), baseline.parent / f".mini.{which}"
    if content == "records":
        shutil.copytree(baseline, theirs)
    elif content == "link":
        theirs.symlink_to("nowhere")
    elif content == "file":
        theirs.write_text("mine")
    else:
        theirs.mkdir()
        if content == "notes":
            (theirs / "notes.md").write_text("mine")
    before = snapshot(tmp_path)
    assert accept(folder, baseline) == 2
    assert str(theirs) in capsys.readouterr().err
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("written", ["", files.MARK[:10]])
def test_an_accept_killed_while_it_marks_its_folders_owns_none(written: str, baseline: Path, tmp_path: Path) -> None:
    folder, theirs = run(tmp_path / "run", loss=0.3), baseline.parent / ".mini.old"
    (baseline.parent / ".mini.accept").write_text(written)
    shutil.copytree(baseline, theirs)
    before = snapshot(tmp_path)
    assert accept(folder, baseline) == 2
    assert snapshot(tmp_path) == before
    shutil.rmtree(theirs)
    assert accept(folder, baseline) == 0
    assert [path.name for path in baseline.parent.iterdir()] == ["mini"]


def test_one_accept_at_a_time(baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, before = run(tmp_path / "run", loss=0.3), snapshot(baseline)
    with files.replacing(baseline) as new:
        assert accept(folder, baseline) == 2
        assert str(baseline.parent) in capsys.readouterr().err
        assert snapshot(baseline) == before
        assert new.is_dir()
    assert accept(folder, baseline) == 0


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
    spoil: Callable[[Path], str], baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path / "run", loss=0.3)
    fact = spoil(folder)
    before = snapshot(tmp_path)
    for named in (baseline, baseline.with_name("first")):
        assert accept(folder, named) == 2
        said = capsys.readouterr().err
        assert str(folder) in said
        assert fact in said
        assert ".new" not in said
    assert snapshot(tmp_path) == before


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


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert accept(run(tmp_path / "run"), tmp_path / "file" / "mini") == 2
    assert "cannot be" in capsys.readouterr().err


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


def test_a_folder_named_like_a_cell_without_a_record_is_not_ours(tmp_path: Path, baseline: Path) -> None:
    other = baseline / "data-0123456789"
    other.mkdir()
    (other / "samples.parquet").write_text("not ours")
    assert accept(run(tmp_path / "run"), baseline) == 2
    assert (other / "samples.parquet").read_text() == "not ours"
