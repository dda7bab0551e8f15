"""Records on disk: complete or absent, and readable in one call."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from qbench.files import file_name
from qbench.records.store import (
    StoreError,
    cell_folder,
    read_record,
    read_results,
    remove_unfinished,
    write_record,
)

from ..example_records import cell_ref, make_record, make_samples, stored_samples, write_run


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    samples = make_samples(5)
    record = make_record(cell_ref(), samples)
    write_record(tmp_path / "cell", record, samples)
    (stored,) = read_results(tmp_path).current
    assert stored.record == record.model_copy(update={"samples_sha256": stored.record.samples_sha256})
    assert stored_samples(stored).equals(samples)


def test_a_record_that_breaks_the_schema_is_not_written(tmp_path: Path) -> None:
    wrong = make_record(cell_ref()).model_copy(update={"state": "half done"})
    with pytest.raises(ValidationError, match="half done"):
        write_record(tmp_path / "cell", wrong)
    assert not list(tmp_path.rglob("*.json"))


def test_without_its_documents_a_record_is_not_written(tmp_path: Path) -> None:
    """A record says that its cell is done, so it comes last."""
    (tmp_path / "cell" / "samples.parquet").mkdir(parents=True)
    with pytest.raises(StoreError, match="cannot be written"):
        write_record(tmp_path / "cell", make_record(cell_ref()), make_samples(5))
    assert not (tmp_path / "cell" / "record.json").exists()


def test_the_plan_says_what_is_current_superseded_and_missing(tmp_path: Path) -> None:
    samples = make_samples(3)
    write_run(tmp_path, {cell_ref("softmax"): samples, cell_ref("softpick"): samples})
    old = make_record(cell_ref("softmax"), samples, key="0" * 64)
    write_record(cell_folder(tmp_path, old.cell, old.key), old, samples)
    (softpick,) = tmp_path.glob("mini-softpick-*")
    (softpick / "record.json").unlink()
    results = read_results(tmp_path)
    assert [stored.record.cell.attention for stored in results.current] == ["softmax"]
    assert [stored.record.key for stored in results.superseded] == [old.key]
    assert [missing.cell.attention for missing in results.missing] == ["softpick"]


def test_two_records_of_a_cell_without_a_plan_are_an_error(tmp_path: Path) -> None:
    write_run(tmp_path, {cell_ref(): None}, planned=False)
    other = make_record(cell_ref(), key="0" * 64)
    write_record(cell_folder(tmp_path, other.cell, other.key), other)
    with pytest.raises(StoreError, match=r"two records of mini-softmax-hqq-3-g64.*remove one"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ('{"schema_version": 99}', r"schema version 99; this qbench reads version 2"),
        ('{"schema_version": 2}', r"state is missing"),
    ],
)
def test_a_damaged_record_is_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "cell" / "record.json"
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(StoreError, match=message) as error:
        read_record(file)
    assert str(file) in str(error.value)


def test_an_empty_folder_and_none_at_all(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no records"):
        read_results(tmp_path)
    with pytest.raises(StoreError, match="is not a folder"):
        read_results(tmp_path / "nowhere")


def test_stored_samples_another_record_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path, {cell_ref(): make_samples(3)})
    (stored,) = read_results(tmp_path).current
    write_record(tmp_path / "other", make_record(cell_ref()), make_samples(4))
    (tmp_path / "other" / "samples.parquet").replace(stored.folder / "samples.parquet")
    with pytest.raises(StoreError, match="run the cell again"):
        stored_samples(stored)


def test_what_killed_writers_left_is_removed_and_finished_cells_stay(tmp_path: Path) -> None:
    write_run(tmp_path, {cell_ref("softmax"): make_samples(3)})
    (done,) = (file.parent for file in tmp_path.glob("*/record.json"))
    (done / ".record.json.abc").write_text("{")
    half = cell_folder(tmp_path, cell_ref("softpick"), "0" * 64)
    empty = cell_folder(tmp_path, cell_ref("softpick"), "1" * 64)
    others = tmp_path / "notes"  # not ours, so its content does not matter
    for folder in (half, empty, others):
        folder.mkdir()
    for name in ("log.txt", "samples.parquet", ".samples.parquet.xyz"):
        (half / name).write_text("")
    (others / "log.txt").write_text("")
    remove_unfinished(tmp_path)
    assert sorted(p.name for p in done.iterdir()) == ["record.json", "samples.parquet"]
    assert not half.exists()
    assert not empty.exists()
    assert (others / "log.txt").exists()


def test_a_record_cannot_be_written_says_where(tmp_path: Path) -> None:
    (tmp_path / "cell").write_text("a file where the folder should be")
    with pytest.raises(StoreError, match=r"cell: the record cannot be written"):
        write_record(tmp_path / "cell", make_record(cell_ref()))


def test_an_ordinary_name_is_its_own_file_name() -> None:
    for name in ("340M-softpick-hqq-3-g64", "mini_v1.2", "größer"):
        assert file_name(name) == name


def test_names_that_differ_only_in_what_folders_cannot_have_stay_apart(tmp_path: Path) -> None:
    families = ["a b", "a/b", "a:b", "a_b", "a\\b", "../b", "..\\b", "e\u0301", "e\u0302"]
    cells = [cell_ref().model_copy(update={"family": family}) for family in families]
    write_run(tmp_path, {cell: make_samples(2) for cell in cells})
    assert sorted(stored.record.cell.family for stored in read_results(tmp_path).current) == sorted(families)
    folders = [cell_folder(tmp_path, cell, "0" * 64) for cell in cells]
    assert len(set(folders)) == len(families)
    assert {folder.parent for folder in folders} == {tmp_path}


def test_a_long_name_is_cut_and_remains_its_own() -> None:
    names = [file_name("é" * 300 + end) for end in "ab"]
    assert len({*names}) == 2
    assert all(len(name.encode()) < 240 for name in names)
