"""The headline: recomputed from the documents, adjusted over the page, and its sentences."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, variance

import numpy as np
import pytest
from scipy import stats

from qbench.report.answer import answer, caveats
from qbench.report.delta import ReportData, read_report
from qbench.report.headline import Headline, Scales, adjusted
from qbench.uncertainty import ChanceSource, Estimate

from ..example_records import stored_samples
from ..replicates import LABEL, numbered, twins, write_cells
from .examples import PAPER, cell, samples_of, write_cell, write_mini, write_plan_of

LOSSES = {"softmax": numbered([0.30, 0.42, 0.25, 0.36, 0.33]), "softpick": numbered([0.10, 0.16, 0.07, 0.13, 0.12])}


@pytest.fixture(scope="module")
def five_draws(tmp_path_factory: pytest.TempPathFactory) -> ReportData:
    """Twins with five draws of one quantization."""
    return read_report(write_cells(tmp_path_factory.mktemp("five"), twins(LOSSES)))


def nats(report: ReportData, attention: str, label: str, draw: int | None, task: str) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of what is right and their weights, from the frame of a cell's samples."""
    result = report.results.get("mini", attention, label)
    assert result
    stored = result.of_draw(draw).stored
    assert stored
    frame = stored_samples(stored)
    frame = frame[frame["task"] == task].sort_values("doc_id")
    if "word_perplexity" in frame and frame["word_perplexity"].notna().all():
        return frame["word_perplexity"].to_numpy(), frame["word_perplexity.weight"].to_numpy()
    found = []
    for gold, scores in zip(frame["gold"], frame["loglikelihoods"], strict=True):
        if gold is None or len(gold) == 0:
            found.append(scores[0])
        else:
            found.append(scores[gold[0]] - math.log(sum(math.exp(score) for score in scores)))
    return np.array(found), np.ones(len(found))


def test_h_is_the_mean_over_tasks_of_how_much_less_was_lost(five_draws: ReportData) -> None:
    (line,) = five_draws.headlines
    tasks = list(dict.fromkeys(measure.task for measure in five_draws.results.measures))
    by_draw = []
    for draw in range(1, 6):
        gains = []
        for task in tasks:
            changes = []
            for attention in ("softpick", "softmax"):
                after, weights = nats(five_draws, attention, LABEL, draw, task)
                before, _ = nats(five_draws, attention, "none-16", None, task)
                changes.append((after - before).sum() / weights.sum())
            gains.append(changes[0] - changes[1])
        by_draw.append(fmean(gains))
    assert line.value == pytest.approx(fmean(by_draw), rel=1e-9)
    assert line.value > 0
    assert line.draws == 5
    over_documents, over_draws = line.estimate.sources
    assert over_draws.variance == pytest.approx(variance(by_draw) / 5, rel=1e-9)
    assert over_draws.freedom == 4
    reach = math.sqrt(
        stats.t.ppf(0.975, over_documents.freedom) ** 2 * over_documents.variance
        + stats.t.ppf(0.975, 4) ** 2 * over_draws.variance
    )
    assert line.interval == pytest.approx((line.value - reach, line.value + reach))


def test_the_documents_of_a_task_are_resampled_apart_from_those_of_another(five_draws: ReportData) -> None:
    """The variance of a sum of independent means, computed from the documents' variances."""
    (line,) = five_draws.headlines
    tasks = list(dict.fromkeys(measure.task for measure in five_draws.results.measures))
    total = 0.0
    for task in tasks:
        gains = 0.0
        for draw in range(1, 6):
            softpick, softmax = (
                nats(five_draws, kind, LABEL, draw, task)[0] - nats(five_draws, kind, "none-16", None, task)[0]
                for kind in ("softpick", "softmax")
            )
            gains = gains + (softpick - softmax) / 5
        weights = nats(five_draws, "softmax", LABEL, 1, task)[1]
        ratio = np.sum(gains) / weights.sum()
        total += np.sum((gains - ratio * weights) ** 2) / weights.sum() ** 2  # of a ratio of sums
    assert line.estimate.sources[0].variance == pytest.approx(total / len(tasks) ** 2, rel=0.15)


def test_one_draw_of_calibration_claims_nothing(tmp_path: Path) -> None:
    losses = {"softmax": {None: 0.4}, "softpick": {None: 0.1}}
    report = read_report(write_cells(tmp_path, twins(losses)))
    (line,) = report.headlines
    assert line.estimate.p < 1e-3
    assert not line.judged
    assert not line.claims
    assert "one calibration draw" in answer(report)[0]


def test_the_sentence_has_bits_both_names_and_the_interval(five_draws: ReportData) -> None:
    (line,) = five_draws.headlines
    sentence, *_ = answer(five_draws)
    assert line.claims
    assert sentence.startswith("At 3 bits softpick lost ")
    assert "fewer nats per decision than softmax [" in sentence
    assert "(one trained pair)" in sentence


def test_scales_that_disagree_are_one_statement_with_both_sizes_and_why() -> None:
    report = read_report(Path(__file__).parents[2] / "results" / "mini")
    three = next(line for line in report.headlines if line.bits == 3)
    assert three.scales.points is not None
    assert three.scales.logits is not None
    assert three.scales.logits < 0 < three.scales.points
    assert three.value > 0
    assert three.claims
    said = answer(report)
    (sentence,) = [own for own in said if own.startswith("At 3 bits")]
    assert sentence.index("depends on the scale") < sentence.index("fewer nats per decision")
    assert f"but {abs(three.scales.logits):.2f} more logits of accuracy" in sentence
    assert f"{three.scales.points:.2f} fewer points of accuracy" in sentence
    assert three.level is not None
    (why,) = [own for own in caveats(report) if all(f"{level:.2f}%" in own for level in three.level)]
    assert why not in said


@pytest.mark.parametrize(("points", "logits"), [(1.0, 2.0), (-1.0, 2.0), (None, None)])
def test_only_a_scale_of_the_opposite_sign_contradicts_a_claim(
    five_draws: ReportData, points: float | None, logits: float | None
) -> None:
    (line,) = adjusted([replace(headline_of(5.0, 1.0), scales=Scales(points, logits))])
    report = replace(five_draws)
    vars(report)["headlines"] = [line]
    sentence, *_ = answer(report)
    assert line.claims
    assert ("but 1.00 more points of accuracy" in sentence) == (points == -1.0)
    assert ("depends on the scale" in sentence) == (points == -1.0)
    assert ("2.00 fewer logits of accuracy" in sentence) == (logits is not None)


def test_published_accuracies_have_bounds() -> None:
    """Less hurt at 2 bits, no evidence at 4 and 8; 340M at 3 bits is beyond its interval, and not beyond the page's."""
    lines = {(line.families[0], line.bits): line for line in read_report(PAPER).headlines}
    assert {line.unit for line in lines.values()} == {"points"}
    assert [key for key, line in lines.items() if line.claims] == [("340M", 2), ("1.8B", 2)]
    assert [key for key, line in lines.items() if line.interval[0] > 0] == [("340M", 2), ("340M", 3), ("1.8B", 2)]
    said, notes = answer(read_report(PAPER)), caveats(read_report(PAPER))
    assert "documents" in notes[-1]
    (three,) = [line for line in said if line.startswith("340M: At 3 bits")]
    assert "adjustment" in three  # its interval excludes zero, and nothing is claimed
    assert "8 comparisons" in notes[-2]


def write_pairs(folder: Path, families: list[str], replicates: list[str]) -> ReportData:
    """Families trained with several seeds, each with a different difference."""
    planned = []
    for number, family in enumerate(families):
        for attention in ("softmax", "softpick"):
            for label in ("none-16", "hqq-3-g64"):
                samples = samples_of(attention, label, 40)
                if label != "none-16" and attention == "softpick":  # each pair differs
                    shift = 0.02 * number
                    samples = samples.assign(loglikelihoods=[row - shift for row in samples["loglikelihoods"]])
                planned.append(write_cell(folder, cell(attention, label, family), samples))
    write_plan_of(folder, planned, replicates=replicates)
    return read_report(folder)


def test_replicates_are_one_line_whose_interval_has_their_spread(tmp_path: Path) -> None:
    families = ["mini-1", "mini-2", "mini-3"]
    apart = write_pairs(tmp_path / "apart", families, [])
    joined = write_pairs(tmp_path / "joined", families, families)
    assert [line.families for line in apart.headlines] == [(family,) for family in families]
    (line,) = joined.headlines
    values = [own.value for own in apart.headlines]
    assert line.families == tuple(families)
    assert line.value == pytest.approx(fmean(values))
    assert line.estimate.sources[-1].freedom == 2
    assert line.estimate.sources[-1].variance == pytest.approx(variance(values) / 3)
    assert "mean of 3 trained pairs" in answer(joined)[0]
    assert "(one trained pair)" in answer(apart)[0]


def test_replicates_with_other_documents_of_a_task_are_reported_and_that_task_is_left_out(tmp_path: Path) -> None:
    """The families have equally many documents: only the contents differ."""
    planned = []
    for family in ("mini-1", "mini-2"):
        for attention in ("softmax", "softpick"):
            for label in ("none-16", "hqq-3-g64"):
                samples = samples_of(attention, label, 40)
                if family == "mini-2":
                    hashes = samples["doc_hash"].where(samples["task"] != "arc_easy", "other " + samples["doc_hash"])
                    samples = samples.assign(doc_hash=hashes)
                planned.append(write_cell(tmp_path, cell(attention, label, family), samples))
    write_plan_of(tmp_path, planned, replicates=["mini-1", "mini-2"])
    report = read_report(tmp_path)
    (line,) = report.headlines
    (note,) = line.notes
    assert "arc_easy" in note
    assert "same documents" in note
    assert note in caveats(report)


def test_a_quantization_that_one_model_lacks_is_left_out_and_named(tmp_path: Path) -> None:
    cells = [("softmax", "none-16"), ("softpick", "none-16"), ("softmax", "hqq-3-g64"), ("softpick", "hqq-3-g64")]
    planned = [write_cell(tmp_path, cell(*own), samples_of(*own)) for own in cells]
    planned.append(write_cell(tmp_path, cell("softmax", "hqq-3-g128"), samples_of("softmax", "hqq-3-g64")))
    write_plan_of(tmp_path, planned)
    (line,) = read_report(tmp_path).headlines
    assert "hqq-3-g128" in line.notes[0]


def test_a_family_with_one_model_has_no_headline_and_says_so(tmp_path: Path) -> None:
    report = read_report(write_mini(tmp_path, attentions=("softmax",)))
    assert report.headlines == []
    (said,) = answer(report)
    assert "mini" in said
    assert "one model" in said


def test_tasks_without_log_likelihoods_are_left_out_and_named(tmp_path: Path) -> None:
    planned = []
    for attention in ("softmax", "softpick"):
        for label in ("none-16", "hqq-3-g64"):
            samples = samples_of(attention, label)
            scores = samples["loglikelihoods"].where(samples["task"] != "arc_easy", None)
            planned.append(write_cell(tmp_path, cell(attention, label), samples.assign(loglikelihoods=scores)))
    write_plan_of(tmp_path, planned)
    report = read_report(tmp_path)
    (line,) = report.headlines
    assert "arc_easy" in line.notes[0]
    assert line.notes[0] in caveats(report)


def headline_of(value: float, error: float) -> Headline:
    estimate = Estimate(value, (ChanceSource(error**2, math.inf),))
    return Headline(("mini",), "softpick", "softmax", 3, "nats", estimate)


def test_p_is_adjusted_by_holm_over_the_page() -> None:
    found = adjusted([headline_of(z, 1.0) for z in (3.0, 2.2, 0.5)])
    p = [2 * stats.norm.sf(z) for z in (3.0, 2.2, 0.5)]
    assert [line.adjusted_p for line in found] == pytest.approx([3 * p[0], 2 * p[1], p[2]])
    assert [line.claims for line in found] == [True, False, False]  # 2.2 alone would claim


@pytest.mark.parametrize(("draws", "spread", "noise"), [(3, 0.08, 0.02), (5, 0.08, 0.02), (5, 0.01, 0.02)])
def test_the_interval_covers_the_truth(draws: int, spread: float, noise: float) -> None:
    """Documents and draws of calibration as the issue's review found them: two sources, each with its own t."""
    generator = np.random.default_rng(0)
    documents, trials, covered = 200, 2000, 0
    for _ in range(trials):
        by_draw = generator.normal(0, spread, draws)
        sample = generator.normal(0, noise * math.sqrt(documents), documents)
        sources = (
            ChanceSource(float(sample.var(ddof=1)) / documents, documents - 1),
            ChanceSource(float(by_draw.var(ddof=1)) / draws, draws - 1),
        )
        estimate = Estimate(float(by_draw.mean() + sample.mean()), sources)
        covered += abs(estimate.value) <= estimate.half_width()
    assert 0.94 <= covered / trials <= 0.995
