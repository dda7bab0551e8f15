"""How often "not worse by more than x at 95%" holds for made-up losses whose true mean is known.

    python benchmarks/margins.py

One row per law of losses and number of documents. "Student's t" is the plain one-sided interval, "the gate's" has one
more document that lost as much as any changed (for answers, a whole one), the correction for skewness and, except for
answers, the degrees of freedom of the documents that changed. If none changed, the gate says only that, which is not
counted: "no statement" says how often.
"""

import argparse
import math
from collections.abc import Callable

import numpy as np
from tabulate import tabulate

from qbench.gate.sign_flip import Floats, upper_end
from qbench.uncertainty import Estimate, of_draws

Law = Callable[[np.random.Generator, tuple[int, int]], Floats]


def answers(lost: float, won: float) -> Law:
    """Losses of answers: 1, 0 and -1."""

    def draw(random: np.random.Generator, shape: tuple[int, int]) -> Floats:
        coin = random.uniform(size=shape)
        return np.where(coin < lost, 1.0, np.where(coin < lost + won, -1.0, 0.0))

    return draw


def few(share: float) -> Law:
    """Only this share of documents changed, by exponentially distributed losses."""
    return lambda random, shape: (random.uniform(size=shape) < share) * random.exponential(size=shape)


# By name: the law, and its mean.
LAWS: dict[str, tuple[Law, float]] = {
    "normal": (lambda random, shape: random.normal(size=shape), 0.0),
    "Student's t, 3 degrees": (lambda random, shape: random.standard_t(3, size=shape), 0.0),
    "exponential": (lambda random, shape: random.exponential(size=shape), 1.0),
    "lognormal": (lambda random, shape: random.lognormal(size=shape), math.exp(0.5)),
    "lognormal gains": (lambda random, shape: -random.lognormal(size=shape), -math.exp(0.5)),
    "5% of documents changed": (few(0.05), 0.05),
    "1% of documents changed": (few(0.01), 0.01),
    "2% changed, lognormal": (
        lambda random, shape: (random.uniform(size=shape) < 0.02) * random.lognormal(size=shape),
        0.02 * math.exp(0.5),
    ),
    "answers: 2% lost": (answers(0.02, 0), 0.02),
    "answers: 0.75% lost": (answers(0.0075, 0), 0.0075),
    "answers: 2% lost, 2% won": (answers(0.02, 0.02), 0.0),
    "answers: 10% lost, 8% won": (answers(0.1, 0.08), 0.02),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=2000)
    parser.add_argument("--documents", type=int, nargs="+", default=[60, 200, 400])
    options = parser.parse_args()
    rows = []
    for name, (law, mean) in LAWS.items():
        for documents in options.documents:
            losses = law(np.random.default_rng(0), (options.tables, documents))
            shares = held(losses, mean, name.startswith("answers"))
            rows.append([name, documents, *(f"{share:.1%}" for share in shares)])
    header = ["losses", "documents", "Student's t", "the gate's", "no statement"]
    print(tabulate(rows, header, tablefmt="github", disable_numparse=True))


def held(tables: Floats, mean: float, whole: bool) -> tuple[float, float, float]:
    """How often each upper end is not below the mean, and how often the gate has none; whole: answers.

    The second share is of all tables: those without a statement hold.
    """
    ones = np.ones(tables.shape[1])
    estimates = (Estimate(float(own.mean()), (of_draws(own.tolist()),)) for own in tables)
    plain = np.mean([found.value + found.half_width(0.90) >= mean - 1e-12 for found in estimates])
    silent = np.zeros(len(tables), dtype=bool) if whole else ~tables.any(axis=1)
    gates = [upper_end(own, ones, 1.0 if whole else None) >= mean - 1e-12 for own in tables]
    return float(plain), float(np.mean(gates | silent)), float(np.mean(silent))


if __name__ == "__main__":
    main()
