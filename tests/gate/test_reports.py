"""What a check writes: terminal, Markdown, JUnit, annotations, JSON; and the command's exit codes."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from qbench.cli import main
from qbench.gate.render import annotations, to_junit, to_markdown, to_text
from qbench.gate.verdict import check
from qbench.records.schema import Cost, Failure
from qbench.records.store import read_results, write_record

from ..example_records import PROVENANCE, make_record
from .made_up import Population, make_audit, make_cells, write_cells

CELLS = make_cells(3)
POPULATION = Population(100)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A baseline, a run equal to it, and a run with every kind of failure and a warning."""
    root = tmp_path_factory.mktemp("reports")
    baseline, same, bad = root / "baseline", root / "same", root / "bad"
    samples = {cell: POPULATION.samples() for cell in CELLS}
    write_cells(baseline, samples)
    write_cells(same, samples)
    other = PROVENANCE.model_copy(update={"packages": {"torch": "2.14.0"}})
    cost = Cost(seconds={"evaluate": 6.0}, weight_bytes=2000)
    worse = {cell: POPULATION.samples(noise=0.02, loss=0.3) for cell in CELLS}
    write_cells(bad, worse, audit=make_audit(layers=27), provenance=other, cost=cost)
    failed = read_results(bad).current[2]
    reason = "It broke:\n<b>100%</b> | \x1b[31mred"
    write_record(failed.folder, make_record(CELLS[2], failure=Failure(kind="crashed", reason=reason)))
    return baseline, same, bad


def test_the_terminal_leads_with_the_verdict(folders: tuple[Path, Path, Path]) -> None:
    baseline, same, bad = folders
    text = to_text(check(same, baseline))
    assert text.startswith("PASS: none of 36 scores got worse")
    text = to_text(check(bad, baseline))
    report = check(bad, baseline)
    scores, pooled = len(report.worse) - 2, "the pooled loss of 2 cells is above its tolerance"
    expected = f"FAIL: {scores} of 24 scores got worse, {pooled}, 2 failures in the audit, 1 failure in the records"
    assert text.startswith(expected)
    for part in (
        "Failures in the audit",
        "Failures in the records",
        "Failures in the scores",
        "Documents that lost most",
        "packages.torch: 2.13.0 → 2.14.0",
        "Its weights take 2,000 bytes",
    ):
        assert part in text


def test_markdown_is_one_table_row_a_score(folders: tuple[Path, Path, Path]) -> None:
    baseline, _, bad = folders
    report = check(bad, baseline)
    text = to_markdown(report)
    assert text.startswith("## ❌ FAIL")
    rows = [line for line in text.splitlines() if line.startswith("| mini")]
    assert len(rows) == len(report.worse) + min(5, len(report.unclear))
    assert len({row.replace("\\|", "").count("|") for row in rows}) == 1
    assert "\\<b>100%\\</b> \\|" in text


def test_junit_has_a_case_a_score_and_a_finding(folders: tuple[Path, Path, Path]) -> None:
    baseline, same, bad = folders
    report = check(bad, baseline)
    suite = ElementTree.fromstring(to_junit(report).encode()).find("testsuite")
    assert suite is not None
    cases = suite.findall("testcase")
    assert len(cases) == int(suite.attrib["tests"]) == 24 + 2 + 3
    kinds = [failure.attrib["type"] for failure in suite.iter("failure")]
    assert len(kinds) == int(suite.attrib["failures"])
    assert {kind: kinds.count(kind) for kind in ("audit", "records")} == {"audit": 2, "records": 1}
    assert kinds.count("scores") == len(report.worse)
    assert 'failures="0"' in to_junit(check(same, baseline))


def test_annotations_are_one_line_each_and_no_more_than_github_shows(folders: tuple[Path, Path, Path]) -> None:
    baseline, same, bad = folders
    lines = list(annotations(check(bad, baseline)))
    errors = [line for line in lines if line.startswith("::error title=")]
    assert len(errors) == 10
    assert "more failures are in the report." in errors[-1]
    assert any("It broke%3A" in line or "It broke:%0A<b>100%25</b>" in line for line in lines)
    assert all("\n" not in line for line in lines)
    assert any(line.startswith("::warning title=mini-softmax") for line in lines)
    assert not list(annotations(check(same, baseline)))


def test_the_command_writes_all_of_them(
    folders: tuple[Path, Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    baseline, same, bad = folders
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    (tmp_path / "summary.md").write_text("from an earlier step\n")
    files = {name: tmp_path / f"gate.{name}" for name in ("junit", "markdown", "json")}
    arguments = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    assert main(["check", str(bad), "--baseline", str(baseline), *arguments]) == 1
    assert "::error title=" in capsys.readouterr().out
    assert (tmp_path / "summary.md").read_text() == "from an earlier step\n" + files["markdown"].read_text()
    content = json.loads(files["json"].read_text())
    assert content["passed"] is False
    assert {finding["found_by"] for finding in content["failures"]} == {"audit", "records"}
    worse = [score for score in content["scores"] if score["verdict"] == "worse"]
    assert worse
    for score in worse:
        assert score["found_by"] == "scores"
        assert score["adjusted_p"] <= 0.01
        assert score["interval"][0] < score["loss"] < score["interval"][1]
        if score["kind"] == "pooled":
            assert sum(score["in_tolerances"].values()) / 12 == pytest.approx(score["loss"])
        else:
            assert 1 <= len(score["most_changed"]) <= 10
    assert content["differences"][CELLS[0].name] == ["packages.torch: 2.13.0 → 2.14.0"]
    assert main(["check", str(same), "--baseline", str(baseline)]) == 0


def test_a_report_that_cannot_be_written_is_2(
    folders: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline, same, _ = folders
    assert main(["check", str(same), "--baseline", str(baseline), "--junit", str(tmp_path / "no" / "gate.xml")]) == 2
    assert "the report cannot be written (No such file or directory)" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["check", "a"], ["accept", "a", "--baseline", "b"], ["power"]])
def test_a_wrong_call_is_2_and_an_annotation_on_github(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"::error title=qbench {arguments[0]}::")
    assert not printed.out


def test_checking_imports_no_torch(folders: tuple[Path, Path, Path]) -> None:
    baseline, same, _ = folders
    code = (
        "import sys; from qbench.cli import main; "
        f"assert main(['check', {str(same)!r}, '--baseline', {str(baseline)!r}]) == 0; "
        "print([name for name in ('torch', 'transformers', 'lm_eval', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_on_github_a_check_that_cannot_be_made_is_an_annotation_and_a_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    junit = tmp_path / "gate.xml"
    junit.write_text("of an earlier check")
    gone = ["check", str(tmp_path / "gone"), "--baseline", str(tmp_path / "gone too"), "--junit", str(junit)]
    assert main(gone) == 2
    (error,) = ElementTree.parse(junit).iter("error")
    assert str(tmp_path / "gone") in error.attrib["message"]
    printed = capsys.readouterr()
    assert not printed.out  # programs read it: `--format csv > FILE`, `--json`
    (line,) = [line for line in printed.err.splitlines() if line.startswith("::error ")]
    assert str(tmp_path / "gone") in line
    assert str(tmp_path / "gone") in summary.read_text()


def test_on_github_a_recipe_that_is_wrong_is_an_annotation_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))  # a folder: cannot be written
    assert main(["run", str(tmp_path / "gone.yaml")]) == 2
    printed = capsys.readouterr()
    assert "gone.yaml" in printed.err.partition("::error ")[2]
    assert "summary cannot be written" in printed.err
