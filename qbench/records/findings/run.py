"""Rules on the cells of one run: measured as the unquantized model was, and where run.json says."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from qbench.numbers import count, counted
from qbench.records.audit import UNQUANTIZED
from qbench.records.documents import TaskDocuments, pairing
from qbench.records.findings.finding import Finding
from qbench.records.findings.pairs import Problem, other_metrics, other_settings
from qbench.records.findings.record import why_other_key
from qbench.records.metrics import KL
from qbench.records.paired import differ
from qbench.records.schema import CellRef
from qbench.records.store import RECORD, Results, StoredRecord

Model = tuple[str, str]  # family and variant


def unquantized_models(records: Sequence[StoredRecord]) -> dict[Model, StoredRecord]:
    """The unquantized models of a run that have scores."""
    done = [own for own in records if own.record.state == "done" and own.has_samples]
    return {_model(own.record.cell): own for own in done if own.record.cell.label == UNQUANTIZED}


def unlike_unquantized(stored: StoredRecord, models: Mapping[Model, StoredRecord]) -> list[Finding]:
    """Whether a quantized cell has other settings, documents or metrics than its unquantized model in the same run."""
    cell, model = stored.record.cell, models.get(_model(stored.record.cell))
    if model is None or cell.label == UNQUANTIZED or stored.record.state != "done" or not stored.has_samples:
        return []
    return [Finding(rule, (cell,), message) for rule, message in _differences(model, stored)]


def same_calibration(records: Sequence[StoredRecord]) -> Iterator[Finding]:
    """Draws of one cell with the same calibration text: they are one draw."""
    seen: dict[tuple[CellRef, str], CellRef] = {}
    for cell, texts in ((own.record.cell, own.record.identity.what.calibration) for own in records):
        if cell.draw is not None and texts is not None:
            first = seen.setdefault((cell.of_all_draws, texts), cell)
            if first != cell:
                message = f"its calibration text is that of {first.name}; draws must differ."
                yield Finding("same_calibration", (cell, first), message)


def _model(cell: CellRef) -> Model:
    return cell.family, cell.attention


def _differences(before: StoredRecord, after: StoredRecord) -> Iterator[Problem]:
    name, then, now = before.record.cell.name, before.record, after.record
    if then.identity.what.tokenizer != now.identity.what.tokenizer:
        yield "other_tokenizer", f"its tokenizer is not that of {name}."
    sides = ("this cell", name)
    yield from other_settings(then, now, sides)
    yield from other_metrics(then, now, sides)
    for task, own in before.documents.items():
        other = after.documents.get(task)
        if other is None:
            continue
        paired = pairing([own.keys, other.keys])
        if not paired.complete:
            sizes = f"{count(len(other))} here, {count(len(own))} there, {count(paired.count)} in both"
            yield "other_documents", f"{task}: the documents differ from those of {name}: {sizes}."
            continue
        same = paired.of([own, other])
        yield from _unlike(same[0], same[1], name)


def _unlike(before: TaskDocuments, after: TaskDocuments, name: str) -> Iterator[Problem]:
    """Other tokens, or values that are missing."""
    tokens, others = before.answers.tokens, after.answers.tokens
    if not (np.isnan(tokens).all() or np.isnan(others).all()) and differ(tokens, others).any():
        yield "other_tokens", f"{before.task}: the texts have other numbers of tokens than for {name}."
    for metric, own in before.metrics.items():
        if (other := after.metrics.get(metric)) and metric != KL:
            gone = np.flatnonzero(np.isfinite(own.values) & ~np.isfinite(other.values))
            if len(gone):
                documents = counted(len(gone), "document")
                message = f"is NaN or infinite for {documents} that have a value for {name}"
                yield "new_nans", f"{before.task} {metric} {message} (first: document {before.keys.ids[gone[0]]})."


def misplaced(results: Results) -> list[Finding]:
    """Planned cells without a record, although a record says that it is theirs: its name or its key was changed."""
    found = []
    for planned in results.missing:
        for stored in results.superseded:
            place = f"{stored.folder.name}/{RECORD}"
            if stored.record.cell.name == planned.cell.name and (why := why_other_key(stored.record)):
                found.append(Finding("misplaced", (planned.cell,), f"{place} is of this cell, but {why}"))
            elif stored.record.key == planned.key and stored.record.cell.name != planned.cell.name:
                message = f"{place} has the key of this cell, but says that it is {stored.record.cell.name}."
                found.append(Finding("misplaced", (planned.cell,), message))
    return found
