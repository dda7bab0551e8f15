"""Forged runs, made from the committed reference: each fails the gate, and for the right reason."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pytest

from qbench.cli import main
from qbench.gate.verdict import GateReport, check
from qbench.identity import Identity
from qbench.records.store import RECORD, SAMPLES
from qbench.runner.plan import stored_records

MINI = Path(__file__).parents[2] / "results" / "mini"
LABELS = ("none-16", "hqq-2-g64", "hqq-8-g64", "bnb-4-nf4", "gptq-2-g128")
HQQ_2 = "mini-softmax-hqq-2-g64"

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of the committed cells: enough here, and faster to judge."""
    folder = tmp_path_factory.mktemp("reference")
    plan = json.loads((MINI / "run.json").read_text())
    plan["cells"] = [
        own for own in plan["cells"] if own["cell"]["label"] in LABELS and own["cell"].get("draw") in (None, 1)
    ]
    plan["resolved_recipe"]["calibration"]["seeds"] = 1
    (folder / "run.json").write_text(json.dumps(plan))
    for planned in plan["cells"]:
        (source,) = MINI.glob(f"*-{planned['key'][:10]}")
        shutil.copytree(source, folder / source.name)
    return folder


@pytest.fixture
def run(reference: Path, tmp_path: Path) -> Path:
    return shutil.copytree(reference, tmp_path / "run")


def cell(folder: Path, name: str = HQQ_2) -> Path:
    (found,) = folder.glob(f"{name}-*")
    return found


def edit(folder: Path, change: Edit, name: str = HQQ_2) -> None:
    """Change only a record, by hand."""
    file = cell(folder, name) / RECORD
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record))


def resample(folder: Path, change: Callable[[pa.Table], pa.Table], name: str = HQQ_2) -> None:
    """Change a record's samples, and its checksum with them."""
    file = cell(folder, name) / SAMPLES
    pq.write_table(change(pq.read_table(file)), file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    edit(folder, lambda record: record.update(samples_sha256=digest), name)


def rekey(folder: Path, change: Edit, name: str = HQQ_2) -> None:
    """Change a record's identity, and its key and the plan's with it."""
    file = cell(folder, name) / RECORD
    record = json.loads(file.read_text())
    change(record["identity"])
    old, record["key"] = record["key"], Identity(**record["identity"]).key
    file.write_text(json.dumps(record))
    plan = folder / "run.json"
    plan.write_text(plan.read_text().replace(old, record["key"]))


def failures(run: Path, reference: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The failures that the command finds; its exit code and first word must agree."""
    file = run.with_name("gate.json")
    code = main(["check", str(run), "--baseline", str(reference), "--json", str(file)])
    report = json.loads(file.read_text())
    assert code == int(not report["passed"])
    assert capsys.readouterr().out.startswith("PASS" if report["passed"] else "FAIL")
    return [f"{failure['cell']}: {failure['message']}" for failure in report["failures"]]


def metrics(**changes: Any) -> Edit:
    """Change the metrics called acc."""

    def change(record: dict[str, Any]) -> None:
        for metric in record["metrics"]:
            if metric["metric"] == "acc":
                metric.update(changes)

    return change


def without_acc(record: dict[str, Any]) -> None:
    record["metrics"] = [metric for metric in record["metrics"] if metric["metric"] != "acc"]


FORGED_RECORDS: Mapping[str, tuple[Edit, tuple[str, ...]]] = {
    "no direction": (metrics(better=None), ("acc", "better", "none in the run", "higher in the baseline")),
    "reversed direction": (metrics(better="lower"), ("acc", "better", "lower in the run", "higher in the baseline")),
    "other aggregation": (metrics(aggregation="f1"), ("acc", "aggregation", "f1 in the run", "mean in the baseline")),
    "no metric": (without_acc, ("acc", "in the baseline but not in the run")),
    "edited value": (metrics(value=0.9), ("acc", "0.9", "its samples")),
    "edited count": (metrics(documents=4000), ("acc", "4000 documents", "400")),
    "edited identity": (lambda r: r["identity"]["what"].update(seed=7), ("the key", "hash", "identity")),
    "edited cell": (lambda r: r["identity"]["what"].update(bits=8), ("bits is 2", "identity says 8")),
}


@pytest.mark.parametrize("forged", FORGED_RECORDS)
def test_a_forged_record_fails_for_the_right_reason(
    forged: str, run: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, facts = FORGED_RECORDS[forged]
    edit(run, change)
    found = failures(run, reference, capsys)
    assert all(line.startswith(HQQ_2) for line in found)
    assert any(all(fact in line for fact in facts) for line in found), found


@pytest.mark.parametrize("column", ["acc", "word_perplexity", "word_perplexity.weight"])
def test_a_missing_column_fails(column: str, run: Path, reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resample(run, lambda table: table.drop_columns([column]))
    found = failures(run, reference, capsys)
    assert any("lack the column" in line and column in line for line in found)


def test_documents_that_were_removed_fail(run: Path, reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both runs planned the same documents: this is not --limit."""
    resample(run, lambda table: table.filter(pa.compute.not_equal(table["doc_id"], 7)))
    assert any("399 in the run, 400 in the baseline" in line for line in failures(run, reference, capsys))


def test_other_right_answers_fail(run: Path, reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def moved(table: pa.Table) -> pa.Table:
        gold = [None if own is None else [(own[0] + 1) % 2] for own in table["gold"].to_pylist()]
        return table.set_column(table.column_names.index("gold"), "gold", pa.array(gold, pa.list_(pa.int32())))

    resample(run, moved)
    assert any("answers of 400 documents" in line for line in failures(run, reference, capsys))


def test_metrics_of_another_cell_beside_its_own_log_likelihoods_fail(
    run: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unquantized = pq.read_table(cell(run, "mini-softmax-none-16") / SAMPLES)

    def better(table: pa.Table) -> pa.Table:
        return table.set_column(table.column_names.index("acc"), "acc", unquantized["acc"])

    resample(run, better)
    assert any("acc does not follow from the log-likelihoods" in line for line in failures(run, reference, capsys))


def test_without_its_column_and_its_metric_a_hypothesis_does_not_vanish(
    run: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resample(run, lambda table: table.drop_columns(["acc"]))
    edit(run, without_acc)
    assert any("acc is in the baseline but not in the run" in line for line in failures(run, reference, capsys))


SETTINGS: Mapping[str, tuple[Edit, tuple[str, ...]]] = {
    "dtype": (lambda i: i["what"].update(dtype="bfloat16"), ("dtype", "bfloat16", "float32")),
    "device": (lambda i: i["what"].update(device="cuda"), ("device", "cuda", "cpu")),
    "seed": (lambda i: i["what"].update(seed=7), ("seed", "7")),
    "task": (lambda i: i["what"]["tasks"]["mini_piqa"].__setitem__(0, "0" * 64), ("mini_piqa", "documents changed")),
    "few-shot": (lambda i: i["what"]["tasks"]["mini_piqa"].__setitem__(1, 5), ("mini_piqa", "5 few-shot")),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_changed_setting_fails(setting: str, run: Path, reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, facts = SETTINGS[setting]
    rekey(run, change)
    (found,) = failures(run, reference, capsys)
    assert all(fact in found for fact in facts)


def report_of(run: Path, reference: Path, change: Edit) -> GateReport:
    for folder in list(run.glob("mini-*")):
        rekey(run, change, folder.name[: -len("-0123456789")])
    return check(run, reference)


FAILED_AUDITS: Mapping[str, tuple[Edit, str]] = {
    "untouched": (lambda audit: audit.update(untouched=["model.layers.0.mlp.up_proj"]), "was not quantized"),
    "not finite": (lambda audit: audit.update(not_finite=["lm_head.weight"]), "NaN or infinite"),
    "on meta": (lambda audit: audit.update(on_meta=["lm_head.weight"]), "meta device"),
    "another label": (lambda audit: audit.update(label="hqq-8-g64"), "audit of hqq-8-g64"),
    "cosine 0": (lambda audit: audit["layers"][0].update(cosine=0.0), "cosine is 0.00"),
}


@pytest.mark.parametrize("forged", FAILED_AUDITS)
def test_an_audit_that_proves_nothing_fails(
    forged: str, run: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, fact = FAILED_AUDITS[forged]
    edit(run, lambda record: change(record["audit"]))
    found = failures(run, reference, capsys)
    assert any("did not pass its audit" in line and fact in line for line in found)
    assert not check(run, reference, scores_only=True).passed


def test_a_quantized_cell_without_an_audit_fails(
    run: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(run, lambda record: record.update(audit=None))
    assert any("it has no audit" in line for line in failures(run, reference, capsys))


def measured(folder: Path, name: str, under: str) -> None:
    """One cell's scores and samples under another cell's name."""
    shutil.copy(cell(folder, name) / SAMPLES, cell(folder, under) / SAMPLES)
    source = json.loads((cell(folder, name) / RECORD).read_text())
    edit(folder, lambda record: record.update({k: source[k] for k in ("metrics", "samples_sha256")}), under)


@pytest.mark.parametrize(
    ("measured_cell", "label"),
    [("none-16", "gptq-2-g128-draw-1"), ("none-16", "hqq-8-g64"), ("hqq-8-g64", "hqq-2-g64"), ("none-16", "bnb-4-nf4")],
)
def test_scores_of_another_model_fail(
    measured_cell: str, label: str, run: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A harness that copies the model before it quantizes measures the unquantized one, and improves."""
    measured(run, f"mini-softmax-{measured_cell}", f"mini-softmax-{label}")
    (found,) = failures(run, reference, capsys)
    assert found.startswith(f"mini-softmax-{label}")
    assert f"those of mini-softmax-{measured_cell}" in found


def test_the_unquantized_model_of_the_baseline_fails_too(
    run: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of some of the cells, without the unquantized ones."""
    measured(run, "mini-softmax-none-16", "mini-softmax-gptq-2-g128-draw-1")
    plan = json.loads((run / "run.json").read_text())
    plan["resolved_recipe"]["gate"] = {"baseline_may_hold_more": True}
    plan["cells"] = [planned for planned in plan["cells"] if planned["cell"]["label"] == "gptq-2-g128"]
    (run / "run.json").write_text(json.dumps(plan))
    (found,) = failures(run, reference, capsys)
    assert "the baseline's mini-softmax-none-16" in found


def test_another_checkpoint_is_reported_first_and_judged_by_scores_alone(
    run: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(run, reference, lambda identity: identity["what"].update(checkpoint="0" * 64))
    assert report.passed
    (changed,) = report.changed
    assert "checkpoint" in changed
    edit(run, lambda record: record["audit"]["layers"][0].update(slope=1.1 * record["audit"]["layers"][0]["slope"]))
    assert main(["check", str(run), "--baseline", str(reference)]) == 0
    verdict, _, _, first, *_ = filter(None, capsys.readouterr().out.splitlines()[:6])
    assert verdict.startswith("PASS")
    assert "scores alone" in verdict
    assert first.startswith("Before you read the scores")


def test_other_code_and_packages_are_a_note(run: Path, reference: Path) -> None:
    report = report_of(run, reference, lambda identity: identity.update(code="0" * 64, packages={"torch": "9.9"}))
    assert report.passed
    assert not report.changed
    assert any("qbench" in note and "9.9" in note for note in report.notes)


def test_an_edited_score_is_in_no_table_and_no_plan(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = len(stored_records(run))
    edit(run, metrics(value=0.9))
    assert len(stored_records(run)) == before - 1
    assert main(["table", str(run), "--kind", "damage"]) == 0
    said = capsys.readouterr().out
    assert "altered" in said
    assert "is 0.9 in record.json; its samples" in said


def test_an_edited_baseline_is_refused(run: Path, reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(run, metrics(value=0.9))
    honest = shutil.copytree(reference, run.with_name("honest"))
    assert main(["check", str(honest), "--baseline", str(run)]) == 2
    assert "is 0.9 in record.json; its samples" in capsys.readouterr().err


def test_the_reference_passes_against_itself(run: Path, reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert failures(run, reference, capsys) == []
