"""Cells that config.json rules out are marked in the plan, fail at once, and do not stop the other cells."""

import json
from pathlib import Path

import pytest

from qbench.cli import main
from qbench.recipe.cells import load_recipe
from qbench.records.store import read_results
from qbench.runner.plan import make_plan

from ..messages import states
from ..small_recipe import config, write_recipe
from .driver import events_of, run_here

RULED_OUT = {
    "gptq-4-g128": "gptq-4-g128: model.layers.0.self_attn.q_proj…group_size 128…96 inputs…-1, 16, 32",
    "gptq-4-g7": "gptq-4-g7: …group_size is 7…-1, 16, 32, 64",
    "rtn-4-mxfp4": "",
    "hqq-4-g40": "hqq-4-g40: …40…9216 weights",
}


def test_the_plan_names_the_layer_and_what_would_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_recipe(
        tmp_path,
        checkpoints={"tiny": {"softmax": "softmax"}},
        quantizations=[
            {"method": "none"},
            {"method": "gptq", "bits": 4},
            {"method": "gptq", "bits": 4, "options": {"group_size": 7}},
            {"method": "rtn", "bits": 4, "options": {"format": "mxfp4"}},
            {"method": "hqq", "bits": 4, "options": {"group_size": 40}},
        ],
    )
    narrow = config("softmax") | {"hidden_size": 96}
    (tmp_path / "softmax" / "config.json").write_text(json.dumps(narrow))
    entries = {entry.cell.ref.label: entry for entry in make_plan(load_recipe(file), tmp_path / "out").entries}
    assert entries.keys() == {"none-16", *RULED_OUT}
    for label, facts in RULED_OUT.items():
        assert entries[label].state == ("cannot run" if facts else "to do"), label
        assert states(entries[label].note, facts), entries[label].note
    assert entries["none-16"].state == "to do"
    assert main(["plan", str(file), "--out", str(tmp_path / "out")]) == 0
    assert "5 cells: 2 to do, 3 cannot run" in capsys.readouterr().out


def test_a_run_fails_them_at_once_and_finishes_the_others(small: Path, tmp_path: Path) -> None:
    recipe = small.parent / "ruled-out.yaml"
    recipe.write_text(
        f"extends: {small.name}\n"
        "checkpoints: {tiny: {softmax: ./softmax, softpick: ./softmax}}  # the second is a softmax checkpoint\n"
        "quantizations: [{method: none}, {method: hqq, bits: 4, options: {group_size: 40}}]\n"
    )
    code, events = run_here(recipe, tmp_path / "out", "--preflight")
    assert code == 1
    assert [event["cell"] for event in events_of(events, "started")] == ["tiny-softmax-none-16"]
    said = "\n".join(event["text"] for event in events_of(events, "message"))
    assert "1 of 4 cells done" in said
    assert "3 FAILED" in said
    assert "retry" not in said  # it would not help
    failures = {s.record.cell.name: s.record.failure for s in read_results(tmp_path / "out").current}
    assert failures.pop("tiny-softmax-none-16") is None
    assert all(failure and failure.phase is None for failure in failures.values())
    softpick = failures["tiny-softpick-none-16"]
    assert softpick
    assert "'softpick'" in softpick.reason


def test_a_folder_with_pickles_only_cannot_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_recipe(tmp_path)
    weights = tmp_path / "softmax" / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    assert main(["plan", str(file)]) == 0
    assert "4 cannot run" in capsys.readouterr().out
    assert main(["run", str(file), "--out", str(tmp_path / "out")]) == 2
    assert states(capsys.readouterr().err, "only pytorch_model.bin…model.safetensors")
