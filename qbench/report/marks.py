"""Which differences of a table are marked ▲ or ▼: those with a star that remain after adjusting for the table.

Benjamini and Hochberg's false discovery rate over one metric per task, since the metrics of a task are of the same
answers; its cut-off then holds for the other metrics too.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from qbench.numbers import counted
from qbench.report.delta import Difference
from qbench.report.metrics import Measure, first_of_each_task
from qbench.report.results import Gap

RATE = 0.05  # of the marks, at most this share may be chance
CHANCE = 0.05  # of the rows in which nothing happened, this share has a star
READ_MARKS = (
    "▲ for the better, ▼ for the worse, whichever way the metric points: what has a star and remains after adjustment "
    f"for the table (Benjamini–Hochberg over one metric per task, q ≤ {RATE:g})."
)


@dataclass(frozen=True)
class Marks:
    """The adjustment of one set of differences."""

    tested: int = 0  # differences that can be judged
    starred: int = 0
    kept: int = 0
    cutoff: float = 0.0  # p up to this is marked

    def marks(self, difference: Difference) -> bool:
        """Whether a difference is marked."""
        return difference.significant and difference.p is not None and difference.p <= self.cutoff

    @property
    def sentence(self) -> str:
        """What stands under the table; empty if nothing can be judged."""
        if not self.tested:
            return ""
        return (
            f"With a star: {self.starred} of {counted(self.tested, 'comparison')}, where chance alone would give about "
            f"{self.tested * CHANCE:.1f}; after adjustment: {self.kept}."
        )


def marks_for(differences: Iterable[tuple[Measure, Difference | Gap | None]]) -> Marks:
    """The adjustment over the differences of a table."""
    known = [(m, d) for m, d in differences if isinstance(d, Difference) and d.p is not None]
    first = set(first_of_each_task(m for m, _ in known))
    ordered = sorted(d.p for m, d in known if m in first and d.p is not None)
    limits = [RATE * place / len(ordered) for place in range(1, len(ordered) + 1)]
    found = Marks(cutoff=max((limit for p, limit in zip(ordered, limits, strict=True) if p <= limit), default=0.0))
    starred = [d for _, d in known if d.significant]
    return Marks(len(known), len(starred), sum(map(found.marks, starred)), found.cutoff)
