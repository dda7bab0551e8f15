"""Marks: stars, and which of them remain after adjusting for the table."""

import numpy as np
import pytest
from scipy.stats import false_discovery_control, norm

from qbench.report.bootstrap import Interval
from qbench.report.delta import Difference
from qbench.report.marks import Marks, marks_for
from qbench.report.metrics import Measure
from qbench.report.results import Gap
from qbench.uncertainty import ChanceSource, Estimate


def difference(z: float) -> Difference:
    """A difference that is this many standard errors from zero."""
    estimate = Estimate(z, (ChanceSource(1.0, float("inf")),))
    return Difference(z, Interval(z - 1.96, z + 1.96, abs(z) > 1.96, estimate, (z - 1.96, z + 1.96)))


def measures(count: int) -> list[Measure]:
    return [Measure(f"task {n}", "acc", "higher") for n in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_marks_are_those_of_benjamini_and_hochberg(seed: int) -> None:
    generator = np.random.default_rng(seed)
    scores = np.concatenate([generator.normal(0, 1, 20), generator.normal(3.5, 1, 10)])
    rows = [(measure, difference(float(z))) for measure, z in zip(measures(30), scores, strict=True)]
    expected = false_discovery_control(2 * norm.sf(abs(scores))) <= 0.05
    found = marks_for(rows)
    assert [found.marks(own) for _, own in rows] == (expected & (abs(scores) > 1.96)).tolist()
    assert found.tested == 30
    assert found.starred == int((abs(scores) > 1.96).sum())
    assert found.kept == sum(found.marks(own) for _, own in rows)


def test_a_star_alone_is_not_marked() -> None:
    rows = [(measure, difference(z)) for measure, z in zip(measures(20), [2.1] + 19 * [0.3], strict=True)]
    found = marks_for(rows)
    assert rows[0][1].significant
    assert not found.marks(rows[0][1])
    assert (found.starred, found.kept) == (1, 0)
    assert "Deltas" in (sentence := found.sentence("Deltas"))
    assert "1 of 20" in sentence
    assert "about 1.0" in sentence
    assert "Starred" in sentence


def test_differences_that_a_table_does_not_show_are_not_called_starred() -> None:
    rows = [(measure, difference(z)) for measure, z in zip(measures(20), [9.0, 2.1] + 18 * [0.3], strict=True)]
    sentence = marks_for(rows).sentence("Deltas", shown=False)
    assert "Starred" not in sentence
    assert "Of the 20 Deltas (not shown), 2 have" in sentence
    assert sentence.endswith("(▲▼): 1.")


def test_one_metric_per_task_sets_the_cutoff_for_the_others() -> None:
    """Three metrics of the same answers are one piece of evidence: they do not lower the bar three times."""
    primary = [(Measure(f"t{n}", "acc_norm", "higher"), difference(z)) for n, z in enumerate([4.0, 0.1, 0.2, 0.3])]
    others = [(Measure(f"t{n}", "acc", "higher"), difference(z)) for n, z in enumerate([4.0, 0.1, 0.2, 2.4])]
    found = marks_for([*primary, *others])
    assert found.cutoff == pytest.approx(0.05 / 4)
    assert found.marks(primary[0][1])
    assert found.marks(others[0][1])
    assert not found.marks(others[3][1])


def test_what_cannot_be_judged_is_neither_counted_nor_marked() -> None:
    one_draw = Difference(5.0, Interval(4.0, 6.0, excludes_zero=False))
    found = marks_for([(Measure("t", "acc", "higher"), own) for own in (one_draw, Gap("–", "None."), None)])
    assert found == Marks()
    assert found.sentence("Deltas") == ""
    assert not found.marks(one_draw)
