"""Our numbers next to published ones."""

import math
from pathlib import Path
from statistics import variance

import pytest

from qbench.errors import InputError
from qbench.records.metrics import TASKS, is_share
from qbench.report.compare import Comparison, compare, comparison_remarks, comparison_rows, comparison_tables
from qbench.report.delta import ReportData, read_report
from qbench.report.markdown import markdown
from qbench.report.metrics import measure
from qbench.report.published import ROUNDING
from qbench.report.repeats import NUMERICS, RepeatNoise, nearer, repeat_noise
from qbench.report.results import Score

from ..replicates import numbered, twins, write_cells
from .examples import cell, samples_of, write_cell, write_mini
from .golden import check


@pytest.fixture
def ours(tmp_path: Path) -> ReportData:
    """Two settings of HQQ at 3 bits, and the unquantized models."""
    write_mini(tmp_path, labels=("none-16", "hqq-3-g64"), tasks=("arc_easy",), family="340M")
    (tmp_path / "run.json").unlink()
    samples = samples_of("softmax", "hqq-2-g64")
    write_cell(tmp_path, cell("softmax", "hqq-3-g128", "340M"), samples[samples["task"] == "arc_easy"])
    return read_report(tmp_path)


def publish(file: Path, *rows: str, documents: int = 40) -> ReportData:
    """Published numbers of the same documents: method, bits, softmax and softpick of arc_easy's acc in each row."""
    header = "family,method,bits,task,metric,softmax,softpick,delta,documents"
    lines = []
    for row in rows:
        method, bits, *scores = row.split()
        lines.append(",".join(["340M", method, bits, "arc_easy", "acc", *scores, str(documents)]))
    file.write_text("\n".join([header, *lines]) + "\n")
    return read_report(file)


def one(found: list[Comparison], label: str, number: str) -> Comparison:
    """That of arc_easy's acc."""
    own = [c for c in found if (c.measure.task, c.measure.metric) == ("arc_easy", "acc")]
    return next(c for c in own if (c.quantization.label, c.number) == (label, number))


def test_each_of_our_settings_stands_beside_the_published_number(ours: ReportData, paper: ReportData) -> None:
    rows = [row for row in comparison_rows(compare(ours, paper)) if (row["task"], row["metric"]) == ("arc_easy", "acc")]
    assert {row["label"] for row in rows if row["bits"] == 3 and row["method"] == "hqq"} == {"hqq-3-g64", "hqq-3-g128"}
    row = next(row for row in rows if (row["label"], row["number"]) == ("hqq-3-g64", "softpick"))
    assert row["published"] == 57.95
    assert row["difference"] == pytest.approx(row["ours"] - 57.95)
    delta = next(row for row in rows if (row["label"], row["number"]) == ("none-16", "delta"))
    assert delta["published"] == 0.76
    assert {row["family"] for row in rows} == {"340M"}


def test_numbers_of_other_documents_are_not_judged(ours: ReportData, paper: ReportData) -> None:
    row = next(row for row in comparison_rows(compare(ours, paper)) if row["label"] == "hqq-3-g64")
    assert row["agrees"] is row["repeat_noise"] is row["nearer_to"] is None
    assert "40" in row["note"]
    assert "2,376" in row["note"]


def test_what_repeats_differ_by_agrees_and_what_documents_differ_by_does_not(ours: ReportData, tmp_path: Path) -> None:
    """The interval over documents is ±17 points here, and they are the same documents."""
    own = one(compare(ours, ours), "none-16", "softmax").published
    near, far = (
        compare(ours, publish(tmp_path / "published.csv", f"none 16 {own + by} {own} {-by}")) for by in (1.0, 5.0)
    )
    assert one(near, "none-16", "softmax").agrees is True
    assert one(far, "none-16", "softmax").agrees is False
    assert one(far, "none-16", "softpick").agrees is True
    noise = one(far, "none-16", "softmax").noise
    assert isinstance(noise, RepeatNoise)
    answers = NUMERICS[16][0]
    assert noise.half_width == pytest.approx(196 * math.sqrt(answers / 40) + ROUNDING, rel=1e-3)
    delta = one(far, "none-16", "delta").noise
    assert isinstance(delta, RepeatNoise)
    assert delta.half_width - ROUNDING == pytest.approx(math.sqrt(2) * (noise.half_width - ROUNDING))


@pytest.mark.parametrize(
    ("metric", "unquantized", "quantized", "published", "side"),
    [
        ("acc", 60.0, 50.0, 59.0, "unquantized"),
        ("acc", 60.0, 50.0, 66.0, "unquantized"),
        ("acc", 60.0, 50.0, 52.0, "quantized"),
        ("acc", 60.0, 50.0, 20.0, "quantized"),
        ("acc", 60.0, 50.0, 55.9, "undecided"),
        ("acc", 60.0, 59.5, 20.0, "undecided"),  # ours differ by less than repeats
        ("acc", 50.0, 60.0, 52.0, "unquantized"),  # quantized may be better
        ("perplexity", 10.0, 1000.0, 150.0, "quantized"),  # in proportion
        ("perplexity", 10.0, 1000.0, 70.0, "unquantized"),
    ],
)
def test_which_of_our_scores_a_number_is_nearer_to(
    metric: str, unquantized: float, quantized: float, published: float, side: str
) -> None:
    assert nearer(measure("piqa", metric, None), published, unquantized, quantized, RepeatNoise(1.0)) == side


def test_calibration_draws_are_noise_and_one_draw_is_not_judged(tmp_path: Path) -> None:
    spread = twins({"softmax": numbered([0.1, 0.3, 0.2]), "softpick": numbered([0.1, 0.1, 0.1])})
    several = read_report(write_cells(tmp_path / "several", spread))
    single = read_report(
        write_cells(tmp_path / "one", twins({"softmax": numbered([0.2]), "softpick": numbered([0.2])}))
    )
    published = several.results  # as if somebody had published our means
    found = compare(several, several)
    assert {c.agrees for c in found if c.measure.metric != "bits_per_byte"} == {True}
    assert {c.agrees for c in found if c.measure.metric == "bits_per_byte"} == {None}
    arc = measure("arc_easy", "acc", None)
    label = next(q for q in published.quantizations() if not q.is_unquantized)
    noisy, quiet = (repeat_noise(arc, [published.twin(label, kind)], 40) for kind in ("softmax", "softpick"))
    assert isinstance(noisy, RepeatNoise)
    assert isinstance(quiet, RepeatNoise)
    values = [part.scores["arc_easy", "acc"].value for part in published.twin(label, "softmax").draws]
    numerics, t = 1.96 * 100 * math.sqrt(NUMERICS[3][0] / 40), 4.3027  # of 2 degrees of freedom
    expected = math.hypot(numerics, t * math.sqrt(variance(values) * (1 + 1 / 3))) + ROUNDING
    assert noisy.half_width == pytest.approx(expected, rel=1e-3)
    assert quiet.half_width == pytest.approx(numerics + ROUNDING, rel=1e-3)
    alone = repeat_noise(arc, [single.results.twin(label, "softmax")], 40)
    assert isinstance(alone, RepeatNoise)
    assert alone.one_draw
    assert alone.agrees(1e9) is None
    assert alone.agrees(0.0) is True
    rows = comparison_rows(compare(single, several))
    gptq = [row for row in rows if row["method"] == "gptq" and row["number"] == "softmax"]
    assert {row["nearer_to"] for row in gptq} == {None}
    assert all("calibration draw" in row["note"] for row in gptq if row["repeat_noise"])


def test_the_papers_four_bit_accuracies_are_not_taken_for_unquantized_ones(paper: ReportData) -> None:
    """Over documents, 44 of the 56 were within the unquantized model's interval; repeats differ by less."""
    within = over_documents = 0
    four_bit = [
        (row, kind, s)
        for row in paper.deltas
        if row.quantization.bits == 4 and is_share(row.measure.metric)
        for kind, s in row.scores.items()
    ]
    for row, kind, quantized in four_bit:
        result = paper.results.unquantized(paper.results.twin(row.quantization, kind))
        before, noise = result.score(row.measure), repeat_noise(row.measure, [result])
        assert isinstance(before, Score)
        assert isinstance(quantized, Score)
        assert isinstance(noise, RepeatNoise)
        share, difference = before.value / 100, quantized.value - before.value
        over_documents += abs(difference) <= 196 * math.sqrt(share * (1 - share) / TASKS[row.measure.task].documents)
        within += bool(noise.agrees(difference))
    assert (len(four_bit), over_documents) == (56, 44)
    assert within <= 20


def test_what_is_published_and_not_run_is_shown_as_missing(ours: ReportData, paper: ReportData) -> None:
    rows = comparison_rows(compare(ours, paper))
    assert len(rows) == 3 * (81 + 9)  # each published row, HQQ's at 3 bits twice
    not_run = next(row for row in rows if row["label"] == "gptq-4")
    assert not_run["ours"] is not_run["difference"] is not_run["agrees"] is not_run["nearer_to"] is None
    assert "340M-softmax-gptq-4" in not_run["note"]


def test_the_table(ours: ReportData, tmp_path: Path) -> None:
    published = publish(
        tmp_path / "published.csv",
        "none 16 45.00 47.50 +2.50",
        "hqq 3 25.12 44.00 +18.88",
        "hqq 2 26.81 37.54 +10.73",
    )
    found = compare(ours, published)
    check("compare.md", markdown(comparison_tables(found), comparison_remarks(found, published)))


def test_published_within_itself(paper: ReportData) -> None:
    found = compare(paper, paper)
    assert len(found) == 3 * 162
    assert all(c.difference == 0 and c.agrees for c in found)
    # The rows of HQQ at 1.8B are nearly those of an unquantized model (results/paper/README.md).
    hqq = [c for c in found if c.quantization.method == "hqq" and c.quantization.family == "1.8B"]
    assert "quantized" not in {c.nearer for c in hqq}
    assert {c.nearer for c in found if c.quantization.bits == 2 and c not in hqq and not c.is_delta} == {"quantized"}


def test_nothing_in_common_is_a_sentence(mini_report: ReportData, paper: ReportData) -> None:
    with pytest.raises(InputError, match=r"no family in common: .*mini.* 340M, 1\.8B"):
        compare(mini_report, paper)
