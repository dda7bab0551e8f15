"""Which differences of a table are marked ▲ or ▼: starred ones that are still significant after adjustment.

The adjustment is Benjamini and Hochberg's false discovery rate over one metric per task, because the metrics of a task
come from the same answers. Its cut-off then applies to the other metrics too.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from qbench.records.metrics import is_perplexity
from qbench.report.delta import Difference
from qbench.report.metrics import Measure, first_of_each_task
from qbench.report.results import Gap

RATE = 0.05  # at most this share of the marks may be chance
CHANCE = 0.05  # share of rows without any effect that get a star
# How ▲ and ▼ are chosen; what they mean comes before.
READ_ADJUSTED = (
    ": significant after adjustment for all comparisons in the table (Benjamini–Hochberg over one metric per task, "
    f"q ≤ {RATE:g})."
)


@dataclass(frozen=True)
class Marks:
    """The adjustment of one set of differences."""

    tested: int = 0  # differences that can be judged
    starred: int = 0
    kept: int = 0
    cutoff: float = 0.0  # p up to this is marked
    ratios: bool = False  # whether some are of perplexities, which are tested on their ratio

    def marks(self, difference: Difference) -> bool:
        """Whether a difference is marked."""
        return difference.significant and difference.p is not None and difference.p <= self.cutoff

    def sentence(self, what: str, shown: bool = True) -> str:
        """The sentence under the table; empty if nothing can be judged.

        what: the differences, such as values of Δ. shown: whether the table has them; otherwise its stars are of other
        numbers, and are not counted.
        """
        if not self.tested:
            return ""
        rule = "*: the 95% interval excludes zero"
        if self.ratios:
            rule += " (for perplexities, the interval of the ratio)"
        counted = f"Starred: {self.starred} of {self.tested} {what}"
        if not shown:
            have = "has" if self.starred == 1 else "have"
            whose = f"Of the {self.tested} {what} (not shown)"
            counted = f"{whose}, {self.starred} {have} a 95% interval that excludes zero"
        return (
            f"{rule}. {counted} (about {self.tested * CHANCE:.1f} expected by chance); "
            f"significant after adjustment (▲▼): {self.kept}."
        )


def marks_for(differences: Iterable[tuple[Measure, Difference | Gap | None]]) -> Marks:
    """The adjustment over the differences of a table."""
    known = [(m, d) for m, d in differences if isinstance(d, Difference) and d.p is not None]
    first = set(first_of_each_task(m for m, _ in known))
    ordered = sorted(d.p for m, d in known if m in first and d.p is not None)
    limits = [RATE * place / len(ordered) for place in range(1, len(ordered) + 1)]
    cutoff = max((limit for p, limit in zip(ordered, limits, strict=True) if p <= limit), default=0.0)
    starred = [d for _, d in known if d.significant]
    kept = sum(map(Marks(cutoff=cutoff).marks, starred))
    return Marks(len(known), len(starred), kept, cutoff, any(is_perplexity(m.metric) for m, _ in known))
