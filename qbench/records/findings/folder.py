"""The findings on a folder of records: what tables, the page and `audit` show, and `check` fails on."""

from collections.abc import Sequence

from qbench.records.findings.finding import Finding
from qbench.records.findings.measured import Evidence
from qbench.records.findings.record import altered, impossible, unproved
from qbench.records.findings.weights import other_weights
from qbench.records.store import StoredRecord


def findings(records: Sequence[StoredRecord], references: Sequence[StoredRecord] = ()) -> list[Finding]:
    """What is wrong with the current records of a folder. references: the records of its baseline."""
    evidence = Evidence.of(records, references)
    found = []
    for stored in records:
        evidence.read({stored.record.cell.name})
        found += of_record(stored)
    return found + other_weights(evidence)


def of_record(stored: StoredRecord) -> list[Finding]:
    """What is wrong with one record."""
    if stored.record.state != "done":
        return altered(stored)
    return [*altered(stored), *unproved(stored.record), *impossible(stored)]
