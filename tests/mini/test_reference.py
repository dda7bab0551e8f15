"""The committed reference run: the twins' scores, and the damage by quantization with its intervals."""

import pytest
from mini.files import MINI

from qbench.report.delta import DamageRow, Difference, ReportData, read_report
from qbench.report.results import Score

RESULTS = MINI.parents[1] / "results" / "mini"
# Chance is 25% with four choices and 50% with two.
LEAST = {"mini_arc_easy": 70, "mini_lambada": 50, "mini_piqa": 80, "mini_sciq": 70}
TWINS = ("softmax", "softpick")


@pytest.fixture(scope="module")
def report() -> ReportData:
    return read_report(RESULTS)


def damages(report: ReportData, method: str, bits: int, attention: str) -> dict[tuple[str, str], Difference]:
    """What a quantization cost a twin, by task and metric."""

    def own(row: DamageRow) -> Difference:
        score = row.damages[attention].score
        assert isinstance(score, Difference)
        return score

    rows = [row for row in report.damages if (row.quantization.method, row.quantization.bits) == (method, bits)]
    return {(row.measure.task, row.measure.metric): own(row) for row in rows}


@pytest.mark.parametrize("attention", TWINS)
@pytest.mark.parametrize("task", LEAST)
def test_an_unquantized_twin_is_far_above_chance_and_not_perfect(attention: str, task: str, report: ReportData) -> None:
    rows = [row for row in report.deltas if row.quantization.is_unquantized and row.measure.task == task]
    accuracies = [row.scores[attention] for row in rows if row.measure.metric.startswith("acc")]
    assert accuracies
    for score in accuracies:
        assert isinstance(score, Score)
        assert LEAST[task] <= score.value < 100


@pytest.mark.parametrize("attention", TWINS)
@pytest.mark.parametrize("method", ["bnb", "gptq", "hqq"])
def test_8_bits_cost_almost_nothing(method: str, attention: str, report: ReportData) -> None:
    found = damages(report, method, 8, attention)
    assert ("mini_wikitext", "word_perplexity") in found
    for (_, metric), damage in found.items():
        limit = 1.5 if metric.startswith("acc") else 0.02  # points, or perplexity
        assert abs(damage.value) < limit


@pytest.mark.parametrize("attention", TWINS)
@pytest.mark.parametrize("method", ["gptq", "hqq"])  # bnb has two widths only
def test_damage_grows_as_bits_fall(method: str, attention: str, report: ReportData) -> None:
    by_bits = {bits: damages(report, method, bits, attention) for bits in (8, 4, 3, 2)}
    perplexity = [by_bits[bits]["mini_wikitext", "word_perplexity"] for bits in (8, 4, 3, 2)]
    values = [damage.value for damage in perplexity]
    assert values == sorted(values)
    assert all(damage.significant and damage.value > 0 for damage in perplexity[2:]), "3 and 2 bits"
    falls = [-by_bits[2][task, "acc"].value for task in LEAST]
    assert sum(fall >= 5 for fall in falls) >= 3, falls
