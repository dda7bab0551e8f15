"""What counts in a table: only hypotheses that could fail, given the sizes of their losses and not their signs."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from qbench.gate.settings import GateSettings, Tolerances
from qbench.gate.sign_flip import Floats, adjusted_p, counted, exact_tail, holm, settle, smallest_p
from qbench.gate.verdict import check

from .made_up import Population, make_cells, write_cells

ALPHA = 0.05


def step_by_step(p: Floats, smallest: Floats, alpha: float) -> set[int]:
    """Which hypotheses fail by definition: remove those that fail at Tarone's level for those left, and repeat."""
    left: set[int] = set(range(len(p)))
    while left:
        k = next(k for k in range(1, len(p) + 1) if sum(smallest[i] <= alpha / k for i in left) <= k)
        failed = {i for i in left if smallest[i] < 1 and max(p[i], smallest[i]) <= alpha / k}
        if not failed:
            break
        left -= failed
    return set(range(len(p))) - left


def test_adjusted_values_decide_as_the_steps_do() -> None:
    draw = np.random.default_rng(0)
    failing = 0
    for _ in range(500):
        size = int(draw.integers(1, 12))
        smallest = 0.5 ** draw.integers(0, 12, size=size)
        p = np.maximum(smallest, draw.uniform(size=size) ** 4)
        expected = step_by_step(p, smallest, ALPHA)
        assert set(np.flatnonzero(adjusted_p(p, smallest, ALPHA) <= ALPHA).tolist()) == expected
        failing += len(expected) > 1
    assert failing > 50


def test_if_everything_counts_it_is_holms() -> None:
    p = np.random.default_rng(1).uniform(size=40) ** 3
    np.testing.assert_allclose(adjusted_p(p, np.zeros(40), ALPHA), holm(p))


def test_what_cannot_fail_takes_no_level() -> None:
    p = np.array([0.004, 0.02, *[1.0] * 200])
    unchanged = np.array([1e-9, 1e-9, *[1.0] * 200])
    np.testing.assert_allclose(adjusted_p(p, unchanged, 0.05)[:2], [0.008, 0.02])
    three_documents = np.array([1e-9, 1e-9, *[0.125] * 200])
    assert counted(three_documents, 0.05) == 2
    assert holm(p)[0] > 0.05


@pytest.mark.parametrize("seed", range(6))
def test_of_all_signs_at_most_alpha_fail(seed: int) -> None:
    """Four hypotheses of ten documents, judged for all 1,024 ways to swap them: nothing is sampled or approximated."""
    draw = np.random.default_rng(seed)
    losses = [draw.integers(-3, 4, size=10) * (draw.uniform(size=10) < share) for share in (1.0, 0.8, 0.6, 0.3)]
    tolerances = draw.choice([0, 2, 6], size=4)
    failed = sum(
        bool(_failing([signs * own for own in losses], tolerances)) for signs in product((-1.0, 1.0), repeat=10)
    )
    assert failed <= ALPHA * 2**10


def _failing(losses: Sequence[Floats], tolerances: Sequence[int]) -> list[int]:
    able = [np.abs(own).sum() > tolerance for own, tolerance in zip(losses, tolerances, strict=True)]
    smallest = np.array([smallest_p(own) if can else 1.0 for own, can in zip(losses, able, strict=True)])
    adjusted = adjusted_p(np.array([exact_tail(own) for own in losses]), smallest, ALPHA)
    return [i for i, own in enumerate(losses) if own.sum() > tolerances[i] and adjusted[i] <= ALPHA]


def test_p_is_resampled_if_the_smaller_count_depends_on_it() -> None:
    """A bound is three times too large: with 200 unchanged hypotheses it would not do, though only this one counts."""
    losses = np.random.default_rng(3).normal(size=400)
    losses += 2.5 / 20 * losses.std() - losses.mean()  # 2.5 standard errors: p is 0.006
    table = [losses, *[np.zeros(400)] * 200]
    smallest = np.array([smallest_p(own) for own in table])
    counts, all_count = (settle(table, [True] * 201, 0.01, smallest=own)[0] for own in (smallest, None))
    assert counts < all_count
    assert adjusted_p(np.array([counts, *[1.0] * 200]), smallest, 0.01)[0] <= 0.01


def test_a_loss_in_one_cell_of_many_needs_no_more_documents_than_alone(tmp_path: Path) -> None:
    population, cells = Population(60, tasks=["piqa", "wikitext"]), make_cells(20)
    same = {cell: population.samples(0.05) for cell in cells}
    worse = {**same, cells[0]: population.samples(0.05, 0.05)}
    reports = []
    for name, own in (("all", cells), ("one", cells[:1])):
        sides = [
            write_cells(tmp_path / f"{name} {s}", {c: side[c] for c in own}) for s, side in (("b", same), ("r", worse))
        ]
        reports.append(check(sides[1], sides[0]))
    (first, alone) = (
        {o.hypothesis.metric: o.adjusted_p for o in r.tested if o.hypothesis.cell == cells[0]} for r in reports
    )
    assert first == pytest.approx(alone)
    assert len(reports[0].tested) == 20 * 5


def test_a_loss_that_chance_gives_some_cell_of_many_is_not_worse(tmp_path: Path) -> None:
    """Twelve cells, of which none is worse but each has noise of its own: the verdict is that of the adjusted p."""
    population, cells = Population(60, tasks=["piqa"]), make_cells(12)
    baseline, run = (
        write_cells(tmp_path / side, {c: population.samples(0.2, loss, first + i) for i, c in enumerate(cells)})
        for side, loss, first in (("baseline", 0.0, 0), ("run", 0.02, 100))
    )
    settings = {"alpha": ALPHA, "tolerances": {"accuracy": 0, "gold_logprob": 0, "pooled": 0}}
    report = check(run, baseline, override=settings)
    by_chance = [outcome for outcome in report.tested if outcome.p <= ALPHA]
    assert by_chance
    for outcome in by_chance:
        assert outcome.adjusted_p > ALPHA
        assert outcome.verdict == "unclear"
    assert report.passed


def test_what_counts_does_not_depend_on_which_side_is_the_baseline(tmp_path: Path) -> None:
    """Also for KL, whose tolerance is in percent of the baseline's: swapped sides are one of the sign flips."""
    population, cells = Population(80), make_cells(1)
    for kl, other in ((0.05, 0.053), (0.0001, 0.0002), (0.05, 0.2)):
        sides = [
            write_cells(
                tmp_path / f"{kl} {other} {i}", {cells[0]: population.samples(0.02, seed=i, kl=own, kl_noise=0.1)}
            )
            for i, own in enumerate((kl, other))
        ]
        one, two = (check(*pair, GateSettings(), scores_only=True).tested for pair in (sides, sides[::-1]))
        assert [o.hypothesis.smallest_p for o in one] == [o.hypothesis.smallest_p for o in two]
        for there, back in zip(one, two, strict=True):
            if there.hypothesis.kind != "perplexity":
                assert there.hypothesis.loss == pytest.approx(-back.hypothesis.loss)


@pytest.mark.parametrize(("before", "after"), [(0.05, 0.0524), (0.05, 0.0526), (0.001, 0.0019), (0.001, 0.0021)])
def test_the_tolerance_of_kl_is_a_share_of_the_baselines_with_a_floor(
    before: float, after: float, tmp_path: Path
) -> None:
    population, cell = Population(80, tasks=["wikitext"]), make_cells(1)[0]
    folders = [write_cells(tmp_path / str(own), {cell: population.samples(kl=own)}) for own in (before, after)]
    (outcome,) = (o for o in check(folders[1], folders[0], scores_only=True).tested if o.hypothesis.kind == "kl")
    allowed = max(0.05 * before, Tolerances().kl_floor)
    assert outcome.hypothesis.tolerance == pytest.approx(allowed)
    assert (outcome.verdict == "worse") == (after - before > allowed)
    assert outcome.hypothesis.can_fail == (outcome.verdict == "worse")  # here all documents lose
