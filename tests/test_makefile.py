"""The Makefile: which commands of qbench its targets run, what they print, and how they end. And what CI runs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def make(target: str, venv: Path, run_ends_with: int) -> tuple[int, list[str]]:
    """A target's exit code and what it prints, with a qbench that does nothing."""
    (venv / "bin").mkdir(parents=True)
    (venv / "installed").touch()
    command = venv / "bin" / "qbench"
    command.write_text(f'#!/bin/sh\n[ "$1" != run ] || exit {run_ends_with}\n')
    command.chmod(0o755)
    arguments = [target, f"VENV={venv}", "RECIPE=recipes/mini.yaml", "--old-file", str(venv / "installed")]
    done = subprocess.run(
        ["make", "--no-print-directory", *arguments], cwd=ROOT, text=True, capture_output=True, check=False
    )
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("failed", [0, 1])
def test_make_bench_prints_its_commands_and_nothing_of_its_shell(failed: int, tmp_path: Path) -> None:
    code, printed = make("bench", tmp_path, failed)
    called = [command.removeprefix(f"{tmp_path}/bin/qbench ").split()[0] for command in printed]
    assert called[:3] == ["doctor", "run", "table"]
    assert set(called[3:]) == {"table"}
    assert printed[-1].endswith("--out results/runs/mini/report.html")  # which qbench confirms
    assert bool(code) == bool(failed)  # make has its own code for a failure


@pytest.mark.parametrize(("ends_with", "checked"), [(0, True), (1, True), (2, False)])
def test_make_check_leaves_a_failed_cell_to_the_gate(ends_with: int, checked: bool, tmp_path: Path) -> None:
    code, printed = make("check", tmp_path, ends_with)
    called = [command.removeprefix(f"{tmp_path}/bin/qbench ").split()[0] for command in printed]
    assert called == (["run", "check"] if checked else ["run"])
    assert bool(code) != checked


@pytest.mark.parametrize("clone", ["qbench", "a b/another-name"])
@pytest.mark.parametrize("ends_with", [0, 3])
def test_ci_runs_in_a_folder_called_qbench(clone: str, ends_with: int, tmp_path: Path) -> None:
    """As users' clones are called; another clone is left as it was, and nothing stays in the temporary folder."""
    folder, log = tmp_path / clone, tmp_path / "log"
    (folder / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci")
    identity = ["-c", "user.name=me", "-c", "user.email=me@here"]
    for command in (["init", "--quiet"], ["add", "."], [*identity, "commit", "--quiet", "-m", "first"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "temporary").mkdir()
    (tmp_path / "bin" / "make").write_text(
        f'#!/bin/sh\necho "$1 $PWD" >> "{log}"\n[ $1 != test ] || exit {ends_with}\n'
    )
    (tmp_path / "bin" / "make").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "TMPDIR": str(tmp_path / "temporary")}
    assert subprocess.run([folder / ".ci" / "run"], env=environment).returncode == ends_with
    targets, folders = zip(*(line.split(" ", 1) for line in log.read_text().splitlines()), strict=True)
    assert targets == (("lint", "test", "check") if ends_with == 0 else ("lint", "test"))
    assert {Path(each).name for each in folders} == {"qbench"}
    assert list((tmp_path / "temporary").iterdir()) == []
    assert {file.name for file in folder.iterdir()} == {".git", ".ci"}
