"""python -m qbench.lm_eval: lm-eval's command line with our model, and the same results as with lm-eval's model."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from lm_eval import simple_evaluate
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from qbench import load_checkpoint
from qbench.checkpoint.load import CheckpointError
from qbench.evaluate.scorer import ScoringError
from qbench.lm_eval import main

TASKS = ["own_choices", "own_words", "own_pages"]
QUESTIONS = [
    ("Which animal eats only plants?", ["a cow", "a wolf", "an owl"], 0),
    ("What turns sunlight into sugar?", ["erosion", "photosynthesis", "the wind"], 1),
    ("What ran over its banks?", ["the envelope", "the table", "the river"], 2),
]
TEXTS = ["The river ran over its banks after three days of rain", "She put the letter back into its envelope"]


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three small tasks, one for each kind of scored request."""
    folder = tmp_path_factory.mktemp("tasks")
    documents = {
        "own_choices": [{"question": q, "choices": c, "answer": a} for q, c, a in QUESTIONS],
        "own_words": [{"text": text} for text in TEXTS],
        "own_pages": [{"text": text} for text in TEXTS],
    }
    tasks: dict[str, dict] = {
        "own_choices": {
            "output_type": "multiple_choice",
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "own_words": {
            "output_type": "loglikelihood",
            "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
            "doc_to_target": "{{' '+text.split(' ')[-1]}}",
            "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
        },
        "own_pages": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
    }
    for name, task in tasks.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents[name]))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **source, **task}))
    return folder


def arguments(checkpoint: Path, task_folder: Path, out: Path) -> list[str]:
    line = ["--model", "qbench", "--model_args", f"pretrained={checkpoint},batch_tokens=300"]
    line += ["--tasks", ",".join(TASKS), "--include_path", str(task_folder), "--output_path", str(out)]
    return line


def assert_results_are_those_of_hflm(out: Path, checkpoint: Path, task_folder: Path) -> None:
    (file,) = out.rglob("results_*.json")
    ours = json.loads(file.read_text())["results"]
    model, tokenizer = load_checkpoint(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    lm = HFLM(pretrained=model, tokenizer=tokenizer, softmax_dtype=torch.float32)
    manager = TaskManager(include_path=str(task_folder), include_defaults=False)
    theirs = simple_evaluate(lm, tasks=TASKS, task_manager=manager, bootstrap_iters=0)["results"]
    for name in TASKS:
        values = {key: value for key, value in theirs[name].items() if key.endswith(",none") and "stderr" not in key}
        assert values
        assert {key: ours[name][key] for key in values} == pytest.approx(values, rel=1e-5)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


def test_its_results_are_those_of_lm_eval(checkpoints, task_folder, tmp_path, monkeypatch) -> None:
    # Without lm-eval's tasks, which take half a minute to index.
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    line = arguments(checkpoints["softpick"], task_folder, tmp_path / "out")
    monkeypatch.setattr(sys, "argv", ["lm_eval", *line])
    main()
    assert_results_are_those_of_hflm(tmp_path / "out", checkpoints["softpick"], task_folder)


@pytest.mark.slow
def test_it_is_a_command(checkpoints, task_folder, tmp_path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "datasets")}
    line = arguments(checkpoints["softpick"], task_folder, tmp_path / "out")
    result = subprocess.run([sys.executable, "-m", "qbench.lm_eval", *line], env=environment, stderr=subprocess.PIPE)
    assert result.returncode == 0, result.stderr
    assert_results_are_those_of_hflm(tmp_path / "out", checkpoints["softpick"], task_folder)


@pytest.mark.parametrize(
    ("model_args", "error", "message"),
    [
        ("quantise=4", ScoringError, "model_args.*quantise.*pretrained,"),
        ("dtype=float8", ScoringError, "dtype=float8.*float32,"),
        ("batch_size=8", ScoringError, "batch_size.*8.*batch_tokens"),
        ("batch_tokens=-1", ScoringError, "batch_tokens.*-1"),
        ("attention=softpick", CheckpointError, "'softpick'.*is softmax"),
    ],
)
def test_wrong_model_args_are_one_sentence(checkpoints, model_args, error, message) -> None:
    with pytest.raises(error, match=message):
        get_model("qbench").create_from_arg_string(f"pretrained={checkpoints['softmax']},{model_args}")


def test_a_wrong_call_exits_with_2_and_no_traceback(monkeypatch, capsys) -> None:
    def fail() -> None:
        raise ScoringError("What is wrong.")

    monkeypatch.setattr("qbench.lm_eval.cli_evaluate", fail)
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "What is wrong.\n"
