"""Scores that no model can have: found by arithmetic, within the precision that they were published with."""

from pathlib import Path

import pytest

from qbench.records.findings.arithmetic import ClaimedScore, impossible_scores
from qbench.records.metrics import METRICS, facts_of
from qbench.records.samples import AGGREGATIONS
from qbench.records.store import read_results

MINI = Path(__file__).parents[2] / "results" / "mini"
TWO_DECIMALS = 0.005


def claim(metric: str, value: float, documents: int | None = None, precision: float = 1e-8) -> ClaimedScore:
    facts = facts_of(metric)
    return ClaimedScore("task", metric, value, facts.better if facts else None, documents, precision)


def reasons(*scores: ClaimedScore) -> list[tuple[str, str]]:
    return [(found.score.metric, found.why) for found in impossible_scores(scores)]


def test_the_reference_run_has_none() -> None:
    records = [stored.record for stored in read_results(MINI).current]
    assert len(records) == 54
    for record in records:
        claims = [ClaimedScore(m.task, m.metric, m.value, m.better, m.documents) for m in record.metrics]
        assert impossible_scores(claims) == []


@pytest.mark.parametrize(
    ("scores", "metric", "why"),
    [
        ([claim("acc", 1.01)], "acc", "101.00 is not a percentage"),
        ([claim("exact_match,strict-match", -0.1)], "exact_match,strict-match", "-10.00 is not a percentage"),
        ([claim("word_perplexity", 0.9)], "word_perplexity", "0.90 is below 1"),
        ([claim("acc", 0.5025, 1000)], "acc", "50.25…1000 documents…50.2000"),
        ([claim("byte_perplexity", 2.0), claim("bits_per_byte", 1.5)], "bits_per_byte", "1.5000 is not log2"),
        ([claim("byte_perplexity", 2.0), claim("word_perplexity", 1.9)], "word_perplexity", "below byte_perplexity"),
        ([claim("acc", 0.2), claim("perplexity", 1.5)], "perplexity", "1.50…acc 20.00…at least 1.74"),
    ],
)
def test_what_cannot_be_is_found_once(scores: list[ClaimedScore], metric: str, why: str) -> None:
    ((found, reason),) = reasons(*scores)
    assert found == metric
    assert all(fact in reason for fact in why.split("…"))


def test_a_direction_that_is_the_other_one_is_found() -> None:
    ((_, reason),) = reasons(ClaimedScore("task", "acc", 0.5, "lower", None))
    assert "'lower'" in reason
    assert "higher is better" in reason
    assert reasons(ClaimedScore("task", "unheard_of", 0.5, "lower", None)) == []


def test_rounding_explains_what_it_can_and_no_more() -> None:
    third = 0.3333
    assert reasons(claim("acc", third, 6, TWO_DECIMALS / 100)) == []
    assert len(reasons(claim("acc", third, 6))) == 1  # a record has all digits
    rounded = [claim("byte_perplexity", 1.85, precision=0.005), claim("bits_per_byte", 0.89, precision=0.005)]
    assert reasons(*rounded) == []
    assert len(reasons(claim("byte_perplexity", 1.85), claim("bits_per_byte", 0.89))) == 1


def test_possible_scores_pass() -> None:
    assert reasons(claim("acc", 0.502, 1000), claim("perplexity", 1.5)) == []
    assert reasons(claim("byte_perplexity", 2.0), claim("bits_per_byte", 1.0), claim("word_perplexity", 40.0)) == []


def test_every_metric_names_an_aggregation_that_can_be_computed() -> None:
    assert {facts.aggregation for facts in METRICS.values()} <= set(AGGREGATIONS)
