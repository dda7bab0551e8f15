"""The whole matrix through real processes, real quantizers and real lm-eval."""

from pathlib import Path

from qbench.store import read_frame, read_results

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
    frame = read_frame(tmp_path)
    assert set(frame.task) == set(documents())
    assert not left_behind(tmp_path)
