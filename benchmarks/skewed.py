"""How often the gate fails a whole table if losses are skewed but nothing got worse on average.

    python benchmarks/skewed.py                   made-up losses: one cell of mini, 13 hypotheses and the pooled loss
    python benchmarks/skewed.py results/mini      recorded losses: quantized − unquantized, each metric around its mean

The gate's promise is for noise, of which either sign is as likely. Here most documents lose a little and a few gain
much (their mean is zero), which is no noise in this sense. Alpha is 1%, tolerances are 0 (--tolerances: as recorded).
Each table is judged by the gate three times: with a second look at cut-back losses whenever one document makes up a
sixteenth of Σd², only if one makes up nearly all of it among many (as the gate does), and never.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
from gate import STRICT, made_up_hypothesis
from tabulate import tabulate

from qbench.gate import sign_flip
from qbench.gate.hypotheses import Hypothesis
from qbench.gate.pooled import with_pooled
from qbench.gate.power import recorded_noise
from qbench.gate.settings import GateSettings, MetricKind
from qbench.gate.sign_flip import Floats, ratio
from qbench.gate.verdict import judge

# The metrics of a cell of mini, by task.
TASKS: dict[str, tuple[MetricKind, ...]] = {
    "arc_easy": ("accuracy", "accuracy", "gold_logprob"),
    "lambada": ("perplexity", "accuracy"),
    "piqa": ("accuracy", "accuracy", "gold_logprob"),
    "sciq": ("accuracy", "accuracy", "gold_logprob"),
    "wikitext": ("perplexity", "kl"),
}
Law = Callable[[np.random.Generator, int], Floats]
LAWS: dict[str, Law] = {
    "symmetric (Student's t, 3 degrees)": lambda random, size: random.standard_t(3, size=size),
    "exponential": lambda random, size: 1 - random.exponential(size=size),
    "lognormal": lambda random, size: np.exp(0.5) - random.lognormal(size=size),
    "lognormal, the other way round": lambda random, size: random.lognormal(size=size) - np.exp(0.5),
}
# The value of DOMINANT for each.
CUT_BACK = {"often": 1 / sign_flip.SHARES, "as the gate does": sign_flip.DOMINANT, "never": 1.0}

Draw = Callable[[np.random.Generator, int], list[Hypothesis]]


def main() -> None:
    """Print one row per distribution and number of documents."""
    options = _options()
    settings = GateSettings() if options.tolerances else STRICT
    laws = _recorded(options.results, settings) if options.results else _made_up(settings)
    rows = []
    for name, draw in laws.items():
        for documents in options.documents:
            random = np.random.default_rng([options.seed, documents])
            failed = count_failures((draw(random, documents) for _ in range(options.tables)), settings)
            shares = {f"cut back: {when}": f"{count / options.tables:.1%}" for when, count in failed.items()}
            rows.append({"losses": name, "documents": documents} | shares)
    print(f"whole tables that fail, of {options.tables:,}:")
    print(tabulate(rows, "keys", tablefmt="github", disable_numparse=True))


def count_failures(tables: Iterable[list[Hypothesis]], settings: GateSettings) -> dict[str, int]:
    """How many of the tables the gate fails, by when losses are cut back."""
    failed = dict.fromkeys(CUT_BACK, 0)
    usual = sign_flip.DOMINANT
    try:
        for table in tables:
            for when, sign_flip.DOMINANT in CUT_BACK.items():
                failed[when] += any(outcome.verdict == "worse" for outcome in judge(table, settings))
    finally:
        sign_flip.DOMINANT = usual
    return failed


def _made_up(settings: GateSettings) -> dict[str, Draw]:
    return {name: partial(_cell, law, settings) for name, law in LAWS.items()}


def _cell(law: Law, settings: GateSettings, random: np.random.Generator, documents: int) -> list[Hypothesis]:
    table = []
    for task, kinds in TASKS.items():
        for kind in kinds:
            answers = random.choice([-1.0, 0, 0, 0, 0, 0, 0, 0, 0, 1], size=documents)
            losses = answers if kind == "accuracy" else law(random, documents)
            table.append(made_up_hypothesis(task, f"{kind} {len(table)}", kind, losses, settings))
    return with_pooled(table, settings)


def _recorded(folder: Path, settings: GateSettings) -> dict[str, Draw]:
    """Documents drawn with replacement, the same in all cells, and treated as different documents."""
    table = [h for h in recorded_noise(folder) if h.kind not in ("accuracy", "pooled")]
    if settings is STRICT:
        table = [replace(h, tolerance=0.0, threshold=0.0) for h in table]
    centered = [h.losses - ratio(h.losses, h.weights) * h.weights for h in table]

    def draw(random: np.random.Generator, documents: int) -> list[Hypothesis]:
        chosen = random.integers(len(centered[0]), size=documents)
        order = np.arange(documents)
        drawn = [
            replace(h, losses=losses[chosen], weights=h.weights[chosen], groups=order, by_draw=None)
            for h, losses in zip(table, centered, strict=True)
        ]
        return _by_cell(drawn, settings)

    return {f"{folder}, {len(_by_cell(table, settings))} hypotheses": draw}


def _by_cell(table: Sequence[Hypothesis], settings: GateSettings) -> list[Hypothesis]:
    return [h for _, own in groupby(table, lambda h: h.cell) for h in with_pooled(list(own), settings)]


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
