"""What a pass excludes: "not worse by more than x at 95%", and a recipe that requires it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from qbench.gate.accept import accept
from qbench.gate.pairing import CheckError
from qbench.gate.render import to_json, to_junit, to_markdown, to_text
from qbench.gate.settings import GateSettings, Margins, Override
from qbench.gate.sign_flip import Floats, upper_end
from qbench.gate.verdict import check, parse_settings

from .made_up import Population, make_cells, write_cells

CELLS = make_cells(2)
POPULATION = Population(300)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A baseline, and a run that differs by noise."""
    root = tmp_path_factory.mktemp("margins")
    sides = (("baseline", 0), ("run", 10))
    one, two = (
        write_cells(root / name, {cell: POPULATION.samples(0.05, seed=seed + i) for i, cell in enumerate(CELLS)})
        for name, seed in sides
    )
    return one, two


def held(draws: Floats, truth: float, largest: float | None = None) -> float:
    """How often the upper end is not below the truth; draws: [tables, documents]."""
    ones = np.ones(draws.shape[1])
    ends = [upper_end(own, ones, largest) for own in draws]
    return float(np.mean(np.array(ends) >= truth))


SURE = 0.013  # two standard errors of 95% among 1,000


@pytest.mark.parametrize("documents", [60, 400])
@pytest.mark.parametrize(
    "law",
    [
        lambda draw, shape: draw.normal(size=shape),
        lambda draw, shape: draw.standard_t(3, size=shape),
        lambda draw, shape: draw.exponential(size=shape) - 1,
        lambda draw, shape: draw.lognormal(size=shape) - math.exp(0.5),
        lambda draw, shape: math.exp(0.5) - draw.lognormal(size=shape),
    ],
    ids=["normal", "t3", "exponential", "lognormal", "lognormal gains"],
)
def test_it_holds_in_95_of_100_tables(law, documents: int) -> None:
    assert held(law(np.random.default_rng(0), (1000, documents)), 0.0) >= 0.95 - SURE


@pytest.mark.parametrize(("share", "documents"), [(0.05, 60), (0.01, 200), (0.01, 400)])
def test_it_holds_though_few_documents_change(share: float, documents: int) -> None:
    """The spread of their losses is known from a few. If none changed, there is no upper end, and no statement."""
    draw = np.random.default_rng(3)
    losses = (draw.uniform(size=(1000, documents)) < share) * draw.exponential(size=(1000, documents))
    changed = losses.any(axis=1)
    silent = 1 - changed.mean()
    assert silent + held(losses[changed], share) * changed.mean() >= 0.95 - SURE
    of_all = [upper_end(own, np.ones(documents), float(own.max())) for own in losses[changed]]  # degrees of freedom
    assert silent + np.mean(np.array(of_all) >= share) * changed.mean() < 0.95 - SURE


def test_one_document_that_changed_says_little_about_the_next() -> None:
    one = np.zeros(400)
    one[7] = 1.0
    known, unknown = (upper_end(one, np.ones(400), largest) for largest in (1.0, None))
    assert known < 0.02 < unknown


@pytest.mark.parametrize(
    ("lost", "won"), [(0.0075, 0), (0.02, 0), (0.02, 0.02), (0.1, 0.08), (0.004, 0.001), (0.3, 0.02)]
)
def test_it_holds_for_answers_though_few_change(lost: float, won: float) -> None:
    for documents in (60, 400):
        coin = np.random.default_rng(1).uniform(size=(1000, documents))
        answers = (coin < lost) * 1.0 - ((coin >= lost) & (coin < lost + won)) * 1.0
        assert held(answers, lost - won, 1.0) >= 0.95 - SURE


def test_unchanged_answers_do_not_promise_that_none_will_change() -> None:
    """Of 400 answers that did not change, the rule of three says 0.75 points."""
    assert 0.0075 <= upper_end(np.zeros(400), np.ones(400), 1.0) <= 0.01
    assert upper_end(np.zeros(400), np.ones(400)) == 0
    assert upper_end(np.ones(1), np.ones(1), 1.0) == math.inf


def test_pages_of_different_lengths_are_bounded_per_word() -> None:
    draw, good = np.random.default_rng(2), 0
    for _ in range(600):
        words = draw.integers(20, 400, size=100).astype(float)
        losses = words * 0.01 + np.sqrt(words) * draw.normal(size=100)
        good += upper_end(losses, words) >= 0.01
    assert 0.94 <= good / 600 <= 0.99


def test_a_pass_says_what_it_excludes(folders: tuple[Path, Path]) -> None:
    baseline, run = folders
    report = check(run, baseline)
    worst = report.least_sure
    assert worst is not None
    h = worst.hypothesis
    assert h.upper_in_tolerances == max(
        o.hypothesis.upper_in_tolerances for o in report.tested if not o.hypothesis.parts
    )
    for outcome in report.tested:
        assert outcome.hypothesis.loss < outcome.hypothesis.upper
    for text in (to_text(report).splitlines()[1], to_markdown(report).replace("\\", "")):
        assert "95%" in text
        assert h.name in text
        assert "not worse by more than" in text
    content = json.loads(to_json(report))
    assert content["statement"]["metric"] == h.metric
    assert content["statement"]["not_worse_by_more_than"] == pytest.approx(h.upper)
    assert all(score["loss"] < score["not_worse_by_more_than"] for score in content["scores"])
    cases = list(ElementTree.fromstring(to_junit(report).encode()).iter("testcase"))
    assert len(cases) == len(report.tested)
    assert all("not worse by more than" in (case.findtext("system-out") or "") for case in cases)


def test_unchanged_log_likelihoods_are_called_so_and_meet_any_margin(tmp_path: Path) -> None:
    """That none of 50 pages changed says how many may change (5.8%), but not by how much."""
    cells = {CELLS[0]: Population(50, ["wikitext"]).samples()}
    one, two = (write_cells(tmp_path / name, cells) for name in ("b", "r"))
    report = check(two, one, GateSettings(noninferiority=Margins(perplexity=1e-6)))
    assert report.passed
    for own in json.loads(to_json(report))["scores"]:
        assert (own["changed_documents"], own["not_worse_by_more_than"]) == (0, None)
    said = "unchanged in all 50 documents, so fewer than 5.82% of new ones change"
    assert said in to_junit(report)
    assert said in to_text(report).splitlines()[1]
    assert "0 times its tolerance" not in to_text(report)
    assert json.loads(to_json(report))["statement"] is None


def test_a_required_margin_fails_if_it_cannot_be_excluded(folders: tuple[Path, Path]) -> None:
    baseline, run = folders
    uppers = {
        o.hypothesis.name: o.hypothesis.upper for o in check(run, baseline).tested if o.hypothesis.kind == "perplexity"
    }
    edge = max(uppers.values())
    assert check(run, baseline, GateSettings(noninferiority=Margins(perplexity=1.01 * edge))).passed
    report = check(run, baseline, GateSettings(noninferiority=Margins(perplexity=0.99 * edge)))
    assert not report.passed
    (failed,) = report.not_excluded
    assert failed.hypothesis.upper == edge
    text = to_text(report)
    assert text.startswith("FAIL: 1 score may be worse by more than the required margin")
    assert "gate.noninferiority" in text
    (line,) = (line for line in text.splitlines() if "tolerance: margin" in line)
    assert f"  {0.99 * edge:.6g}%" in text[text.index(line) :]  # the margin is shown, not the tolerance
    assert "no score is worse" not in text  # only a pass excludes losses
    explained = text.splitlines()[1]  # a margin may fail a run of which nothing got worse
    assert "fail for this reason" in explained
    assert "required margin" in explained
    passed = to_text(check(run, baseline)).splitlines()
    assert "no score is worse" in passed[1]
    assert "margin" not in passed[2]
    assert 'failures="1"' in to_junit(report)
    assert failed.hypothesis.cell.name in report.differences


def test_a_margin_can_be_set_for_a_metric(folders: tuple[Path, Path]) -> None:
    baseline, run = folders
    own = {"wikitext": {"word_perplexity": Override(noninferiority=1e-9)}}
    report = check(run, baseline, GateSettings(overrides=own))
    assert {(o.hypothesis.task, o.hypothesis.metric) for o in report.not_excluded} == {("wikitext", "word_perplexity")}


def test_a_recipe_may_write_the_unit(folders: tuple[Path, Path], tmp_path: Path) -> None:
    baseline, _ = folders
    gate = {"noninferiority": {"perplexity": "0.001%", "accuracy": "90 points"}}
    run = write_cells(
        tmp_path / "run", {c: POPULATION.samples(0.05, seed=10 + i) for i, c in enumerate(CELLS)}, gate=gate
    )
    report = check(run, baseline)
    assert report.settings.noninferiority == Margins(perplexity=0.001, accuracy=90)
    assert {o.hypothesis.kind for o in report.not_excluded} == {"perplexity"}


def test_a_run_with_too_few_documents_for_its_margin_is_no_baseline(tmp_path: Path) -> None:
    """With this baseline every later check would fail."""
    gate = {"noninferiority": {"accuracy": 0.5}}
    run = write_cells(tmp_path / "run", {CELLS[0]: Population(50).samples()}, gate=gate)
    with pytest.raises(CheckError, match=r"cannot be a baseline.*0\.5 points"):
        accept(run, tmp_path / "baseline", "first", None)


@pytest.mark.parametrize("kind", ["perplexity", "kl"])
def test_a_margin_of_something_that_is_not_tested_is_no_pass(kind: str, tmp_path: Path) -> None:
    folders = [write_cells(tmp_path / name, {CELLS[0]: Population(50, ["piqa"]).samples()}) for name in ("b", "r")]
    with pytest.raises(CheckError, match=rf"gate\.noninferiority\.{kind} is 2.*accuracy, gold_logprob"):
        check(folders[1], folders[0], GateSettings(noninferiority=Margins(**{kind: 2.0})))


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_margin_of_kl_needs_kl_on_both_sides(lacking: int, tmp_path: Path) -> None:
    folders = [
        write_cells(tmp_path / str(side), {CELLS[0]: POPULATION.samples(kl=None if side == lacking else 0.05)})
        for side in (0, 1)
    ]
    assert check(folders[1], folders[0]).passed
    with pytest.raises(CheckError, match=r"noninferiority\.kl"):
        check(folders[1], folders[0], GateSettings(noninferiority=Margins(kl=5)))


def test_the_statement_leaves_out_scores_of_which_nothing_is_known(tmp_path: Path) -> None:
    """No document changed: accuracies have a largest loss, log-likelihoods do not."""
    cells = {CELLS[0]: Population(50, ["piqa", "wikitext"]).samples()}
    report = check(*(write_cells(tmp_path / name, cells) for name in ("b", "r")))
    unknown = [o for o in report.tested if o.hypothesis.is_score and o.hypothesis.kind != "accuracy"]
    assert unknown
    assert len(report.unchanged) == len(unknown)
    assert report.least_sure is not None
    assert report.least_sure.hypothesis.kind == "accuracy"
    assert f"{len(unknown)} scores" in to_text(report).splitlines()[1]
    content = json.loads(to_json(report))
    assert content["statement"]["unchanged_scores_left_out"] == len(unknown)
    assert sum(score["not_worse_by_more_than"] is None for score in content["scores"]) == len(unknown) + 1  # the pooled


@pytest.mark.parametrize("share", [0.02, 0.05])
def test_the_statement_about_a_pooled_loss_of_answers_and_pages_holds(share: float, tmp_path: Path) -> None:
    """No answer changes, and a few pages lose very different amounts: the answers say nothing about these."""
    cells = {CELLS[0]: Population(60, ["piqa", "wikitext"]).samples()}
    report = check(*(write_cells(tmp_path / name, cells) for name in ("b", "r")))
    (h,) = (o.hypothesis for o in report.tested if o.hypothesis.parts)
    assert not h.only_answers
    draw, size = np.random.default_rng(4), len(h.losses) // 2
    pages = (draw.uniform(size=(1000, size)) < share) * draw.lognormal(size=(1000, size)) * 5 * h.lost_answers
    mean = share * math.exp(0.5) * 5 * h.lost_answers * size / h.weights.sum()
    tables = [replace(h, losses=np.concatenate([np.zeros(len(h.losses) - size), own])) for own in pages]
    assert np.mean([own.is_unchanged or own.upper >= mean for own in tables]) >= 0.95 - SURE
    answers = [replace(own, only_answers=True) for own in tables]  # the statement if pages could lose no more
    assert np.mean([own.upper >= mean for own in answers]) < 0.9


def test_unchanged_answers_do_not_promise_an_unchanged_pooled_loss(tmp_path: Path) -> None:
    """Three metrics, two of them accuracies: one lost answer in 60 is (2 / 3) / (60 · 0.005) tolerances."""
    folders = [write_cells(tmp_path / name, {CELLS[0]: Population(60, ["piqa"]).samples()}) for name in ("b", "r")]
    settings = GateSettings(noninferiority=Margins(pooled=1))
    (failed,) = check(folders[1], folders[0], settings).not_excluded
    assert failed.hypothesis.kind == "pooled"
    single = upper_end(np.zeros(60), np.ones(60), 1.0) / 0.005  # of one accuracy
    assert failed.hypothesis.upper == pytest.approx(2 / 3 * single)
    report = check(folders[1], folders[0], settings)
    text, most = to_text(report), f"{failed.hypothesis.upper:.3g}×"
    assert text.startswith("FAIL: the pooled loss of 1 cell may be above the required margin (")  # it is not a score
    assert f"unchanged in all 60 documents; of so few, answers alone may lose {most} (95%); 1× is" in to_junit(report)


def test_the_statement_about_the_pooled_loss_of_answers_holds(tmp_path: Path) -> None:
    """Answers alone, few of which change: 0.75% and 2% of them are lost, in both metrics of a document."""
    (h,) = (
        o.hypothesis
        for o in check(
            *(write_cells(tmp_path / name, {CELLS[0]: Population(60, ["piqa"]).samples()}) for name in ("b", "r"))
        ).tested
        if o.hypothesis.parts
    )
    coins = np.random.default_rng(0).uniform(size=(1000, 60))
    for lost in (0.0075, 0.02):
        tables = [replace(h, losses=(own < lost) * h.lost_answers) for own in coins]
        assert np.mean([own.upper >= lost * h.lost_answers * 60 for own in tables]) >= 0.95 - SURE


def test_an_improvement_is_not_a_negative_loss_in_words(tmp_path: Path) -> None:
    population = Population(60, ["wikitext"])
    before, after = (
        write_cells(tmp_path / str(loss), {CELLS[0]: population.samples(loss=loss)}) for loss in (0.3, 0.0)
    )
    report = check(after, before)
    assert report.least_sure is not None
    assert report.least_sure.hypothesis.upper < 0
    assert " more than 0 times its tolerance" in to_text(report).splitlines()[1]


@pytest.mark.parametrize("value", ["1..5%", ".%", True, "-1%", "1%%", "%"])
def test_what_is_no_percentage_says_so(value: object) -> None:
    with pytest.raises(CheckError, match=r"gate\.noninferiority\.perplexity is .*must be a number of percent"):
        parse_settings({"noninferiority": {"perplexity": value}}, "gate")
    assert parse_settings({"noninferiority": {"perplexity": ".5 %"}}, "gate").noninferiority.perplexity == 0.5
