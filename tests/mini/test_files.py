"""The committed files equal the generator's, have the real tasks' prompts and metrics, and damage is reported."""

import json
import shutil
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
from lm_eval.tasks._yaml_loader import load_yaml
from mini.files import MINI, damaged, write_texts

from qbench import load_checkpoint
from qbench.checkpoint.load import CheckpointError
from qbench.evaluate.tasks import load_tasks

REAL = {
    "mini_arc_easy": "arc/arc_easy",
    "mini_lambada": "lambada/lambada_openai",
    "mini_piqa": "piqa/piqa",
    "mini_sciq": "sciq/sciq",
    "mini_wikitext": "wikitext/wikitext",
}
WHERE = {"task", "tag", "dataset_path", "dataset_name", "dataset_kwargs", "test_split"}
WHERE |= {"training_split", "validation_split"}


def test_the_committed_files_are_what_the_generator_makes(tmp_path: Path) -> None:
    write_texts(tmp_path)
    made = sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("*.[jt]*") if file.is_file())
    assert len(made) == len(REAL) + 1
    for name in made:
        assert (MINI / name).read_text() == (tmp_path / name).read_text(), f"{name}: run `make mini-tasks`"


@pytest.mark.parametrize("task", REAL)
def test_a_mini_task_has_the_prompts_and_metrics_of_the_real_one(task: str) -> None:
    real, mini = Path(lm_eval.tasks.__file__).parent / f"{REAL[task]}.yaml", MINI / "tasks" / f"{task}.yaml"
    assert _content(mini) == _content(real)


def _content(file: Path) -> dict[str, Any]:
    """A task file without the location of its documents; functions by their names."""
    config = load_yaml(file, resolve_func=False)
    return {k: str(v).replace(f"{file.parent}/", "") for k, v in config.items() if k not in WHERE}


def test_the_tasks_load_with_data_from_a_recipe() -> None:
    folder = MINI / "tasks"
    tasks = load_tasks(list(REAL), data={task: folder / f"{task}.jsonl" for task in REAL}, folders=[folder])
    assert all(300 <= len(list(task.eval_docs)) <= 500 for task in tasks.values())
    assert sum(file.stat().st_size for file in folder.iterdir()) < 3e6


def test_gold_answers_are_spread_over_the_choices() -> None:
    keys = [json.loads(line)["answerKey"] for line in (MINI / "tasks/mini_arc_easy.jsonl").read_text().splitlines()]
    labels = [json.loads(line)["label"] for line in (MINI / "tasks/mini_piqa.jsonl").read_text().splitlines()]
    assert min(keys.count(key) for key in "ABCD") > len(keys) / 6
    assert min(labels.count(label) for label in (0, 1)) > len(labels) / 3


def test_the_committed_files_are_intact() -> None:
    assert damaged(MINI) == []


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MINI, tmp_path / "mini"))


def test_a_task_file_edited_by_hand_is_named_with_a_remedy(copy: Path) -> None:
    file = copy / "tasks" / "mini_piqa.jsonl"
    file.write_text(file.read_text().replace("hammer", "spoon"))
    (problem,) = damaged(copy)
    assert str(file) in problem
    assert "edited" in problem
    assert "`make mini-tasks`" in problem
    write_texts(copy)
    assert damaged(copy) == []


@pytest.mark.parametrize(("kind", "command"), [("softpick", "make twins"), ("gated", "make siblings")])
def test_a_damaged_model_is_named_with_a_remedy_and_writing_the_tasks_does_not_hide_it(
    copy: Path, kind: str, command: str
) -> None:
    file = copy / kind / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)
    write_texts(copy)
    (problem,) = damaged(copy)
    assert str(file) in problem
    assert f"`{command}`" in problem


def test_a_truncated_twin_does_not_load(copy: Path) -> None:
    file = copy / "softmax" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_checkpoint(copy / "softmax")


def test_a_missing_file_is_named(copy: Path) -> None:
    (copy / "calibration.txt").unlink()
    (problem,) = damaged(copy)
    assert "calibration.txt is missing" in problem
