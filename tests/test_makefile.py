"""The Makefile: which commands of qbench its targets run, what they print, and how they end."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = "results/runs/mini"
TABLES = [
    f"table {RUN} --kind summary",
    f"table {RUN}",
    f"table {RUN} --kind damage",
    f"table {RUN} --format html --out {RUN}/report.html",
]
GATE = "check results/runs/ci --baseline results/mini --junit results/runs/ci/gate.xml --json results/runs/ci/gate.json"


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
    commands = ["doctor recipes/mini.yaml", "run recipes/mini.yaml", *TABLES]
    assert printed == [*(f"{tmp_path}/bin/qbench {command}" for command in commands), f"report: {RUN}/report.html"]
    assert bool(code) == bool(failed)  # make has its own code for a failure


@pytest.mark.parametrize(("ends_with", "checked"), [(0, True), (1, True), (2, False)])
def test_make_check_leaves_a_failed_cell_to_the_gate(ends_with: int, checked: bool, tmp_path: Path) -> None:
    code, printed = make("check", tmp_path, ends_with)
    commands = ["run recipes/ci.yaml", GATE] if checked else ["run recipes/ci.yaml"]
    assert printed == [f"{tmp_path}/bin/qbench {command}" for command in commands]
    assert bool(code) != checked
