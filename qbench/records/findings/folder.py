"""The findings on a folder of records: what tables, the page and `audit` show, and `check` fails on."""

from collections.abc import Sequence

from qbench.records.findings.finding import Finding
from qbench.records.findings.measured import Evidence
from qbench.records.findings.record import altered, impossible, unproved
from qbench.records.findings.run import misplaced, same_calibration, unlike_unquantized, without_others
from qbench.records.findings.weights import other_weights
from qbench.records.store import Results, StoredRecord


def findings(results: Results, references: Sequence[StoredRecord] = ()) -> list[Finding]:
    """What is wrong with the current records of a folder. references: the records of its baseline."""
    evidence = Evidence.of(results.current, references)
    found, unlike = [*misplaced(results), *same_calibration(results.current)], list[Finding]()
    for stored in results.current:  # all that needs a cell's documents, while they are in memory
        evidence.read({stored.record.cell.name})
        found += of_record(stored)
        unlike += unlike_unquantized(stored, results.current)
    found += other_weights(evidence)
    return found + without_others(unlike, found)


def of_record(stored: StoredRecord) -> list[Finding]:
    """What is wrong with one record."""
    if stored.record.state != "done":
        return altered(stored)
    return [*altered(stored), *unproved(stored.record), *impossible(stored)]
