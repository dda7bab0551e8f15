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
        self._baseline = {own.record.cell.name: own for own in references}, unquantized_models(references)
        self._alone: dict[str, list[Finding]] = {}
        self._unlike: list[Finding] = []

    def read(self, stored: StoredRecord) -> list[Finding]:
        """Read the documents of a record, and of its cell in the baseline; returns why the record was altered."""
        wrong, name = altered(stored), stored.record.cell.name
        if name not in self._alone:
            done = stored.record.state == "done"
            self._alone[name] = [*wrong, *unproved(stored.record), *impossible(stored)] if done else wrong
            self.evidence.read(name)
            self._unlike += self._unlike_unquantized(stored)
        return wrong

    def _unlike_unquantized(self, stored: StoredRecord) -> list[Finding]:
        """How the cell was measured unlike its unquantized model, as far as its baseline was not."""
        references, models = self._baseline
        reference = references.get(stored.record.cell.name)
        known = unlike_unquantized(reference, models) if reference else []
        return [
            own for own in unlike_unquantized(stored, self._models) if own.message not in {k.message for k in known}
        ]

    def findings(self, others: Sequence[Finding] = ()) -> list[Finding]:
        """All findings. How a cell was measured is one only if there are no others on it, the given ones included."""
        for stored in self._records:
            if stored.record.cell.name not in self._alone:
                self.read(stored)
        found = [*other_weights(self.evidence), *(own for each in self._alone.values() for own in each)]
        found += same_calibration(self._records)
        known = {own.cell for own in (*found, *others) if own.fails}
        unlike = of_unquantized(self._unlike, self._records, self._models)
        return found + [own for own in unlike if not {own.cell, own.cell.of_all_draws} & known]


def findings(results: Results, references: Sequence[StoredRecord] = ()) -> list[Finding]:
    """What is wrong with the current records of a folder. references: the records of its baseline."""
    elsewhere = misplaced(results)
    return elsewhere + Review(results.current, references).findings(elsewhere)
