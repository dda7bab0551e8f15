"""The audits of all cells as one table: the proof that each was quantized, for the page and for `qbench audit`."""

from qbench.records.audit import Audit
from qbench.records.schema import Record
from qbench.records.suspicious import audit_failures
from qbench.report.outcomes import Outcome, Outcomes
from qbench.report.tables import Column, Field, Table, formatted

CAPTION = (
    "Measured on the quantized models: bits a weight in storage, weights against their source, and the next token."
)
BITS = (
    "Quantized: of the weights that were to be. Code bits: what the codes take in storage, in the method's packing; "
    "HQQ puts ten 3-bit codes into 32 bits, which is 3.2 a code, and more where words are not full. Storage bits: with "
    "scales and zeros."
)
PROBE = (
    "KL and top-1 agreement are of the next token, against the unquantized model, on the audit's probe: by default a "
    "fixed batch of pseudo-random tokens, on which models are far less sure than on text, so that an agreement of 80% "
    "is nothing alarming."
)
COLUMNS = (
    *(Column("Cell", "l"), Column("Passed", "l"), Column("Quantized"), Column("Code bits"), Column("Storage bits")),
    *(Column("Relative error"), Column("SNR (dB)"), Column("KL (nats)"), Column("Top-1 agreement")),
)


def audit_table(outcomes: Outcomes) -> Table | None:
    """A line for each quantized cell that was audited; None where there are none."""
    table = Table("audits", "Audits", CAPTION, [BITS, PROBE], COLUMNS, heads=0)
    for outcome in outcomes.cells:
        record = outcome.stored.record if outcome.stored else None
        if record and record.audit and record.cell.method != "none":
            table.rows.append(_fields(table, outcome, record, record.audit))
    return table if table.rows else None


def _fields(table: Table, outcome: Outcome, record: Record, audit: Audit) -> list[Field]:
    reasons = audit_failures(record, audit)
    passed = Field("no", marks=table.mark(reasons[:1])) if reasons else Field("yes")
    measured = audit.model_dump(include={"target_share", "code_bits", "storage_bits", "relative_error", "snr_db"})
    return [
        *(Field(outcome.cell.name), passed, formatted(measured["target_share"], "{:.1%}")),
        *(formatted(measured[name], "{:.2f}") for name in ("code_bits", "storage_bits")),
        *(formatted(measured["relative_error"], "{:.4f}"), formatted(measured["snr_db"], "{:.1f}")),
        *(formatted(audit.kl, "{:.4f}"), formatted(audit.top1_agreement, "{:.1%}")),
    ]
