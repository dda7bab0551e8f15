"""Where it hurts: what quantizing each linear layer alone costs, as tables and rows; models side by side."""

from collections.abc import Sequence
from itertools import groupby

from qbench.numbers import signed_significant, significant
from qbench.records.analysis_facts import LinearDamage
from qbench.records.schema import CellRef
from qbench.report.attentions import kind_title
from qbench.report.delta import ReportData
from qbench.report.results import NOTHING
from qbench.report.tables import Column, Field, Table
from qbench.report.tidy import DataRow

Measured = tuple[CellRef, tuple[LinearDamage, ...]]
READ_SENSITIVITY = (
    "Each linear layer quantized alone: the log-likelihood lost, and the KL from the unquantized model, both in "
    "millinats per token."
)
MILLI = 1000


def sensitivity_tables(report: ReportData) -> list[Table]:
    """One table per family and quantization."""
    return [_table(own) for own in by_quantization(report)]


def by_quantization(report: ReportData) -> list[list[Measured]]:
    """The models of one family under one quantization, the reference first."""

    def place(own: Measured) -> tuple[str, str]:
        return own[0].family, own[0].label

    reference = report.results.reference
    found = sorted(report.analyses.sensitivities, key=lambda own: (*place(own), own[0].attention != reference))
    return [list(group) for _, group in groupby(found, place)]


def sensitivity_rows(report: ReportData) -> list[DataRow]:
    """One row per linear layer, in nats per token."""
    return [
        {
            "family": cell.family,
            "attention": cell.attention,
            "label": cell.label,
            "layer": own.layer,
            "linear": own.linear,
            "nats_per_token": own.nats_per_token,
            "kl": own.kl,
            "tokens": own.tokens,
        }
        for cell, damages in report.analyses.sensitivities
        for own in damages
    ]


def _table(models: Sequence[Measured]) -> Table:
    family, label = models[0][0].family, models[0][0].label
    by_place = [{(own.layer, own.linear): own for own in damages} for _, damages in models]
    table = Table(
        name=f"sensitivity-{family}-{label}",
        title=f"{family}, {label}: where it hurts",
        caption=f"What quantizing one linear layer alone with {label} costs the {family} models.",
        reading=[READ_SENSITIVITY],
        columns=[
            Column("Layer", "l"),
            Column("Linear", "l"),
            *(Column(title, group=kind_title(cell.attention)) for cell, _ in models for title in ("Lost", "KL")),
        ],
        heads=1,
    )
    for layer, linear in dict.fromkeys(place for own in by_place for place in own):
        line = [Field(str(layer), layer), Field(linear)]
        for own in by_place:
            line += _fields(own.get((layer, linear)))
        table.rows.append(line)
    return table


def _fields(damage: LinearDamage | None) -> list[Field]:
    if damage is None:
        return [Field(NOTHING)] * 2
    lost, kl = MILLI * damage.nats_per_token, MILLI * damage.kl
    return [Field(signed_significant(lost), lost), Field(significant(kl), kl)]
