"""How often the gate fails a whole table if losses are skewed but nothing got worse on average.

    python benchmarks/skewed.py                   made-up losses: one cell of mini, 12 hypotheses, 7 of them accuracies
    python benchmarks/skewed.py results/mini      recorded losses: quantized − unquantized, each metric around its mean

The gate's promise is for noise, of which either sign is as likely. Here most documents lose a little and a few gain
much (their mean is zero), which is no noise in this sense. Alpha is 1%, tolerances are 0 (--tolerances: as recorded).
Each table is judged three times: with a second look at cut-back losses whenever one document makes up a sixteenth of
Σd², only if one makes up nearly all of it among many (as the gate does), and never.
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tabulate import tabulate

from qbench.gate import sign_flip
from qbench.gate.hypotheses import mean_loss
from qbench.gate.power import recorded_noise
from qbench.gate.settings import GateSettings
from qbench.gate.sign_flip import Floats, holm, ratio, settle

ALPHA = GateSettings().alpha
ANSWERS, OTHERS = 7, 5  # in a cell of mini
LAWS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Floats]] = {
    "symmetric (Student's t, 3 degrees)": lambda random, shape: random.standard_t(3, size=shape),
    "exponential": lambda random, shape: 1 - random.exponential(size=shape),
    "lognormal": lambda random, shape: np.exp(0.5) - random.lognormal(size=shape),
    "lognormal, the other way round": lambda random, shape: random.lognormal(size=shape) - np.exp(0.5),
}
# The value of DOMINANT for each.
CUT_BACK = {"often": 1 / sign_flip.SHARES, "as the gate does": sign_flip.DOMINANT, "never": 1.0}


@dataclass(frozen=True)
class Losses:
    """The losses of one hypothesis, and whether they exceed its tolerance."""

    losses: Floats
    above: bool


Draw = Callable[[np.random.Generator, int], list[Losses]]


def main() -> None:
    """Print one row per distribution and number of documents."""
    options = _options()
    laws = _recorded(options.results, options.tolerances) if options.results else _made_up()
    rows = []
    for name, draw in laws.items():
        for documents in options.documents:
            random = np.random.default_rng([options.seed, documents])
            failed = count_failures(draw(random, documents) for _ in range(options.tables))
            shares = {f"cut back: {when}": f"{count / options.tables:.1%}" for when, count in failed.items()}
            rows.append({"losses": name, "documents": documents} | shares)
    print(f"whole tables that fail, of {options.tables:,}:")
    print(tabulate(rows, "keys", tablefmt="github", disable_numparse=True))


def count_failures(tables: Iterable[list[Losses]]) -> dict[str, int]:
    """How many of the tables the gate fails, by when losses are cut back."""
    failed = dict.fromkeys(CUT_BACK, 0)
    usual = sign_flip.DOMINANT
    try:
        for table in tables:
            above = [own.above for own in table]
            for when, sign_flip.DOMINANT in CUT_BACK.items():
                adjusted = holm(settle([own.losses for own in table], above, ALPHA))
                failed[when] += bool((above & (adjusted <= ALPHA)).any())
    finally:
        sign_flip.DOMINANT = usual
    return failed


def _made_up() -> dict[str, Draw]:
    return {name: partial(_cell, law) for name, law in LAWS.items()}


def _cell(law: Callable[..., Floats], random: np.random.Generator, documents: int) -> list[Losses]:
    answers = random.choice([-1.0, 0, 0, 0, 0, 0, 0, 0, 0, 1], size=(ANSWERS, documents))
    return [Losses(losses, losses.sum() > 0) for losses in (*answers, *law(random, (OTHERS, documents)))]


def _recorded(folder: Path, tolerances: bool) -> dict[str, Draw]:
    """Documents drawn with replacement, the same in all cells, and treated as different documents."""
    table = [h for h in recorded_noise(folder) if h.kind != "accuracy"]
    centered = [h.losses - ratio(h.losses, h.weights) * h.weights for h in table]
    allowed = [mean_loss(h.kind, h.tolerance) if tolerances else 0.0 for h in table]

    def draw(random: np.random.Generator, documents: int) -> list[Losses]:
        chosen = random.integers(len(centered[0]), size=documents)
        return [
            Losses(losses[chosen], ratio(losses[chosen], h.weights[chosen]) > tolerance)
            for h, losses, tolerance in zip(table, centered, allowed, strict=True)
        ]

    return {f"{folder}, {len(table)} hypotheses": draw}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", metavar="DIR", nargs="?", type=Path, help="tasks must have equally many documents")
    parser.add_argument("--documents", type=int, nargs="+", default=[60, 100, 200, 400])
    parser.add_argument("--tolerances", action="store_true", help="use the recipe's tolerances for recorded losses")
    parser.add_argument("--tables", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
