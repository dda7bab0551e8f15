"""Draws of calibration at the gate: replicates are compared with replicates, and the verdict includes their spread."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from qbench.gate.accept import accept
from qbench.gate.pairing import CheckError
from qbench.gate.power import power
from qbench.gate.render import to_json, to_text
from qbench.gate.settings import GateSettings
from qbench.gate.verdict import GateReport, check
from qbench.records.findings.pairs import draws_changes
from qbench.records.paired import PairedDocuments, pair_documents
from qbench.records.schema import CellRef
from qbench.records.store import read_results

from ..replicates import LABEL, gptq, unquantized, write_cells
from .made_up import Population, layer_audit, make_audit

POPULATION = Population(150, ("lambada_openai", "piqa", "wikitext"))
NOISE = 0.05  # of documents, of one draw
SPREAD = 0.06  # of the losses of draws
DRAWS = (1, 2, 3, 4, 5)
ONE_OTHER = "other"  # windows of another calibration


def cells(
    losses: Mapping[int | None, float], kinds: Sequence[str] = ("softmax",), seed: int = 0
) -> dict[CellRef, pd.DataFrame]:
    """An unquantized cell of each kind, and draws that lose the given amounts."""
    plain = {unquantized(kind): POPULATION.samples() for kind in kinds}
    return plain | {
        gptq(kind, draw): POPULATION.samples(NOISE, loss, 100 * seed + (draw or 0))
        for kind in kinds
        for draw, loss in losses.items()
    }


def spread(seed: int, more: float = 0.0) -> dict[int | None, float]:
    """Losses of equally good draws, all of them made worse by the same amount."""
    drawn = 0.3 + SPREAD * np.random.default_rng(seed).normal(size=len(DRAWS)) + more
    return dict(zip(DRAWS, drawn.tolist(), strict=True))


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five draws."""
    return write_cells(tmp_path_factory.mktemp("gate") / "baseline", cells(spread(0)))


def failed_by_scores(report: GateReport) -> bool:
    """Whether a score got worse."""
    return any(outcome.hypothesis.cell.label == LABEL for outcome in report.worse)


def test_a_cell_is_tested_once_whatever_the_number_of_its_draws(baseline: Path, tmp_path: Path) -> None:
    report = check(write_cells(tmp_path, cells(spread(0))), baseline)
    assert report.passed
    assert len(report.tested) == 2 * 7  # two cells
    (tested,) = (o for o in report.tested if o.hypothesis.metric == "perplexity" and o.hypothesis.draws == 5)
    assert tested.hypothesis.cell == gptq("softmax", None)
    assert tested.p == 1


@pytest.mark.parametrize("seed", range(1, 9))
def test_equally_good_draws_pass_as_replicates(baseline: Path, tmp_path: Path, seed: int) -> None:
    report = check(write_cells(tmp_path, cells(spread(seed), seed=seed), ONE_OTHER), baseline)
    assert report.passed, to_text(report)


def test_of_equally_good_single_draws_many_fail(tmp_path: Path) -> None:
    """Why replicates exist: without them half of these runs fail, and the others seem to improve."""
    runs = [
        write_cells(tmp_path / str(draw), cells({None: loss}, seed=draw), f"{ONE_OTHER}{draw}")
        for draw, loss in spread(0).items()
        if draw
    ]
    verdicts = [failed_by_scores(check(one, two)) for one in runs for two in runs if one != two]
    assert 4 <= sum(verdicts) <= 10


def test_a_real_loss_fails_with_other_draws_and_with_the_same(baseline: Path, tmp_path: Path) -> None:
    worse = cells(spread(3, more=0.5), seed=3)
    assert failed_by_scores(check(write_cells(tmp_path / "other", worse, ONE_OTHER), baseline))
    same = cells({draw: loss + 0.1 for draw, loss in spread(0).items()})
    assert failed_by_scores(check(write_cells(tmp_path / "same", same), baseline))  # paired: the spread cancels


def test_a_small_loss_is_seen_by_pairs_of_draws_and_not_by_other_draws(baseline: Path, tmp_path: Path) -> None:
    worse = cells({draw: loss + 0.02 for draw, loss in spread(0).items()})
    assert failed_by_scores(check(write_cells(tmp_path / "same", worse), baseline))
    assert not failed_by_scores(check(write_cells(tmp_path / "other", worse, ONE_OTHER), baseline))


def test_another_calibration_is_said_first(baseline: Path, tmp_path: Path) -> None:
    text = to_text(check(write_cells(tmp_path, cells(spread(2), seed=2), ONE_OTHER), baseline))
    lines = text.splitlines()
    assert "calibration" in lines[5]
    assert f"mini-softmax-{LABEL}" in lines[5]
    assert not any("draw-1" in line for line in lines[:7])  # each cell is named only once


@pytest.mark.parametrize(("before", "after"), [((None,), DRAWS), (DRAWS, (None,)), (DRAWS[:3], DRAWS)])
def test_replicates_are_not_compared_with_something_else(
    tmp_path: Path, before: Sequence[int | None], after: Sequence[int | None]
) -> None:
    folders = [
        write_cells(tmp_path / name, cells(dict.fromkeys(draws, 0.3)))
        for name, draws in (("before", before), ("after", after))
    ]
    with pytest.raises(CheckError, match=rf"mini-softmax-{LABEL} has {len(after)} .*{len(before)} .*seeds.*accept"):
        check(folders[1], folders[0])


def test_a_part_of_the_draws_is_compared_where_a_recipe_allows_it(baseline: Path, tmp_path: Path) -> None:
    some = {draw: loss for draw, loss in spread(0).items() if draw in (1, 2, 3)}
    allowed = {"baseline_may_hold_more": True}
    report = check(write_cells(tmp_path / "some", cells(some), gate=allowed), baseline)
    assert report.passed
    assert {outcome.hypothesis.draws for outcome in report.tested} == {1, 3}
    with pytest.raises(CheckError, match=r"3 calibration draws .* 5 draws"):
        check(write_cells(tmp_path / "not", cells(some)), baseline)


def test_a_failed_draw_fails_and_the_others_are_compared(baseline: Path, tmp_path: Path) -> None:
    some: dict[CellRef, pd.DataFrame | None] = {**cells(spread(0)), gptq("softmax", 4): None}
    report = check(write_cells(tmp_path, some), baseline)
    (failure,) = report.failures
    assert failure.cell == gptq("softmax", 4)
    assert {o.hypothesis.draws for o in report.tested if o.hypothesis.cell.label == LABEL} == {4}
    assert set(report.differences) == {gptq("softmax", 4).name}


def test_draws_of_other_documents_fail(baseline: Path, tmp_path: Path) -> None:
    folder = write_cells(tmp_path, cells(spread(0)))
    pairs = [(s, s) for s in read_results(folder).current if s.record.cell.draw]
    few = write_cells(tmp_path / "few", {gptq("softmax", 6): Population(150, ("piqa",), seed=9).samples().head(100)})
    (other,) = read_results(few).current
    found = {type(paired).__name__ for paired in pair_documents(*pairs, (other, other))}
    assert found == {"OtherDocuments"}


def test_means_are_over_draws_and_spread_is_between_them(tmp_path: Path) -> None:
    """The numbers of a hypothesis, from the frames themselves."""
    then, now = cells(spread(0)), cells(spread(1, 0.1), seed=1)
    report = check(write_cells(tmp_path / "now", now, ONE_OTHER), write_cells(tmp_path / "then", then))
    (own,) = (
        o.hypothesis for o in report.tested if o.hypothesis.metric == "word_perplexity" and o.hypothesis.draws > 1
    )

    def scores(of: Mapping[CellRef, pd.DataFrame]) -> list[float]:
        pages = [of[gptq("softmax", draw)].query("task == 'wikitext'") for draw in DRAWS]
        return [-page["word_perplexity"].sum() / page["word_perplexity.weight"].sum() for page in pages]

    assert own.before == pytest.approx(np.exp(np.mean(scores(then))))
    assert own.after == pytest.approx(np.exp(np.mean(scores(now))))
    assert own.calibration is not None
    expected = sum(np.var(scores(side), ddof=1) / 5 for side in (then, now))
    assert own.calibration.variance == pytest.approx(expected)
    assert 4 <= own.calibration.freedom <= 8
    alone = check(tmp_path / "now", tmp_path / "then", GateSettings()).tested
    assert own.with_calibration(1e-9) > 1e-9
    assert own.with_calibration(0.7) == 0.7
    assert len(alone) == len(report.tested)


def test_the_spread_of_the_same_draws_does_not_count(tmp_path: Path) -> None:
    """With the same draws, a loss beyond the chance of documents is the run's."""
    then, now = cells(spread(0)), cells({draw: loss + 0.2 for draw, loss in spread(0).items()})
    folders = [write_cells(tmp_path / name, own) for name, own in (("then", then), ("now", now))]
    by_draw = [{s.record.cell.draw: s for s in read_results(f).current if s.record.cell.draw} for f in folders]
    pairs = [(by_draw[0][draw], by_draw[1][draw]) for draw in DRAWS]
    assert all(isinstance(p, PairedDocuments) and p.same_calibration for p in pair_documents(*pairs))
    report = check(folders[1], folders[0])
    assert all(o.hypothesis.calibration is None for o in report.tested)
    assert failed_by_scores(report)


def test_a_run_of_replicates_is_accepted_and_passes_against_itself(baseline: Path, tmp_path: Path) -> None:
    run = write_cells(tmp_path / "run", cells(spread(5), seed=5), ONE_OTHER)
    accept(run, tmp_path / "new", "five draws", None, "new")
    found = read_results(tmp_path / "new")
    assert sorted(s.record.cell.draw or 0 for s in found.current) == [0, *DRAWS]
    assert check(run, tmp_path / "new").passed
    assert json.loads(to_json(check(run, tmp_path / "new")))["scores"][-1]["calibration_draws"] == 5
    assert power(tmp_path / "new")


def test_audits_of_other_draws_are_compared_on_their_mean(tmp_path: Path) -> None:
    random = np.random.default_rng(0)

    def audits(slope: float = 1.0) -> dict[CellRef, object]:
        found = {}
        for draw in DRAWS:
            off = 1 + 0.01 * random.normal(size=2)  # as draws of mini differ
            changes = {"slope": slope * (1 + 0.003 * random.normal()), "error_energy": 1.12 * off[0]}
            audit = make_audit(**changes, bits=3, group_size=128)
            label = {"label": LABEL, "method": "gptq"}
            found[gptq("softmax", draw)] = audit.model_copy(update=label)
        return found

    then = write_cells(tmp_path / "then", cells(spread(0)), audits=audits())
    equal = check(write_cells(tmp_path / "equal", cells(spread(1), seed=1), ONE_OTHER, audits=audits()), then)
    assert not [f for f in equal.failures if f.found_by == "audit"]
    scaled = check(write_cells(tmp_path / "scaled", cells(spread(1), seed=1), ONE_OTHER, audits=audits(1.03)), then)
    assert any("Weight scale" in f.message and f.cell.draw is None for f in scaled.failures)
    same = check(write_cells(tmp_path / "same", cells(spread(0)), audits=audits()), then)  # each with its own draw
    assert any("Relative weight error" in f.message and f.cell.draw for f in same.failures)


def test_a_drift_of_draws_must_be_beyond_chance_and_beyond_its_limit() -> None:
    def audits(slopes: Sequence[float]) -> list[object]:
        return [make_audit().model_copy(update={"layers": (layer_audit("a", slope=slope),)}) for slope in slopes]

    def changes(then: Sequence[float], now: Sequence[float]) -> list[str]:
        return [
            text for _, text in draws_changes(list(zip(audits(then), audits(now), strict=True)), GateSettings(), 1e-4)
        ]

    steady = [1.0, 1.0001, 0.9999]
    assert not changes(steady, [1.005, 1.0051, 1.0049])  # certain, but within 1%
    assert not changes([0.9, 1.0, 1.1], [1.0, 1.1, 1.2])  # 10%, but may be chance
    assert changes(steady, [1.05, 1.0501, 1.0499])
