"""A small real matrix: tiny twins, five lm-eval tasks with a few documents each, every method and width."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..evaluate.conftest import SENTENCES, checkpoints, texts, tokenizer
from .driver import run_here

__all__ = ["checkpoints", "texts", "tokenizer"]

DOCUMENTS = 6
QUANTIZATIONS = [
    {"method": "none"},
    {"methods": ["bnb"], "bits": [2, 4, 8]},
    {"method": "gptq", "bits": [2, 3, 4, 8], "options": {"group_size": 32}},
    {"method": "hqq", "bits": [2, 3, 4, 8], "options": {"group_size": 32}},
]


def documents() -> dict[str, list[dict[str, Any]]]:
    """A few documents of each of the five tasks, in the Hub's format."""
    draw = random.Random(0)
    words = sorted({word.strip(".,?") for sentence in SENTENCES for word in sentence.split() if word.isascii()})

    def some(count: int) -> str:
        return " ".join(draw.choices(words, k=count))

    rows: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("arc_easy", "lambada_openai", "piqa", "sciq", "wikitext")
    }
    for i in range(DOCUMENTS):
        choices = {"text": [some(2) for _ in range(4)], "label": list("ABCD")}
        rows["arc_easy"].append(
            {"id": str(i), "question": some(8) + "?", "choices": choices, "answerKey": draw.choice("ABCD")}
        )
        rows["lambada_openai"].append({"text": some(20)})
        rows["piqa"].append({"goal": some(6), "sol1": some(5), "sol2": some(5), "label": draw.randrange(2)})
        answers = {key: some(1) for key in ("distractor1", "distractor2", "distractor3", "correct_answer")}
        rows["sciq"].append({"support": some(20), "question": some(6) + "?", **answers})
        rows["wikitext"].append({"page": some(60)})
    return rows


@pytest.fixture(scope="session")
def matrix(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recipe.yaml and everything it needs; tests that change something use a copy."""
    folder = tmp_path_factory.mktemp("matrix")
    for kind, source in checkpoints.items():
        shutil.copytree(source, folder / kind)
    for task, rows in documents().items():
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "calibration.txt").write_text("\n".join(SENTENCES * 20))
    recipe = {
        "checkpoints": {"tiny": {"softmax": "./softmax", "softpick": "./softpick"}},
        "quantizations": QUANTIZATIONS,
        "tasks": list(documents()),
        "data": {task: f"{task}.jsonl" for task in documents()},
        "calibration": {"source": "calibration.txt", "samples": 4, "length": 64},
        "device": "cpu",
        "threads": 1,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    return folder


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A separate cache for this process and every process it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def small(matrix: Path) -> Path:
    """A recipe with six cells, two at a time."""
    quantizations = [{"method": "none"}, {"method": "hqq", "bits": [3, 4], "options": {"group_size": 32}}]
    recipe = yaml.safe_load((matrix / "recipe.yaml").read_text())
    changed = recipe | {"quantizations": quantizations, "tasks": ["arc_easy", "wikitext"], "workers": 2}
    changed["data"] = {task: recipe["data"][task] for task in changed["tasks"]}
    (matrix / "small.yaml").write_text(yaml.safe_dump(changed, sort_keys=False))
    return matrix / "small.yaml"


@pytest.fixture(scope="session")
def undisturbed(small: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The records and events of an undisturbed run of the small recipe."""
    out = tmp_path_factory.mktemp("undisturbed")
    code, events = run_here(small, out)
    assert code == 0, events
    return out, events


@pytest.fixture
def change(matrix: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copy the matrix and change fields of its recipe; returns the recipe's file."""

    def changed(**fields: Any) -> Path:
        folder = tmp_path / "matrix"
        if not folder.exists():
            shutil.copytree(matrix, folder)
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text()) | fields
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
        return folder / "recipe.yaml"

    return changed
