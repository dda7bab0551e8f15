"""The paired test, its three ways to a p, Holm's correction, and the promise on false alarms."""

import math

import numpy as np
import pytest
from scipy import stats

from qbench.gate.sign_flip import (
    BOUND,
    exact_tail,
    holm,
    interval,
    is_whole,
    normal_tail,
    resampled_tail,
    score,
    settle,
    sign_flip,
    tail,
    views,
)


def all_signs(losses: np.ndarray) -> float:
    """p by trying every sign."""
    signs = 1 - 2 * ((np.arange(2 ** len(losses))[:, None] >> np.arange(len(losses))) & 1)
    return float(np.mean(signs @ np.abs(losses) >= losses.sum() - 1e-9))


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (1, 0), (0, 1), (7, 2), (15, 0), (40, 12), (300, 200)])
def test_answers_get_mcnemars_exact_p(lost: int, won: int) -> None:
    losses = np.array([1.0] * lost + [-1.0] * won + [0.0] * 50)
    expected = stats.binomtest(lost, lost + won, 0.5, alternative="greater").pvalue if lost + won else 1.0
    assert sign_flip(losses) == pytest.approx(expected, rel=1e-9)


def test_documents_that_occur_twice_are_exact_too() -> None:
    losses = np.array([2.0, 2.0, 1.0, 1.0, 1.0, -1.0, 3.0, -2.0, 0.0])
    assert exact_tail(losses) == pytest.approx(all_signs(losses))


def test_the_bound_is_never_below_the_exact_p() -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):
        losses = draw.standard_t(2, size=10) + draw.uniform(-0.5, 2)
        assert all_signs(losses) <= tail(losses) + 1e-12


def test_resampling_agrees_with_all_signs() -> None:
    draw = np.random.default_rng(1)
    for _ in range(20):
        losses = draw.standard_t(3, size=14) + draw.uniform(0.3, 1.5)
        exact = all_signs(losses)
        assert exact <= resampled_tail(losses) <= 1.35 * exact


def test_resampling_sees_a_p_far_below_one_over_the_draws() -> None:
    losses = np.array([1.0] * 90 + [-1.0] * 40)
    exact = exact_tail(losses)
    assert exact < 1e-5
    assert exact <= resampled_tail(losses) <= 1.3 * exact


def test_one_document_does_not_hide_the_loss_of_all_others() -> None:
    losses = np.random.default_rng(8).normal(0.5, 1, size=200)
    alone = sign_flip(losses)
    assert alone < 1e-8
    assert views(losses) == [losses]
    for huge in (1e3, -1e3, 1e9):
        assert sign_flip(np.append(losses, huge)) < 1e-6


def test_a_few_documents_with_huge_losses_are_found_among_many_small_gains() -> None:
    losses = np.concatenate([np.full(30, 50.0) + np.arange(30) / 7, np.full(400, -0.01)])
    assert sign_flip(losses) < 1e-5


@pytest.mark.parametrize("documents", [200, 300, 5000])
def test_what_is_cut_back_leaves_no_document_more_than_its_share(documents: int) -> None:
    losses = np.append(np.random.default_rng(9).standard_t(3, size=documents - 1), 1e4)
    seen = views(losses)[-1]
    assert np.array_equal(np.sign(seen), np.sign(losses))
    assert (seen**2).max() <= 1.0001 * (seen**2).sum() / 16
    np.testing.assert_array_equal(views(-losses)[-1], -seen)


def test_one_document_of_all_the_changes_is_cut_back_to_its_share() -> None:
    losses = np.append(np.full(199, 1e-9), 1.0)
    whole, cut = views(losses)
    assert whole is losses
    assert cut.max() == pytest.approx(1e-9 * math.sqrt(199 / 15))


@pytest.mark.parametrize("unchanged", [0, 1000])
def test_of_few_changed_documents_none_is_cut_back(unchanged: int) -> None:
    losses = np.append(np.random.default_rng(9).normal(size=198), [1e4, *np.zeros(unchanged)])
    assert len(views(losses)) == 1


def test_a_large_document_that_does_not_hide_the_others_is_left_alone() -> None:
    losses = np.append(np.random.default_rng(9).normal(size=300), 30.0)  # three quarters of Σd²
    assert len(views(losses)) == 1


@pytest.mark.parametrize(("documents", "limit"), [(60, 30), (200, 16)])
def test_skewed_losses_rarely_fail_a_table(documents: int, limit: int) -> None:
    """Most documents lose a little and a few gain much; the mean change is zero. If those few were trimmed, a third of
    the tables of 60 documents and a sixth of those of 200 would fail: 52 and 24 of 150."""
    draw, failed = np.random.default_rng(10), 0
    for _ in range(150):
        answers = draw.choice([-1.0, 0, 0, 0, 0, 0, 0, 0, 0, 1], size=(7, documents))
        table = [*answers, *(np.exp(0.5) - draw.lognormal(size=(5, documents)))]
        p = settle(table, [losses.sum() > 0 for losses in table], 0.01)
        failed += bool((holm(p) <= 0.01).any())
    assert failed <= limit


def test_no_change_is_no_evidence() -> None:
    assert sign_flip(np.zeros(100)) == 1
    assert sign_flip(np.zeros(0)) == 1
    assert score(np.zeros(3)) == 0


def test_the_same_loss_in_every_document_is_as_strong_as_its_documents_are_many() -> None:
    for n in (3, 20, 60):
        constant = np.full(n, 1e-7 / 3)
        assert not is_whole(constant)
        assert resampled_tail(constant) == pytest.approx(0.5**n)
        assert tail(constant) >= 0.5**n
        assert 0.5**n <= sign_flip(constant)


def test_the_score_is_students_t_in_other_words() -> None:
    losses = np.random.default_rng(2).normal(0.1, 1, size=80)
    t = stats.ttest_1samp(losses, 0).statistic
    assert t == pytest.approx(score(losses) * math.sqrt(79 / (80 - score(losses) ** 2)))


@pytest.mark.parametrize("scale", [1e-200, 1e-9, 1.0, 1e150])
def test_the_unit_of_a_loss_does_not_matter(scale: float) -> None:
    losses = np.array([0.5, 1.5, -0.25, 2.25, 0.125])
    assert score(scale * losses) == pytest.approx(score(losses))


def test_holm_by_hand() -> None:
    p = np.array([0.01, 0.04, 0.03, 0.005])
    assert holm(p) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm(np.array([0.9, 0.8])) == pytest.approx([1, 1])


def test_a_decision_that_hangs_on_the_bound_is_resampled() -> None:
    draw = np.random.default_rng(3)
    noise = draw.normal(size=400)
    noise -= noise.mean()
    losses = noise + 3.0 * math.sqrt(noise @ noise) / 400  # a score near 3
    bound = sign_flip(losses)
    level = 0.5 * bound
    assert normal_tail(score(losses)) < level < bound
    (settled,) = settle([losses], [True], level)
    assert settled < level
    (left,) = settle([losses], [False], level)
    assert left == bound


def test_far_from_the_threshold_nothing_is_resampled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> float:
        raise AssertionError("resampled")

    monkeypatch.setattr("qbench.gate.sign_flip.resampled_tail", fail)
    draw = np.random.default_rng(4)
    table = [draw.normal(0, 1, 300), draw.normal(2, 1, 300)]
    p = settle(table, [True, True], 0.01)
    assert p[0] > 0.01 > p[1]


def heavy(draw: np.random.Generator, n: int) -> np.ndarray:
    """Differences of log-likelihoods: most tiny, a few huge."""
    return draw.standard_t(1.5, size=n) * draw.exponential(size=n)


@pytest.mark.parametrize("documents", [8, 60, 400])
def test_false_alarms_of_whole_tables_stay_below_alpha(documents: int) -> None:
    """20 hypotheses per table, heavy-tailed or answers, alpha 10%: 43 failures in 300 tables have a chance of 1%."""
    draw = np.random.default_rng(5)
    failed = 0
    for _ in range(300):
        answers = draw.choice([-1.0, 0, 0, 0, 0, 1], size=(10, documents))
        table = [heavy(draw, documents) for _ in range(10)] + list(answers)
        failed += bool((holm(settle(table, [True] * 20, 0.1)) <= 0.1).any())
    assert failed <= 43


def test_resampling_gives_back_what_the_bound_costs() -> None:
    """Among losses at the edge, the gate finds nearly all that the exact test finds, the bound alone fewer."""
    draw = np.random.default_rng(6)
    alpha, found = 1e-4, np.zeros(3)
    for _ in range(100):
        losses = draw.normal(3.9 / math.sqrt(200), 1, size=200)
        found += [
            sign_flip(losses) <= alpha,
            settle([losses], [True], alpha)[0] <= alpha,
            normal_tail(score(losses)) <= alpha,
        ]
    bound, settled, exact = found
    assert bound < settled
    assert settled >= 0.9 * exact


def test_the_bounds_constant() -> None:
    assert pytest.approx(3.178, abs=1e-3) == BOUND


@pytest.mark.parametrize("weighted", [False, True])
def test_intervals_cover_as_often_as_they_say(weighted: bool) -> None:
    draw = np.random.default_rng(7)
    covered = 0
    for _ in range(600):
        weights = draw.uniform(20, 400, size=100) if weighted else np.ones(100)
        losses = 0.05 * weights + draw.normal(size=100) * np.sqrt(weights)
        low, high = interval(losses, weights)
        covered += low <= 0.05 <= high
    assert 0.92 <= covered / 600 <= 0.98


def test_one_document_has_no_interval() -> None:
    assert interval(np.ones(1), np.ones(1)) == (-math.inf, math.inf)
