"""What a rule found."""

from dataclasses import dataclass, replace
from typing import Literal

from qbench.records.schema import CellRef

# cost: only a warning. change: no failure either, but a reader must know it before the scores.
FoundBy = Literal["audit", "records", "cost", "change"]


@dataclass(frozen=True)
class Finding:
    """Why numbers cannot be right, or cannot be compared."""

    rule: str  # the name of what was found, such as same_weights
    cells: tuple[CellRef, ...]  # that it is about; the first one is at fault, as far as that is known
    message: str
    found_by: FoundBy = "records"
    where: str = ""  # what it is about, if that is not just the cell at fault: a score, or several cells

    @property
    def cell(self) -> CellRef:
        """The cell at fault."""
        return self.cells[0]

    @property
    def fails(self) -> bool:
        """Whether it is wrong, and not only worth a look."""
        return self.found_by in ("audit", "records")

    @property
    def of_the_baseline(self) -> "Finding":
        """The same about the baseline's records."""
        return replace(self, message=f"In the baseline: {self.message}")

    @property
    def names(self) -> tuple[str, ...]:
        """The cells it is about."""
        return tuple(dict.fromkeys(cell.name for cell in self.cells))

    def __str__(self) -> str:
        return f"{self.where or self.cell.name}: {self.message}"
