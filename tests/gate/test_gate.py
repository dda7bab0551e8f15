"""The gate on made-up runs: what fails, what does not, and who found it."""

import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from qbench.gate.render import sections
from qbench.gate.settings import GateSettings, Override, Tolerances
from qbench.gate.verdict import check
from qbench.records.findings.finding import Finding
from qbench.records.findings.pairs import audit_changes
from qbench.records.schema import Cost, Failure, PlannedCell, RunPlan
from qbench.records.store import cell_folder, read_results, write_plan, write_record

from ..example_records import PROVENANCE, make_record
from .made_up import Population, layer_audit, make_audit, make_cells, write_cells

CELLS = make_cells(2)
POPULATION = Population(200)


def run(folder: Path, noise: float = 0.0, loss: float = 0.0, seed: int = 1, **changes: Any) -> Path:
    """A run of both cells."""
    return write_cells(
        folder, {cell: POPULATION.samples(noise, loss, seed + i) for i, cell in enumerate(CELLS)}, **changes
    )


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("gate") / "baseline")


def test_the_same_numbers_pass(baseline: Path, tmp_path: Path) -> None:
    report = check(run(tmp_path / "run"), baseline)
    assert report.passed
    assert len(report.tested) == 2 * (12 + 1)  # scores, and their pooled loss
    assert {outcome.p for outcome in report.tested} == {1.0}


def test_cells_with_the_same_failure_share_a_line(baseline: Path, tmp_path: Path) -> None:
    cells = make_cells(5)
    alike = [Finding("new_cell", (cell,), "The baseline does not have this cell.") for cell in cells]
    other = Finding("other_task", (cells[0],), "Something else.")
    report = replace(check(run(tmp_path / "run"), baseline), findings=(*alike, other))
    (section,) = (section for section in sections(report) if section.title == "Failures in the records")
    assert len(section.lines) == 2
    assert section.lines[0].startswith(", ".join(cell.name for cell in cells) + ": ")
    assert section.lines[1].startswith(cells[0].name)


def test_each_kind_is_tested_once(baseline: Path, tmp_path: Path) -> None:
    tested = check(run(tmp_path / "run"), baseline).tested
    tested = {(o.hypothesis.task, o.hypothesis.metric): o.hypothesis.kind for o in tested}
    assert tested == {
        **{(task, metric): "accuracy" for task in ("arc_easy", "piqa", "sciq") for metric in ("acc", "acc_norm")},
        **{(task, "gold_logprob"): "gold_logprob" for task in ("arc_easy", "piqa", "sciq")},
        ("lambada_openai", "acc"): "accuracy",
        ("lambada_openai", "perplexity"): "perplexity",
        ("all_tasks", "pooled"): "pooled",
        ("wikitext", "word_perplexity"): "perplexity",  # byte_perplexity and bits_per_byte are the same information
    }


def test_values_and_losses_are_those_of_the_records(baseline: Path, tmp_path: Path) -> None:
    report = check(run(tmp_path / "run", noise=0.05, loss=0.1), baseline)
    records = {
        side: {stored.record.cell: stored.record.metrics for stored in read_results(folder).current}
        for side, folder in (("before", baseline), ("after", tmp_path / "run"))
    }
    assert report.tested
    for outcome in report.tested:
        h = outcome.hypothesis
        if h.kind in ("gold_logprob", "pooled"):
            continue
        before, after = (
            next(m.value for m in records[side][h.cell] if (m.task, m.metric) == (h.task, h.metric))
            for side in ("before", "after")
        )
        assert (h.before, h.after) == pytest.approx((before, after))
        loss = 100 * (after / before - 1) if h.kind == "perplexity" else 100 * (before - after)
        assert h.loss == pytest.approx(loss, abs=1e-9)


def test_rounding_noise_passes(baseline: Path, tmp_path: Path) -> None:
    assert check(run(tmp_path / "run", noise=1e-6), baseline).passed


def test_a_noisy_run_that_is_no_worse_passes(baseline: Path, tmp_path: Path) -> None:
    report = check(run(tmp_path / "run", noise=0.1), baseline)
    assert report.passed
    assert report.unclear


def test_a_real_loss_fails_and_says_where(baseline: Path, tmp_path: Path) -> None:
    report = check(run(tmp_path / "run", noise=0.03, loss=0.1), baseline)
    assert not report.passed
    assert not report.failures
    found = {(o.hypothesis.task, o.hypothesis.metric) for o in report.worse}
    assert {("wikitext", "word_perplexity"), ("arc_easy", "gold_logprob")} <= found
    for outcome in report.worse:
        low, high = outcome.hypothesis.interval
        assert outcome.hypothesis.tolerance < outcome.hypothesis.loss
        assert low < outcome.hypothesis.loss < high
        assert low > 0


def test_a_loss_within_the_tolerance_passes_however_sure_it_is(baseline: Path, tmp_path: Path) -> None:
    folder = run(tmp_path / "run", loss=0.005)
    report = check(folder, baseline)
    assert report.passed
    (pages, _) = [o for o in report.tested if o.hypothesis.task == "wikitext"]
    assert pages.p < 1e-6
    assert pages.adjusted_p == 1  # of these sizes, no signs make a loss above the tolerance
    assert 0 < pages.hypothesis.loss < 1
    strict = GateSettings(tolerances=Tolerances(accuracy=0, perplexity=0, gold_logprob=0))
    assert not check(folder, baseline, strict).passed


def test_an_improvement_is_told_and_passes(baseline: Path, tmp_path: Path) -> None:
    report = check(run(tmp_path / "run", loss=-0.1), baseline)
    assert report.passed
    assert ("wikitext", "word_perplexity") in {(o.hypothesis.task, o.hypothesis.metric) for o in report.better}


def test_the_documents_that_lost_most_are_named(baseline: Path, tmp_path: Path) -> None:
    def spoil(samples: pd.DataFrame) -> pd.DataFrame:
        pages = samples.index[samples.task == "wikitext"]
        samples.loc[pages[7], ["word_perplexity", "byte_perplexity", "bits_per_byte"]] -= 1000
        return samples

    samples = {cell: spoil(POPULATION.samples(loss=0.1)) for cell in CELLS}
    report = check(write_cells(tmp_path / "run", samples), baseline)
    (pages, _) = [o for o in report.worse if o.hypothesis.task == "wikitext"]
    changed = pages.hypothesis.documents.most_changed
    assert len(changed) == 10
    assert changed[0][0] == 7
    losses = [before - after for _, before, after in changed]
    assert losses == sorted(losses, reverse=True)


def test_a_document_counts_once_however_often_it_occurs(tmp_path: Path) -> None:
    """Five documents, each repeated a hundred times, are not 500 documents."""

    def repeated(samples: pd.DataFrame) -> pd.DataFrame:
        return pd.concat([samples] * 100, ignore_index=True)

    few = Population(5, tasks=["piqa"])
    baseline = write_cells(tmp_path / "baseline", {CELLS[0]: repeated(few.samples())})
    report = check(write_cells(tmp_path / "run", {CELLS[0]: repeated(few.samples(loss=0.5))}), baseline)
    assert min(o.p for o in report.tested) >= 0.5**5
    assert report.passed


# --- settings


def test_settings_come_from_the_runs_recipe(baseline: Path, tmp_path: Path) -> None:
    loose = {"overrides": {"wikitext": {"word_perplexity": {"tolerance": 50}}}, "tolerances": {"gold_logprob": 5.0}}
    report = check(run(tmp_path / "run", loss=0.1, gate=loose), baseline)
    assert report.settings.overrides["wikitext"]["word_perplexity"].tolerance == 50
    assert not {"word_perplexity", "gold_logprob"} & {o.hypothesis.metric for o in report.worse}
    assert "settings" in report.changed[0]
    assert "word_perplexity" in report.changed[0]


def test_alpha_can_be_set_for_a_metric(baseline: Path, tmp_path: Path) -> None:
    folder = run(tmp_path / "run", noise=0.03, loss=0.1)
    never = {"word_perplexity": Override(alpha=1e-300)}
    worse = check(folder, baseline, GateSettings(overrides={"wikitext": never})).worse
    assert "wikitext" not in {o.hypothesis.task for o in worse}
    assert worse


# --- structure: what fails regardless of the scores


def test_a_failed_cell_fails(baseline: Path, tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    for kind, found_by in (("error", "records"), ("audit", "audit")):
        (stored, _) = read_results(folder).current
        failure = Failure(kind=kind, reason="It broke.")  # type: ignore[arg-type]
        write_record(stored.folder, make_record(stored.record.cell, failure=failure))
        report = check(folder, baseline)
        assert not report.passed
        (finding,) = report.failures
        assert finding.found_by == found_by
        assert "It broke." in finding.message
        assert finding.cell.name in report.differences


def test_a_missing_cell_fails(baseline: Path, tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    (read_results(folder).current[0].folder / "record.json").unlink()
    (finding,) = check(folder, baseline).failures
    assert "no record" in finding.message


def test_a_cell_that_is_no_longer_offered_fails(baseline: Path, tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    plan = read_results(folder).plan
    assert plan is not None
    cells = (plan.cells[0], PlannedCell(cell=plan.cells[1].cell, key=None, not_offered=True))
    write_plan(folder, RunPlan(recipe="test.yaml", resolved_recipe={}, cells=cells))
    (finding,) = check(folder, baseline).failures
    assert finding.cell == CELLS[1]


def test_a_missing_cell_fails_without_a_plan_too(baseline: Path, tmp_path: Path) -> None:
    folder = write_cells(tmp_path / "run", {CELLS[0]: POPULATION.samples(seed=1)})
    (folder / "run.json").unlink()
    (finding,) = check(folder, baseline).failures
    assert finding.cell == CELLS[1]


AUDITS: list[tuple[dict[str, Any], str]] = [
    ({"layers": 27}, ["27 layers", "28", "model.layers.3.part6"]),
    ({"layers": 29}, ["1 more layer", "model.layers.4.part0"]),
    ({"bits": 2}, ["code width", "from 3 to 2"]),
    ({"group_size": 128}, ["group size", "from 64 to 128"]),
    ({"packed_bytes": 4096 * 8}, ["bytes", "from 24,576 to 32,768"]),
    ({"slope": 1.02 * 0.991234567}, ["Weight scale", "1.0%"]),
    ({"error_energy": 2.0}, ["Relative weight error", "1.0%"]),
    ({"error_energy": 1.03 * 1.123456789}, ["Relative weight error", "1.0%"]),
    ({"slope": float("nan")}, ["Weight scale", "1.0%"]),
]


@pytest.mark.parametrize(("change", "facts"), AUDITS)
def test_a_changed_audit_is_put_in_words(change: dict[str, Any], facts: list[str]) -> None:
    message = audit_changes(make_audit(), make_audit(**change), GateSettings())[0][1]
    assert all(fact in message for fact in facts)


def test_a_changed_audit_fails_and_the_audit_found_it(baseline: Path, tmp_path: Path) -> None:
    folder = run(tmp_path / "run", audit=make_audit(layers=27))
    report = check(folder, baseline)
    assert [failure.found_by for failure in report.failures] == ["audit", "audit"]
    assert not report.worse
    without = check(folder, baseline, scores_only=True)
    assert without.passed
    (note,) = without.notes
    assert "--scores-only" in note


def test_rounding_in_an_audit_is_no_change() -> None:
    assert not audit_changes(make_audit(), make_audit(slope=0.9915, error_energy=1.13), GateSettings())


def test_an_audit_that_is_gone_is_a_change() -> None:
    assert len(audit_changes(make_audit(), None, GateSettings())) == 1
    assert audit_changes(None, None, GateSettings()) == []


def test_one_layer_of_another_width_is_named() -> None:
    layers = make_audit().layers
    audit = make_audit().model_copy(update={"layers": (*layers[:5], layer_audit(layers[5].name, bits=4), *layers[6:])})
    ((_, change),) = audit_changes(make_audit(), audit, GateSettings())
    assert "from 3 to 4" in change
    assert change.endswith(": model.layers.0.part5.")


def test_a_new_nan_fails(baseline: Path, tmp_path: Path) -> None:
    samples = {cell: POPULATION.samples() for cell in CELLS}
    lambada = samples[CELLS[0]].index[samples[CELLS[0]].task == "lambada_openai"]
    samples[CELLS[0]].loc[lambada[3], "perplexity"] = np.nan
    report = check(write_cells(tmp_path / "run", samples), baseline)
    (finding,) = report.failures
    assert finding.found_by == "records"
    assert "lambada_openai perplexity" in finding.message
    assert "1 document " in finding.message
    assert "document 3" in finding.message


def test_a_metric_that_is_nan_throughout_fails(baseline: Path, tmp_path: Path) -> None:
    samples = {cell: POPULATION.samples() for cell in CELLS}
    records = {cell: make_record(cell, frame) for cell, frame in samples.items()}
    for cell, frame in samples.items():
        frame.loc[frame.task == "wikitext", "word_perplexity"] = np.nan
        write_record(tmp_path / "run" / cell.attention, records[cell], frame)
    report = check(tmp_path / "run", baseline, scores_only=True)
    assert any("word_perplexity" in f.message and "200 documents" in f.message for f in report.failures)


def test_other_weights_fail(baseline: Path, tmp_path: Path) -> None:
    samples = {cell: POPULATION.samples() for cell in CELLS}
    samples[CELLS[0]]["word_perplexity.weight"] *= 2
    report = check(write_cells(tmp_path / "run", samples), baseline)
    assert "wikitext word_perplexity.weight" in report.failures[0].message


def test_some_other_documents_fail(baseline: Path, tmp_path: Path) -> None:
    samples = {cell: POPULATION.samples() for cell in CELLS}
    samples[CELLS[0]].loc[3, "doc_hash"] = "edited"
    report = check(write_cells(tmp_path / "run", samples), baseline)
    (finding,) = report.failures
    assert "arc_easy: the documents" in finding.message
    assert "200 in the run" in finding.message
    assert "199 in both" in finding.message


def test_an_override_of_a_task_with_other_documents_is_no_typo(baseline: Path, tmp_path: Path) -> None:
    samples = {cell: POPULATION.samples() for cell in CELLS}
    for frame in samples.values():
        frame.loc[frame.index[frame.task == "wikitext"][0], "doc_hash"] = "edited"
    gate = {"overrides": {"wikitext": {"word_perplexity": {"tolerance": 2}}}}
    report = check(write_cells(tmp_path / "run", samples, gate=gate), baseline)
    assert ": the documents" in report.failures[0].message


# --- what does not fail


def test_slower_and_larger_warn(baseline: Path, tmp_path: Path) -> None:
    cost = Cost(seconds={"load": 1.0, "evaluate": 19.0}, weight_bytes=1200)
    report = check(run(tmp_path / "run", cost=cost), baseline)
    assert report.passed
    messages = [warning.message for warning in report.warnings]
    assert any(all(fact in m for fact in ("20.0 s", "6.0 s", "3.33", "1.5)")) for m in messages)
    assert any(all(fact in m for fact in ("1,200 bytes", "1,000", "1.20", "1.05)")) for m in messages)


def test_a_new_cell_that_failed_says_why(baseline: Path, tmp_path: Path) -> None:
    new = CELLS[0].model_copy(update={"family": "other"})
    record = make_record(new, None)
    write_record(cell_folder(run(tmp_path / "run"), new, record.key), record, None)
    entries = tuple(PlannedCell(cell=cell, key=make_record(cell).key) for cell in (*CELLS, new))
    write_plan(tmp_path / "run", RunPlan(recipe="test.yaml", resolved_recipe={"gate": {}}, cells=entries))
    report = check(tmp_path / "run", baseline)
    (message,) = [failure.message for failure in report.failures if failure.cell == new]
    assert "The baseline does not have this cell, and it failed (error): It broke." in message


def test_a_few_seconds_more_say_nothing(baseline: Path, tmp_path: Path) -> None:
    cost = Cost(seconds={"load": 1.0, "evaluate": 14.0}, weight_bytes=1000)
    assert not check(run(tmp_path / "run", cost=cost), baseline).warnings


def test_seconds_of_another_machine_say_nothing(baseline: Path, tmp_path: Path) -> None:
    other = PROVENANCE.model_copy(update={"machine": {"cpu": "another"}})
    cost = Cost(seconds={"load": 100.0}, weight_bytes=1000)
    assert not check(run(tmp_path / "run", cost=cost, provenance=other), baseline).warnings


def test_a_part_of_the_baseline_passes_where_the_recipe_says_so(baseline: Path, tmp_path: Path) -> None:
    part = {CELLS[0]: POPULATION.samples(seed=1)}
    report = check(write_cells(tmp_path / "run", part, gate={"baseline_may_hold_more": True}), baseline)
    assert report.passed
    (note,) = report.notes
    assert "1 cell of the baseline" in note
    assert "baseline_may_hold_more" in note


def test_a_checkpoint_may_be_elsewhere(baseline: Path, tmp_path: Path) -> None:
    moved = {cell.model_copy(update={"checkpoint": f"/elsewhere/{cell.attention}"}): cell for cell in CELLS}
    report = check(write_cells(tmp_path / "run", {cell: POPULATION.samples() for cell in moved}), baseline)
    assert report.passed


def test_what_differs_in_the_provenance_is_told(baseline: Path, tmp_path: Path) -> None:
    changed = {
        "packages": {"torch": "2.14.0"},
        "git_commit": "1" * 40,
        "resolved_recipe": {"checkpoints": {}, "batch": {"tokens": 512}, "gate": {"alpha": 0.02}},
    }
    provenance = PROVENANCE.model_copy(update=changed)
    report = check(run(tmp_path / "run", loss=0.2, provenance=provenance), baseline)
    lines = report.differences[CELLS[0].name]
    assert "packages.torch: 2.13.0 → 2.14.0" in lines
    assert f"git_commit: {'0' * 40} → {'1' * 40}" in lines
    assert "resolved_recipe.batch.tokens: none → 512" in lines
    assert not any("gate" in line or "started" in line for line in lines)


@pytest.mark.slow
def test_it_answers_in_five_seconds(tmp_path: Path) -> None:
    """100 cells × 2,000 documents × 5 tasks, in CPU time of one process."""
    population = Population(2000)
    for side in ("baseline", "run"):
        cells = {cell: population.samples(0.05, seed=i) for i, cell in enumerate(make_cells(100))}
        write_cells(tmp_path / side, cells)
    arguments = ["check", str(tmp_path / "run"), "--baseline", str(tmp_path / "baseline")]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "qbench.cli", *arguments], capture_output=True, env=_one_thread())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5


def _one_thread() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "ARROW_NUM_THREADS": "1"}
