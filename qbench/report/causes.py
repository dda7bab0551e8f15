"""Damage and possible causes: what quantization cost each model, next to its kurtosis, largest |x| and sink rate."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from qbench.numbers import fixed, signed, significant
from qbench.report.analyses import AnalyzedModel
from qbench.report.attentions import kind_title
from qbench.report.delta import ReportData
from qbench.report.evidence import common_draws
from qbench.report.results import FamilyQuantization
from qbench.report.tables import Column, Field, Table, number_field
from qbench.report.tidy import DataRow

WIDTHS = (4, 3, 2)  # bits at which quantizers begin to stumble
READ_CAUSES = (
    "Damage: log-likelihood lost by quantization in nats per decision, averaged over tasks and methods as for the "
    "headline. Next to it: the unquantized model's kurtosis of hidden states, largest |x|, and sink rate at ε=0.3 in "
    "percent."
)


@dataclass(frozen=True)
class Cause:
    """A figure of the unquantized model that may explain the damage."""

    name: str  # of its column
    title: str


CAUSES = (Cause("kurtosis", "Kurtosis"), Cause("largest", "Largest |x|"), Cause("sink_rate", "Sink rate %"))


@dataclass(frozen=True)
class ModelCauses:
    """One model."""

    family: str
    attention: str
    damages: Mapping[int, float]  # nats lost per decision, by bits
    causes: Mapping[str, float]  # by the name of the cause


def model_causes(report: ReportData) -> list[ModelCauses]:
    """Every unquantized model that was analyzed and has a damage, in the order of the analyses."""
    found = []
    for family in report.analyses.families:
        for model in report.analyses.of(family):
            losses = {bits: nats_lost(report, family, model.cell.attention, bits) for bits in WIDTHS}
            damages = {bits: loss for bits, loss in losses.items() if loss is not None}
            if damages:
                found.append(ModelCauses(family, model.cell.attention, damages, causes_of(model)))
    return found


def causes_of(model: AnalyzedModel) -> dict[str, float]:
    """The causes that were measured."""
    kurtosis, sinks = model.find("kurtosis"), model.find("sink_rate", "0.3")
    ends = [end.value for name in ("min", "max") if (end := model.find(name))]
    causes = {
        "kurtosis": kurtosis.value if kurtosis else None,
        "largest": max(map(abs, ends)) if ends else None,
        "sink_rate": sinks.value if sinks else None,
    }
    return {name: value for name, value in causes.items() if value is not None}


def nats_lost(report: ReportData, family: str, attention: str, bits: int) -> float | None:
    """ℓ_0 − ℓ_q per decision, the mean over tasks and the weight quantizations of a width; None if there are none."""
    losses = []
    for quantization in report.results.quantizations():
        if quantization.family == family and quantization.bits == bits and not quantization.is_unquantized:
            losses += _losses(report, quantization, attention)
    return fmean(losses) if losses else None


def _losses(report: ReportData, quantization: FamilyQuantization, attention: str) -> list[float]:
    """For each task, the mean over calibration draws."""
    quantized = report.results.get(quantization.family, attention, quantization.label)
    if quantized is None or not quantized.scores or quantized.has_axes:
        return []
    unquantized = report.results.unquantized(quantized)
    documents, found = report.evidence.documents, []
    for task in dict.fromkeys(measure.task for measure in report.results.measures):
        lost = []
        for draw in common_draws(quantized, unquantized):
            own = [documents.get(result.of_draw(draw).cell, {}).get(task) for result in (quantized, unquantized)]
            after, first = own
            if after is None or first is None or after.keys is not first.keys:
                continue
            if after.has_decisions and first.has_decisions:
                before, now = first.decisions, after.decisions
                lost.append(float((before.values.sum() - now.values.sum()) / before.weights.sum()))
        found += [fmean(lost)] if lost else []
    return found


def cause_tables(report: ReportData) -> list[Table]:
    """One line per model."""
    models = model_causes(report)
    if not models:
        return []
    widths = [bits for bits in WIDTHS if any(bits in model.damages for model in models)]
    table = Table(
        name="causes",
        title="Damage and possible causes",
        caption="What quantization cost each model, and what may explain it.",
        reading=[READ_CAUSES],
        columns=[
            Column("Size", "l"),
            Column("Model", "l"),
            *(Column(f"{bits} bits", group="Damage (nats per decision)") for bits in widths),
            *(Column(cause.title, group="Unquantized") for cause in CAUSES),
        ],
        heads=1,
    )
    for model in models:
        damages = [number_field(model.damages.get(bits), lambda value: signed(value, 3)) for bits in widths]
        causes = [number_field(model.causes.get(cause.name), _shown) for cause in CAUSES]
        table.rows.append([Field(model.family), Field(kind_title(model.attention)), *damages, *causes])
    return [table]


def _shown(value: float) -> str:
    return fixed(value) if abs(value) < 1e5 else significant(value, 4)


def cause_rows(report: ReportData) -> list[DataRow]:
    """The same, unrounded: one row per model and width."""
    return [
        {
            "family": model.family,
            "attention": model.attention,
            "bits": bits,
            "nats": damage,
            **{cause.name: model.causes.get(cause.name) for cause in CAUSES},
        }
        for model in model_causes(report)
        for bits, damage in model.damages.items()
    ]
