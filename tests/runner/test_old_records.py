"""`qbench runs`: what it lists, what it removes, and that it removes nothing else."""

from pathlib import Path

import pytest

from qbench.cli import main
from qbench.records.store import RECORD, read_results
from qbench.runner.lock import RunError, holding
from qbench.runner.old_records import prune

from ..report.examples import cell, samples_of, write_cell, write_plan_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run whose plan names two of its three records."""
    out = tmp_path / "run"
    planned = [write_cell(out, cell("softmax", label), samples_of("softmax", label, 4)) for label in LABELS]
    write_plan_of(out, planned[:2])
    return out


LABELS = ("none-16", "hqq-3-g64", "hqq-2-g64")


def tree(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def old(folder: Path) -> Path:
    (stored,) = read_results(folder).superseded
    return stored.folder


def test_it_lists_current_and_superseded_records(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(folder)
    assert main(["runs", str(folder)]) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith(("| current", "| superseded"))]
    assert [row.split("|")[1].strip() for row in rows] == ["current", "current", "superseded"]
    assert LABELS[2] in rows[2]
    assert all(part in out for part in ("2 current", "1 superseded", "--prune", "MB", "days"))
    assert tree(folder) == before


def test_prune_removes_superseded_records_and_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = old(folder)
    (folder / "notes.txt").write_text("mine")
    (folder / "not-a-cell").mkdir()
    (folder / "unread-0123456789").mkdir()  # like a cell, but without a record
    (folder / "unread-0123456789" / "thesis.txt").write_text("mine")
    expected = tree(folder) - {place, *place.iterdir()}
    assert main(["runs", str(folder), "--prune"]) == 0
    assert tree(folder) == expected
    first, last = capsys.readouterr().out.splitlines()
    assert str(place) in first
    assert last.startswith("1 superseded record")
    assert main(["runs", str(folder), "--prune"]) == 0
    assert tree(folder) == expected


@pytest.mark.parametrize("strange", ["file", "folder", "link", "name"])
def test_a_folder_with_anything_else_in_it_stays(strange: str, folder: Path, tmp_path: Path) -> None:
    place = old(folder)
    if strange == "file":
        (place / "thesis.txt").write_text("mine")
    elif strange == "folder":
        (place / "log.txt").mkdir()
    elif strange == "link":
        place.rename(tmp_path / "elsewhere-0123456789")
        place.symlink_to(tmp_path / "elsewhere-0123456789")
    else:
        place.rename(folder / "my best run")
    before = tree(tmp_path)
    kept, last = prune(folder)
    assert kept.startswith("kept ")
    assert last.startswith("0 ")
    assert tree(tmp_path) == before
    assert sum(1 for _ in folder.glob(f"*/{RECORD}")) == 3


def test_a_folder_in_use_is_left_alone(folder: Path) -> None:
    with holding(folder):
        before = tree(folder)
        with pytest.raises(RunError, match="in use"):
            prune(folder)
        assert tree(folder) == before


@pytest.mark.parametrize("options", [[], ["--prune"]])
def test_a_folder_that_is_none(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path / "none"), *options]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err
    assert main(["runs", str(tmp_path), *options]) == 2
    assert list(tmp_path.iterdir()) == []


def test_without_a_plan_all_records_count(folder: Path) -> None:
    (folder / "run.json").unlink()
    (line,) = prune(folder)
    assert line.startswith("0 ")
    assert sum(1 for _ in folder.glob(f"*/{RECORD}")) == 3
