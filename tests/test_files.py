"""Files are written whole, under the names and modes that people expect."""

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qbench import check, run, table
from qbench.files import write_atomically
from qbench.runner.child import redirect
from qbench.runner.lock import LOCK, RunError, holding


@pytest.fixture(params=[0o022, 0o077, 0o002, 0o027])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (table, "a folder of records or CSV"),
        (lambda given: check(given, given), "a folder of records"),
        (run, "a recipe"),
    ],
)
def test_what_is_no_path_is_a_sentence(call: Callable[[Any], Any], wanted: str) -> None:
    with pytest.raises(ValueError, match=rf"\['a'\] is a list; it must be the path of {wanted}"):
        call(["a"])


def mode(file: Path) -> int:
    return file.stat().st_mode & 0o777


def test_files_keep_the_umask(umask: int, tmp_path: Path) -> None:
    write_atomically(tmp_path / "record.json", "{}")
    assert mode(tmp_path / "record.json") == 0o666 & ~umask
    with holding(tmp_path / "out"):
        assert mode(tmp_path / "out" / LOCK) == 0o666 & ~umask
    kept = os.dup(1), os.dup(2)
    try:
        redirect(tmp_path / "log.txt")
    finally:
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
    assert mode(tmp_path / "log.txt") == 0o666 & ~umask


def test_nothing_is_left_of_a_file_that_was_not_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_atomically(tmp_path / "folder", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_file_whose_writing_fails_stays_as_it_was(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    write_atomically(tmp_path / "record.json", "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(OSError, match="No space"):
            write_atomically(tmp_path / "record.json", "new and longer")
    assert (tmp_path / "record.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_a_lock_file_that_its_last_holder_removes_meanwhile_locks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs would each hold a file, of which only one is still in the folder."""
    lock, calls = fcntl.flock, []

    def late(handle: int, how: int) -> None:
        calls.append(handle)
        if len(calls) == 1:
            (tmp_path / LOCK).unlink()
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with holding(tmp_path):
        assert (tmp_path / LOCK).exists()
        with pytest.raises(RunError, match="in use by another run"), holding(tmp_path):
            pass
    assert len(calls) == 3
