"""The findings on a folder of records: what tables, the page and `audit` show, and `check` fails on."""

from collections.abc import Sequence

from qbench.records.findings.finding import Finding
from qbench.records.findings.measured import Evidence
from qbench.records.findings.record import altered, impossible, unproved
from qbench.records.findings.run import (
    misplaced,
    of_unquantized,
    same_calibration,
    unlike_unquantized,
    unquantized_models,
)
from qbench.records.findings.weights import other_weights
from qbench.records.store import Results, StoredRecord


class Review:
    """The findings on a run's records. What needs a cell's documents is done while others need them too."""

    def __init__(self, records: Sequence[StoredRecord], references: Sequence[StoredRecord] = ()) -> None:
        """references: the records of the run's baseline."""
        self.evidence = Evidence.of(records, references)
        self._records, self._models = records, unquantized_models(records)
        self._of_record: dict[str, list[Finding]] = {}
        self._unlike: list[Finding] = []

    def read(self, stored: StoredRecord) -> None:
        """Read the documents of a record of the run, and of the same cell in its baseline."""
        name = stored.record.cell.name
        if name not in self._of_record:
            self.evidence.read(name)
            self._of_record[name] = _of_record(stored)
            self._unlike += unlike_unquantized(stored, self._models)

    def findings(self, others: Sequence[Finding] = ()) -> list[Finding]:
        """The others and all findings. How a cell was measured is one only if there are no others on it."""
        for stored in self._records:
            self.read(stored)
        found = [*others, *other_weights(self.evidence), *(own for each in self._of_record.values() for own in each)]
        found += same_calibration(self._records)
        known = {own.cell for own in found if own.fails}
        unlike = of_unquantized(self._unlike, self._records, self._models)
        return found + [own for own in unlike if not {own.cell, own.cell.of_all_draws} & known]


def findings(results: Results, references: Sequence[StoredRecord] = ()) -> list[Finding]:
    """What is wrong with the current records of a folder. references: the records of its baseline."""
    return Review(results.current, references).findings(misplaced(results))


def _of_record(stored: StoredRecord) -> list[Finding]:
    """What is wrong with one record."""
    if stored.record.state != "done":
        return altered(stored)
    return [*altered(stored), *unproved(stored.record), *impossible(stored)]
