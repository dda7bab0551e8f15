"""Rows: joins, differences of unrounded values, damage, flips, and why a number is missing."""

import csv
import shutil
from pathlib import Path

import pytest

from qbench.errors import InputError
from qbench.records.metrics import Better
from qbench.records.schema import CellRef, Failure, QuantizerFacts
from qbench.report.bootstrap import Interval
from qbench.report.damage_tables import damage_tables
from qbench.report.delta import DeltaRow, Difference, ReportData, read_report, recovery
from qbench.report.layouts import READ_STAR
from qbench.report.marks import marks_for
from qbench.report.metrics import Measure
from qbench.report.remarks import remarks
from qbench.report.results import Gap, Score
from qbench.report.score_tables import delta_tables
from qbench.report.tables import Table, difference_field, interval_field
from qbench.uncertainty import ChanceSource, Estimate

from ..example_records import PROVENANCE, identity_of, make_samples
from .examples import LABELS, PAPER, audit_of, cell, samples_of, write_cell, write_mini, write_plan_of

ACC = Measure("arc_easy", "acc", "higher")


def row(report: ReportData, label: str, task: str, metric: str, family: str = "mini") -> DeltaRow:
    key = (family, label, task, metric)
    (found,) = (
        r
        for r in report.deltas
        if (r.quantization.family, r.quantization.label, r.measure.task, r.measure.metric) == key
    )
    return found


def gap(score: Score | Gap) -> str:
    assert isinstance(score, Gap)
    return score.text


def test_the_papers_delta_is_the_papers_for_all_rows(paper: ReportData) -> None:
    published = {}
    for name in ("baseline.csv", "quantization.csv"):
        for line in csv.DictReader((PAPER / name).open()):
            key = (line["size"], f"{line['method']}-{line['bits']}", line["task"], line["metric"])
            published[key] = float(line["delta"])
    assert len(published) == len(paper.deltas) == 162
    for r in paper.deltas:
        expected = published[r.quantization.family, r.quantization.label, r.measure.task, r.measure.metric]
        assert r.deltas["softpick"] is not None
        assert r.deltas["softpick"].value == pytest.approx(expected, abs=1e-9)
        assert isinstance(r.scores["softmax"], Score)
        assert isinstance(r.scores["softpick"], Score)
        assert r.scores["softpick"].value - r.scores["softmax"].value == pytest.approx(expected, abs=0.0101)
        assert r.deltas["softpick"].interval is None


def test_accuracies_are_percent_and_perplexities_are_not(mini_report: ReportData) -> None:
    record = mini_report.results.get("mini", "softmax", "hqq-3-g64")
    assert record
    assert record.stored
    values = {(m.task, m.metric): m.value for m in record.stored.record.metrics}
    accuracy = row(mini_report, "hqq-3-g64", "arc_easy", "acc").scores["softmax"]
    perplexity = row(mini_report, "hqq-3-g64", "wikitext", "word_perplexity").scores["softmax"]
    assert isinstance(accuracy, Score)
    assert isinstance(perplexity, Score)
    assert accuracy.value == pytest.approx(100 * values["arc_easy", "acc"])
    share = accuracy.value / 100
    assert accuracy.stderr == pytest.approx(100 * (share * (1 - share) / 39) ** 0.5)
    assert perplexity.value == values["wikitext", "word_perplexity"]


@pytest.mark.parametrize(
    ("value", "better", "tone"),
    [
        (0.3, "higher", "better"),
        (-0.3, "higher", "worse"),
        (0.3, "lower", "worse"),
        (-0.3, "lower", "better"),
        (0.004, "higher", "same"),
        (-0.004, "lower", "same"),
        (0.3, None, None),
        (0.0, None, "same"),
    ],
)
def test_tone_follows_the_metrics_direction(value: float, better: str | None, tone: str | None) -> None:
    assert Difference(value).tone(Measure("t", "m", better)) == tone  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "low", "high", "excludes", "shown", "between", "tone"),
    [
        (0.0004, 0.0001, 0.0007, True, "+0.0004", "[+0.0001, +0.0007]", "worse"),
        (0.012, 0.0044, 0.021, True, "+0.01", "[+0.004, +0.021]", "worse"),
        (-0.0004, -0.0009, 0.0001, False, "+0.00", "[-0.001, +0.000]", None),
        (0.25, -0.0, 0.5, False, "+0.25", "[+0.00, +0.50]", None),
    ],
)
def test_what_excludes_zero_is_not_rounded_to_zero(
    value: float, low: float, high: float, excludes: bool, shown: str, between: str, tone: str | None
) -> None:
    estimate = Estimate(value, (ChanceSource(((high - low) / 4) ** 2, 100),))
    difference, measure = (
        Difference(value, Interval(low, high, excludes, estimate)),
        Measure("t", "perplexity", "lower"),
    )
    table = Table("", "", "", [], [])
    field = difference_field(table, difference, measure, marks_for([(measure, difference)]))
    assert (field.text, field.starred, field.tone) == (shown, excludes, tone)
    assert interval_field(difference, measure).text == between


def test_differences_of_kl_have_two_digits() -> None:
    value, low, high = -0.00023, -0.000244, -0.000221
    estimate = Estimate(value, (ChanceSource(((high - low) / 4) ** 2, 100),))
    difference, measure = Difference(value, Interval(low, high, True, estimate)), Measure("t", "kl", "lower")
    field = difference_field(Table("", "", "", [], []), difference, measure, marks_for([(measure, difference)]))
    assert (field.text, field.tone) == ("-0.00023", "better")
    assert interval_field(difference, measure).text == "[-0.00024, -0.00022]"
    noise = Difference(-2.4e-14, Interval(-2.9e-14, -2e-14, False, estimate))
    assert difference_field(Table("", "", "", [], []), noise, measure, marks_for([])).text == "+0.00"
    assert interval_field(noise, measure).text == "[0, 0]"


def test_methods_come_in_the_order_of_the_plan_and_the_unquantized_first(tmp_path: Path) -> None:
    planned = [write_cell(tmp_path, cell("softmax", label), make_samples(5)) for label in reversed(LABELS)]
    write_plan_of(tmp_path, planned)
    found = [q.label for q in read_report(tmp_path).results.quantizations()]
    assert found == ["none-16", "hqq-2-g64", "hqq-3-g64", "bnb-4-nf4"]


def test_a_method_is_called_as_its_records_say(tmp_path: Path) -> None:
    facts = QuantizerFacts(title="HalfQuad", calibrated=False)
    write_cell(tmp_path, cell("softmax", "hqq-3-g64"), make_samples(5), quantizer=facts)
    for label in ("none-16", "bnb-4-nf4"):  # of qbench 0.1
        write_cell(tmp_path, cell("softmax", label), make_samples(5))
    titles = {q.label: q.method_title for q in read_report(tmp_path).results.quantizations()}
    assert titles == {"none-16": "unquantized", "bnb-4-nf4": "BNB", "hqq-3-g64": "HalfQuad"}


def test_weights_as_they_were_are_not_unquantized_if_something_else_is_quantized(tmp_path: Path) -> None:
    for label in ("none-16", "none-16-kv4"):
        write_cell(tmp_path, cell("softmax", label), samples_of("softmax", "none-16"), audit=None)
    report = read_report(tmp_path)
    assert {r.quantization.label for r in report.damages} == {"none-16-kv4"}
    first, second = delta_tables(report)
    assert [column.title for column in first.columns][:3] == ["Task", "Metric", "Softmax"]
    assert {line[2].text for line in second.rows} == {"16-bit kv4"}
    unproved = row(report, "none-16-kv4", "arc_easy", "acc").scores["softmax"]
    assert isinstance(unproved, Score)
    assert any("has no audit" in note for note in unproved.notes)


def test_two_settings_of_one_width_never_meet(tmp_path: Path) -> None:
    for attention, label in (("softmax", "hqq-3-g64"), ("softpick", "hqq-3-g128")):
        write_cell(tmp_path, cell(attention, label), make_samples(10))
    report = read_report(tmp_path)
    first, second = row(report, "hqq-3-g64", "arc_easy", "acc"), row(report, "hqq-3-g128", "arc_easy", "acc")
    assert first.deltas["softpick"] is None
    assert second.deltas["softpick"] is None
    assert gap(first.scores["softpick"]) == "missing"
    assert gap(second.scores["softmax"]) == "missing"


def says(score: Score | Difference | Gap, text: str, *facts: str) -> None:
    """Fail unless it is a gap that shows the text, for a reason with these facts."""
    assert isinstance(score, Gap)
    assert score.text == text
    assert all(fact in score.reason for fact in facts)


def test_what_has_no_number_says_why(troubled_report: ReportData) -> None:
    at_2_bits = row(troubled_report, "hqq-2-g64", "arc_easy", "acc")
    at_3_bits = row(troubled_report, "hqq-3-g64", "arc_easy", "acc")
    says(at_2_bits.scores["softmax"], "failed", "mini-softmax-hqq-2-g64", "quantize", "error", "It broke.")
    says(at_2_bits.scores["softpick"], "audit failed", "mini-softpick-hqq-2-g64", "model.layers.0.mlp.up_proj")
    assert gap(at_3_bits.scores["softpick"]) == "missing"
    not_offered = row(troubled_report, "bnb-3", "arc_easy", "acc")
    says(not_offered.scores["softmax"], "n/a", "bnb", "3 bits")
    assert at_2_bits.deltas["softpick"] is at_3_bits.deltas["softpick"] is None


def test_a_failed_audit_of_a_failed_cell_is_called_so(tmp_path: Path) -> None:
    failure = Failure(kind="audit", reason="The audit of hqq-3-g64 failed.\n- nothing was quantized")
    write_cell(tmp_path, cell("softmax", "hqq-3-g64"), None, failure=failure)
    (only,) = read_report(tmp_path).deltas
    says(only.scores["softmax"], "audit failed", "mini-softmax-hqq-3-g64", "(audit)", "The audit of hqq-3-g64 failed.")
    says(only.scores["softpick"], "–", "mini has no softpick model")


@pytest.mark.parametrize("other", ["none-16", "hqq-2-g64"])
def test_an_audit_of_another_quantization_proves_nothing(other: str, tmp_path: Path) -> None:
    of_other = audit_of(cell("softmax", "hqq-2-g64")).model_copy(update={"label": other})
    write_cell(tmp_path, cell("softmax", "hqq-3-g64"), make_samples(10), audit=of_other)
    report = read_report(tmp_path)
    score = row(report, "hqq-3-g64", "arc_easy", "acc").scores["softmax"]
    says(score, "audit failed", "mini-softmax-hqq-3-g64", f"audit of {other}")
    (doubt,) = map(str, report.findings)
    assert doubt.startswith("mini-softmax-hqq-3-g64: ")
    assert f"audit of {other}" in doubt


def test_cells_of_other_code_or_packages_are_named(tmp_path: Path) -> None:
    identity = identity_of(cell("softmax", "none-16"), code="old", packages={})
    write_cell(tmp_path, cell("softpick", "none-16"), make_samples(10))
    older = PROVENANCE.model_copy(update={"finished": "2025-12-31T00:00:00+00:00"})
    write_cell(tmp_path, cell("softmax", "none-16"), make_samples(10), identity=identity, provenance=older)
    (remark,) = remarks(read_report(tmp_path))
    assert "packages" in remark
    assert remark.endswith(": mini-softmax-none-16.")


def test_a_number_without_an_audit_says_so(tmp_path: Path) -> None:
    write_cell(tmp_path, cell("softmax", "hqq-3-g64"), make_samples(10), audit=None)
    score = row(read_report(tmp_path), "hqq-3-g64", "arc_easy", "acc").scores["softmax"]
    assert isinstance(score, Score)
    assert any("mini-softmax-hqq-3-g64 has no audit" in note for note in score.notes)


def test_other_documents_mean_no_interval_and_a_note(troubled_report: ReportData) -> None:
    delta = row(troubled_report, "bnb-4-nf4", "arc_easy", "acc").deltas["softpick"]
    assert delta
    assert delta.interval is None
    (note,) = delta.notes
    for fact in ("No interval", "mini-softpick-bnb-4-nf4", "mini-softmax-bnb-4-nf4", "documents"):
        assert fact in note


def test_chance_is_noted_where_a_score_is_not_above_it(paper: ReportData) -> None:
    below = row(paper, "gptq-2", "piqa", "acc_norm", "340M")
    assert isinstance(below.scores["softmax"], Score)
    assert isinstance(below.scores["softpick"], Score)
    (note,) = below.scores["softmax"].notes
    assert "chance" in note
    assert "50.00" in note
    assert below.scores["softpick"].notes == ()


def test_chance_follows_from_the_documents(tmp_path: Path) -> None:
    samples = make_samples(10, tasks=["piqa", "arc_easy"])
    samples["acc"] = [1.0, 0.0] * 10
    write_cell(tmp_path, cell("softmax", "none-16"), samples)
    report = read_report(tmp_path)
    guessed, known = (row(report, "none-16", task, "acc").scores["softmax"] for task in ("piqa", "arc_easy"))
    assert isinstance(guessed, Score)
    assert isinstance(known, Score)
    assert guessed.value == 50.0
    (note,) = guessed.notes
    assert "chance" in note
    assert "50.00" in note
    assert (known.value, known.notes) == (50.0, ())


def test_damage_is_quantized_minus_its_own_baseline(paper: ReportData) -> None:
    found = {(r.quantization.family, r.quantization.label, r.measure.task, r.measure.metric): r for r in paper.damages}
    assert len(found) == 144
    r = found["340M", "hqq-3", "sciq", "acc_norm"]
    assert isinstance(r.damages["softmax"].score, Difference)
    assert isinstance(r.damages["softpick"].score, Difference)
    assert r.differences["softpick"]
    assert r.damages["softmax"].score.value == pytest.approx(71.60 - 74.90)
    assert r.damages["softpick"].score.value == pytest.approx(72.10 - 77.30)
    # Softpick is ahead by 0.50 here, but it lost more.
    assert r.differences["softpick"].value == pytest.approx(-1.90)
    assert r.differences["softpick"].tone(r.measure) == "worse"


def test_damage_down_to_chance_says_so(paper: ReportData) -> None:
    (found,) = (
        r
        for r in paper.damages
        if (r.quantization.family, r.quantization.label, r.measure.task, r.measure.metric)
        == ("340M", "gptq-2", "piqa", "acc_norm")
    )
    assert isinstance(found.damages["softmax"].score, Difference)
    assert isinstance(found.damages["softpick"].score, Difference)
    (note,) = found.damages["softmax"].score.notes
    assert "quantized score" in note
    assert "50.00" in note
    assert found.damages["softpick"].score.notes == ()


def test_damage_without_a_baseline_says_so(tmp_path: Path) -> None:
    write_mini(tmp_path, labels=("hqq-3-g64",))
    damage = read_report(tmp_path).damages[0]
    says(damage.damages["softmax"].score, "–", "no unquantized mini-softmax")
    assert damage.differences["softpick"] is None


def test_the_star_of_a_lone_twins_damage_is_explained(tmp_path: Path) -> None:
    for label in ("none-16", "hqq-2-g64"):
        write_cell(tmp_path, cell("softmax", label), samples_of("softmax", label))
    (table,) = damage_tables(read_report(tmp_path))
    assert any(field.starred for line in table.rows for field in line)
    assert READ_STAR in table.reading


def test_flips_are_seen_where_accuracy_is_equal(tmp_path: Path) -> None:
    before, after = make_samples(20, tasks=["arc_easy"]), make_samples(20, tasks=["arc_easy"])
    before["acc"], after["acc"] = [1.0, 0.0] * 10, [0.0, 1.0, *[1.0, 0.0] * 9]
    write_cell(tmp_path, cell("softmax", "none-16"), before)
    write_cell(tmp_path, cell("softmax", "hqq-3-g64"), after)
    (damage,) = (r.damages["softmax"] for r in read_report(tmp_path).damages if r.measure == ACC)
    assert isinstance(damage.score, Difference)
    assert damage.score.value == 0
    assert damage.flips
    assert (damage.flips.right_to_wrong, damage.flips.wrong_to_right) == (5.0, 5.0)


def test_a_metric_of_no_known_direction_has_no_tone_but_a_note(tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text("family,method,bits,task,metric,softmax,softpick\nS,none,16,t,odd,1,2\n")
    (only,) = read_report(tmp_path).deltas
    assert only.deltas["softpick"]
    assert only.deltas["softpick"].tone(only.measure) is None
    (note,) = only.deltas["softpick"].notes
    assert " odd " in note


def test_bad_input_is_a_sentence(tmp_path: Path, mini: Path) -> None:
    with pytest.raises(InputError, match=r"neither records .* nor CSV files"):
        read_report(tmp_path)
    with pytest.raises(InputError, match=r"none does not exist; it must be a folder of records"):
        read_report(tmp_path / "none")
    twice = tmp_path / "twice"
    write_cell(twice, cell("softmax", "none-16"), make_samples(5))
    write_cell(twice, cell("softmax", "none-16"), make_samples(5), key="e" * 64)
    with pytest.raises(InputError, match="two records of mini-softmax-none-16"):
        read_report(twice)
    copied = write_mini(tmp_path / "copied", labels=("none-16",), tasks=("arc_easy",))
    (first, *_) = sorted(copied.glob("mini-softmax-*"))
    shutil.copytree(first, copied / "a-copy")
    with pytest.raises(InputError, match=r"two records of mini-softmax-none-16, in a-copy and .* with the same key"):
        read_report(copied)
    old = tmp_path / "old"
    write_cell(old, cell("softmax", "none-16"), make_samples(5))
    (file,) = old.glob("*/record.json")
    file.write_text(file.read_text().replace('"schema_version": 2', '"schema_version": 1'))
    with pytest.raises(InputError, match="has the schema version 1; this qbench reads version 2"):
        read_report(old)


def test_samples_that_are_not_the_records_are_refused(tmp_path: Path) -> None:
    write_cell(tmp_path, cell("softmax", "none-16"), make_samples(5))
    (file,) = tmp_path.glob("*/samples.parquet")
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(InputError, match=r"samples\.parquet .*checksum.* record\.json"):
        read_report(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("method,bits\n", "missing columns: family, task, metric, softmax, softpick"),
        ("size,method,bits,task,metric,softmax,softpick\nS,hqq,two,t,acc,1,2\n", "line 2: bits is 'two'"),
        ("size,method,bits,task,metric,softmax,softpick\nS,hqq,2,t,acc,nan,2\n", "line 2: softmax is 'nan'"),
        (
            "size,method,bits,task,metric,softmax,softpick\nS,hqq,2,t,perplexity,9,0\n",
            "line 2: softpick is 0; .*least 1",
        ),
        ("size,method,bits,task,metric,softmax,softpick\nS,hqq,2,t,acc,1\n", "line 2 does not have as many fields"),
        ("size,method,bits,task,metric,softmax,softpick\n" + 2 * "S,hqq,2,t,acc,1,2\n", "line 3 repeats S, hqq-2, t"),
        ("size,method,bits,task,metric,better,softmax,softpick\nS,hqq,2,t,acc,up,1,2\n", "line 2: better is 'up'"),
        ("size,method,bits,task,metric,softmax,softpick\n", "has no rows of numbers"),
    ],
)
def test_a_bad_csv_file_is_a_sentence_with_its_line(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text(content)
    with pytest.raises(InputError, match=message):
        read_report(tmp_path)


def test_all_planned_cells_have_rows(mini_report: ReportData) -> None:
    assert {r.quantization.label for r in mini_report.deltas} == set(LABELS)
    cells: list[CellRef] = [result.cell for result in mini_report.results.cells]
    assert len(cells) == 2 * len(LABELS)
    assert all(audit_of(c).label == c.label for c in cells if c.label != "none-16")


@pytest.mark.parametrize(
    ("metric", "better", "before", "after", "expected"),
    [
        ("acc", "higher", 0.8, 0.6, 75.0),
        ("word_perplexity", "lower", 20.0, 25.0, 80.0),  # unquantized / quantized: less than 100% is a loss
        ("acc", "higher", 0.0, 0.1, None),
        ("kl", "lower", 0.0, 0.1, None),
        ("unknown", None, 1.0, 0.5, None),
    ],
)
def test_recovery_is_what_is_left_of_the_unquantized_score(
    metric: str, better: Better | None, before: float, after: float, expected: float | None
) -> None:
    found = recovery(Measure("a task", metric, better), before, after)
    assert found == (expected if expected is None else pytest.approx(expected))
