"""Damaged task files and data end with a sentence or a plan: no traceback, no hang, no crash."""

import random
from pathlib import Path

import pytest
import yaml

from ..small_recipe import MINE, write_recipe
from .commands import complaint
from .mutate import damaged, mutated_yaml

SAMPLE, ALL = 24, 500
MINI = Path(__file__).parents[2] / "recipes/mini"
FUNCTION = "FUNCTION"  # stands for `!function`, which plain YAML does not have


def complaints(folder: Path, seeds: range) -> dict[int, str]:
    models = {kind: str(MINI / kind) for kind in ("softmax", "softpick")}
    given = {"checkpoints": {"tiny": models}, "tasks": ["mine"], "quantizations": [{"method": "none"}]}
    recipe = write_recipe(folder, **given, data={"mine": "mine.jsonl"})
    without_data = folder / "without_data.yaml"
    without_data.write_text(recipe.read_text().replace("data:\n  mine: mine.jsonl\n", ""))
    rows = (folder / "mine.jsonl").read_bytes()
    task = yaml.safe_load(MINE.replace("!function ", FUNCTION))
    task["dataset_kwargs"]["data_files"]["test"] = str(folder / "mine.jsonl")
    found = {}
    for seed in seeds:
        hurts_data = seed % 4 == 0
        text = yaml.safe_dump(task).encode() if hurts_data else mutated_yaml(task, seed)
        (folder / "tasks/mine.yaml").write_bytes(text.replace(FUNCTION.encode(), b"!function "))
        (folder / "mine.jsonl").write_bytes(damaged(rows, random.Random(seed)) if hurts_data else rows)
        if wrong := complaint(["plan", str(without_data if seed % 4 == 1 else recipe)]):
            found[seed] = wrong
    return found


def test_a_sample(tmp_path: Path) -> None:
    assert complaints(tmp_path, range(SAMPLE)) == {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all(tmp_path: Path) -> None:
    assert complaints(tmp_path, range(ALL)) == {}
