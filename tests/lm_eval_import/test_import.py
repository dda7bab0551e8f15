"""lm-eval's output as records: the same scores, and the same Δ, intervals and verdict as from our own records.

tests/lm_eval_import/output was written by lm-eval's command line (lm_eval_cli.py); results/mini by ours, of the same
models, by another scorer.
"""

import csv
import io
import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from qbench import cli
from qbench.gate.verdict import GateReport, check
from qbench.identity import Identity
from qbench.records.lm_eval_import.gold import Choices, right_choices
from qbench.records.lm_eval_import.store import import_lm_eval
from qbench.records.samples import AGGREGATIONS, WEIGHT, as_floats
from qbench.records.schema import MetricValue
from qbench.records.store import StoredRecord, read_results, write_record
from qbench.report.render import comparison, table

from .lm_eval_cli import DOCUMENTS, MINI, MODELS, OUTPUT, ROOT


def folders_of(output: Path) -> list[Path]:
    """The folders of the unquantized and the quantized model."""
    return [output / f"models__{model}" for model in MODELS]


BASELINE, RUN = folders_of(OUTPUT)


def results_files(folder: Path) -> list[Path]:
    """The oldest first: plain tasks, then a group and generated text."""
    return sorted(folder.glob("results_*.json"))


def own_folder(out: Path, labels: Sequence[str], documents: int = DOCUMENTS, as_label: str | None = None) -> Path:
    """Our own records of the mini softmax model, with the first documents of each task."""
    for stored in read_results(ROOT / "results/mini").current:
        cell = stored.record.cell
        if cell.attention == "softmax" and cell.label in labels:
            _write_part(out, stored, documents, as_label)
    return out


def _write_part(out: Path, stored: StoredRecord, documents: int, as_label: str | None) -> None:
    samples = pq.read_table(io.BytesIO(stored.samples_content()))
    samples = samples.filter(pc.less(samples["doc_id"], documents)).drop_columns(["kl", f"kl{WEIGHT}"])
    metrics = [_again(m, samples) for m in stored.record.metrics if m.metric != "kl"]
    changes: dict[str, Any] = {"metrics": tuple(metrics), "audit": None}
    if as_label:  # as the gate sees it: another model under the same name
        cell = stored.record.cell.model_copy(update={"method": "none", "bits": 16, "label": as_label})
        what = stored.record.identity.what.model_copy(update={"method": "none", "bits": 16})
        identity = Identity(what=what, code="", packages={})
        changes |= {"cell": cell, "identity": identity, "key": identity.key}
    content = io.BytesIO()
    pq.write_table(samples, content, store_schema=False)
    record = stored.record.model_copy(update=changes)
    write_record(out / record.cell.name, record, content.getvalue())


def _again(metric: MetricValue, samples: Any) -> MetricValue:
    own = samples.filter(pc.equal(samples["task"], metric.task))
    values = as_floats(own[metric.metric])
    weighted = metric.metric + WEIGHT in own.column_names
    weights = as_floats(own[metric.metric + WEIGHT]) if weighted else np.ones(len(values))
    value = AGGREGATIONS[metric.aggregation].value(values, weights)
    return metric.model_copy(update={"value": value, "stderr": None, "documents": len(values)})


def imported_by_the_command(output: Path, out: Path) -> Path:
    """The output of both models as records."""
    cells = ["--cell", "family=mini", "--cell", "family=mini,attention=softmax,method=hqq,bits=3,label=hqq-3-g64"]
    assert cli.main(["import", "lm-eval", *map(str, folders_of(output)), "--out", str(out), *cells]) == 0
    return out


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The committed output as records."""
    return imported_by_the_command(OUTPUT, tmp_path_factory.mktemp("imported") / "records")


def scores_of_lm_eval(folder: Path) -> dict[tuple[str, str], tuple[float, float | None]]:
    """By task and metric: the value and its standard error in lm-eval's results files, the newest of each."""
    found: dict[tuple[str, str], tuple[float, float | None]] = {}
    for file in results_files(folder):
        for task, scores in json.loads(file.read_text())["results"].items():
            for key, value in scores.items():
                metric, _, filter_name = key.partition(",")
                if filter_name and not metric.endswith("_stderr"):
                    error = scores[f"{metric}_stderr,{filter_name}"]
                    found[task, metric if filter_name == "none" else key] = value, None if error == "N/A" else error
    return found


def assert_scores_are_those_of_lm_eval(imported: Path, output: Path) -> None:
    stored = {own.record.cell.label: own.record for own in read_results(imported).current}
    for label, folder in zip(("none-16", "hqq-3-g64"), folders_of(output), strict=True):
        ours = {(m.task, m.metric): (m.value, m.stderr) for m in stored[label].metrics}
        assert ours == scores_of_lm_eval(folder)
        assert {task for task, _ in ours} == {*MINI, "mini_choices", "mini_generate"}


def test_scores_are_those_of_lm_eval_to_the_last_digit(imported: Path) -> None:
    assert_scores_are_those_of_lm_eval(imported, OUTPUT)


def test_a_quantized_model_may_have_fewer_tasks(tmp_path: Path) -> None:
    """Each model is a call of lm-eval of its own, so this is no mistake."""
    shutil.copytree(BASELINE, tmp_path / "output" / BASELINE.name)
    plain, _ = results_files(RUN)
    (tmp_path / "output" / RUN.name).mkdir()
    for file in RUN.glob(f"*{plain.stem.partition('_')[2]}*"):
        shutil.copy(file, tmp_path / "output" / RUN.name)
    folder = imported_by_the_command(tmp_path / "output", tmp_path / "records")
    tasks = {s.record.cell.label: {m.task for m in s.record.metrics} for s in read_results(folder).current}
    assert tasks["hqq-3-g64"] < tasks["none-16"]
    assert cli.main(["audit", str(folder)]) == 0


def damages(folder: Path) -> dict[tuple[str, str], list[float]]:
    """What quantization cost and its interval, by task and metric, as `qbench table` gives them to programs."""
    rows = csv.DictReader(io.StringIO(table(folder, "csv", "damage")))
    names = ("softmax_damage", "softmax_low", "softmax_high")
    return {(row["task"], row["metric"]): [float(row[name]) for name in names] for row in rows if row[names[1]]}


def assert_damages_are_those_of_our_own_records(imported: Path, tmp_path: Path, documents: int) -> None:
    ours, theirs = damages(own_folder(tmp_path / "own", ["none-16", "hqq-3-g64"], documents)), damages(imported)
    assert {task for task, _ in ours} == set(MINI)
    for key, expected in ours.items():
        assert theirs[key] == pytest.approx(expected, rel=1e-5, abs=1e-5), key


def test_damages_and_intervals_are_those_of_our_own_records(imported: Path, tmp_path: Path) -> None:
    assert_damages_are_those_of_our_own_records(imported, tmp_path, DOCUMENTS)


def verdict(report: GateReport) -> dict[tuple[str, str], tuple[Any, ...]]:
    tested = {(outcome.hypothesis.task, outcome.hypothesis.metric): outcome for outcome in report.tested}
    return {key: (own.verdict, own.hypothesis.loss, own.p, own.adjusted_p) for key, own in tested.items()}


def assert_the_verdict_is_that_of_our_own_records(output: Path, tmp_path: Path, documents: int) -> None:
    run = own_folder(tmp_path / "run", ["hqq-3-g64"], documents, as_label="none-16")
    own = check(run, own_folder(tmp_path / "base", ["none-16"], documents))
    original, quantized = folders_of(output)
    theirs = check(results_files(quantized)[0], results_files(original)[0])
    assert [own.passed, theirs.passed] == [False, False]
    ours, found = verdict(own), verdict(theirs)
    assert len(ours) == len(found) == 13
    for key, (said, loss, p, adjusted) in ours.items():
        assert found[key][0] == said, key
        assert found[key][1:] == pytest.approx((loss, p, adjusted), rel=1e-3, abs=1e-4), key


def test_the_verdict_is_that_of_our_own_records(tmp_path: Path) -> None:
    assert_the_verdict_is_that_of_our_own_records(OUTPUT, tmp_path, DOCUMENTS)


def test_two_folders_are_checked_in_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"gate.{name}" for name in ("junit", "markdown", "json")}
    options = [part for name, file in files.items() for part in (f"--{name}", str(file))]
    assert cli.main(["check", str(RUN), str(BASELINE), *options]) == 1
    assert "mini_wikitext" in capsys.readouterr().out
    assert "<testsuite" in files["junit"].read_text()
    assert "FAIL" in files["markdown"].read_text()
    assert json.loads(files["json"].read_text())["passed"] is False
    assert cli.main(["check", str(BASELINE), str(shutil.copytree(BASELINE, tmp_path / "same"))]) == 0


def test_a_baseline_may_be_imported_and_the_run_not(tmp_path: Path) -> None:
    cell = ["--cell", "family=8B,method=awq,bits=4"]
    assert cli.main(["import", "lm-eval", str(BASELINE), "--out", str(tmp_path / "base"), *cell]) == 0
    report = check(RUN, tmp_path / "base")
    assert not report.passed
    assert {outcome.hypothesis.cell.name for outcome in report.tested} == {"8B-softmax-awq-4"}
    assert verdict(report) == verdict(check(RUN, BASELINE))


def test_the_newest_results_count_and_it_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "records"
    assert cli.main(["import", "lm-eval", str(BASELINE), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "mini_piqa" in said
    assert results_files(BASELINE)[1].name in said
    (stored,) = read_results(out).current
    assert stored.record.cell.name == "models/softmax"
    assert stored.record.imported
    assert stored.record.imported.tasks["mini_piqa"].file.endswith(
        results_files(BASELINE)[1].stem.split("_")[1] + ".jsonl"
    )


def test_tolerances_and_alpha_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["check", str(RUN), str(BASELINE)]
    assert cli.main([*line, "--tolerances", "accuracy=90,perplexity=900%,gold_logprob=9,pooled=99"]) == 0
    assert cli.main([*line, "--alpha", "1e-12"]) == 0
    capsys.readouterr()
    for wrong, name in ({"--tolerances": "acuracy=1"}, "acuracy"), ({"--alpha": "2"}, "alpha"):
        assert cli.main([*line, *(part for pair in wrong.items() for part in pair)]) == 2
        assert name in capsys.readouterr().err


def test_all_commands_take_imported_records(imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in (
        ["table", str(imported), "--kind", "summary"],
        ["table", str(imported), "--kind", "baseline", "--format", "latex"],
        ["table", str(imported), "--format", "html", "--out", str(tmp_path / "page.html")],
        ["audit", str(imported)],
        ["power", str(imported)],
        ["accept", str(imported), "--baseline", str(tmp_path / "base"), "--reason", "the first"],
        ["check", str(imported), "--baseline", str(tmp_path / "base")],
        ["table", str(imported), "--format", "csv", "--out", str(tmp_path / "published.csv")],
        ["compare", str(imported), "--with", str(tmp_path / "published.csv")],
    ):
        assert cli.main(line) == 0, line
    assert "not audited" in capsys.readouterr().out
    assert "not audited" in (tmp_path / "page.html").read_text().lower()
    assert "mini-softmax-hqq-3-g64" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("kind", ["summary", "damage", "delta"])
@pytest.mark.parametrize("format", ["md", "latex"])
def test_that_nothing_was_audited_is_one_note(imported: Path, kind: str, format: str) -> None:
    shown = table(imported, format, kind)
    assert [shown.count(word) for word in ("audited", "proves", "no audit")] == [1, 1, 0]
    assert "8.33" in shown or kind == "delta"
    note = next(line for line in shown.splitlines() if "audited" in line)
    assert "hqq-3-g64" in note


def test_that_nothing_was_audited_is_a_note_of_a_comparison(imported: Path, tmp_path: Path) -> None:
    (tmp_path / "published.csv").write_text(table(imported, "csv"))
    shown = comparison(imported, tmp_path / "published.csv")
    assert [shown.count(word) for word in ("audited", "proves", "no audit")] == [1, 1, 0]


@pytest.mark.parametrize("command", ["table {}", "audit {}", "power {}", "accept {} --baseline {}-2 --reason x"])
def test_commands_that_need_records_name_import(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([word.replace("{}", str(OUTPUT)) for word in command.split()]) == 2
    message = capsys.readouterr().err
    assert f"qbench import lm-eval {shlex.quote(str(OUTPUT))}" in message
    assert "record.json" not in message


def test_a_check_of_a_folder_without_results_names_files_of_lm_eval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    assert cli.main(["check", str(tmp_path / "run"), str(tmp_path / "run")]) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in (str(tmp_path / "run"), "results_<date>.json"))
    assert "record.json" not in message


def test_a_standard_error_that_is_not_that_of_the_documents_names_no_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(RUN, tmp_path / "run")
    file = results_files(run)[0]
    content = json.loads(file.read_text())
    content["results"]["mini_arc_easy"]["acc_stderr,none"] *= 2
    file.write_text(json.dumps(content))
    assert cli.main(["check", str(run), str(BASELINE)]) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in ("mini_arc_easy acc", "standard error", str(run)))
    assert "record.json" not in message


def test_a_quantized_model_that_is_the_unquantized_one_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(BASELINE, tmp_path / "copy")
    cells = ["--cell", "family=m", "--cell", "family=m,method=awq,bits=4"]
    out = str(tmp_path / "records")
    assert cli.main(["import", "lm-eval", str(BASELINE), str(copy), "--out", out, *cells]) == 0
    first, second = capsys.readouterr().out.splitlines()[-3:-1]
    assert all(fact in first for fact in ("m-softmax-none-16", str(BASELINE)))
    assert all(fact in second for fact in ("m-softmax-awq-4", str(copy)))
    assert cli.main(["audit", out]) == 1
    assert "m-softmax-awq-4" in capsys.readouterr().out


def test_cells_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = tmp_path / "cells.yaml"
    cells.write_text("models/softmax-hqq-3: {family: 8B, method: hqq, bits: 3}\nmodels/softmax: {family: 8B}\n")
    assert cli.main(["import", "lm-eval", str(OUTPUT), "--out", str(tmp_path / "out"), "--cells", str(cells)]) == 0
    names = {stored.record.cell.name for stored in read_results(tmp_path / "out").current}
    assert names == {"8B-softmax-none-16", "8B-softmax-hqq-3"}
    cells.write_text("models/softmx: {family: 8B}\n")
    assert cli.main(["import", "lm-eval", str(OUTPUT), "--out", str(tmp_path / "out"), "--cells", str(cells)]) == 2
    assert "models/softmax?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "accuracy", "gold"),
    [
        ("0", 1.0, [0]),  # an index
        ("0", 0.0, [1]),  # the text of the second choice: the first is the likeliest, and was wrong
        ("[0, 1]", 1.0, [0, 1]),
        ("yes", 1.0, [0]),  # neither: one of two choices, of which the likelier was right
        ("yes", None, None),
    ],
)
def test_a_target_is_read_in_the_way_that_gives_the_accuracy(
    target: str, accuracy: float | None, gold: list[int] | None
) -> None:
    choices = Choices(texts=["1", "0"], loglikelihoods=[-1.0, -5.0], target=target, accuracy=accuracy)
    assert right_choices([choices]) == [gold]


def test_metrics_that_are_no_means_are_shown_and_not_tested(tmp_path: Path) -> None:
    """F1's pairs are labels and not a value with a divisor, BLEU's are texts, and `own` has no known direction."""
    folders = [shutil.copytree(BASELINE, tmp_path / name) for name in ("one", "two")]
    for folder in folders:
        file = results_files(folder)[0]
        content = json.loads(file.read_text())
        further = {"f1,none": 0.25, "bleu,none": 12.5, "own,none": 7.0}
        content["results"]["mini_arc_easy"] |= further
        content["configs"]["mini_arc_easy"]["metric_list"].append({"metric": "f1", "aggregation": "f1"})
        file.write_text(json.dumps(content))
        (samples,) = folder.glob("samples_mini_arc_easy_*")
        lines = [
            json.loads(line) | {"f1": [1, 0], "bleu": ["a", "b"], "own": 7} for line in samples.read_text().splitlines()
        ]
        samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = check(*folders)
    assert report.passed
    assert {"acc", "acc_norm", "gold_logprob"} == {
        o.hypothesis.metric for o in report.tested if o.hypothesis.task == "mini_arc_easy"
    }
    (stored,), _ = import_lm_eval([folders[0]], tmp_path / "out")
    shown = {m.metric: (m.value, m.aggregation) for m in stored.record.metrics if m.task == "mini_arc_easy"}
    assert shown["f1"] == (0.25, "f1")
    assert shown["bleu"] == (12.5, "unknown")
    assert shown["own"] == (7.0, "mean")


def test_other_layouts(tmp_path: Path) -> None:
    """A file as --output_path; the fields of older releases only; fields that nobody knows."""
    new = import_lm_eval([results_files(BASELINE)[1]], tmp_path / "new")[0][0]
    old = tmp_path / "old"
    old.mkdir()
    content = json.loads(results_files(BASELINE)[1].read_text())
    for field in ("model_name", "n-samples", "higher_is_better", "git_hash", "date", "task_hashes"):
        del content[field]
    for scores in content["results"].values():
        del scores["sample_len"], scores["name"]
    content["config"]["model_args"] = "pretrained=models/softmax,dtype=float32,softmax_dtype=float32"
    date = results_files(BASELINE)[1].stem.removeprefix("results")
    (old / f"answers{date}.json").write_text(json.dumps(content | {"unheard_of": [1]}))
    for file in BASELINE.glob(f"samples_*{date}.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            del line["filter"], line["metrics"]
            line["unheard_of"] = {"a": None}
            line["arguments"] = [list(request.values()) for request in line["arguments"].values()]
        (old / file.name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = import_lm_eval([old / "answers.json"], tmp_path / "read")[0][0]
    assert read.record.cell == new.record.cell
    assert [(m.task, m.metric, m.value) for m in read.record.metrics] == [
        (m.task, m.metric, m.value) for m in new.record.metrics
    ]
    assert read.samples_content() == new.samples_content()
