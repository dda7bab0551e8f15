"""The result of every cell: its scores, or the reason why it has none. qbench.report.sources reads them."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.errors import InputError
from qbench.identity import Identity
from qbench.records.audit import UNQUANTIZED
from qbench.records.schema import CellRef
from qbench.records.store import Results, StoredRecord
from qbench.report.attentions import TWINS, kind_name
from qbench.report.metrics import Measure

if TYPE_CHECKING:
    from qbench.records.documents import Documents
    from qbench.records.findings.folder import Review

NOTHING = "–"  # shown if there is no number and none is missing
NOT_OFFERED = "n/a"
UNQUANTIZED_METHOD = "none"  # of the weights; other parts may still be quantized


class ReportError(InputError):
    """Why no table can be made of results, in a sentence."""


@dataclass(frozen=True)
class Score:
    """A number as tables show it: accuracies in percent."""

    value: float
    stderr: float | None = None
    documents: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gap:
    """A missing number: the text shown instead, and why."""

    text: str
    reason: str


@dataclass(frozen=True)
class CellResult:
    """What one cell produced."""

    cell: CellRef
    scores: Mapping[tuple[str, str], Score] = field(default_factory=dict)  # by task and metric
    gap: Gap | None = None  # why there are none
    caveat: str = ""  # a note at each score
    stored: StoredRecord | None = None
    documents: "Documents | None" = field(default=None, compare=False, repr=False)
    draws: tuple["CellResult", ...] = ()  # of calibration, if there are several: then scores are means over them

    @property
    def parts(self) -> tuple["CellResult", ...]:
        """What was measured: its draws, or the cell itself."""
        return self.draws or (self,)

    @property
    def has_axes(self) -> bool:
        """Whether more than the weights is changed: activations, the KV cache, heads."""
        return any(part.stored and part.stored.record.identity.what.parts for part in self.parts)

    def of_draw(self, draw: int | None) -> "CellResult":
        """What was measured with one draw of calibration; the cell itself if it has no draws."""
        return next((part for part in self.draws if part.cell.draw == draw), self)

    @property
    def calibration_draws(self) -> int | None:
        """How many draws of calibration the scores are means of; None if it was not calibrated."""
        done = [part.stored for part in self.parts if part.stored and part.scores]
        return sum(stored.record.identity.what.calibration is not None for stored in done) or None

    def score(self, measure: Measure) -> Score | Gap:
        """The score, or why there is none."""
        if self.gap:
            return self.gap
        found = self.scores.get((measure.task, measure.metric))
        if found is None:
            return Gap("missing", f"{self.cell.name} has no {measure.metric} of {measure.task}.")
        return replace(found, notes=(*found.notes, self.caveat)) if self.caveat else found


@dataclass(frozen=True)
class FamilyQuantization:
    """One quantization of one family: what a row of a table is about."""

    family: str
    method: str
    bits: int
    label: str
    method_title: str = field(default="", compare=False)  # as papers write it: GPTQ

    @property
    def is_unquantized(self) -> bool:
        """Whether nothing is quantized."""
        return self.label == UNQUANTIZED

    @property
    def key(self) -> dict[str, Any]:
        """The columns that name it, for programs."""
        return {"family": self.family, "method": self.method, "bits": self.bits, "label": self.label}


@dataclass(frozen=True)
class ResultSet:
    """All cells of a folder of records, or all rows of published files."""

    source: Path
    cells: tuple[CellResult, ...]
    measures: tuple[Measure, ...]
    # Δ as it was published, by family, label, task, metric and attention
    published: Mapping[tuple[str, str, str, str, str], float] = field(default_factory=dict)
    records: Results | None = None
    review: "Review | None" = None  # of the records
    said_reference: str | None = None  # the kind that the others are compared with, if the results name it
    analysis_files: tuple[Path, ...] = ()  # of published figures

    @cached_property
    def parts(self) -> tuple[CellResult, ...]:
        """All that was or should have been measured: one result per calibration draw if there are several."""
        return tuple(part for result in self.cells for part in result.parts)

    def get(self, family: str, attention: str, label: str) -> CellResult | None:
        """One cell."""
        return self._by_name.get((family, attention, label))

    def twin(self, quantization: FamilyQuantization, attention: str) -> CellResult:
        """The cell of this quantization with this attention; if there is none, a result that says so."""
        if found := self.get(quantization.family, attention, quantization.label):
            return found
        cell = CellRef(attention=attention, checkpoint="", **quantization.key)
        if attention in self.kinds_of(quantization.family):
            return CellResult(cell, gap=Gap("missing", f"There is no record of {cell.name}."))
        reason = f"The family {quantization.family} has no {kind_name(attention)} model."
        return CellResult(cell, gap=Gap(NOTHING, reason))

    @cached_property
    def reference(self) -> str:
        """The kind that the others are compared with: as the results say, or softmax, or the first of several."""
        kinds = list(dict.fromkeys(c.cell.attention for c in self.cells))
        return self.said_reference or (kinds[0] if len(kinds) > 1 and TWINS[0] not in kinds else TWINS[0])

    def kinds_of(self, family: str) -> list[str]:
        """The kinds of attention that the family has, with or without scores; the reference comes first."""
        have = dict.fromkeys(c.cell.attention for c in self.cells if c.cell.family == family)
        return sorted(have, key=lambda attention: attention != self.reference)

    @property
    def has_pairs(self) -> bool:
        """Whether any family has two models to compare."""
        return any(len(self.kinds_of(family)) > 1 for family in self.families)

    def compared_kinds(self, family: str) -> list[str]:
        """The reference and what is compared with it, whether the family has them or not: at least two."""
        have = self.kinds_of(family)
        if have == [self.reference]:
            anywhere = [*(c.cell.attention for c in self.cells), *TWINS]
            return [*have, next(attention for attention in anywhere if attention != self.reference)]
        return have if self.reference in have else [self.reference, *have]

    @property
    def families(self) -> list[str]:
        """The families in the order of the cells."""
        return list(dict.fromkeys(c.cell.family for c in self.cells))

    @property
    def all_kinds(self) -> list[str]:
        """All kinds that are compared in any family, the reference first."""
        return list(dict.fromkeys(kind for family in self.families for kind in self.compared_kinds(family)))

    def unquantized(self, result: CellResult) -> CellResult:
        """The unquantized model of a cell; if there is none, a result that says so."""
        family, attention = result.cell.family, result.cell.attention
        return self.get(family, attention, UNQUANTIZED) or CellResult(
            result.cell, gap=Gap(NOTHING, f"There is no unquantized {family}-{attention} to compare with.")
        )

    def published_delta(self, quantization: FamilyQuantization, attention: str, measure: Measure) -> float | None:
        """Δ as it was published; None if we compute it."""
        key = (quantization.family, quantization.label, measure.task, measure.metric, attention)
        return self.published.get(key)

    def quantizations(self) -> list[FamilyQuantization]:
        """Families and methods in the order of the cells, the unquantized first, and within each method by bits."""
        cells, families = [result.cell for result in self.cells], self.families
        methods = list(dict.fromkeys([UNQUANTIZED_METHOD, *(cell.method for cell in cells)]))

        def place(q: FamilyQuantization) -> tuple[int, int, int, list[str | int]]:
            return families.index(q.family), methods.index(q.method), q.bits, _natural(q.label)

        return sorted({self._quantization(cell) for cell in cells}, key=place)

    def weights_only(self, family: str) -> list[FamilyQuantization]:
        """The unquantized models of a family, and the quantizations of its weights and of nothing else."""
        own = [q for q in self.quantizations() if q.family == family]
        own = [q for q in own if q.is_unquantized or q.method != UNQUANTIZED_METHOD]
        return [q for q in own if not any(self.twin(q, kind).has_axes for kind in self.kinds_of(family))]

    def measures_of(self, family: str) -> list[Measure]:
        """The measures of the family's cells; those of any cell if all of them failed."""
        have = {key for c in self.cells if c.cell.family == family for key in c.scores}
        own = [m for m in self.measures if (m.task, m.metric) in have]
        return own or list(self.measures) or [Measure("", "", None)]

    def recipes(self) -> Mapping[str, Mapping[str, Any]]:
        """The resolved recipes by their names: the run's, or without a run.json those of the records."""
        if self.records and self.records.plan:
            return {self.records.plan.recipe: self.records.plan.resolved_recipe}
        own = [c.stored.record.provenance for c in self.parts if c.stored]
        return {provenance.recipe: provenance.resolved_recipe for provenance in own}

    def of_other_versions(self) -> list[str]:
        """Cells measured with other code or packages than the latest one; `run --reuse-stale` keeps them."""
        done = [c.stored.record for c in self.parts if c.stored and c.scores]
        latest = max(done, key=lambda record: record.provenance.finished, default=None)
        return [r.cell.name for r in done if latest and _differs(r.identity, latest.identity)]

    def _quantization(self, cell: CellRef) -> FamilyQuantization:
        title = self.method_titles[cell.method]
        if cell.method == UNQUANTIZED_METHOD and cell.label != UNQUANTIZED:
            title = "unquantized weights"
        return FamilyQuantization(cell.family, cell.method, cell.bits, cell.label, title)

    @cached_property
    def method_titles(self) -> Mapping[str, str]:
        """The methods as papers write them, from the records; imported and published numbers do not have them."""
        titles = {c.cell.method: c.cell.method.upper() for c in self.cells}
        for stored in (c.stored for c in self.parts):
            if stored and stored.record.quantizer:
                titles[stored.record.cell.method] = stored.record.quantizer.title
        return titles | {UNQUANTIZED_METHOD: "unquantized"}

    @cached_property
    def _by_name(self) -> Mapping[tuple[str, str, str], CellResult]:
        return {(c.cell.family, c.cell.attention, c.cell.label): c for c in self.cells}


def one_direction_each(measures: Iterable[Measure]) -> list[Measure]:
    """One measure per task and metric: records from another lm-eval may lack the direction."""
    found: dict[tuple[str, str], Measure] = {}
    for m in measures:
        key = (m.task, m.metric)
        if key not in found or found[key].better is None:
            found[key] = m
    return list(found.values())


def _differs(one: Identity, other: Identity) -> bool:
    """Whether two cells were measured with different code or packages; each lists only its own quantizer's library."""
    common = one.packages.keys() & other.packages.keys()
    return one.code != other.code or any(one.packages[name] != other.packages[name] for name in common)


def _natural(label: str) -> list[str | int]:
    """A key to sort by that puts g64 before g128."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", label)]
