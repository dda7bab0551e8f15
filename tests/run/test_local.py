"""Real runs through real processes."""

from pathlib import Path

from qbench.cli import main
from qbench.store import read_results


def test_the_whole_matrix(matrix: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["run", str(matrix / "recipe.yaml"), "--out", str(out)]) == 0
    results = read_results(out)
    assert len(results.current) == 22
    assert not results.missing
