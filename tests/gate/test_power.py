"""How many documents are needed for which loss: the formula against simulation, and the command."""

import math
from pathlib import Path

import numpy as np
import pytest

from qbench.cli import main
from qbench.gate.power import Noise, Power, documents_needed, power, smallest_loss, to_text
from qbench.gate.sign_flip import settle

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
    # Of few documents, sign flips have lighter tails than the formula's normal ones.
    assert aimed - 0.07 <= found / 300 <= aimed + (0.07 if n > 100 else 0.15)


def test_the_power_for_answers_is_about_right_too() -> None:
    alpha, lost, won = 0.01 / 264, 0.09, 0.02
    spread = math.sqrt(lost + won - (lost - won) ** 2)
    draw = np.random.default_rng(1)
    found = 0
    needed = math.ceil(documents_needed(lost - won, 0.005, Noise(spread), alpha, 0.8))
    for _ in range(300):
        losses = draw.choice([1.0, -1.0, 0.0], p=[lost, won, 1 - lost - won], size=needed)
        found += settle([losses], [True], alpha)[0] <= alpha
    assert found / 300 == pytest.approx(0.8, abs=0.1)


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
    assert len(quiet) == 12
    for key in (("wikitext", "word_perplexity"), ("sciq", "gold_logprob")):
        assert quiet[key].found[0.8] < quiet[key].found[0.9]
        assert quiet[key].found[0.8] < noisy[key].found[0.8]
        for loss, documents in quiet[key].needed.items():
            assert documents <= noisy[key].needed[loss]


def test_the_table_is_explained_by_a_row_that_sees_something() -> None:
    blind = Power("sciq", "acc", "accuracy", 3, {0.8: math.inf, 0.9: math.inf}, {1.0: 900, 2.0: 300})
    row = Power("piqa", "acc", "accuracy", 400, {0.8: 2.94, 0.9: 3.2149}, {1.0: 3304, 2.0: 841})
    assert to_text([blind, row]).splitlines()[3:] == [
        "sciq    acc       3            none         none         900 for 1 point       300 for 2 points",
        "piqa    acc       400          2.94 points  3.21 points  3,304 for 1 point     841 for 2 points",
        "",
        "How to read it: the 400 documents of piqa show a loss in acc of 2.94 points with a chance of 80%, and one of "
        "3.21 points with a chance of 90%.",
        "To see, with a chance of 80%, a loss of 1 point (2 times the tolerance) takes 3,304 documents, one of "
        "2 points (4 times the tolerance) takes 841 documents.",
    ]
    assert to_text([blind]).endswith("\nThe documents are too few to see any loss.")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    population = Population(50)
    whole, quantized = cell_ref(method="none", bits=16, label="none-16"), cell_ref()
    folder = write_cells(tmp_path / "run", {whole: population.samples(), quantized: population.samples(0.05)})
    assert main(["power", str(folder), "--format", "markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| task")
    assert "| documents for 2× tolerance (80%) " in lines[0]  # on one line, which Markdown needs
    assert lines[14:15] == [""]  # after 12 rows
    assert lines[15].startswith("How to read it: ")
    assert main(["power", str(folder)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines()[:15])) < 120
    alone = write_cells(tmp_path / "alone", {quantized: population.samples()})
    assert main(["power", str(alone)]) == 2
    assert "no pair of cells to take the noise from" in capsys.readouterr().err
