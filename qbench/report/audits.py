"""The audits of all cells as one table: the proof that each was quantized, for the page and for `qbench audit`."""

from collections.abc import Callable

from qbench.numbers import fixed, percent
from qbench.records.audit import UNQUANTIZED, Audit, PartAudit
from qbench.records.findings.record import audit_failures
from qbench.report.results import NOTHING, CellResult, ResultSet
from qbench.report.tables import Column, Field, Table, number_field

CAPTION = "Measured on the quantized models: stored bits per weight, weight errors, and next-token predictions."
READ_BITS = (
    "Quantized: share of the target weights that were quantized. Code bits: stored bits per code, as the method packs "
    "them (HQQ packs ten 3-bit codes into 32 bits: 3.2 bits per code, more if words are not full). Storage bits: plus "
    "scales and zeros."
)
READ_PROBE = (
    "KL and top-1 agreement compare next-token predictions with the unquantized model's, by default on a fixed batch "
    "of pseudo-random tokens. Models are less certain about these than about text, so even harmless quantization can "
    "change a fifth of the top-1 predictions."
)
# By the column's title: the number in the audit, and how it is written.
MEASURED: dict[str, tuple[str, Callable[[float], str]]] = {
    "Quantized": ("target_share", percent),
    "Code bits": ("code_bits", fixed),
    "Storage bits": ("storage_bits", fixed),
    "Relative error": ("relative_error", lambda error: fixed(error, 4)),
    "SNR (dB)": ("snr_db", lambda ratio: fixed(ratio, 1)),
    "KL (nats)": ("kl", lambda nats: fixed(nats, 4)),
    "Top-1 agreement": ("top1_agreement", percent),
}


def audit_table(results: ResultSet) -> Table | None:
    """One line per quantized cell that was audited, or that another program measured; None if there are none."""
    columns = [Column("Cell", "l"), Column("Passed", "l"), *map(Column, MEASURED)]
    table = Table("audits", "Audits", CAPTION, [READ_BITS, READ_PROBE], columns, heads=0)
    for result in results.parts:
        audit = result.stored.record.audit if result.stored else None
        if result.cell.label == UNQUANTIZED:
            continue
        if audit:
            table.rows.append(_fields(table, result, audit))
        elif result.stored and result.stored.record.imported:
            table.rows.append([Field(result.cell.name), Field("not audited"), *(Field(NOTHING) for _ in MEASURED)])
    return table if table.rows else None


def _fields(table: Table, result: CellResult, audit: Audit) -> list[Field]:
    reasons = [found.message for found in audit_failures(result.stored.record)] if result.stored else []
    done = [f"{part.label}: {'; '.join(_details(part))}." for part in audit.parts if part.details]
    passed = Field("no", marks=table.mark(reasons[:1])) if reasons else Field("yes", marks=table.mark(done))
    numbers = audit.model_dump(include={name for name, _ in MEASURED.values()})
    return [Field(result.cell.name), passed, *(number_field(numbers[name], how) for name, how in MEASURED.values())]


def _details(part: PartAudit) -> list[str]:
    """What was done, and how much of it in the texts that were scored."""
    pairs = part.quantized_pairs
    return [*part.details, *([] if pairs is None else [f"{percent(pairs)} of such pairs in the scored texts"])]
