"""`qbench analyze`: it uses the same runner and store as a run, and is independent of the scores."""

import contextlib
import io
import json
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from qbench import analyze, load_checkpoint
from qbench.analysis.source import read_texts
from qbench.cli import main
from qbench.quantizers.calibration import Calibration
from qbench.recipe.cells import analysis_cells, load_recipe
from qbench.records.analysis import sums_to_parquet
from qbench.records.store import StoredRecord, read_analyses
from qbench.runner.plan import make_analysis_plan, make_plan

from ..evaluate.conftest import SENTENCES
from .driver import Driver, finished, left_behind, run_here

HQQ = {"method": "hqq", "bits": 3, "options": {"group_size": 32}}  # the rows of the small models have 96 weights
SETTINGS = {"source": "texts.jsonl", "samples": 6, "length": 24, "lengths": [4, 8], "sensitivity": [HQQ]}
MOMENTS = 6


def analyze_here(recipe: Path, out: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Run a whole analysis in this process; returns its exit code and its events."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(["analyze", str(recipe), "--out", str(out), "--json", *options])
    return code, [json.loads(line) for line in printed.getvalue().splitlines()]


def ended(events: list[dict[str, Any]]) -> dict[str, str]:
    """The state of each cell that was computed."""
    return {event["cell"]: event["state"] for event in events if event["event"] == "finished"}


def said(events: list[dict[str, Any]]) -> str:
    return "\n".join(event["text"] for event in events if event["event"] == "message")


def found(out: Path) -> dict[str, Any]:
    """Everything that was measured, by cell, without what may differ between two runs."""
    return {s.record.cell.name: content(s) for s in read_analyses(out).current}


def content(stored: StoredRecord) -> tuple[Any, bytes | None]:
    kept = stored.record.model_dump(mode="json", exclude={"cost", "provenance"})
    return kept, stored.samples_content() if stored.has_samples else None


@pytest.fixture(scope="session")
def analyzed_recipe(small: Path) -> Path:
    """A recipe with two models and an analysis."""
    texts = [f"{sentence} {sentence}" for sentence in SENTENCES] + ["The town.", SENTENCES[1]]
    (small.parent / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    content = yaml.safe_load(small.read_text()) | {"analysis": SETTINGS}
    (small.parent / "analyzed.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return small.parent / "analyzed.yaml"


@pytest.fixture(scope="session")
def analyzed(analyzed_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Its analyses, and the events of the run."""
    out = tmp_path_factory.mktemp("analyzed")
    code, events = analyze_here(analyzed_recipe, out)
    assert code == 0
    return out, events


@pytest.fixture
def changed(analyzed_recipe: Path, tmp_path: Path) -> Callable[..., Path]:
    """The recipe with other analysis settings, in a copy of its folder."""

    def make(**settings: Any) -> Path:
        folder = tmp_path / "changed"
        if not folder.exists():
            shutil.copytree(analyzed_recipe.parent, folder)
        recipe = yaml.safe_load(analyzed_recipe.read_text())
        own = {name: value for name, value in (SETTINGS | settings).items() if value is not None}
        (folder / "changed.yaml").write_text(yaml.safe_dump(recipe | {"analysis": own}))
        return folder / "changed.yaml"

    return make


def test_what_is_measured(analyzed: tuple[Path, list[dict[str, Any]]]) -> None:
    out, events = analyzed
    names = [f"tiny-{kind}-{rest}" for kind in ("softmax", "softpick") for rest in ("none-16-analysis", "none-16-maps")]
    names += [f"tiny-{kind}-hqq-3-g32-sensitivity" for kind in ("softmax", "softpick")]
    assert ended(events) == dict.fromkeys(names, "done")
    assert set(found(out)) == set(names)
    assert not left_behind(out)


def test_the_closing_lines_are_printed_once_and_count_maps_too(analyzed: tuple[Path, list[dict[str, Any]]]) -> None:
    lines = said(analyzed[1]).splitlines()
    assert [line for line in lines if " done in " in line] == lines[-3:-2]
    assert lines[-3].startswith("6 of 6 cells done")
    assert sum("qbench table" in line for line in lines) == 2


def test_a_sensitivity_that_does_not_fit_fails_once_and_is_counted_once(
    changed: Callable[..., Path], tmp_path: Path
) -> None:
    bad = HQQ | {"options": {"group_size": 40}}  # does not divide 96 × 96
    code, events = analyze_here(changed(sensitivity=[bad]), tmp_path / "out")
    assert code == 1
    failed = [event for event in events if event["event"] == "finished" and event["state"] == "failed"]
    assert [event["cell"] for event in failed] == [
        f"tiny-{kind}-hqq-3-g40-sensitivity" for kind in ("softmax", "softpick")
    ]
    assert "nearest sizes that fit (powers of two): 16, 32, 64, 128" in failed[0]["reason"]
    assert "4 of 6 cells done" in said(events)
    assert "2 FAILED" in said(events)


def test_the_analysis_is_that_of_the_function(analyzed_recipe: Path, analyzed: tuple[Path, Any]) -> None:
    folder = analyzed_recipe.parent
    (stored,) = (
        s for s in read_analyses(analyzed[0]).current if s.record.cell.name == "tiny-softpick-none-16-analysis"
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "softpick")
    lines = [json.loads(line)["text"] for line in (folder / "texts.jsonl").read_text().splitlines()]
    texts = [torch.tensor(tokenizer(line)["input_ids"][:24]) for line in lines[:6]]
    own = analyze(load_checkpoint(folder / "softpick"), texts, length=24, lengths=[4, 8])
    assert stored.samples_content() == sums_to_parquet(own)
    assert stored.record.analysis == own.facts


def test_the_heads_that_differ_most_are_drawn(analyzed: tuple[Path, Any]) -> None:
    from qbench.records.analysis_metrics import differing_heads

    stored = {s.record.cell.name: s for s in read_analyses(analyzed[0]).current}
    both = [stored[f"tiny-{kind}-none-16-analysis"].analysis() for kind in ("softmax", "softpick")]
    for kind in ("softmax", "softpick"):
        maps = stored[f"tiny-{kind}-none-16-maps"]
        assert maps.record.maps
        assert list(maps.record.maps.heads) == differing_heads(*both, 4)
        assert [(own.layer, own.head) for own in maps.maps()] == differing_heads(*both, 4)


def test_a_second_call_computes_nothing(analyzed_recipe: Path, analyzed: tuple[Path, Any]) -> None:
    before = finished(analyzed[0])
    code, events = analyze_here(analyzed_recipe, analyzed[0])
    assert code == 0
    assert ended(events) == {}
    assert "nothing to do" in said(events)
    assert finished(analyzed[0]) == before


def test_what_an_interrupted_analysis_left_is_kept_and_the_rest_is_as_if_it_had_never_stopped(
    analyzed_recipe: Path, analyzed: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Maps are of the heads in which two analyses differ most, of which one was measured before."""
    out = shutil.copytree(analyzed[0], tmp_path / "out")
    missing = {"tiny-softmax-none-16-analysis", "tiny-softpick-none-16-maps"}
    for stored in read_analyses(out).current:
        if stored.record.cell.name in missing:
            shutil.rmtree(stored.folder)
    before = finished(out)
    code, events = analyze_here(analyzed_recipe, out)
    assert code == 0
    assert ended(events) == dict.fromkeys(missing, "done")
    assert before.items() <= finished(out).items()
    assert found(out) == found(analyzed[0])


@pytest.mark.slow  # the test above resumes, and test_kill.py kills the same runner
@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_killed_analysis_continues_as_if_nothing_had_happened(
    moment: int, analyzed_recipe: Path, analyzed: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    reference, events = analyzed
    out, draw = tmp_path / "out", random.Random(moment)
    with Driver(analyzed_recipe, out, command="analyze") as driver:
        wanted = int((moment + draw.random()) / MOMENTS * len(events))
        for _, _event in zip(range(wanted), driver.follow(), strict=False):
            pass
        time.sleep(draw.uniform(0, 0.2))
        for worker in driver.workers()[:1] if moment % 2 else []:
            with contextlib.suppress(psutil.NoSuchProcess):  # it may have just ended
                worker.kill()
        driver.process.kill()
        driver.end()
        assert driver.gone()
    before = finished(out) if out.exists() else {}
    assert analyze_here(analyzed_recipe, out)[0] == 0
    assert before.items() <= finished(out).items()
    assert found(out) == found(reference)
    assert not left_behind(out)


def test_scores_and_analyses_leave_each_other_alone(changed: Callable[..., Path], tmp_path: Path) -> None:
    """Analysis settings are not part of the scores' keys, and scoring settings are not part of the analyses' keys."""
    recipe = changed(sensitivity=None, maps=[])
    keys = {entry.cell.ref.name: entry.key for entry in make_plan(load_recipe(recipe), tmp_path).entries}
    analyses = {e.cell.ref.name: e.key for e in make_analysis_plan(load_recipe(recipe), tmp_path).entries}
    assert len(keys) == 6
    assert list(analyses) == [f"tiny-{kind}-none-16-analysis" for kind in ("softmax", "softpick")]
    for settings in ({"length": 20}, {"samples": 5}, {"lengths": [4]}, {"cells": "all"}):
        other = load_recipe(changed(**{"sensitivity": None, "maps": []} | settings))
        assert {e.cell.ref.name: e.key for e in make_plan(other, tmp_path).entries} == keys
        now = {e.cell.ref.name: e.key for e in make_analysis_plan(other, tmp_path).entries}
        same = {name for name, key in analyses.items() if now[name] == key}
        assert same == (set(analyses) if "cells" in settings else set())
    content = yaml.safe_load(changed(sensitivity=None, maps=[]).read_text())
    fewer_tasks = {"tasks": ["arc_easy"], "data": {"arc_easy": content["data"]["arc_easy"]}}
    for change in ({"seed": 7}, {"limit": 3}, {"num_fewshot": 0}, {"max_length": 200}, fewer_tasks):
        recipe.write_text(yaml.safe_dump(content | change))
        now = {e.cell.ref.name: e.key for e in make_analysis_plan(load_recipe(recipe), tmp_path).entries}
        assert now == analyses, change


def test_a_run_and_an_analysis_in_one_folder(changed: Callable[..., Path], tmp_path: Path) -> None:
    recipe, out = changed(sensitivity=None, maps=[]), tmp_path / "out"
    assert analyze_here(recipe, out)[0] == 0
    before = finished(out)
    code, events = run_here(recipe, out, "--only", "*softmax-none*")
    assert code == 0
    assert "ignored" not in said(events)
    assert before.items() <= finished(out).items()
    assert ended(analyze_here(recipe, out)[1]) == {}
    assert ended(run_here(recipe, out, "--only", "*softmax-none*")[1]) == {}


def test_every_cell_of_the_recipe(changed: Callable[..., Path], tmp_path: Path) -> None:
    recipe = changed(cells="all", sensitivity=None, maps=[], samples=2)
    code, events = analyze_here(recipe, tmp_path / "out", "--only", "*softpick*")
    assert code == 0
    labels = ("none-16", "hqq-3-g32", "hqq-4-g32")
    assert ended(events) == {f"tiny-softpick-{label}-analysis": "done" for label in labels}
    by_label = {s.record.cell.label: s.analysis() for s in read_analyses(tmp_path / "out").current}
    assert len({analysis.sums.power_sums.tobytes() for analysis in by_label.values()}) == 3


def test_limit_and_steps(changed: Callable[..., Path], tmp_path: Path) -> None:
    recipe = changed(sensitivity=None, maps=[])
    content = yaml.safe_load(recipe.read_text())
    content["checkpoints"]["tiny"]["softpick"] = {"path": "./softpick", "steps": {1000: "./softmax-as-step"}}
    shutil.copytree(recipe.parent / "softpick", recipe.parent / "softmax-as-step")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (recipe.parent / "softmax-as-step" / name).unlink(missing_ok=True)
    recipe.write_text(yaml.safe_dump(content))
    code, events = analyze_here(recipe, tmp_path / "out", "--limit", "2", "--only", "*softpick*")
    assert code == 0
    assert set(ended(events)) == {"tiny-softpick-none-16-analysis", "tiny-softpick-none-16-step-1000-analysis"}
    assert {s.record.analysis.texts for s in read_analyses(tmp_path / "out").current if s.record.analysis} == {2}


# --- bad input: one sentence each, and nothing is lost


def test_fewer_texts_than_asked_and_shorter_ones_are_reported(changed: Callable[..., Path], tmp_path: Path) -> None:
    recipe = changed(samples=50, length=200, lengths=[4, 190], sensitivity=None, maps=[{"layer": 0, "head": 0}])
    texts = recipe.parent / "texts.jsonl"
    texts.write_text('{"text": ""}\n' + texts.read_text())  # maps use the first text that has something to draw
    code, events = analyze_here(recipe, tmp_path / "out", "--only", "*softmax*")
    assert code == 0
    text = said(events)
    assert re.search(r"texts\.jsonl .*\b8 .*\b50\b", text)
    assert re.search(r"shorter than .*\b200\b", text)
    assert re.search(r"\b190\b", text)
    assert re.search(r"1 text\b.*fewer than 2 tokens", text)
    records = [stored.record for stored in read_analyses(tmp_path / "out").current]
    (analysis,) = [record.analysis for record in records if record.analysis]
    (maps,) = [record.maps for record in records if record.maps]
    assert analysis.texts == 7
    assert len(maps.tokens) > 2


def test_lengths_beyond_the_models_positions_are_reported(changed: Callable[..., Path], tmp_path: Path) -> None:
    recipe = changed(samples=1, length=300, lengths=[280], sensitivity=None, maps=[])
    (recipe.parent / "texts.jsonl").write_text(json.dumps({"text": " ".join(SENTENCES * 8)}) + "\n")
    code, events = analyze_here(recipe, tmp_path / "out", "--only", "*softmax*")
    assert code == 0
    assert re.search(r"300 tokens.* trained on 256 positions.*[Pp]aper", said(events))


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"maps": [{"layer": 2, "head": 0}]}, ("analysis.maps[0].layer", "is 2", "layers 0 to 1")),
        ({"maps": [{"layer": 1, "head": 0}, {"layer": 0, "head": 4}]}, ("analysis.maps[1].head", "heads 0 to 3")),
        ({"maps": [{"layer": 1, "heads": 2}]}, ("heads", "Did you mean head?")),
        ({"sensitivity": ["hqq"]}, ("analysis.sensitivity", "hqq-3")),
        ({"sensitivity": ["bnb-3"]}, ("analysis.sensitivity[0]", "bnb", "3 bits", "4, 8")),
        ({"sensitivity": ["none-16"]}, ("analysis.sensitivity[0]", "none", "hqq-3")),
        ({"sensitivity": ["hqqq-3"]}, ("hqqq", "Did you mean hqq?")),
        ({"source": "nowhere.jsonl"}, ("analysis.source", "nowhere.jsonl", "is not a file")),
        ({"source": "owner/name"}, ("owner/name", "revision")),
        ({"cells": "quantized"}, ("analysis.cells", "unquantized, all")),
        ({"sample": 3}, ("sample", "Did you mean samples?")),
        ({"lengths": [1]}, ("analysis.lengths[0]", "2 or more")),
    ],
)
def test_wrong_settings_are_sentences(
    settings: dict[str, Any],
    facts: tuple[str, ...],
    changed: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = changed(**settings)
    assert main(["analyze", str(recipe), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "changed.yaml, line" in error
    assert all(fact in error for fact in facts), error
    assert not (tmp_path / "out").exists()


def test_without_a_source_it_reads_the_default_text_and_says_if_that_is_not_here(
    changed: Callable[..., Path], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    for name in ("huggingface_hub.constants.HF_HUB_OFFLINE", "datasets.config.HF_HUB_OFFLINE"):
        monkeypatch.setattr(name, True)  # the variable is read when they are imported
    recipe = changed(source=None, sensitivity=None)
    content = yaml.safe_load(recipe.read_text())
    content.pop("calibration")
    recipe.write_text(yaml.safe_dump(content))
    assert main(["analyze", str(recipe), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert all(fact in said for fact in ("analysis wikitext2", "cache", "`analysis: {source: FILE}`"))
    assert not list(tmp_path.glob("out/*/record.json"))


def test_nan_activations_fail_one_model_and_lose_nothing(changed: Callable[..., Path], tmp_path: Path) -> None:
    recipe = changed(sensitivity=None)
    file = recipe.parent / "softpick" / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    code, events = analyze_here(recipe, tmp_path / "out")
    assert code == 1
    states = ended(events)
    assert states["tiny-softmax-none-16-analysis"] == "done"
    assert states["tiny-softpick-none-16-analysis"] == "failed"
    (reason,) = (event["reason"] for event in events if event.get("state") == "failed")
    assert "NaN" in reason or "infinite" in reason


# --- the texts of a source


def test_the_default_source_is_the_calibration(changed: Callable[..., Path]) -> None:
    recipe = load_recipe(changed(source=None))
    source = recipe.analysis_source()
    assert source.source.endswith("calibration.txt")
    assert (source.samples, source.length) == (6, 24)
    assert {cell.ref.measured for cell in analysis_cells(recipe)} == {"analysis", "sensitivity"}


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "One text.\nStill it.\n\n \nAnother.\n", ["One text.\nStill it.", "Another."]),
        ("b.txt", "One.\n\nStill.<s>Another.<s>", ["One.\n\nStill.", "Another."]),
        ("c.jsonl", '{"text": "One.\\n\\nStill."}\n{"text": ""}\n', ["One.\n\nStill.", ""]),
    ],
)
def test_what_a_text_is(name: str, content: str, expected: list[str], tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / name).write_text(content)
    texts, notes = read_texts(Calibration(source=str(tmp_path / name), samples=3, length=50), tokenizer)
    assert [ids.tolist() for ids in texts] == [tokenizer(text)["input_ids"] for text in expected]
    assert len(notes) == 1
    assert re.search(r"\b2 .*\b3\b", notes[0])
    first, _ = read_texts(Calibration(source=str(tmp_path / name), samples=1, length=3), tokenizer)
    assert [ids.tolist() for ids in first] == [tokenizer(expected[0])["input_ids"][:3]]
