"""How many documents are needed for which loss: the formula against simulation, and the command."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from qbench.cli import main
from qbench.gate.hypotheses import in_unit
from qbench.gate.pairing import CheckError
from qbench.gate.power import Noise, Power, binomial_tail, documents_needed, power, smallest_loss, to_text
from qbench.gate.sign_flip import holm, settle

from ..example_records import cell_ref
from .made_up import Population, make_cells, write_cells


@pytest.mark.parametrize("aimed", [0.8, 0.9])
@pytest.mark.parametrize("loss", [0.1, 0.4])
def test_the_documents_needed_give_the_power_aimed_at(loss: float, aimed: float) -> None:
    alpha, tolerance = 0.01 / 264, 0.02
    n = math.ceil(documents_needed(loss, tolerance, Noise(0.5), alpha, aimed))
    draw = np.random.default_rng(0)
    found = 0
    for _ in range(300):
        losses = draw.normal(loss, 0.5, size=n)
        found += losses.mean() > tolerance and settle([losses], [True], alpha)[0] <= alpha
    # With few documents, sign flips have lighter tails than the formula's normal distribution.
    assert aimed - 0.07 <= found / 300 <= aimed + (0.07 if n > 100 else 0.15)


def found_by_the_gate(documents: int, loss: float, noise: Noise, alpha: float, tolerance: float = 0.005) -> float:
    """How often the gate's test finds a loss of answers, if the recorded share of answers changes."""
    changing = max(noise.spread**2 + loss**2, loss)
    lost, won = (changing + loss) / 2, (changing - loss) / 2
    draw, found = np.random.default_rng(1), 0
    for _ in range(1000):
        losses = draw.choice([1.0, -1.0, 0.0], p=[lost, won, 1 - lost - won], size=documents)
        found += losses.mean() > tolerance and settle([losses], [True], alpha)[0] <= alpha
    return found / 1000


SURE = 0.04  # three standard errors of a share of 80% among 1,000


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.1, 0.3])
def test_a_promised_loss_is_found_although_few_answers_change(spread: float) -> None:
    """The normal formula assumes that every loss has the recorded spread. With 400 documents and a spread of 0.1 it
    promised to find 2.46 points in 80% of cases, and simulation found them in 6%; with a spread of 0 it promised 0.5
    points, which is two documents."""
    noise, alpha = Noise(spread, answers=True), 0.01 / 264
    loss = smallest_loss(400, 0.005, noise, alpha, 0.8)
    assert found_by_the_gate(400, loss, noise, alpha) == pytest.approx(0.8, abs=SURE)


@pytest.mark.parametrize(("spread", "loss"), [(0.0, 0.02), (0.05, 0.02), (0.1, 0.02), (0.3, 0.02), (0.1, 0.01)])
def test_documents_that_are_promised_to_be_enough_are(spread: float, loss: float) -> None:
    """It promised that 16 documents detect a loss of 2 points if no answer changed, and 595 with a spread of 0.1."""
    noise, alpha = Noise(spread, answers=True), 0.01 / 264
    needed = documents_needed(loss, 0.005, noise, alpha, 0.8)
    assert found_by_the_gate(int(needed), loss, noise, alpha) == pytest.approx(0.8, abs=SURE)


@pytest.mark.parametrize("documents", [20, 30, 50, 100])
def test_few_documents_see_what_mcnemars_exact_test_sees_in_them(documents: int) -> None:
    """A large share of few documents changes: 25.7 points of 50 documents were promised with 80% and found in 28%."""
    noise, alpha = Noise(0.3, answers=True), 0.01 / 264
    loss = smallest_loss(documents, 0.005, noise, alpha, 0.8)
    assert found_by_the_gate(documents, loss, noise, alpha) == pytest.approx(0.8, abs=SURE)
    assert smallest_loss(14, 0.005, noise, alpha, 0.8) == math.inf  # 2 ** -14 is above alpha
    assert documents_needed(1.2, 0.005, noise, alpha, 0.8) == math.inf  # points of more than all answers


def test_a_loss_in_a_metric_with_its_own_alpha_is_found_as_promised() -> None:
    """p was resampled for the largest alpha of the table alone; where another was smaller, 72% were found of 80%."""
    own = 0.0001
    loss, draw, found = smallest_loss(400, 0.02, Noise(0.5), own / 12, 0.8), np.random.default_rng(0), 0
    alphas = np.array([own, *[0.01] * 11])
    for _ in range(1000):
        table = [draw.normal(loss, 0.5, size=400), *[np.zeros(400)] * 11]
        found += holm(settle(table, [True] * 12, alphas))[0] <= own
    assert found / 1000 == pytest.approx(0.8, abs=SURE)


def test_the_tails_are_scipys() -> None:
    for trials, chance in ((0, 0.5), (1, 0.3), (40, 0.5), (5000, 0.01)):
        successes = np.arange(trials + 2)
        expected = stats.binom.sf(successes - 1, trials, chance)
        np.testing.assert_allclose(binomial_tail(successes, trials, chance), expected, rtol=1e-9, atol=1e-300)


def test_what_no_document_shows_is_none_and_not_a_percentage(tmp_path: Path) -> None:
    """It used to be printed as 1.01e+306%."""
    population, cells = Population(8), make_cells(2)
    write_cells(tmp_path / "base", {cell: population.samples() for cell in cells})
    write_cells(tmp_path / "run", {cell: population.samples(0.1) for cell in cells})
    rows = power(tmp_path / "run", tmp_path / "base")
    pages = next(row for row in rows if row.metric == "word_perplexity")
    assert set(pages.found.values()) == {math.inf}
    text = to_text(rows)
    assert "e+" not in text
    assert in_unit("perplexity", math.inf) == math.inf
    huge = Power("w", "word_perplexity", "perplexity", 20, {0.8: 3e40, 0.9: math.inf}, {30.0: math.inf, 60.0: 9})
    line = to_text([huge]).splitlines()[3]
    assert "over 1,000%" in line
    assert "none" in line
    assert "e+" not in line


def test_near_the_tolerance_it_is_the_tolerance_that_needs_documents() -> None:
    assert documents_needed(0.01, 0.01, Noise(0.1), 1e-4, 0.8) == math.inf
    near = documents_needed(0.0101, 0.01, Noise(0.1), 1e-4, 0.8)
    assert near == pytest.approx((0.8416 * 0.1 / 0.0001) ** 2, rel=1e-3)


def test_the_smallest_loss_is_the_other_way_round() -> None:
    noise = Noise(0.7, stretch=1.5)
    loss = smallest_loss(400, 0.02, noise, 1e-4, 0.9)
    assert documents_needed(loss, 0.02, noise, 1e-4, 0.9) == pytest.approx(400, rel=1e-6)
    assert smallest_loss(5, 0.02, noise, 1e-4, 0.9) == math.inf


def test_more_noise_needs_more_documents(tmp_path: Path) -> None:
    population, cells = Population(100), make_cells(2)
    write_cells(tmp_path / "base", {cell: population.samples() for cell in cells})
    seen = []
    for noise in (0.02, 0.1):
        write_cells(tmp_path / str(noise), {cell: population.samples(noise) for cell in cells})
        seen.append({(p.task, p.metric): p for p in power(tmp_path / str(noise), tmp_path / "base")})
    quiet, noisy = seen
    assert len(quiet) == 12 + 1  # and the pooled loss
    for key in (("wikitext", "word_perplexity"), ("sciq", "gold_logprob")):
        assert quiet[key].found[0.8] < quiet[key].found[0.9]
        assert quiet[key].found[0.8] < noisy[key].found[0.8]
        for loss, documents in quiet[key].needed.items():
            assert documents <= noisy[key].needed[loss]


def test_fewer_documents_than_p_needs_find_nothing() -> None:
    """Without noise, the normal formula promised that six documents are enough for 1%; their p is at least 2 ** -6."""
    for alpha in (0.05, 0.01, 0.01 / 4):
        needed = documents_needed(0.04, 0.02, Noise(0.0), alpha, 0.8)
        assert needed == math.ceil(-math.log2(alpha))
        assert settle([np.full(int(needed), 0.04)], [True], alpha)[0] <= alpha
        assert settle([np.full(int(needed) - 1, 0.04)], [True], alpha)[0] > alpha
        assert smallest_loss(int(needed) - 1, 0.02, Noise(0.0), alpha, 0.8) == math.inf


def test_cells_that_did_not_change_say_nothing_about_noise(tmp_path: Path) -> None:
    """Among many, they made the median 0: any loss above its tolerance was promised to be found."""
    population, cells = Population(100), make_cells(6)
    same = {cell: population.samples() for cell in cells}
    base, copy = (write_cells(tmp_path / name, same) for name in ("base", "copy"))
    changed = {cell: population.samples(0.1) for cell in cells[:2]}
    few, all_of_them = write_cells(tmp_path / "few", same | changed), write_cells(tmp_path / "all", changed)
    part = write_cells(tmp_path / "part", {cell: same[cell] for cell in cells[:2]})
    assert power(few, base) == power(few, base, cells=2) == power(all_of_them, part)
    with pytest.raises(CheckError, match="the same scores in every document"):
        power(copy, base)
    with pytest.raises(CheckError, match=r"from 1 to 2, the cells of .*few that differ from .*base"):
        power(few, base, cells=3)


def test_the_table_is_explained_by_a_row_that_sees_something() -> None:
    blind = Power("sciq", "acc", "accuracy", 3, {0.8: math.inf, 0.9: math.inf}, {1.0: 900, 2.0: 300})
    row = Power("piqa", "acc", "accuracy", 400, {0.8: 2.94, 0.9: 3.2149}, {1.0: 3304, 2.0: 841})
    lines = to_text([blind, row]).splitlines()
    assert lines[3:6] == [
        "sciq    acc       3            none         none         900 for 1 point       300 for 2 points",
        "piqa    acc       400          2.94 points  3.21 points  3,304 for 1 point     841 for 2 points",
        "",
    ]
    found, needed = lines[6:]
    for fact in ("400 documents of piqa", "in acc", "2.94 points with 80%", "3.21 points", "90%"):
        assert fact in found
    for fact in ("80%", "3,304 documents for 1 point (2 times", "841 documents for 2 points (4 times"):
        assert fact in needed
    assert "too few" in to_text([blind]).splitlines()[-1]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    population = Population(50)
    whole, quantized = cell_ref(method="none", bits=16, label="none-16"), cell_ref()
    folder = write_cells(tmp_path / "run", {whole: population.samples(), quantized: population.samples(0.05)})
    assert main(["power", str(folder), "--format", "markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| task")
    assert "| documents for 2× tolerance (80%) " in lines[0]  # on one line, which Markdown needs
    assert lines[15:16] == [""]  # after 13 rows
    assert lines[16].startswith("How to read it: ")
    assert main(["power", str(folder)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines()[:16])) < 120
    alone = write_cells(tmp_path / "alone", {quantized: population.samples()})
    assert main(["power", str(alone)]) == 2
    said = capsys.readouterr().err
    assert str(alone) in said
    assert "--against" in said
