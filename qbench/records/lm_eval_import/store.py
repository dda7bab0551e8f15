"""lm-eval's output as a folder of records: read as if it were one, or stored as one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from qbench.records.lm_eval_import.cells import NamedCell, cells_of
from qbench.records.lm_eval_import.fields import LmEvalError
from qbench.records.lm_eval_import.output import ModelOutput, read_outputs
from qbench.records.lm_eval_import.records import to_record
from qbench.records.schema import CellRef
from qbench.records.store import RUN, Results, StoredRecord, cell_folder, holds_records, read_results, write_record


def import_lm_eval(
    paths: Sequence[Path], out: Path, cells: Sequence[NamedCell] = (), by_model: Mapping[str, NamedCell] | None = None
) -> tuple[list[StoredRecord], list[str]]:
    """Store lm-eval's output as records, all or none; returns them, and what a reader must know."""
    outputs = read_outputs(paths)
    stored = [to_record(output, cell) for output, cell in zip(outputs, cells_of(outputs, cells, by_model), strict=True)]
    _check_new(stored, out)
    written = []
    for own in stored:
        folder = cell_folder(out, own.record.cell, own.record.key)
        write_record(folder, own.record, own.content)
        written.append(replace(own, folder=folder))
    return written, [note for output in outputs for note in output.notes]


def as_results(path: Path, outputs: Sequence[ModelOutput], cells: Sequence[CellRef]) -> Results:
    """lm-eval's output as a folder of records that was read."""
    return Results(path, None, tuple(to_record(output, cell) for output, cell in zip(outputs, cells, strict=True)))


def _check_new(stored: Sequence[StoredRecord], out: Path) -> None:
    """An error if the folder is that of a run, or has other records of these cells."""
    if out.exists() and not out.is_dir():
        raise LmEvalError(f"{out} is not a folder; --out must be a folder of imported records, or a new one.")
    if (out / RUN).exists():
        raise LmEvalError(f"{out} is the folder of a run ({RUN}); choose another one for imported records.")
    there = read_results(out).current if holds_records(out) else ()
    for own in stored:
        for other in there:
            if other.record.cell.name == own.record.cell.name and other.record.key != own.record.key:
                raise LmEvalError(
                    f"{out} already has a record of {own.record.cell.name}, in {other.folder.name}; remove it, or "
                    "choose another folder or cell."
                )
