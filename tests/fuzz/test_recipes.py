"""Damaged recipes end with a sentence or a plan: no traceback, no hang, no crash."""

from pathlib import Path

import pytest

from ..small_recipe import fields, write_recipe
from .commands import complaint
from .mutate import mutated_yaml

SAMPLE, ALL = 60, 1200
MINI = Path(__file__).parents[2] / "recipes/mini"
RICH = fields() | {
    "checkpoints": {"tiny": {"softmax": str(MINI / "softmax"), "softpick": {"path": str(MINI / "softpick")}}},
    "description": "all fields",
    "limit": 2,
    "reference": "softmax",
    "num_fewshot": 1,
    "analysis": {"source": "corpus.txt", "samples": 2, "length": 8, "lengths": [4], "maps": [{"layer": 0, "head": 0}]},
    "dtype": "float32",
    "max_length": 64,
    "seed": 1,
    "workers": 1,
    "threads": 1,
    "timeout_minutes": 1.5,
    "output": "out",
    "gate": {"alpha": 0.05},
}


def complaints(folder: Path, seeds: range) -> dict[int, str]:
    write_recipe(folder)
    found = {}
    for seed in seeds:
        file = folder / "mutated.yaml"
        file.write_bytes(mutated_yaml(RICH, seed))
        if wrong := complaint(["plan", str(file)]):
            found[seed] = wrong
    return found


def test_a_sample(tmp_path: Path) -> None:
    assert complaints(tmp_path, range(SAMPLE)) == {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all(tmp_path: Path) -> None:
    assert complaints(tmp_path, range(ALL)) == {}
