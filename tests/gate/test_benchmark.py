"""benchmarks/gate.py runs on recorded runs, and its false alarms are within what is promised."""

import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from ..example_records import cell_ref
from .made_up import Population, make_cells, write_cells

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BENCHMARK = BENCHMARKS / "gate.py"
OURS = ("holm", "tarone", "kl", "gate")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("benchmark")
    population, cells = Population(80), make_cells(2)
    base = write_cells(root / "base", {cell: population.samples(0.05, seed=i) for i, cell in enumerate(cells)})
    worse = write_cells(
        root / "worse", {cell: population.samples(0.05, 0.2, seed=9 + i) for i, cell in enumerate(cells)}
    )
    return base, worse


def benchmark(*arguments: object, script: Path = BENCHMARK) -> subprocess.CompletedProcess[str]:
    """Run the script in this process: its imports take longer than its work."""
    command, code, out, err = [str(script), *map(str, arguments)], 0, io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", command)
        patch.syspath_prepend(str(script.parent))
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            err.write(ended.code if isinstance(ended.code, str) else "")
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


def test_swapped_sides_are_no_loss(folders: tuple[Path, Path]) -> None:
    command = [sys.executable, str(BENCHMARK), "null", *map(str, folders), "--tables", "60"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "PASS: at most 1 may" in done.stdout


def test_a_loss_is_found_and_chance_is_not(folders: tuple[Path, Path]) -> None:
    base, worse = folders
    done = benchmark("power", base, f"all of it={worse}", "--documents", 40, "--subsets", 10)
    assert done.returncode == 0, done.stderr
    header, *rows = [
        [part.strip() for part in line.split("|")] for line in done.stdout.splitlines() if "---" not in line
    ]
    assert [row[2] for row in rows] == ["40", "80"]
    for row in rows:
        found = dict(zip(header, row, strict=True))
        assert found["regression"] == "all of it"
        shares = {rule: [int(x) for x in re.findall(r"(\d+)%", found[rule])] for rule in (*OURS, "relative")}
        for rule in OURS:
            power, alarms = shares[rule]
            assert power == 100
            # At most 1% of swapped tables fail: three or more of ten is one chance in 9,000.
            assert alarms <= 20, rule
        assert shares["relative"][1] >= 50  # a rule that mistakes chance for a loss fails here


def test_the_pooled_loss_finds_what_single_tests_do_not() -> None:
    done = benchmark("pooled", "--tables", 20)
    assert done.returncode == 0, done.stderr
    pooled, single = (int(line.split(": ")[1].split()[0]) for line in done.stdout.splitlines())
    assert single < 10 < pooled


def test_what_is_excluded_is_counted(folders: tuple[Path, Path]) -> None:
    done = benchmark("coverage", *folders, "--tables", 20, "--documents", 80)
    documents, each, _, table = done.stdout.splitlines()[-1].split()
    assert documents == "80"
    assert float(each.rstrip("%")) > 90
    assert float(table.rstrip("%")) > 80


def test_cells_of_other_labels_are_paired_by_renaming(folders: tuple[Path, Path], tmp_path: Path) -> None:
    base, _ = folders
    renamed = {
        cell.model_copy(update={"label": "hqq-3-another"}): Population(80).samples(0.05) for cell in make_cells(2)
    }
    other = write_cells(tmp_path / "other", renamed)
    assert "have no cell and task in common" in benchmark("null", base, other).stderr
    done = benchmark("null", base, other, "--rename", "hqq-3-another=hqq-3-g0", "--tables", 2)
    assert done.stdout.startswith("26 hypotheses")


@pytest.mark.parametrize("recorded", [False, True])
def test_skewed_losses_are_judged_with_and_without_the_second_look(folders: tuple[Path, Path], recorded: bool) -> None:
    """With few documents, none is cut back: the last two columns are equal."""
    base, _ = folders
    cells = {cell_ref(method="none", bits=16, label="none-16"): 0.0, cell_ref(): 0.05}
    run = write_cells(base.parent / "skewed", {cell: Population(60).samples(noise) for cell, noise in cells.items()})
    arguments = [*([run, "--tolerances"] if recorded else []), "--tables", 4, "--documents", 60]
    done = benchmark(*arguments, script=BENCHMARKS / "skewed.py")
    assert done.returncode == 0, done.stderr
    header, _, *rows = [line.split("|")[1:-1] for line in done.stdout.splitlines()[1:]]
    assert [name.strip() for name in header[2:]] == ["cut back: often", "cut back: as the gate does", "cut back: never"]
    assert len(rows) == (1 if recorded else 4)
    assert all(row[3].strip() == row[4].strip() for row in rows)


def test_the_old_rule_counts_what_it_tested(tmp_path: Path) -> None:
    """KL and pooled losses are not hypotheses of the rule as it was."""
    cells = {
        cell_ref(method="none", bits=16, label="none-16"): 0.0,
        cell_ref(): 0.05,
        cell_ref(bits=8, label="hqq-8-g64"): 0.01,
    }
    run = write_cells(tmp_path / "run", {cell: Population(60).samples(noise) for cell, noise in cells.items()})
    done = benchmark("needed", run)
    assert done.returncode == 0, done.stderr
    first, header, _, *rows = done.stdout.splitlines()
    tested = [row for row in rows if "not tested" not in row]
    assert f" {2 * len(tested)} hypotheses of 2 cells" in first
    assert {row.split("|")[1].split()[-1] for row in rows if row not in tested} <= {"kl", "pooled"}
    assert any("pooled" in row for row in rows)
    assert "Holm" in header
