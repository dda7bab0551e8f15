"""Output of lm-eval that cannot be imported or compared: the sentence names file, line and field, the exit code is 2,
and nothing is written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qbench import cli

from .lm_eval_cli import OUTPUT

BASELINE = OUTPUT / "models__softmax"
Lines = list[dict[str, Any]]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A copy of one model's output: its first results file, with plain tasks."""
    folder = tmp_path / "output"
    folder.mkdir()
    date = min(BASELINE.glob("results_*.json")).stem.removeprefix("results")
    for file in BASELINE.glob(f"*{date}*"):
        shutil.copy(file, folder)
    return folder


def samples_of(folder: Path, task: str) -> Path:
    (file,) = folder.glob(f"samples_{task}_*.jsonl")
    return file


def change(folder: Path, task: str, how: Callable[[Lines], Any]) -> None:
    """Change the lines of a samples file."""
    file = samples_of(folder, task)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    how(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def change_results(folder: Path, how: Callable[[dict[str, Any]], Any]) -> None:
    (file,) = folder.glob("results_*.json")
    content = json.loads(file.read_text())
    how(content)
    file.write_text(json.dumps(content))


def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The error of an import, which writes nothing."""
    out = folder.parent / "records"
    assert cli.main(["import", "lm-eval", str(folder), "--out", str(out)]) == 2
    assert not out.exists()
    return capsys.readouterr().err


def test_the_copy_is_right_as_it_is(output: Path, tmp_path: Path) -> None:
    assert cli.main(["import", "lm-eval", str(output), "--out", str(tmp_path / "out")]) == 0


def test_results_without_samples_name_the_flag(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples_of(output, "mini_sciq").unlink()
    message = refused(output, capsys)
    assert "--log_samples" in message
    assert "mini_sciq" in message
    assert "results_" in message


def test_a_line_that_is_cut_off(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = samples_of(output, "mini_piqa")
    file.write_bytes(file.read_bytes()[:-40])
    assert f"{file}, line 24" in refused(output, capsys)


def test_lines_that_are_missing(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(output, "mini_piqa", lambda lines: lines.pop())
    message = refused(output, capsys)
    assert str(samples_of(output, "mini_piqa")) in message
    assert "23" in message
    assert "24" in message


LINES: dict[str, tuple[str, Callable[[Lines], Any], str, list[str]]] = {
    "a metric is NaN": ("mini_arc_easy", lambda lines: lines[4].update(acc=float("nan")), "line 5", ["acc", "nan"]),
    "a log-likelihood is NaN": (
        "mini_lambada",
        lambda lines: lines[1].update(resps=[[["nan", "False"]]]),
        "line 2",
        ["resps", "nan"],
    ),
    "a document twice": ("mini_sciq", lambda lines: lines.insert(7, lines[2]), "line 8", ["document 2", "line 3"]),
    "no doc_hash": ("mini_sciq", lambda lines: lines[0].pop("doc_hash"), "line 1", ["'doc_hash'"]),
    "no doc_id": ("mini_sciq", lambda lines: lines[3].pop("doc_id"), "line 4", ["'doc_id'"]),
    "no arguments": ("mini_sciq", lambda lines: lines[3].pop("arguments"), "line 4", ["'arguments'"]),
    "no resps": ("mini_sciq", lambda lines: lines[3].pop("resps"), "line 4", ["resps"]),
    "a request is empty": (
        "mini_sciq",
        lambda lines: lines[0]["arguments"].update(gen_args_1={}),
        "line 1",
        ["arguments"],
    ),
    "a log-likelihood is huge": (
        "mini_wikitext",
        lambda lines: lines[0].update(resps=[[10**400]]),
        "line 1",
        ["resps"],
    ),
    "doc_id is text": ("mini_sciq", lambda lines: lines[0].update(doc_id="a"), "line 1", ["doc_id", "'a'"]),
    "doc_id is too large": ("mini_sciq", lambda lines: lines[0].update(doc_id=2**40), "line 1", ["doc_id"]),
    "a divisor is 0": (
        "mini_wikitext",
        lambda lines: lines[1].update(word_perplexity=[-3.0, 0]),
        "line 2",
        ["word_perplexity"],
    ),
    "another score": ("mini_sciq", lambda lines: lines[0].update(acc=1 - lines[0]["acc"]), "", ["mini_sciq", "acc"]),
    "no score": ("mini_sciq", lambda lines: [line.pop("acc") for line in lines], "", ["mini_sciq", "'acc'"]),
}


@pytest.mark.parametrize("case", LINES)
def test_a_line_that_is_wrong(case: str, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task, how, line, words = LINES[case]
    change(output, task, how)
    message = refused(output, capsys)
    assert str(samples_of(output, task)) in message
    assert all(word in message for word in [line, *words])


RESULTS: dict[str, tuple[Callable[[dict[str, Any]], Any], list[str]]] = {
    "no results": (lambda content: content.pop("results"), ["'results'"]),
    "results is a list": (lambda content: content.update(results=[]), ["results", "[]"]),
    "a score is NaN": (
        lambda c: c["results"]["mini_sciq"].update({"acc,none": float("nan")}),
        ["mini_sciq.acc", "nan"],
    ),
    "a score is too large": (lambda c: c["results"]["mini_sciq"].update({"new,none": 1e308}), ["mini_sciq.new"]),
    "a metric with a field's name": (lambda c: c["results"]["mini_sciq"].update({"gold,none": 1.0}), ["gold"]),
    "no scores": (
        lambda content: content.update(results={"t": {"bypass,none": 999, "alias": "t"}}),
        ["--predict_only"],
    ),
}


@pytest.mark.parametrize("case", RESULTS)
def test_a_results_file_that_is_wrong(case: str, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how, words = RESULTS[case]
    change_results(output, how)
    message = refused(output, capsys)
    assert all(word in message for word in [str(next(output.glob("results_*.json"))), *words])


def test_a_document_may_have_nan_in_a_field_that_is_not_a_score(output: Path, tmp_path: Path) -> None:
    change(output, "mini_sciq", lambda lines: lines[0]["doc"].update(hint=float("nan")))
    assert cli.main(["import", "lm-eval", str(output), "--out", str(tmp_path / "out")]) == 0


def test_a_folder_without_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(tmp_path, capsys)
    assert "results_" in message
    assert "--output_path" in message


@pytest.mark.parametrize("exists", [True, False])
def test_a_baseline_that_is_not_there(
    exists: bool, output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    if exists:
        other.mkdir()
    assert cli.main(["check", str(output), str(other)]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in (str(other), "lm-eval", "--output_path"))


def test_folders_with_other_models(output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(output, tmp_path / "two/again")
    (file,) = (tmp_path / "two/again").glob("results_*.json")
    file.write_text(file.read_text().replace("models/softmax", "models/another"))
    shutil.copytree(output, tmp_path / "two/first")
    assert cli.main(["check", str(OUTPUT), str(tmp_path / "two")]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in ("models/another", "models/softmax-hqq-3"))


def test_two_model_args_under_one_name(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model loaded in 4 bits has the name of the model."""
    for file in list(output.iterdir()):
        shutil.copy(file, output / file.name.replace("_2026", "_2027"))
    new = max(output.glob("results_*.json"))
    content = json.loads(new.read_text())
    content["config"]["model_args"]["load_in_4bit"] = True
    del content["results"]["mini_sciq"]
    new.write_text(json.dumps(content))
    message = refused(output, capsys)
    assert str(new) in message
    assert "load_in_4bit=True" in message


# --- two runs that did not ask the same


def as_asked(name: str) -> Callable[[Lines], None]:
    """A change that another prompt, target or document makes to line 3."""

    def how(lines: Lines) -> None:
        lines[2][name] = "0" * 64

    return how


OTHER_QUESTIONS: dict[str, tuple[str, Callable[[Path], Any], list[str]]] = {
    "other documents": ("mini_sciq", lambda f: change(f, "mini_sciq", as_asked("doc_hash")), ["line 3", "documents"]),
    "other prompts": ("mini_sciq", lambda f: change(f, "mini_sciq", as_asked("prompt_hash")), ["line 3", "prompts"]),
    "other targets": ("mini_sciq", lambda f: change(f, "mini_sciq", as_asked("target_hash")), ["line 3", "targets"]),
    "other few-shot": (
        "mini_piqa",
        lambda f: change_results(f, lambda content: content["n-shot"].update(mini_piqa=5)),
        ["few-shot", "5", "0"],
    ),
    "other version": (
        "mini_piqa",
        lambda f: change_results(f, lambda content: content["versions"].update(mini_piqa=2.5)),
        ["version", "2.5", "1.0"],
    ),
}


@pytest.mark.parametrize("imported", [False, True], ids=["straight", "imported first"])
@pytest.mark.parametrize("case", OTHER_QUESTIONS)
def test_runs_that_did_not_ask_the_same(
    case: str, imported: bool, output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, how, words = OTHER_QUESTIONS[case]
    folders = [output, shutil.copytree(output, tmp_path / "baseline")]
    how(output)
    files = [str(samples_of(folder, task)) for folder in folders]
    if imported:
        for n, folder in enumerate(folders):
            assert cli.main(["import", "lm-eval", str(folder), "--out", str(tmp_path / f"records-{n}")]) == 0
        folders = [tmp_path / f"records-{n}" for n in range(2)]
    report = tmp_path / "gate.xml"
    assert cli.main(["check", *map(str, folders), "--junit", str(report)]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in [task, *files, *words])
    assert 'errors="1"' in report.read_text()
    assert 'failures="0"' in report.read_text()


def test_a_run_with_a_limit(output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = shutil.copytree(output, tmp_path / "baseline")

    def shortened(content: dict[str, Any]) -> None:
        content["results"] = {"mini_lambada": content["results"]["mini_lambada"]}
        lines = [json.loads(line) for line in samples_of(output, "mini_lambada").read_text().splitlines()]
        content["results"]["mini_lambada"] = {"acc,none": sum(line["acc"] for line in lines[:12]) / 12}

    change_results(output, shortened)
    change_results(whole, lambda content: content.update(results={"mini_lambada": {"acc,none": _mean(whole)}}))
    for folder in (output, whole):
        change_results(folder, lambda content: content.pop("n-samples"))
    change(output, "mini_lambada", lambda lines: lines.__delitem__(slice(12, None)))
    assert cli.main(["check", str(output), str(whole)]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in ("--limit", "12", "24", "line 13"))


def _mean(folder: Path) -> float:
    lines = [json.loads(line) for line in samples_of(folder, "mini_lambada").read_text().splitlines()]
    return sum(line["acc"] for line in lines) / len(lines)


def test_lm_eval_and_our_own_records_are_not_mixed(
    output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from .test_import import own_folder

    assert cli.main(["check", str(output), str(own_folder(tmp_path / "own", ["none-16"]))]) == 2
    assert "lm-eval" in capsys.readouterr().err


def test_a_folder_of_a_run_is_not_written_to(output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "run.json").write_text("{}")
    assert cli.main(["import", "lm-eval", str(output), "--out", str(out)]) == 2
    assert "run.json" in capsys.readouterr().err
    assert [file.name for file in out.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("famly=8B", ["famly", "family"]),
        ("family", ["family"]),
        ("method=awq", ["bits"]),
        ("method=awq,bits=four", ["bits", "four"]),
        ("method=awq,bits=4,label=gptq-4", ["gptq-4", "awq-4"]),
    ],
)
def test_a_wrong_cell(
    cell: str, words: list[str], output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["import", "lm-eval", str(output), "--out", str(tmp_path / "out"), "--cell", cell]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words)
    assert not (tmp_path / "out").exists()
