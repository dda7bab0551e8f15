"""A folder of 500 cells is read within the memory and time that benchmarks/large_folder.py measures."""

import importlib.util
import sys
from pathlib import Path

import pytest

MEMORY_MB = 500
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "large_folder.py"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_500_cells_with_2000_documents_of_5_tasks(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("large_folder", BENCHMARK)
    assert spec
    assert spec.loader
    large = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = large  # dataclasses look their module up
    spec.loader.exec_module(large)
    folders = large.make_folders(tmp_path, large.CELLS, large.DOCUMENTS)
    used = {
        name: large.measure([part.format(**folders) for part in command])
        for name, command in large.COMMANDS.items()
        if "csv" not in name
    }
    assert {name: own.code for name, own in used.items() if own.code not in (0, 1)} == {}
    for name in ("check", "table --kind summary", "audit"):
        assert used[name].peak_mb <= MEMORY_MB, name
    assert len(used["table --format html"].output) <= 5e6
    assert used["table --format html"].cpu_seconds <= 30
