"""Wrong input gives an error message and no verdict, never a pass."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from qbench.cli import main
from qbench.errors import InputError
from qbench.gate.settings import GateSettings
from qbench.gate.verdict import check
from qbench.records.schema import CellRef
from qbench.records.store import read_results, write_record

from ..example_records import audit_of, cell_ref, make_record, make_samples, write_run
from .made_up import write_cells

SOFTMAX, SOFTPICK = cell_ref("softmax"), cell_ref("softpick")
DOCUMENTS = 12


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    return write_run(tmp_path / "baseline", {cell: make_samples(DOCUMENTS) for cell in (SOFTMAX, SOFTPICK)})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", {cell: make_samples(DOCUMENTS) for cell in (SOFTMAX, SOFTPICK)})


def refused(run: Path, baseline: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The command's error message."""
    assert main(["check", str(run), "--baseline", str(baseline)]) == 2
    said = capsys.readouterr()
    assert not said.out
    return said.err


def empty(folder: Path) -> None:
    for file in sorted(folder.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()


def no_records(folder: Path) -> None:
    for file in folder.glob("*/record.json"):
        file.unlink()


def one_record_less(folder: Path) -> None:
    sorted(folder.glob("*/record.json"))[0].unlink()


def another_schema(folder: Path) -> None:
    file = next(folder.glob("*/record.json"))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema_version": 1}))


def a_failed_cell(folder: Path) -> None:
    stored = read_results(folder).current[0]
    write_record(stored.folder, make_record(stored.record.cell))


def other_samples(folder: Path) -> None:
    next(folder.glob("*/samples.parquet")).write_bytes(b"PAR1")


def no_samples(folder: Path) -> None:
    stored = read_results(folder).current[0]
    write_record(stored.folder, stored.record)


BAD_BASELINES: list[tuple[Callable[[Path], None], str]] = [
    (empty, "no records"),
    (no_records, "lacks mini-softmax-hqq-3-g64, mini-softpick-hqq-3-g64"),
    (one_record_less, "lacks mini-softmax-hqq-3-g64"),
    (another_schema, "has the schema version 1; this qbench reads version 2"),
    (a_failed_cell, "mini-softmax-hqq-3-g64 failed"),
    (other_samples, "does not match the checksum in its record.json"),
    (no_samples, "has no per-document results"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD_BASELINES)
def test_a_bad_baseline_is_refused(
    spoil: Callable[[Path], None], message: str, run: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(baseline)
    assert message in refused(run, baseline, capsys)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (empty, "no records"),
        (no_records, "no record of any planned cell"),
        (another_schema, "schema version 1"),
        (other_samples, "does not match the checksum in its record.json"),
    ],
)
def test_a_bad_run_is_refused(
    spoil: Callable[[Path], None], message: str, run: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(run)
    assert message in refused(run, baseline, capsys)


def test_no_folder_at_all(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(run, tmp_path / "nowhere", capsys)
    assert f"{tmp_path / 'nowhere'} does not exist" in said
    assert f"qbench accept {run} --baseline {tmp_path / 'nowhere'} --reason " in said
    (tmp_path / "nowhere").mkdir()
    assert "qbench accept" in refused(run, tmp_path / "nowhere", capsys)
    (tmp_path / "nowhere").rmdir()
    assert "is not a folder" in refused(tmp_path / "nowhere", run, capsys)


def test_a_misspelt_baseline_gets_a_suggestion(run: Path, baseline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    misspelt = baseline.with_name(f"{baseline.name}s")
    said = refused(run, misspelt, capsys)
    assert f"{misspelt} " in said
    assert f"Did you mean {baseline}?" in said
    run.rename(misspelt.with_name("renamed"))  # a run is not its own baseline
    own = misspelt.with_name("rename")
    said = refused(misspelt.with_name("renamed"), own, capsys)
    assert f"{own} does not exist" in said
    assert "Did you mean" not in said


def test_a_baseline_against_itself(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is the baseline itself" in refused(run, run / ".." / "run", capsys)


OTHER_RUNS = [
    ({SOFTMAX: make_samples(12, seed=1), SOFTPICK: make_samples(12, seed=1)}, "have no document in common"),
    ({cell_ref(label="hqq-3-g128"): make_samples(12)}, "the run has mini-softmax-hqq-3-g128"),
    ({cell_ref(family="340M"): make_samples(12)}, "the run has 340M-softmax-hqq-3-g64"),
    (dict.fromkeys((SOFTMAX, SOFTPICK), make_samples(12, tasks=["piqa", "sciq"])), "The task arc_easy is in"),
]


@pytest.mark.parametrize(("cells", "message"), OTHER_RUNS)
def test_a_run_of_something_else_is_refused(
    cells: dict, message: str, baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(write_run(tmp_path / "other", cells), baseline, capsys)


@pytest.mark.parametrize(
    ("cells", "changed", "found"),
    [
        ([SOFTMAX], "no longer has mini-softpick-hqq-3-g64.", {"mini-softpick-hqq-3-g64": "no longer has"}),
        (
            [SOFTMAX, cell_ref("softpick", label="hqq-3-g128")],
            "no longer has mini-softpick-hqq-3-g64; it now has mini-softpick-hqq-3-g128.",
            {"mini-softpick-hqq-3-g128": "does not have", "mini-softpick-hqq-3-g64": "no longer has"},
        ),
        (
            [SOFTMAX, SOFTPICK, cell_ref(label="hqq-3-g32")],
            "changed: it now has mini-softmax-hqq-3-g32.",
            {"mini-softmax-hqq-3-g32": "does not have"},
        ),
    ],
)
def test_a_changed_recipe_fails_with_what_changed_and_the_rest_is_compared(
    cells: list[CellRef], changed: str, found: dict[str, str], baseline: Path, tmp_path: Path
) -> None:
    report = check(write_run(tmp_path / "other", dict.fromkeys(cells, make_samples(12))), baseline)
    assert not report.passed
    assert changed in report.changed[0]
    assert "qbench accept" in report.changed[0]
    assert {failure.cell.name: failure.message for failure in report.failures}.keys() == found.keys()
    assert all(found[failure.cell.name] in failure.message for failure in report.failures)
    same = {cell.name for cell in cells if cell in (SOFTMAX, SOFTPICK)}
    assert {outcome.hypothesis.cell.name for outcome in report.tested} == same


@pytest.mark.parametrize("limit", [5, 20])
def test_a_limited_run_or_baseline_is_refused(
    limit: int, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = {cell: make_samples(limit) for cell in (SOFTMAX, SOFTPICK)}
    limited = write_run(tmp_path / "limited", cells, limit=limit)
    said = refused(limited, run, capsys)
    assert f"has {limit} documents and the baseline 12, of which {min(limit, 12)} are the same" in said
    assert "one was run with --limit" in said
    assert "one was run with --limit" in refused(run, limited, capsys)


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        ({"alpha": 0}, "gate.alpha is 0; it must be more than 0"),
        ({"alfa": 0.1}, "gate.alfa is not a known field. Did you mean alpha?"),
        ({"tolerances": {"accuracy": -1}}, "gate.tolerances.accuracy is -1; it must be 0 or more"),
        ({"overrides": {"piqa": {"acc": {"tolerances": 1}}}}, "gate.overrides.piqa.acc.tolerances is not"),
        ({"overrides": {"piqa": {"ac": {"tolerance": 1}}}}, "gate.overrides.piqa.ac is not"),
        ({"overrides": {"wikitext": {"bits_per_byte": {"tolerance": 1}}}}, "Did you mean"),
        ({"noninferiority": {"perplexty": 1}}, "perplexty is not a known field. Did you mean perplexity?"),
        ({"noninferiority": {"accuracy": "1%"}}, "noninferiority.accuracy is '1%'; it must be a number of points"),
        ({"tolerances": {"perplexity": "1 points"}}, "is '1 points'; it must be a number of percent"),
        ({"overrides": {"piqa": {"acc": {"noninferiority": "1%"}}}}, "acc.noninferiority is '1%'"),
        ({"slower_ratio": 1}, "gate.slower_ratio is 1; it must be more than 1"),
    ],
)
def test_wrong_settings_are_refused(
    gate: dict, message: str, baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = {cell: make_samples(DOCUMENTS) for cell in (SOFTMAX, SOFTPICK)}
    folder = write_cells(tmp_path / "other", cells, gate=gate, audit=audit_of(SOFTMAX))
    assert message in refused(folder, baseline, capsys)


def test_metrics_that_are_not_means_of_documents_are_not_skipped(tmp_path: Path) -> None:
    """If nothing can be tested, the gate does not pass."""
    samples = make_samples(DOCUMENTS, tasks=["lambada_openai"])
    for side in ("baseline", "run"):
        record = make_record(SOFTMAX, samples)
        odd = tuple(metric.model_copy(update={"metric": "f1", "aggregation": "f1"}) for metric in record.metrics[:1])
        write_record(tmp_path / side / "cell", record.model_copy(update={"metrics": odd}), samples)
    with pytest.raises(InputError, match="no metric in common that the gate can test"):
        check(tmp_path / "run", tmp_path / "baseline", GateSettings())
