"""Reads analyses: from records of `qbench analyze`, or from CSV files of published figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from qbench.records.analysis import Analysis, AttentionMap
from qbench.records.analysis_facts import LinearDamage
from qbench.records.analysis_metrics import Figure, figures
from qbench.records.audit import UNQUANTIZED
from qbench.records.findings.record import altered
from qbench.records.schema import CellRef
from qbench.records.store import ANALYSES, StoredRecord, read_analyses
from qbench.report.published import csv_rows, number
from qbench.report.results import ReportError, ResultSet

REQUIRED = ("family", "attention", "metric", "setting", "value")
NOT_SAID = 0  # the length or the tokens of a published figure


@dataclass(frozen=True)
class AnalyzedModel:
    """One model as it was measured, or as it was published."""

    cell: CellRef
    figures: tuple[Figure, ...]
    dtype: str = ""
    length: int = NOT_SAID  # of the whole analysis: the sweep has others
    analysis: Analysis | None = field(default=None, repr=False)  # None if it was published

    def find(self, metric: str, setting: str = "", part: str = "all", length: int | None = None) -> Figure | None:
        """A figure, by default at the length of the analysis."""
        wanted = (metric, setting, part, self.length if length is None else length)
        return self._by_name.get(wanted)

    @cached_property
    def _by_name(self) -> Mapping[tuple[str, str, str, int], Figure]:
        return {(own.metric, own.setting, own.part, own.length): own for own in self.figures}


@dataclass(frozen=True)
class PublishedScore:
    """A score published with analyses, from an experiment that the other tables do not have."""

    cell: CellRef
    task: str
    metric: str
    value: float
    source: str


@dataclass(frozen=True)
class DrawnMaps:
    """The attention maps of one model."""

    cell: CellRef
    tokens: tuple[str, ...]
    maps: tuple[AttentionMap, ...] = field(repr=False)


@dataclass(frozen=True)
class AnalysisSet:
    """All analyses of a folder."""

    models: tuple[AnalyzedModel, ...] = ()  # without those at steps of training
    steps: tuple[AnalyzedModel, ...] = ()
    maps: tuple[DrawnMaps, ...] = ()
    sensitivities: tuple[tuple[CellRef, tuple[LinearDamage, ...]], ...] = ()
    scores: tuple[PublishedScore, ...] = ()
    failures: tuple[str, ...] = ()  # which models have no analysis, and why; one sentence each
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)  # names of models by note

    @property
    def families(self) -> list[str]:
        """In the order of the models."""
        return list(dict.fromkeys(model.cell.family for model in self.models))

    def of(self, family: str) -> list[AnalyzedModel]:
        """The unquantized models of a family that were measured."""
        return [m for m in self.models if m.cell.family == family and m.cell.label == UNQUANTIZED]


def analysis_set(results: ResultSet) -> AnalysisSet:
    """The analyses stored with results; empty if there are none. In a family the reference comes first."""
    if results.analysis_files:
        models, scores = _published(results.analysis_files)
        return AnalysisSet(tuple(_sorted(models, results.reference)), scores=tuple(scores))
    if not results.source.is_dir() or not (results.source / ANALYSES).exists():
        return AnalysisSet()
    stored = read_analyses(results.source)
    usable, failures = (
        [],
        [f"{p.cell.name} is planned but not run yet; `qbench analyze` will run it." for p in stored.missing],
    )
    for found in stored.current:
        if reason := _reason(found):
            failures.append(reason)
        else:
            usable.append(found)
    measured = [_model(found) for found in usable if found.record.analysis]
    return AnalysisSet(
        models=tuple(_sorted([m for m in measured if m.cell.step is None], results.reference)),
        steps=tuple(m for m in measured if m.cell.step is not None),
        maps=tuple(
            DrawnMaps(own.record.cell, own.record.maps.tokens, tuple(own.maps())) for own in usable if own.record.maps
        ),
        sensitivities=tuple((own.record.cell, own.record.sensitivity) for own in usable if own.record.sensitivity),
        failures=tuple(failures),
        notes=_notes(usable),
    )


def _notes(usable: Sequence[StoredRecord]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for stored in usable:
        for note in stored.record.analysis.notes if stored.record.analysis else ():
            found.setdefault(note, []).append(stored.record.cell.name)
    return found


def _reason(stored: StoredRecord) -> str:
    """Why a record has nothing to show; empty if it does."""
    record = stored.record
    if record.failure:
        return f"{record.cell.name} failed ({record.failure.kind}): {record.failure.reason.splitlines()[0]}"
    wrong = altered(stored)
    return f"{record.cell.name} does not match what was measured: {wrong[0].message} Run it again." if wrong else ""


def _model(stored: StoredRecord) -> AnalyzedModel:
    analysis = stored.analysis()
    facts = analysis.facts
    return AnalyzedModel(stored.record.cell, tuple(figures(analysis)), facts.dtype, facts.length, analysis)


def _sorted(models: Sequence[AnalyzedModel], reference: str) -> list[AnalyzedModel]:
    families = list(dict.fromkeys(model.cell.family for model in models))
    labels = list(dict.fromkeys([UNQUANTIZED, *(model.cell.label for model in models)]))

    def place(model: AnalyzedModel) -> tuple[int, int, bool]:
        cell = model.cell
        return families.index(cell.family), labels.index(cell.label), cell.attention != reference

    return sorted(models, key=place)


# --- published figures


def _published(files: Sequence[Path]) -> tuple[list[AnalyzedModel], list[PublishedScore]]:
    found: dict[CellRef, dict[tuple[str, str, str, int], Figure]] = {}
    dtypes: dict[CellRef, str] = {}
    scores = []
    rule = f"published analyses need the columns {', '.join(REQUIRED)}"
    for where, row in csv_rows(files, lambda names: REQUIRED, rule):
        value, cell = number(row, "value", where), _cell(row, where)
        if value is None:
            continue
        if row.get("task"):
            scores.append(PublishedScore(cell, row["task"], row["metric"], value, row.get("source", "")))
            continue
        length, tokens = (int(number(row, column, where) or NOT_SAID) for column in ("length", "tokens"))
        figure = Figure(row["metric"], row["setting"], row.get("part") or "all", length, value, 0, tokens)
        name = (figure.metric, figure.setting, figure.part, figure.length)
        if name in found.setdefault(cell, {}):
            raise ReportError(f"{where} repeats {cell.name}, {', '.join(map(str, name))}; remove one of the rows.")
        found[cell][name] = figure
        dtypes[cell] = dtypes.get(cell) or row.get("dtype", "")
    return [AnalyzedModel(cell, tuple(own.values()), dtypes[cell]) for cell, own in found.items()], scores


def _cell(row: Mapping[str, str], where: str) -> CellRef:
    label = row.get("label") or UNQUANTIZED
    method, _, rest = label.partition("-")
    bits = rest.partition("-")[0]
    if not bits.isdecimal():
        raise ReportError(f"{where}: label is {label!r}; it must begin with a method and its bits, such as hqq-3.")
    family, attention = row["family"], row["attention"]
    return CellRef(family=family, attention=attention, checkpoint="", method=method, bits=int(bits), label=label)
