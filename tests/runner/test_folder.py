"""The folder of records: locked by another run, full, or read-only; and a second run with nothing left to do."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from qbench.recipe.cells import load_recipe
from qbench.records.store import read_results, remove_unfinished
from qbench.runner.local import Slot, run_local
from qbench.runner.lock import RunError, holding
from qbench.runner.matrix import make_jobs
from qbench.runner.plan import make_plan
from qbench.runner.view import PlainView

from .driver import Driver, events_of, finished, left_behind, results, run, run_here

Undisturbed = tuple[Path, list[dict[str, Any]]]
Mount = Callable[[Path, str], None]


@pytest.fixture
def mount() -> Iterator[Mount]:
    """Mount a new file system on a folder, with these options."""
    mounted = []

    def mounting(folder: Path, options: str) -> None:
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            pytest.skip(f"cannot mount a file system: {error}")
        if done.returncode:
            pytest.skip(f"not allowed to mount a file system: {done.stderr.strip()}")
        mounted.append(folder)

    yield mounting
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def test_the_second_run_computes_nothing_and_takes_a_moment(small: Path, undisturbed: Undisturbed) -> None:
    out, _ = undisturbed
    before = finished(out)
    code, events, errors = run(small, out)
    assert code == 0, errors
    assert not events_of(events, "started")
    assert [event["text"] for event in events_of(events, "message")][-1] == "nothing to do"
    assert finished(out) == before
    before_it = os.times()
    run(small, out)
    after_it = os.times()  # CPU time: wall time depends on the other load
    assert after_it.children_user - before_it.children_user < 3


def test_a_folder_is_held_by_one_run(small: Path, undisturbed: Undisturbed, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(undisturbed[0], out)
    with holding(out):
        code, _, errors = run(small, out)
        assert code == 2
        assert all(fact in errors for fact in (str(out), f"process {os.getpid()} on", "--out"))
    assert run_here(small, out)[0] == 0
    assert not left_behind(out)


def test_the_lock_of_a_killed_run_is_free(tmp_path: Path) -> None:
    code = f"""
import os, pathlib
from qbench.runner.lock import holding
with holding(pathlib.Path({str(tmp_path)!r})):
    os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    assert (tmp_path / ".lock").exists()
    with holding(tmp_path), pytest.raises(RunError, match="in use"), holding(tmp_path):
        pass
    assert not (tmp_path / ".lock").exists()


def test_a_file_in_place_of_the_folder(small: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("not a folder")
    code, _, errors = run(small, tmp_path / "out")
    assert code == 2
    assert all(fact in errors for fact in (str(tmp_path / "out"), "(File exists)", "--out"))


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [True, False])
def test_a_folder_that_goes_away_during_the_run(replaced: bool, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Driver(small, out) as driver:
        driver.until("finished")
        out.rename(tmp_path / "moved")
        if replaced:
            out.write_text("a file")
        code, errors = driver.end()
        assert driver.gone()
    assert "Traceback" not in errors
    if replaced:
        assert code == 2
        assert str(out) in errors
        assert out.read_text() == "a file"
    else:
        # The next cell makes the folder again; a cell that was writing its record at that moment ends the run.
        assert code == 0 or (code == 2 and str(out) in errors)
    assert finished(tmp_path / "moved")


def test_no_cell_starts_in_a_file(small: Path, tmp_path: Path) -> None:
    recipe = load_recipe(small)
    jobs = make_jobs(make_plan(recipe, tmp_path / "out").entries)
    (tmp_path / "out").write_text("a file")
    with pytest.raises(RunError, match=r"out.*Not a directory"):
        run_local(jobs[:1], tmp_path / "out", [Slot(threads=1)], PlainView([]), timeout=60)


def test_a_folder_that_is_gone_needs_no_tidying(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with holding(out):
        out.rename(tmp_path / "moved")
        out.write_text("a file")
        remove_unfinished(out)
    assert out.read_text() == "a file"


def test_a_read_only_folder(small: Path, undisturbed: Undisturbed, tmp_path: Path, mount: Mount) -> None:
    out = tmp_path / "out"
    mount(out, "size=16m")
    shutil.copytree(undisturbed[0], out, dirs_exist_ok=True)
    remount(out, "ro")
    code, _, errors = run(small, out)
    assert code == 2
    assert all(fact in errors for fact in (str(out), "(Read-only file system)", "--out"))
    assert results(out) == results(undisturbed[0])


def test_a_full_disk_stops_the_run_and_damages_nothing(
    small: Path, undisturbed: Undisturbed, tmp_path: Path, mount: Mount
) -> None:
    out = tmp_path / "out"
    mount(out, "size=16m")
    with Driver(small, out) as driver:
        driver.until("finished")
        fill(out)
        code, errors = driver.end()
        assert driver.gone()
    assert code == 2
    assert "(No space left on device)" in errors
    assert "Traceback" not in errors
    (out / "filler").unlink()
    before = finished(out)
    assert before
    whole, done = results(undisturbed[0]), results(out)
    assert done == {name: whole[name] for name in done}
    assert run_here(small, out)[0] == 0
    assert before.items() <= finished(out).items()
    assert results(out) == whole
    assert not left_behind(out)


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as stream:
        for size in (2**20, 2**12, 1):
            with contextlib.suppress(OSError):
                while stream.write(b"x" * size):
                    pass


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_fresh_folders_of_the_whole_matrix_are_the_same(matrix: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        code, _, errors = run(matrix / "recipe.yaml", tmp_path / name)
        assert code == 0, errors
    assert results(tmp_path / "one") == results(tmp_path / "two")


@pytest.mark.slow
def test_beyond_its_work_a_cell_costs_less_than_a_second(matrix: Path, tmp_path: Path) -> None:
    recipe = yaml.safe_load((matrix / "recipe.yaml").read_text())
    (matrix / "one.yaml").write_text(yaml.safe_dump(recipe | {"workers": 1}))
    ends: list[float] = []
    with Driver(matrix / "one.yaml", tmp_path / "out") as driver:
        for event in driver.follow():
            if event["event"] == "finished":
                ends.append(time.monotonic())
        assert driver.end()[0] == 0
    seconds = {}
    for stored in read_results(tmp_path / "out").current:
        assert stored.record.cost is not None
        seconds[stored.record.cell.name] = sum(stored.record.cost.seconds.values())
    names = [event["cell"] for event in events_of(driver.events, "finished")]
    beyond = [b - a - seconds[name] for name, (a, b) in zip(names[1:], pairwise(ends), strict=True)]
    print(f"beyond its work a cell took {sum(beyond) / len(beyond):.2f} s, at most {max(beyond):.2f} s")
    assert sum(beyond) / len(beyond) < 1
