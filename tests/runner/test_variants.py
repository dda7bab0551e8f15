"""Variants that are names, run for real: mini's softmax model, a perturbed copy of it, and other combinations."""

import csv
import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from qbench.cli import main
from qbench.records.findings.folder import findings
from qbench.records.findings.record import altered
from qbench.records.store import RECORD, StoredRecord, read_analyses, read_results
from qbench.report.attentions import kind_name, kind_title

from ..messages import states
from .driver import events_of, finished, run_here

MINI = Path(__file__).parents[2] / "recipes" / "mini"
TASKS = ("mini_arc_easy", "mini_wikitext")
LIMIT = 12


def write_recipe(folder: Path, variants: dict[str, str], **changes: Any) -> Path:
    """A recipe of mini's tasks; `tuned` is a perturbed copy of mini's softmax model."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(MINI / "softmax", folder / "tuned")
    weights, draw = load_file(folder / "tuned" / "model.safetensors"), np.random.default_rng(0)
    noisy = {
        name: own * (1 + 0.02 * draw.standard_normal(own.shape)).astype(own.dtype) for name, own in weights.items()
    }
    save_file(noisy, folder / "tuned" / "model.safetensors", metadata={"format": "pt"})
    content = {
        "checkpoints": {"m": variants},
        "quantizations": [{"method": "none"}, {"method": "hqq", "bits": 3}],
        "task_folders": [str(MINI / "tasks")],
        "tasks": {task: {"data": str(MINI / "tasks" / f"{task}.jsonl")} for task in TASKS},
        "analysis": {"source": str(MINI / "tasks" / "mini_wikitext.jsonl"), "field": "page", "sensitivity": ["hqq-3"]},
        "device": "cpu",
        "threads": 1,
        "workers": 1,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content | changes, sort_keys=False))
    return folder / "recipe.yaml"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a perturbed copy of it."""
    return write_recipe(tmp_path_factory.mktemp("pair"), {"base": str(MINI / "softmax"), "instruct": "tuned"})


@pytest.fixture(scope="module")
def pair(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its scores and analyses."""
    out = tmp_path_factory.mktemp("runs") / "pair"
    code, events = run_here(recipe, out, "--limit", str(LIMIT))
    assert code == 0, events
    assert main(["analyze", str(recipe), "--out", str(out), "--limit", "4"]) == 0
    return out


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint under three names, one of them its kind's, and one of another kind; the recipe and its scores."""
    variants = {"base": str(MINI / "softmax"), "softmax": str(MINI / "softmax"), "again": str(MINI / "softmax")}
    file = write_recipe(tmp_path_factory.mktemp("several"), variants | {"Ours-v2": str(MINI / "softpick")})
    out = tmp_path_factory.mktemp("runs") / "several"
    code, events = run_here(file, out, "--limit", str(LIMIT))
    assert code == 0, events
    return file, out


def table(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main(["table", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_records_name_the_variant_and_the_real_attention(pair: Path) -> None:
    records = {stored.record.cell.name: stored.record for stored in read_results(pair).current}
    names = [f"m-{variant}-{label}" for label in ("none-16", "hqq-3-g64") for variant in ("base", "instruct")]
    assert sorted(records) == sorted(names)
    assert {folder.name.rpartition("-")[0] for folder in pair.glob("m-*")} >= set(names)
    assert {record.identity.what.attention for record in records.values()} == {"softmax"}
    base, instruct = (records[f"m-{variant}-none-16"].identity.what for variant in ("base", "instruct"))
    assert base.checkpoint != instruct.checkpoint
    assert [altered(stored) for stored in read_results(pair).current] == [[]] * 4
    assert findings(read_results(pair)) == []


def test_tables_compare_the_variants(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.DictReader(io.StringIO(table(capsys, pair, "--kind", "delta", "--format", "csv"))))
    assert {(row["attention"], row["reference_attention"]) for row in rows} == {("instruct", "base")}
    assert all(float(row["value"]) - float(row["reference"]) == pytest.approx(float(row["delta"])) for row in rows)
    shown = table(capsys, pair, "--format", "md")
    assert "softpick" not in shown
    assert "instruct" in shown
    assert "base" in shown


def test_the_page_and_the_plots_show_the_variants(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "instruct" in table(capsys, pair, "--format", "html", "--kind", "delta")
    assert main(["table", str(pair), "--plots", str(tmp_path / "plots")]) == 0
    assert list((tmp_path / "plots").iterdir())


def test_the_gate_compares_each_variant_with_itself(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(pair, tmp_path / "baseline")
    assert main(["check", str(pair), "--baseline", str(tmp_path / "baseline")]) == 0
    shutil.copytree(pair, tmp_path / "run")
    for folder in (tmp_path / "run").glob("m-instruct-hqq*"):
        shutil.rmtree(folder)
    capsys.readouterr()
    assert main(["check", str(tmp_path / "run"), "--baseline", str(tmp_path / "baseline")]) == 1
    assert "m-instruct-hqq-3-g64" in capsys.readouterr().out.replace("m instruct ", "m-instruct-")


def test_a_second_run_computes_nothing(recipe: Path, pair: Path) -> None:
    before = finished(pair)
    code, events = run_here(recipe, pair, "--limit", str(LIMIT))
    assert code == 0
    assert events_of(events, "finished") == []
    assert finished(pair) == before


def test_analyses_are_of_the_variants(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = {(s.record.cell.attention, s.record.cell.measured) for s in read_analyses(pair).current}
    kinds = ("analysis", "maps", "sensitivity")
    assert measured == {(variant, kind) for variant in ("base", "instruct") for kind in kinds}
    analyses = [stored for stored in read_analyses(pair).current if stored.record.analysis]
    assert {stored.record.analysis.attention for stored in analyses if stored.record.analysis} == {"softmax"}
    assert len({stored.analysis().sums.first.sum() for stored in analyses}) == 2
    rows = list(csv.DictReader(io.StringIO(table(capsys, pair, "--kind", "analysis", "--format", "csv"))))
    assert {row["attention"] for row in rows} == {"base", "instruct"}


def test_one_checkpoint_under_three_names_is_measured_alike_and_is_not_suspicious(several: tuple[Path, Path]) -> None:
    results = read_results(several[1])
    current = results.current
    assert len(current) == 8
    assert findings(results) == []
    assert [reasons for stored in current if (reasons := altered(stored))] == []
    by_name = {stored.record.cell.name: stored.record for stored in current}
    for label in ("none-16", "hqq-3-g64"):
        same = [by_name[f"m-{variant}-{label}"] for variant in ("base", "softmax", "again")]
        assert len({record.key for record in same}) == 1
        assert len({record.samples_sha256 for record in same}) == 1
    assert by_name["m-Ours-v2-none-16"].identity.what.attention == "softpick"
    assert by_name["m-Ours-v2-none-16"].attention_title == "Softpick"
    assert [kind_title("Ours-v2"), kind_name("Ours-v2"), kind_name("Instruct")] == ["Ours-v2", "Ours-v2", "Instruct"]


def test_the_unquantized_scores_of_a_twin_under_another_label_are_still_found(
    several: tuple[Path, Path], tmp_path: Path
) -> None:
    out = shutil.copytree(several[1], tmp_path / "out")
    places = {stored.record.cell.name: stored for stored in read_results(out).current}
    victim, other = places["m-base-hqq-3-g64"], places["m-again-none-16"]
    copied = {"metrics": other.record.metrics, "samples_sha256": other.record.samples_sha256}
    shutil.copy(other.parquet, victim.parquet)
    (victim.parquet.parent / RECORD).write_text(victim.record.model_copy(update=copied).model_dump_json())
    suspicions = findings(read_results(out))
    assert [str(found) for found in suspicions if states(str(found), "m-base-hqq-3-g64…same weights")]


def test_a_record_of_a_kind_that_was_measured_as_another_is_altered(several: tuple[Path, Path]) -> None:
    (stored,) = [own for own in read_results(several[1]).current if own.record.cell.name == "m-softmax-none-16"]
    cell = stored.record.cell.model_copy(update={"attention": "softpick"})
    reasons = altered(StoredRecord(stored.record.model_copy(update={"cell": cell}), stored.parquet.parent))
    assert states(" ".join(map(str, reasons)), "attention is softpick…softmax")


def test_tables_of_several_variants(several: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.DictReader(io.StringIO(table(capsys, several[1], "--kind", "damage", "--format", "csv"))))
    assert {(row["attention"], row["reference_attention"]) for row in rows} == {
        (variant, "softmax") for variant in ("base", "again", "Ours-v2")
    }
    assert all(float(row["difference"]) == 0 for row in rows if row["attention"] in ("base", "again"))
    assert "Ours-v2" in table(capsys, several[1], "--format", "html")
    assert "Ours-v2" in table(capsys, several[1], "--format", "md", "--kind", "headline")
