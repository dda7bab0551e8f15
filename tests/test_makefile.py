"""The Makefile: which commands of qbench its targets run, what they print, and how they end."""

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
    *commands, report = printed
    called = [command.removeprefix(f"{tmp_path}/bin/qbench ").split()[0] for command in commands]
    assert called[:3] == ["doctor", "run", "table"]
    assert set(called[3:]) == {"table"}
    assert [command for command in commands if report.removeprefix("report: ") in command]
    assert bool(code) == bool(failed)  # make has its own code for a failure


@pytest.mark.parametrize(("ends_with", "checked"), [(0, True), (1, True), (2, False)])
def test_make_check_leaves_a_failed_cell_to_the_gate(ends_with: int, checked: bool, tmp_path: Path) -> None:
    code, printed = make("check", tmp_path, ends_with)
    called = [command.removeprefix(f"{tmp_path}/bin/qbench ").split()[0] for command in printed]
    assert called == (["run", "check"] if checked else ["run"])
    assert bool(code) != checked
