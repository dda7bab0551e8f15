"""Rules on the cells of one run: measured as the unquantized model was, and where run.json says."""

from collections import Counter
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
from qbench.records.store import RECORD, Results, StoredRecord, cell_folder

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


def of_unquantized(
    found: Sequence[Finding], records: Sequence[StoredRecord], models: Mapping[Model, StoredRecord]
) -> Iterator[Finding]:
    """The findings of unlike_unquantized; those that all cells of a model share are one, on its unquantized model."""
    cells: dict[Model, list[CellRef]] = {}
    for cell in (own.record.cell for own in records if own.record.state == "done" and own.has_samples):
        if cell.label != UNQUANTIZED:
            cells.setdefault(_model(cell), []).append(cell)
    alike: dict[tuple[Model, str, str], list[Finding]] = {}
    for own in found:
        alike.setdefault((_model(own.cell), own.rule, own.message), []).append(own)
    for (model, rule, message), same in alike.items():
        if len(same) == len(cells[model]) and len({own.cell.label for own in same}) > 1:
            many = f"all {count(len(same))} quantized cells of this model differ from it"
            unquantized = models[model].record.cell
            yield Finding(rule, (unquantized,), f"{many}. {same[0].cell.name}: {message}")
        else:
            yield from same


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
    if not now.imported:  # each model's own call of lm-eval names its checkpoint and its tasks
        if then.identity.what.checkpoint != now.identity.what.checkpoint:
            yield "unlike_unquantized_checkpoint", f"its checkpoint is not that of {name}."
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
        if (other := after.metrics.get(metric)) is None or metric == KL:
            continue
        here, there = np.isfinite(other.values), np.isfinite(own.values)
        for gone, words in ((there & ~here, f"that have a value for {name}"), (here & ~there, f"of {name} alone")):
            if gone.any():
                documents, first = counted(int(gone.sum()), "document"), before.keys.ids[gone.argmax()]
                message = f"is NaN or infinite for {documents} {words} (first: document {first})."
                yield "new_nans", f"{before.task} {metric} {message}"


def misplaced(results: Results) -> list[Finding]:
    """Planned cells without a record, although a record says that it is theirs: its name or its key was changed.

    A recipe in which a family got another name leaves all records of the old name, which are no mistake.
    """
    found = []
    of_model = Counter(_model(stored.record.cell) for stored in results.superseded)
    for planned in results.missing:
        own_folder = cell_folder(results.folder, planned.cell, planned.key or "").name
        for stored in results.superseded:
            place = f"{stored.folder.name}/{RECORD}"
            if stored.record.cell.name == planned.cell.name and (why := why_other_key(stored.record)):
                found.append(Finding("misplaced", (planned.cell,), f"{place} is of this cell, but {why}"))
            elif (
                stored.record.key == planned.key
                and stored.record.cell.name != planned.cell.name
                and (stored.folder.name == own_folder or of_model[_model(stored.record.cell)] == 1)
            ):
                message = f"{place} has the key of this cell, but says that it is {stored.record.cell.name}."
                found.append(Finding("misplaced", (planned.cell,), message))
    return found
