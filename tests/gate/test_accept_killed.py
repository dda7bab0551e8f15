"""An accept that is killed, or one of whose steps fails: a baseline is the old or the new one, and nothing is lost."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qbench import files

from .accepting import accept, changes, interrupt, losses, run, snapshot


class Killed(BaseException):
    """An exception that nothing catches."""


def die_at(step: int, how: Callable[[], None], setattr_: Callable[[object, str, object], None]) -> None:
    """Die before this step of an accept, and before all later ones: a killed process does not clean up."""
    interrupt(lambda count: how() if count >= step else None, setattr_)


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
    killed: Callable[[int, Path, Path], bool], accepted_baseline: Path, tmp_path: Path
) -> None:
    """Killed before each of its steps in turn, a baseline is the old or the new one; the next accept works."""
    first, second = run(tmp_path / "first"), run(tmp_path / "second", loss=0.3)
    (accepted_baseline / "README.md").write_text("what this is")
    old, new = losses(first), losses(second)
    for step in range(100):
        assert accept(first, accepted_baseline) == 0
        if not killed(step, second, accepted_baseline):
            break
        if accepted_baseline.exists():
            assert losses(accepted_baseline) in (old, new)
        else:
            assert losses(accepted_baseline.parent / ".mini.old") == old
    assert step >= 10
    assert losses(accepted_baseline) == new
    assert (accepted_baseline / "README.md").read_text() == "what this is"
    assert [path.name for path in accepted_baseline.parent.iterdir()] == ["mini"]
    assert {change["why"] for change in changes(accepted_baseline)} == {"a new kernel", "killed"}


@pytest.mark.parametrize("lasts", [1, 2, 1000])
def test_nothing_is_lost_when_a_step_fails(
    lasts: int, accepted_baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step in turn fails, alone or with those after it, such as the one that puts the old baseline back."""
    (accepted_baseline / "README.md").write_text("what this is")
    old, folder = losses(accepted_baseline), run(tmp_path / "run", loss=0.3)
    before = snapshot(accepted_baseline)
    for step in range(100):

        def fail(count: int, step: int = step) -> None:
            if step <= count < step + lasts:
                raise OSError(28, "No space left on device")

        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            interrupt(fail, patch.setattr)
            code = accept(folder, accepted_baseline)
        if code == 0:  # the new baseline is in place: only the clean-up could still fail
            break
        said = capsys.readouterr().err
        assert code == 2
        assert str(accepted_baseline.parent) in said
        assert "No space left on device" in said
        if not accepted_baseline.exists():
            assert lasts > 1
            assert str(accepted_baseline.parent / ".mini.old") in said
            (accepted_baseline.parent / ".mini.old").rename(accepted_baseline)
        assert snapshot(accepted_baseline) == before
    assert step >= 10
    assert losses(accepted_baseline) == losses(folder) != old
    assert accept(folder, accepted_baseline) == 0
    assert [path.name for path in accepted_baseline.parent.iterdir()] == ["mini"]


def test_what_took_the_baselines_place_meanwhile_is_kept(
    accepted_baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, before, rename = run(tmp_path / "run", loss=0.3), snapshot(accepted_baseline), Path.rename

    def renamed(path: Path, target: Path) -> Path:
        done = rename(path, target)
        if path == accepted_baseline:
            run(accepted_baseline, loss=0.1)
        return done

    monkeypatch.setattr(Path, "rename", renamed)
    assert accept(folder, accepted_baseline) == 2
    assert str(accepted_baseline.parent / ".mini.old") in capsys.readouterr().err
    assert snapshot(accepted_baseline.parent / ".mini.old") == before
    assert losses(accepted_baseline) == losses(run(tmp_path / "other", loss=0.1))


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


@pytest.mark.parametrize("written", ["", files.MARK[:10]])
def test_an_accept_killed_while_it_marks_its_folders_owns_none(
    written: str, accepted_baseline: Path, tmp_path: Path
) -> None:
    folder, theirs = run(tmp_path / "run", loss=0.3), accepted_baseline.parent / ".mini.old"
    (accepted_baseline.parent / ".mini.accept").write_text(written)
    shutil.copytree(accepted_baseline, theirs)
    before = snapshot(tmp_path)
    assert accept(folder, accepted_baseline) == 2
    assert snapshot(tmp_path) == before
    shutil.rmtree(theirs)
    assert accept(folder, accepted_baseline) == 0
    assert [path.name for path in accepted_baseline.parent.iterdir()] == ["mini"]


def test_one_accept_at_a_time(accepted_baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, before = run(tmp_path / "run", loss=0.3), snapshot(accepted_baseline)
    with files.replacing(accepted_baseline) as new:
        assert accept(folder, accepted_baseline) == 2
        assert str(accepted_baseline.parent) in capsys.readouterr().err
        assert snapshot(accepted_baseline) == before
        assert new.is_dir()
    assert accept(folder, accepted_baseline) == 0
