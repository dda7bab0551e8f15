"""The command line: exit codes, help, and what fetch finds, in a real process without network."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from qbench.cli import main

SCIQ = {
    "question": "What is H2O?",
    "support": "Wet.",
    "distractor1": "salt",
    "distractor2": "gold",
    "distractor3": "air",
    "correct_answer": "water",
}
PIQA = {"goal": "Open a jar", "sol1": "turn the lid", "sol2": "turn the page", "label": 0}


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["fetch", "--help"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 0
    assert "example:\n  qbench fetch recipes/" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["fetsh"], ["fetch"], ["fetch", "a.yaml", "--fast"]])
def test_a_wrong_call_is_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2


QUANTIZED = "quantizations: [{method: none}]\n"
ONE = QUANTIZED + "checkpoints: {tiny: {softmax: a/b}}\n"
BAD_RECIPES = [
    ("", "recipe.yaml: a recipe must be a mapping"),
    ("checkpoints: [a\ntasks", "recipe.yaml, line 2: not YAML"),
    (ONE + "task: [piqa]", "recipe.yaml, line 3: task: unknown. Did you mean tasks? Allowed are description,"),
    (ONE + "task: [piqa]", "extends."),
    (ONE, "recipe.yaml: tasks: is missing."),
    (
        QUANTIZED + "checkpoints: {340M: {softmax: 3}}\ntasks: [piqa]",
        "line 2: checkpoints.340M.softmax: is 3; it must be",
    ),
    (
        QUANTIZED + "checkpoints: [a/b]\ntasks: [piqa]",
        'line 2: checkpoints: is ["a/b"]; it must be a mapping with one field per family',
    ),
    (ONE + "tasks: [piqa]\ndata: {piqa: 1}", "line 4: data.piqa: is 1; it must be a string or be a mapping."),
    (ONE + "tasks: [piqa]\ndata: nothing", 'line 4: data: is "nothing"; it must be a mapping.'),
    (ONE + "tasks: [piqa]\ndata: {piqa: none.jsonl}", "line 4: data.piqa: …/none.jsonl is not a file"),
]


@pytest.mark.parametrize(("recipe", "message"), BAD_RECIPES)
def test_a_wrong_recipe_is_2(recipe: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe)
    assert main(["fetch", str(file)]) == 2
    error = capsys.readouterr().err
    assert message in error.replace(str(tmp_path), "…")
    assert error.startswith("qbench: ")


def test_a_recipe_that_is_not_there_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: the recipe cannot be read (No such file or directory)" in capsys.readouterr().err


def local_recipe(folder: Path, calibration: str = "") -> Path:
    """A recipe whose checkpoint, tokenizer and data lie beside it."""
    (folder / "model").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / "model" / name).write_text("{}")
    (folder / "piqa.jsonl").write_text(json.dumps(PIQA))
    recipe = folder / "recipe.yaml"
    fields = ["checkpoints: {tiny: {softmax: model}}", "tasks: {piqa: {}}", "data: {piqa: piqa.jsonl}", calibration]
    recipe.write_text(QUANTIZED + "\n".join(fields))
    return recipe


def test_what_is_all_here_is_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "corpus.txt").write_text("words")
    recipe = local_recipe(tmp_path, "calibration: {source: corpus.txt}")
    assert main(["fetch", str(recipe)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"checkpoint {tmp_path / 'model'}: 0.00 MB in a local folder"
    assert lines[1] == f"tokenizer {tmp_path / 'model'}: in a local folder"
    assert "task piqa: 1 documents" in lines
    assert lines[-1] == f"calibration {tmp_path / 'corpus.txt'}: a local file"


@pytest.mark.parametrize(
    ("absent", "line"),
    [
        (
            "model.safetensors",
            "MISSING checkpoint {folder}: {folder} has no safetensors weights: it must have model.safetensors",
        ),
        ("tokenizer.json", "MISSING tokenizer {folder}: {folder} has no tokenizer: none of tokenizer.json, "),
    ],
)
def test_a_local_folder_that_is_not_whole_is_1(
    absent: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = local_recipe(tmp_path)
    (tmp_path / "model" / absent).unlink()
    assert main(["fetch", str(recipe)]) == 1
    assert line.format(folder=tmp_path / "model") in capsys.readouterr().out


def cached_checkpoint(home: Path, owner: str, files: dict[str, str]) -> None:
    """A checkpoint as the hub's library keeps it."""
    folder = home / "hub" / f"models--{owner}--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    for name, content in files.items():
        (folder / "snapshots" / ("0" * 40) / name).write_text(content)


def cached_dataset(home: Path, owner: str, name: str, document: dict[str, str]) -> None:
    """A dataset as the datasets library keeps it once it was downloaded."""
    file = home / "rows.jsonl"
    file.write_text(json.dumps(document))
    splits = {split: str(file) for split in ("train", "validation", "test")}
    datasets.load_dataset("json", data_files=splits, cache_dir=str(home / "made"))
    (info,) = (home / "made" / "json").glob("*/*/*/dataset_info.json")
    folder = home / "datasets" / f"{owner}___{name}" / "default" / "0.0.0" / "0123abcd"
    shutil.copytree(info.parent, folder)
    for arrow in folder.glob("json-*.arrow"):
        arrow.rename(folder / arrow.name.replace("json-", f"{name}-"))
    fields = json.loads(info.read_text()) | {"dataset_name": name}
    (folder / "dataset_info.json").write_text(json.dumps(fields))


def test_without_network_it_says_what_is_missing_and_finds_what_is_cached(tmp_path: Path) -> None:
    home = tmp_path / "home"
    cached_checkpoint(home, "whole", {"config.json": "{}", "model.safetensors": "weights"})
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    half = {"config.json": "{}", "model.safetensors.index.json": index, "model-1.safetensors": "weights"}
    cached_checkpoint(home, "half", half)
    cached_dataset(home, "allenai", "sciq", SCIQ)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "checkpoints: {tiny: {softmax: whole/tiny, softpick: half/tiny}, other: {softmax: none/tiny}}\n"
        "tasks: [sciq, arc_easy]\n"
        "quantizations: [{method: gptq, bits: 4}]\n"
        "tokenizer: none/words\n"
        "calibration: {source: wikitext2}\n"
    )
    offline = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    strip = ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE")
    env = {key: value for key, value in os.environ.items() if key not in strip} | offline
    command = [sys.executable, "-m", "qbench.cli", "fetch", str(recipe)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.endswith("its dataset")]
    assert lines[0] == "checkpoint whole/tiny: 0.00 MB in the cache"
    assert lines[1].startswith("MISSING checkpoint half/tiny: ")
    assert "the shard model-2.safetensors, which is not in the folder" in lines[1]
    assert lines[2].startswith(
        "MISSING checkpoint none/tiny: not a local folder, and could not be downloaded from the Hub"
    )
    assert lines[3].startswith(
        "MISSING tokenizer none/words: not a local folder, and could not be downloaded from the Hub"
    )
    assert lines[4] == "task sciq: 1 documents"
    assert lines[5].startswith("MISSING task arc_easy: The dataset of the task arc_easy is not in the Hugging Face")
    assert "Run `qbench fetch` where there is network" in lines[5]
    assert lines[6].startswith("MISSING calibration wikitext2: not in the cache, and could not be downloaded (")
    assert done.stderr.endswith(f"qbench: 5 of what {recipe} needs is not here.\n")
