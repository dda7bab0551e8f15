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

from .messages import states

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
    ("", "recipe.yaml: …mapping"),
    ("checkpoints: [a\ntasks", "recipe.yaml, line 2: not YAML"),
    (ONE + "task: [piqa]", "recipe.yaml, line 3: task: …Did you mean tasks?…description,"),
    (ONE + "task: [piqa]", "extends."),
    (ONE, "recipe.yaml: …`tasks`"),
    (
        QUANTIZED + "checkpoints: {340M: {softmax: 3}}\ntasks: [piqa]",
        "line 2: checkpoints.340M.softmax …3",
    ),
    (
        QUANTIZED + "checkpoints: [a/b]\ntasks: [piqa]",
        'line 2: checkpoints …["a/b"]…mapping…family',
    ),
    (ONE + "tasks: [piqa]\ndata: {piqa: 1}", "line 4: data.piqa …1…string…mapping"),
    (ONE + "tasks: [piqa]\ndata: nothing", 'line 4: data …"nothing"…mapping'),
    (ONE + "tasks: [piqa]\ndata: {piqa: none.jsonl}", "line 4: data.piqa: {folder}/none.jsonl…file"),
]


@pytest.mark.parametrize(("recipe", "facts"), BAD_RECIPES)
def test_a_wrong_recipe_is_2(recipe: str, facts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe)
    assert main(["fetch", str(file)]) == 2
    error = capsys.readouterr().err
    assert states(error, facts.replace("{folder}", str(tmp_path))), error
    assert error.startswith("qbench: ")


def test_a_recipe_that_is_not_there_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", str(tmp_path / "none.yaml")]) == 2
    assert states(capsys.readouterr().err, "none.yaml does not exist")


def local_recipe(folder: Path, calibration: str = "") -> Path:
    """A recipe whose checkpoint, tokenizer and data are in the same folder."""
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
    assert states(lines[0], f"checkpoint {tmp_path / 'model'}: …0.00 MB…local")
    assert states(lines[1], f"tokenizer {tmp_path / 'model'}: …local")
    assert any(states(line, "task piqa: 1 document") for line in lines)
    assert states(lines[-1], f"calibration {tmp_path / 'corpus.txt'}: …local")


@pytest.mark.parametrize(
    ("absent", "line"),
    [
        ("model.safetensors", "MISSING checkpoint {folder}: …no safetensors…model.safetensors"),
        ("tokenizer.json", "MISSING tokenizer {folder}: …no tokenizer…tokenizer.json, "),
    ],
)
def test_a_local_folder_that_is_not_whole_is_1(
    absent: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = local_recipe(tmp_path)
    (tmp_path / "model" / absent).unlink()
    assert main(["fetch", str(recipe)]) == 1
    assert states(capsys.readouterr().out, line.format(folder=tmp_path / "model"))


def cached_checkpoint(home: Path, owner: str, files: dict[str, str]) -> None:
    """A checkpoint as huggingface_hub stores it."""
    folder = home / "hub" / f"models--{owner}--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    for name, content in files.items():
        (folder / "snapshots" / ("0" * 40) / name).write_text(content)


def cached_dataset(home: Path, owner: str, name: str, document: dict[str, str]) -> None:
    """A dataset as the datasets library stores it after a download."""
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


def test_without_network_missing_files_are_listed_and_cached_ones_found(tmp_path: Path) -> None:
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
    expected = [
        "checkpoint whole/tiny: …0.00 MB…cache",
        "MISSING checkpoint half/tiny: …model-2.safetensors",
        "MISSING checkpoint none/tiny: …folder…Hub",
        "MISSING tokenizer none/words: …folder…Hub",
        "task sciq: 1 document",
        "MISSING task arc_easy: …Hugging Face cache…`qbench fetch`",
        "MISSING calibration wikitext2: …cache",
    ]
    for line, facts in zip(lines, expected, strict=True):
        assert line.startswith(facts.partition(":")[0])
        assert states(line, facts), line
    assert states(done.stderr.splitlines()[-1], f"5 …{recipe}")


@pytest.mark.parametrize(
    ("arguments", "given", "meant"),
    [
        (["tabel", "results/mini"], "'tabel'", "table"),
        (["table", "results/mini", "--fromat", "md"], "--fromat", "--format"),
        (["plan", "recipe.yaml", "--limt=3"], "--limt", "--limit"),
        (["table", "results/mini", "--kind", "sumary"], "'sumary'", "summary"),
        (["run", "recipe.yaml", "--no-preflihgt"], "--no-preflihgt", "--no-preflight"),
    ],
)
def test_a_misspelled_word_is_answered_with_the_nearest(
    arguments: list[str], given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert given in said
    assert said.rstrip().endswith(f"Did you mean {meant}?")


def test_few_choices_are_listed_without_a_guess(capsys: pytest.CaptureFixture[str]) -> None:
    """cpu is the most similar name to gpu, but a misleading suggestion."""
    with pytest.raises(SystemExit):
        main(["run", "recipe.yaml", "--device", "gpu"])
    said = capsys.readouterr().err
    assert all(name in said for name in ("--device", "'gpu'", "auto", "cpu", "cuda"))
    assert "Did you mean" not in said


def test_a_crash_before_the_arguments_are_known_is_a_crash_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise RuntimeError("a broken installation")

    monkeypatch.setattr("qbench.cli._parser", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert main(["table", "results/mini"]) == 3
    (log,) = tmp_path.glob("qbench-crash-*.log")
    assert "a broken installation" in log.read_text()
    said, _, annotated = capsys.readouterr().err.partition("::error ")
    assert str(log) in said
    assert str(log) in annotated


@pytest.mark.parametrize("arguments", [["table"], ["plan"], ["plan", "recipes/mini.yaml", "--out"]])
def test_a_path_that_is_too_long(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "x y" * 1000]) == 2
    assert "x yx y" in capsys.readouterr().err


def test_progress_bars_are_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS")
    for name in names:
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    assert main(["table", "/nowhere"]) == 2
    assert [os.environ.get(name) for name in names] == ["1", "1"]


def test_a_command_that_a_light_installation_lacks_is_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def import_package(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'psutil_of_all'", name="psutil_of_all.parts")

    monkeypatch.setattr("qbench.commands.running._load", import_package)
    assert main(["run", "recipes/mini.yaml"]) == 2
    assert states(capsys.readouterr().err, "psutil_of_all…not installed…install qbench")
    monkeypatch.setattr("qbench.commands.running._load", lambda *_: __import__("qbench.no_such_module"))
    assert main(["run", "recipes/mini.yaml"]) == 3  # ours is missing: a bug
