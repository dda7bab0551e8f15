"""The absolute gate: damage to the quantized models of a run, compared with its own unquantized ones."""

import shutil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from qbench.gate.pairing import CheckError
from qbench.gate.render import score, sentence, to_junit, to_text
from qbench.gate.settings import GateSettings
from qbench.gate.verdict import TestedHypothesis, check
from qbench.records.store import read_results

from ..example_records import stored_samples

MINI = Path(__file__).parents[2] / "results" / "mini"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few cells of mini."""
    folder = tmp_path_factory.mktemp("damage") / "run"
    for label in ("none-16", "hqq-2-g64", "hqq-8-g64", "gptq-3-g128"):
        for cell in MINI.glob(f"*-{label}-*"):
            shutil.copytree(cell, folder / cell.name)
    return folder


def settings_of(max_damage: dict[str, dict[str, float | str]]) -> GateSettings:
    return GateSettings.model_validate({"max_damage": max_damage, "baseline_may_hold_more": True})


def damages(run: Path, **limits: dict[str, float | str]) -> dict[str, TestedHypothesis]:
    labels = {label.replace("_", "-"): own for label, own in limits.items()}
    report = check(run, MINI, settings_of(labels))
    assert not report.failures
    found = {o.hypothesis.name: o for o in report.tested if o.hypothesis.limit is not None}
    assert report.passed == all(outcome.verdict != "worse" for outcome in found.values())
    return found


def test_what_is_excluded_does_not_depend_on_the_limit(run: Path) -> None:
    small, large = (damages(run, hqq_8_g64={"accuracy": limit, "perplexity": limit}) for limit in (1.0, 50.0))
    assert small.keys() == large.keys()
    for name, outcome in small.items():
        assert outcome.hypothesis.upper == pytest.approx(large[name].hypothesis.upper)
        assert outcome.hypothesis.changed_documents == large[name].hypothesis.changed_documents
    answers = [o.hypothesis.changed_documents for o in small.values() if o.hypothesis.kind == "accuracy"]
    assert max(answers) < 20  # of 400: subtracting the limit does not turn an unchanged answer into a change


def test_damage_is_the_difference_to_the_unquantized_model_of_the_run(run: Path) -> None:
    found = damages(
        run, hqq_2_g64={"accuracy": 1.0, "perplexity": "2%"}, hqq_8_g64={"accuracy": 1.0, "perplexity": 2.0}
    )
    assert {outcome.hypothesis.cell.label for outcome in found.values()} == {"hqq-2-g64", "hqq-8-g64"}
    records = {stored.record.cell.name: stored for stored in read_results(run).current}
    for attention in ("softmax", "softpick"):
        two = found[f"mini-{attention}-hqq-2-g64 mini_wikitext word_perplexity (damage)"]
        both = [
            next(m.value for m in records[f"mini-{attention}-{label}"].record.metrics if m.metric == "word_perplexity")
            for label in ("none-16", "hqq-2-g64")
        ]
        assert two.hypothesis.loss == pytest.approx(100 * (both[1] / both[0] - 1), rel=1e-6)
        assert (two.hypothesis.before, two.hypothesis.after) == pytest.approx(both)
        assert two.hypothesis.tolerance == 2
        assert two.verdict == "worse"
        accuracy = found[f"mini-{attention}-hqq-8-g64 mini_arc_easy acc (damage)"]
        samples = [stored_samples(records[f"mini-{attention}-{label}"]) for label in ("none-16", "hqq-8-g64")]
        right = [own[own["task"] == "mini_arc_easy"]["acc"].mean() for own in samples]
        assert accuracy.hypothesis.loss == pytest.approx(100 * (right[0] - right[1]), abs=1e-9)
        assert accuracy.verdict in ("same", "unclear")


def test_damage_that_is_above_its_limit_by_chance_passes(run: Path) -> None:
    (first, *_) = damages(run, hqq_2_g64={"perplexity": 2.0}).values()
    low, high = first.hypothesis.interval
    assert low < first.hypothesis.loss < high
    within = damages(run, hqq_2_g64={"perplexity": first.hypothesis.loss * 0.999})[first.hypothesis.name]
    assert (within.verdict, within.hypothesis.loss) == ("unclear", pytest.approx(first.hypothesis.loss))
    assert within.hypothesis.interval == pytest.approx((low, high), rel=1e-6)
    beyond = damages(run, hqq_2_g64={"perplexity": low / 2})[first.hypothesis.name]
    assert beyond.verdict == "worse"


def test_reports_tell_damage_from_losses(run: Path) -> None:
    report = check(run, MINI, settings_of({"hqq-2-g64": {"accuracy": "1 point"}}))
    cell = "mini-softmax-hqq-2-g64"
    (outcome,) = (o for o in report.worse if o.hypothesis.name == f"{cell} mini_sciq acc (damage)")
    assert all(part in sentence(outcome) for part in ("unquantized", "limit 1)"))
    text = to_text(report)
    assert f"the damage to {len(report.worse)} scores is above its limit" in text.splitlines()[0]
    assert all(
        part in text for part in ("(gate.max_damage", " 1 point ", "max_damage.hqq-2-g64.accuracy not set → 1.0")
    )
    assert not any(part in text for part in ("Failures in the scores", " 1 points"))
    names = [(case.get("classname"), case.get("name")) for case in ElementTree.fromstring(to_junit(report))[0]]
    assert len(names) == len(set(names))
    assert (cell, "mini_sciq acc (damage)") in names
    rows = [row for row in map(score, report.tested) if (row["cell"], row["task"]) == (cell, "mini_sciq")]
    assert {row["compared_with"] for row in rows if row["metric"] == "acc"} == {"baseline", "unquantized"}


def test_draws_of_calibration_are_one_hypothesis(run: Path) -> None:
    found = damages(run, gptq_3_g128={"accuracy": 50.0})
    assert {outcome.hypothesis.draws for outcome in found.values()} == {5}
    assert all(np.isfinite(outcome.hypothesis.upper) for outcome in found.values())


def test_a_label_that_the_run_does_not_have_and_a_run_without_unquantized_models(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckError, match=r"max_damage\.hqq-2-g65.*Did you mean hqq-2-g64\?"):
        check(run, MINI, settings_of({"hqq-2-g65": {"accuracy": 1}}))
    without = shutil.copytree(run, tmp_path / "without")
    for folder in without.glob("*none-16*"):
        shutil.rmtree(folder)
    with pytest.raises(CheckError, match=r"unquantized model of mini-softm\S+-hqq-2-g64.*`method: none`"):
        check(without, MINI, settings_of({"hqq-2-g64": {"accuracy": 1}}))
