"""What became of every cell: scores, or the reason why there are none. From records or from published CSV files."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from qbench.errors import InputError
from qbench.quantizers.options import quantizers
from qbench.records.schema import CellRef, MetricValue, PlannedCell, Record
from qbench.records.store import RECORD, RUN, Results, StoredRecord, read_results
from qbench.report.metrics import Measure, in_order, is_share, measure

TWINS = ("softmax", "softpick")
NOT_OFFERED = "n/a"


class ReportError(InputError):
    """Results that no table can be made of, in a sentence."""


@dataclass(frozen=True)
class Score:
    """A number as tables have it: accuracies in percent."""

    value: float
    stderr: float | None = None
    documents: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gap:
    """A number that is not there: what stands in its place, and why."""

    text: str
    reason: str


@dataclass(frozen=True)
class Outcome:
    """What one cell produced."""

    cell: CellRef
    scores: Mapping[tuple[str, str], Score] = field(default_factory=dict)  # by task and metric
    gap: Gap | None = None  # why there are none
    caveat: str = ""  # a note at each score
    stored: StoredRecord | None = None

    def score(self, measure: Measure) -> Score | Gap:
        """The score, or why there is none."""
        if self.gap:
            return self.gap
        found = self.scores.get((measure.task, measure.metric))
        if found is None:
            return Gap("missing", f"{self.cell.name} has no {measure.metric} of {measure.task}.")
        return replace(found, notes=(*found.notes, self.caveat)) if self.caveat else found


@dataclass(frozen=True)
class Quantized:
    """One quantization of one family: what a row of a table is about."""

    family: str
    method: str
    bits: int
    label: str

    @property
    def is_baseline(self) -> bool:
        """Whether nothing is quantized."""
        return self.method == "none"


@dataclass(frozen=True)
class Outcomes:
    """All cells of a folder of records, or all rows of published files."""

    source: Path
    cells: tuple[Outcome, ...]
    measures: tuple[Measure, ...]
    # Δ as it was published, by family, label, task and metric
    published: Mapping[tuple[str, str, str, str], float] = field(default_factory=dict)
    results: Results | None = None

    def get(self, family: str, attention: str, label: str) -> Outcome | None:
        """One cell."""
        return self._by_name.get((family, attention, label))

    def twin(self, quantized: Quantized, attention: str) -> Outcome:
        """The cell of this quantization with this attention; where there is none, an outcome that says so."""
        if found := self.get(quantized.family, attention, quantized.label):
            return found
        cell = CellRef(attention=attention, checkpoint="", **vars(quantized))
        if attention in self.twins_of(quantized.family):
            return Outcome(cell, gap=Gap("missing", f"There is no record of {cell.name}."))
        return Outcome(cell, gap=Gap("–", f"There is no {attention} model of {quantized.family} here."))

    def twins_of(self, family: str) -> list[str]:
        """Which of the twins the family has, with scores or without."""
        have = {c.cell.attention for c in self.cells if c.cell.family == family}
        return [attention for attention in TWINS if attention in have]

    def baseline(self, outcome: Outcome) -> Outcome:
        """The unquantized model of a cell; where there is none, an outcome that says so."""
        family, attention = outcome.cell.family, outcome.cell.attention
        return self._baselines.get((family, attention)) or Outcome(
            outcome.cell, gap=Gap("–", f"There is no unquantized {family}-{attention} to compare with.")
        )

    def published_delta(self, quantized: Quantized, measure: Measure) -> float | None:
        """Δ as it was published; None where it is ours to compute."""
        return self.published.get((quantized.family, quantized.label, measure.task, measure.metric))

    def quantizations(self) -> list[Quantized]:
        """Families as they come, and within each by method and bits."""
        cells = [outcome.cell for outcome in self.cells if outcome.cell.attention in TWINS]
        families = list(dict.fromkeys(cell.family for cell in cells))
        methods = [*quantizers(), *dict.fromkeys(cell.method for cell in cells)]

        def place(q: Quantized) -> tuple[int, int, int, list[str | int]]:
            return families.index(q.family), methods.index(q.method), q.bits, _natural(q.label)

        return sorted({Quantized(c.family, c.method, c.bits, c.label) for c in cells}, key=place)

    def measures_of(self, family: str) -> list[Measure]:
        """What the family's cells were measured on; where all failed, what any cell was."""
        have = {key for c in self.cells if c.cell.family == family for key in c.scores}
        own = [m for m in self.measures if (m.task, m.metric) in have]
        return own or list(self.measures) or [Measure("", "", None)]

    def other_attentions(self) -> list[str]:
        """Kinds of attention that are in the records and in no Δ."""
        return sorted({c.cell.attention for c in self.cells} - set(TWINS))

    def recipes(self) -> Mapping[str, Mapping[str, Any]]:
        """The resolved recipes by their names: the run's, or without a run.json those of the records."""
        if self.results and self.results.plan:
            return {self.results.plan.recipe: self.results.plan.resolved_recipe}
        own = [c.stored.record.provenance for c in self.cells if c.stored]
        return {provenance.recipe: provenance.resolved_recipe for provenance in own}

    def of_other_versions(self) -> list[str]:
        """Cells that were measured with other code or packages than the latest one; `run --reuse-stale` keeps such."""
        done = [c.stored.record for c in self.cells if c.stored and c.scores]
        latest = max(done, key=lambda record: record.provenance.finished, default=None)
        return [r.cell.name for r in done if latest and _version(r) != _version(latest)]

    @cached_property
    def _baselines(self) -> Mapping[tuple[str, str], Outcome]:
        return {(c.cell.family, c.cell.attention): c for c in self.cells if c.cell.method == "none"}

    @cached_property
    def _by_name(self) -> Mapping[tuple[str, str, str], Outcome]:
        return {(c.cell.family, c.cell.attention, c.cell.label): c for c in self.cells}


def read_outcomes(source: Path | str) -> Outcomes:
    """Read a folder of records, or a CSV file of published numbers or a folder of such."""
    from qbench.report.published import read_published

    source = Path(source)
    if not source.exists():
        raise ReportError(f"{source} is not there; it must be a folder of records, or CSV files of published numbers.")
    if source.is_file():
        return read_published([source], source)
    if (source / RUN).exists() or any(source.glob(f"*/{RECORD}")):
        return from_results(read_results(source))
    if files := sorted(source.glob("*.csv")):
        return read_published(files, source)
    raise ReportError(
        f"{source} holds neither records ({RECORD} in a folder for each cell; `qbench run` makes them) nor CSV files "
        "of published numbers."
    )


def from_results(results: Results) -> Outcomes:
    """The outcomes of records that were read."""
    cells = [_of_record(stored) for stored in results.current]
    cells += [Outcome(planned.cell, gap=_missing(planned)) for planned in results.missing]
    cells += [Outcome(planned.cell, gap=_not_offered(planned)) for planned in results.not_offered]
    if results.plan:
        order = [planned.cell.name for planned in results.plan.cells]
        cells.sort(key=lambda outcome: order.index(outcome.cell.name))
    if not cells:
        raise ReportError(f"{results.folder / RUN} plans no cells; there is nothing to make a table of.")
    measures = in_order(
        measure(m.task, m.metric, m.better) for stored in results.current for m in stored.record.metrics
    )
    return Outcomes(results.folder, tuple(cells), tuple(one_direction_each(measures)), results=results)


def _of_record(stored: StoredRecord) -> Outcome:
    from qbench.records.integrity import altered  # published numbers need neither numpy nor pyarrow
    from qbench.records.suspicious import audit_failures

    record = stored.record
    if record.state == "failed":
        failure = record.failure
        why = f" in {failure.phase}" if failure and failure.phase else ""
        why += f" ({failure.kind}): {_first_line(failure.reason)}" if failure else "."
        gap = Gap(
            "audit failed" if failure and failure.kind == "audit" else "failed", f"{record.cell.name} failed{why}"
        )
        return Outcome(record.cell, gap=gap, stored=stored)
    if reasons := altered(stored):
        gap = Gap("altered", f"{record.cell.name} is not what was measured: {reasons[0]} Run the cell again.")
        return Outcome(record.cell, gap=gap, stored=stored)
    if record.audit and (reasons := audit_failures(record, record.audit)):
        gap = Gap("audit failed", f"{record.cell.name} did not pass its audit: {_first_line(reasons[0])}")
        return Outcome(record.cell, gap=gap, stored=stored)
    unproved = record.audit is None and record.cell.method != "none"
    caveat = f"{record.cell.name} has no audit: that it was quantized is not proved." if unproved else ""
    scores = {(m.task, m.metric): _score(m) for m in record.metrics}
    return Outcome(record.cell, scores, caveat=caveat, stored=stored)


def _score(metric: MetricValue) -> Score:
    factor = 100 if is_share(metric.metric) else 1
    stderr = None if metric.stderr is None else factor * metric.stderr
    return Score(factor * metric.value, stderr, metric.documents)


def _missing(planned: PlannedCell) -> Gap:
    # In words that all share: a footnote a cell is a page of them. A damage has the footnote of its baseline.
    what = "The unquantized model is planned" if planned.cell.method == "none" else "Planned"
    return Gap("missing", f"{what} and not run yet; `qbench run` makes it.")


def _not_offered(planned: PlannedCell) -> Gap:
    return Gap(NOT_OFFERED, f"{planned.cell.bits} bits are not offered by {planned.cell.method}.")


def one_direction_each(measures: Iterable[Measure]) -> list[Measure]:
    """One measure a task and metric: records of another lm-eval may lack the direction that others have."""
    found: dict[tuple[str, str], Measure] = {}
    for m in measures:
        key = (m.task, m.metric)
        if key not in found or found[key].better is None:
            found[key] = m
    return list(found.values())


def _version(record: Record) -> tuple[str, dict[str, str]]:
    return record.identity.code, record.identity.packages


def _natural(label: str) -> list[str | int]:
    """A key to sort by that puts g64 before g128."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", label)]


def _first_line(text: str, width: int = 200) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= width else line[: width - 1] + "…"
