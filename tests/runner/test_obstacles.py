"""Cells that config.json rules out are marked in the plan, fail at once, and do not stop the other cells."""

import json
import re
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field

from qbench.cli import main
from qbench.quantizers.declaration import LinearOptions, Quantizer
from qbench.quantizers.options import quantizers
from qbench.recipe.cells import load_recipe
from qbench.records.store import read_results
from qbench.report.sources import read_result_set
from qbench.runner.plan import make_plan

from ..messages import states
from ..small_recipe import config, write_recipe
from .driver import events_of, run_here

RULED_OUT = {
    "gptq-4-g128": "group_size 128…96 inputs of model.layers.0…; sizes that fit: -1 (one group per row), 16, 32.",
    "gptq-4-g7": "no group_size 7…; sizes that fit: -1 (one group per row), 16, 32.",
    "rtn-4-mxfp4": "",
    "hqq-8-g40": "40…9,216 weights of model.layers.0…; nearest sizes that fit (powers of two): 16, 32, 64, 128.",
    "hqq-4-g40": "40…9,216 weights of model.layers.0…; nearest sizes that fit (powers of two): 16, 32, 64, 128.",
    "hqq-4-g100": "100…multiple of 8…nearest sizes that fit (powers of two): 32, 64, 128, 256.",
    "minmax-4-g64": "group_size 64…96 inputs…; sizes that fit: 8, 16, 32.",
}


class MinMaxOptions(LinearOptions):
    """Of another package, which leaves `misfit` out."""

    group_size: int = Field(default=64, ge=8, multiple_of=2)
    label_always: ClassVar = {"group_size": "g{}"}


class MinMax(Quantizer):
    name, title = "minmax", "Min-max"
    widths: ClassVar = {4: MinMaxOptions}


def test_the_plan_names_the_layer_and_what_would_fit_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(quantizers(), "minmax", MinMax())
    file = write_recipe(
        tmp_path,
        checkpoints={"tiny": {"softmax": "softmax"}},
        quantizations=[
            {"method": "none"},
            {"method": "gptq", "bits": 4},
            {"method": "gptq", "bits": 4, "options": {"group_size": 7}},
            {"method": "rtn", "bits": 4, "options": {"format": "mxfp4"}},
            {"method": "hqq", "bits": [8, 4], "options": {"group_size": 40}},
            {"method": "hqq", "bits": 4, "options": {"group_size": 100}},
            {"method": "minmax", "bits": 4},
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
    assert main(["plan", str(file), "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert "8 cells: 2 to do, 6 cannot run" in printed.out
    assert "6 of 8 cells" in printed.err
    (line,) = [line for line in printed.out.splitlines() if "size 40" in line]
    assert states(line, "[3] tiny-softmax-hqq-8-g40, tiny-softmax-hqq-4-g40 …16, 32, 64, 128.")


def test_every_size_that_the_plan_suggests_fits(tmp_path: Path) -> None:
    narrow = config("softmax") | {"hidden_size": 96, "intermediate_size": 160}
    gptq, hqq = ({"method": method, "bits": 4, "options": {"group_size": 80}} for method in ("gptq", "hqq"))
    checkpoints = {"tiny": {"softmax": "softmax"}}
    file = write_recipe(tmp_path, checkpoints=checkpoints, quantizations=[gptq, hqq])
    (tmp_path / "softmax" / "config.json").write_text(json.dumps(narrow))
    for entry in make_plan(load_recipe(file), tmp_path / "out").entries:
        (listed,) = re.findall(r"sizes that fit.*?: (.*?)\.", entry.note)
        sizes = [int(size.split()[0]) for size in listed.split(", ")]
        assert (-1 in sizes) is (entry.cell.ref.method == "gptq")
        (written,) = re.findall(r"`options: {group_size: (\d+)}`", entry.note)
        assert f"`--group-size {written}`" in entry.note
        assert int(written) in sizes
        for size in sizes:
            fitting = {"method": entry.cell.ref.method, "bits": 4, "options": {"group_size": size}}
            file = write_recipe(tmp_path, checkpoints=checkpoints, quantizations=[fitting])
            assert [e.state for e in make_plan(load_recipe(file), tmp_path / "out").entries] == ["to do"], size


def test_one_group_per_row_is_always_among_the_sizes_that_fit_gptq(tmp_path: Path) -> None:
    wide = config("softmax") | {"hidden_size": 1024, "intermediate_size": 2048}
    gptq = {"method": "gptq", "bits": 4, "options": {"group_size": 300}}
    file = write_recipe(tmp_path, checkpoints={"tiny": {"softmax": "softmax"}}, quantizations=[gptq])
    (tmp_path / "softmax" / "config.json").write_text(json.dumps(wide))
    (entry,) = make_plan(load_recipe(file), tmp_path / "out").entries
    assert states(entry.note, "nearest sizes that fit (powers of two): -1 (one group per row), 128, 256, 512, 1024.")


def test_an_unsupported_architecture_says_once_what_can_be_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_recipe(tmp_path, checkpoints={"tiny": {"softmax": "softmax"}})
    (tmp_path / "softmax" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert main(["plan", str(file), "--out", str(tmp_path / "out")]) == 2
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "'gpt2'" in line]
    assert states(
        line, "tiny-softmax-none-16…config.json…'gpt2'…lm-eval…--log_samples…`qbench check RUN BASELINE`…'llama'"
    )


def test_inherited_sensitivities_that_do_not_fit_are_said_by_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(tmp_path, analysis={"sensitivity": ["hqq-3", "gptq-3"]})
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: recipe.yaml\nquantizations: [{method: none}, {method: hqq, bits: 4}]\n")
    assert main(["plan", str(mine), "--out", str(tmp_path / "out")]) == 0
    assert "sensitivity" not in capsys.readouterr().out
    for kind in ("softmax", "softpick"):
        narrow = config(kind) | {"hidden_size": 96}
        (tmp_path / kind / "config.json").write_text(json.dumps(narrow))
    assert main(["plan", str(mine), "--out", str(tmp_path / "out")]) == 0  # a run can do all of its cells
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "sensitivity" in line]
    assert states(line, "recipe.yaml, line …analysis.sensitivity…`qbench analyze`…tiny-softmax-gptq-3…softpick-gptq-3")
    assert states(line, "group_size 128…96 inputs…-1 (one group per row), 16, 32")
    assert "hqq" not in line


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


@pytest.mark.parametrize(
    ("change", "what", "advice"),
    [
        ({"model_type": "gpt2"}, "'gpt2'", "lm-eval…`qbench check RUN BASELINE`"),
        ({}, "group_size 80", "`options: {group_size: 64}`…`--group-size 64`"),
    ],
)
def test_a_run_prints_a_shared_reason_once_and_tables_keep_its_advice(
    change: dict[str, str], what: str, advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hqq = {"method": "hqq", "bits": [8, 4], "options": {"group_size": 80}}
    file = write_recipe(tmp_path, checkpoints={"tiny": {"softmax": "softmax"}}, quantizations=[hqq])
    (tmp_path / "softmax" / "config.json").write_text(json.dumps(config("softmax") | change))
    assert main(["run", str(file), "--out", str(tmp_path / "out")]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if what in line]
    assert states(line, "[2/2] tiny-softmax-hqq-8-g80, tiny-softmax-hqq-4-g80 cannot run: ")
    for result in read_result_set(tmp_path / "out").cells:
        assert result.gap
        assert states(result.gap.reason, f"{what}…{advice}")


def test_a_folder_with_pickles_only_cannot_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_recipe(tmp_path)
    weights = tmp_path / "softmax" / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    assert main(["plan", str(file)]) == 2
    assert "4 cannot run" in capsys.readouterr().out
    assert main(["run", str(file), "--out", str(tmp_path / "out")]) == 2
    assert states(capsys.readouterr().err, "only pytorch_model.bin…model.safetensors")
