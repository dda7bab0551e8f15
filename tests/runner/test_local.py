"""The whole matrix through real processes, real quantizers and real lm-eval."""

from pathlib import Path

import pytest

from qbench.machine import machine
from qbench.recipe.cells import load_recipe
from qbench.records.store import read_results
from qbench.runner.local import Slot
from qbench.runner.lock import RunError
from qbench.runner.places import make_slots
from qbench.runner.plan import make_plan

from .conftest import documents
from .driver import left_behind, run_here


def test_the_whole_matrix(matrix: Path, tmp_path: Path) -> None:
    code, _ = run_here(matrix / "recipe.yaml", tmp_path)
    assert code == 0
    found = read_results(tmp_path)
    assert len(found.current) == 22
    assert not found.missing
    assert {(entry.cell.method, entry.cell.bits) for entry in found.not_offered} == {("bnb", 2)}
    for stored in found.current:
        record = stored.record
        assert record.audit is not None
        assert record.cost is not None
        assert bool(record.audit.layers) == (record.cell.method != "none")
        assert list(record.cost.seconds) == ["load", "quantize", "evaluate"]
        assert record.cost.tokens
        assert record.provenance.machine["threads"] == 1
    measured = {metric.task for stored in read_results(tmp_path).current for metric in stored.record.metrics}
    assert measured == set(documents())
    assert not left_behind(tmp_path)


def test_places_for_cells_are_shares_of_the_cores(matrix: Path, tmp_path: Path) -> None:
    shared = make_slots(make_plan(load_recipe(matrix / "recipe.yaml"), tmp_path))
    assert {slot.threads for slot in shared} == {1}
    assert len(shared) <= machine()["cores"]
    assert (
        make_slots(make_plan(load_recipe(matrix / "recipe.yaml", workers=3, threads=2), tmp_path))
        == [Slot(threads=2)] * 3
    )


def test_a_place_is_one_gpu_by_the_name_that_it_has(
    matrix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = make_plan(load_recipe(matrix / "recipe.yaml", device="cuda"), tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7")
    assert make_slots(planned) == [Slot(gpu="5"), Slot(gpu="7")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RunError, match="device is cuda, and there is no GPU here"):
        make_slots(planned)
