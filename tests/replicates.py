"""Runs with several draws of calibration, made up for tests."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from qbench.records.audit import Audit
from qbench.records.schema import CellRef, PlannedCell, Provenance, RunPlan
from qbench.records.store import cell_folder, write_plan, write_record

from .example_records import PROVENANCE, cell_ref, identity_of, make_record, make_samples, of_model

LABEL = "gptq-3-g128"


def gptq(attention: str, draw: int | None) -> CellRef:
    """A calibrated cell."""
    return cell_ref(attention, "gptq", 3, LABEL).model_copy(update={"draw": draw})


def unquantized(attention: str) -> CellRef:
    """The unquantized cell of an attention."""
    return cell_ref(attention, "none", 16, "none-16")


def write_cells(
    folder: Path,
    cells: Mapping[CellRef, pd.DataFrame | None],
    windows: Mapping[CellRef, str] | str = "windows",
    audits: Mapping[CellRef, Audit] | None = None,
    gate: Mapping[str, Any] | None = None,
    provenance: Provenance = PROVENANCE,
) -> Path:
    """A run of these cells; windows: what calibrated ones were calibrated on, by cell or in one word for all draws."""
    entries = []
    for cell, samples in cells.items():
        identity = identity_of(cell)
        if cell.method == "gptq":
            text = windows if isinstance(windows, str) else windows.get(cell, "windows")
            what = identity.what.model_copy(update={"calibration": text if " " in text else f"{text} {cell.draw}"})
            identity = identity.model_copy(update={"what": what})
        changes = {"audit": audits[cell]} if audits and cell in audits else {}
        record = make_record(cell, samples, identity=identity, provenance=provenance, **changes)
        write_record(
            cell_folder(folder, cell, record.key), record, None if samples is None else of_model(samples, cell)
        )
        entries.append(PlannedCell(cell=cell, key=record.key))
    recipe = {"gate": dict(gate or {})}
    write_plan(folder, RunPlan(recipe="test.yaml", resolved_recipe=recipe, cells=tuple(entries)))
    return folder


def twins(losses: Mapping[str, Mapping[int | None, float]], documents: int = 40) -> dict[CellRef, pd.DataFrame | None]:
    """The unquantized cells, and draws that lose the given amounts, by attention and draw."""
    cells: dict[CellRef, pd.DataFrame | None] = {unquantized(kind): make_samples(documents) for kind in losses}
    return cells | {
        gptq(kind, draw): make_samples(documents, loss) for kind, own in losses.items() for draw, loss in own.items()
    }


def numbered(losses: Iterable[float]) -> dict[int | None, float]:
    """Losses by draw: 1, 2, …"""
    return dict(enumerate(losses, start=1))
