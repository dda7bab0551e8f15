"""Output of other releases, tasks and models than those that tests/lm_eval_import/output is from, written by hand."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from qbench import cli
from qbench.gate.verdict import check
from qbench.records.lm_eval_import.store import import_lm_eval

DATE = "2025-03-01T10-11-12.123456"
SETTINGS = {"until": ["\ndef"]}


def written(
    folder: Path,
    values: Sequence[dict[str, Any]],
    scores: dict[str, Any],
    metric_list: Sequence[dict[str, Any]] = (),
    date: str = DATE,
    **content: Any,
) -> Path:
    """The output of one task: a generated text per document, with these metrics."""
    folder.mkdir(parents=True)
    results = {"results": {"task": {"alias": "task", **scores}}, "configs": {"task": {"metric_list": [*metric_list]}}}
    (folder / f"results_{date}.json").write_text(json.dumps(results | {"model_name": "org/model"} | content))
    (folder / f"samples_task_{date}.jsonl").write_text(
        "".join(f"{json.dumps(_line(i, v))}\n" for i, v in enumerate(values))
    )
    return folder


def _line(i: int, values: dict[str, Any]) -> dict[str, Any]:
    hashes = {
        name: hashlib.sha256(f"{name} {i}".encode()).hexdigest() for name in ("doc_hash", "prompt_hash", "target_hash")
    }
    arguments = {"gen_args_0": {"arg_0": f"prompt {i}", "arg_1": SETTINGS}}
    return {
        "doc_id": i,
        "target": "t",
        "arguments": arguments,
        "resps": [["text"]],
        "filter": "none",
        **hashes,
        **values,
    }


def scores_of(folder: Path, out: Path) -> dict[str, tuple[float, str]]:
    (stored,), _ = import_lm_eval([folder], out)
    return {m.metric: (m.value, m.aggregation) for m in stored.record.metrics}


def compared(folder: Path, other: Path) -> set[str]:
    """The metrics that the gate compares; `pooled` is of all of them."""
    return {own.hypothesis.metric for own in check(folder, other).tested} - {"pooled"}


def test_pass_at_k_is_tested_although_lm_eval_lists_only_the_function(tmp_path: Path) -> None:
    listed = [{"metric": "def pass_at_k(references, predictions, k): ...", "aggregation": "mean"}]
    values = [{"pass@1": 0.5, "pass@10": 1.0}, {"pass@1": 0.0, "pass@10": 1.0}]
    scores = {"pass@1,none": 0.25, "pass@10,none": 1.0}
    folders = [written(tmp_path / name, values, scores, listed) for name in ("run", "base")]
    assert compared(*folders) == {"pass@1", "pass@10"}


def test_a_metric_with_a_function_of_its_own_is_shown(tmp_path: Path) -> None:
    """IFEval's lists, and NaN of a function that leaves it out; lm-eval writes the function's code."""
    listed = [{"metric": name, "aggregation": "def own(items):\n    ..."} for name in ("inst", "bias")]
    values: list[dict[str, Any]] = [{"inst": [True, False], "bias": float("nan")}, {"inst": [True], "bias": 0.5}]
    folder = written(tmp_path / "run", values, {"inst,none": 2 / 3, "bias,none": 0.5}, listed)
    assert scores_of(folder, tmp_path / "out") == {"inst": (2 / 3, "unknown"), "bias": (0.5, "unknown")}


def test_nanmean_is_tested_if_all_documents_have_a_value(tmp_path: Path) -> None:
    listed = [{"metric": name, "aggregation": "nanmean", "higher_is_better": True} for name in ("all", "some")]
    values = [{"all": 1.0, "some": float("nan")}, {"all": 0.0, "some": 0.25}]
    folders = [
        written(tmp_path / name, values, {"all,none": 0.5, "some,none": 0.25}, listed) for name in ("run", "base")
    ]
    assert compared(*folders) == {"all"}
    assert scores_of(folders[0], tmp_path / "out")["some"] == (0.25, "nanmean")


def test_numbers_without_a_filter_are_no_scores(tmp_path: Path) -> None:
    scores = {"acc,none": 1.0, "acc_stderr,none": None, "seconds": 3.5, "samples": 2, "other,none": "N/A"}
    folder = written(tmp_path / "run", [{"acc": 1.0}, {"acc": 1.0}], scores)
    assert scores_of(folder, tmp_path / "out") == {"acc": (1.0, "mean")}


def test_a_date_with_colons(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", [{"acc": 1.0}], {"acc,none": 1.0}, date=DATE.replace("-11-12", ":11:12"))
    assert scores_of(folder, tmp_path / "out") == {"acc": (1.0, "mean")}


def test_images_do_not_count_as_settings(tmp_path: Path) -> None:
    """lm-eval writes an image's address in memory, which differs each time."""
    folders = [written(tmp_path / name, [{"acc": 1.0}], {"acc,none": 1.0}) for name in ("run", "base")]
    for folder in folders:
        file = folder / f"samples_task_{DATE}.jsonl"
        line = json.loads(file.read_text())
        line["arguments"]["gen_args_0"]["arg_2"] = {"visual": [f"<image at {folder.name}>"]}
        file.write_text(json.dumps(line) + "\n")
    assert compared(*folders) == {"acc"}


def test_documents_chosen_with_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """lm-eval 0.4.9 counts all documents then. A truncated file is still found."""
    counts = {"n-samples": {"task": {"original": 9, "effective": 9}}}
    folder = written(tmp_path / "run", [{"acc": 1.0}] * 3, {"acc,none": 1.0}, **counts)
    assert cli.main(["import", "lm-eval", str(folder), "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in ("samples_task_", "3 documents", "9"))
    file = folder / f"samples_task_{DATE}.jsonl"
    file.write_text(file.read_text().replace('"doc_id": 2', '"doc_id": 7'))
    assert scores_of(folder, tmp_path / "out") == {"acc": (1.0, "mean")}


def test_a_page_with_a_pair_as_its_response(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", [{"word_perplexity": [-6.0, 3]}], {"word_perplexity,none": 7.38905609893065})
    file = folder / f"samples_task_{DATE}.jsonl"
    line = json.loads(file.read_text())
    line |= {"arguments": [["page"]], "resps": [[["-6.0", "False"]]]}
    file.write_text(json.dumps(line) + "\n")
    assert set(scores_of(folder, tmp_path / "out")) == {"word_perplexity"}
