"""Results made up for tests of reports: small, whole and with all that can go wrong."""

from pathlib import Path

import pandas as pd

from qbench.quantize.audit import Audit, LayerAudit, failures
from qbench.store import CellRef, PlannedCell, RunPlan, cell_folder, write_plan, write_record

from ..records import cell_ref, make_record, make_samples

PAPER = Path(__file__).parents[2] / "results" / "paper"
LABELS = {"none-16": ("none", 16), "bnb-4-nf4": ("bnb", 4), "hqq-2-g64": ("hqq", 2), "hqq-3-g64": ("hqq", 3)}
LOSSES = {"none-16": 0.0, "bnb-4-nf4": 0.02, "hqq-2-g64": 0.4, "hqq-3-g64": 0.1}


def cell(attention: str, label: str, family: str = "mini") -> CellRef:
    """A cell by its label."""
    method, bits, *_ = label.split("-")
    return cell_ref(attention, method, int(bits), label, family)


def audit_of(cell: CellRef, **changes: object) -> Audit:
    """An audit that passes, unless it is changed."""
    weights, codes = 4096, 2**cell.bits
    stored = {"weights": weights, "code_bytes": weights * cell.bits // 8, "metadata_bytes": weights // 16}
    energies = {"source_energy": 100.0, "error_energy": 100.0 * 4.0**-cell.bits}
    layer = LayerAudit(
        **{"name": "model.layers.0.mlp.down_proj", "bits": cell.bits, "group_size": 64, **stored, **energies},
        **{"levels": min(codes, 60), "codes_used": codes, "max_code": codes - 1, "codes_possible": codes},
        **{"one_value_a_code": True, "median_steps": 0.25, "median_bias": 0.0, "cosine": 0.99, "slope": 1.0},
        **{"misplaced": 0.0, "narrow": 0.0, "packed_bytes": stored["code_bytes"], "nearest": True, "finite": True},
    )
    audit = Audit(
        **{"label": cell.label, "method": cell.method, "bits": cell.bits, "activation_bits": None, "dtype": "float32"},
        **{"execution": "dense", "linear_weights": 2 * weights, "target_weights": weights, "layers": (layer,)},
        **{"kl": 4.0**-cell.bits, "top1_agreement": 1 - 4.0**-cell.bits, **stored, **energies},
    )
    assert not failures(audit)
    return audit.model_copy(update=changes)


def samples_of(attention: str, label: str, documents: int = 40, seed: int = 0) -> pd.DataFrame:
    """The documents of a cell: softpick is a little worse to begin with, and loses half as much."""
    loss = LOSSES[label] if attention == "softmax" else 0.03 + 0.6 * LOSSES[label]
    return make_samples(documents, loss, seed=seed)


def write_cell(folder: Path, cell: CellRef, samples: pd.DataFrame | None, **changes: object) -> PlannedCell:
    """A record, quantized ones with an audit; gives what a plan says of it."""
    audit = audit_of(cell) if cell.method != "none" and samples is not None else None
    record = make_record(cell, samples, **{"audit": audit, **changes})
    write_record(cell_folder(folder, cell, record.key), record, samples)
    return PlannedCell(cell=cell, key=record.key)


def write_plan_of(folder: Path, planned: list[PlannedCell]) -> None:
    """run.json."""
    recipe = {"checkpoints": {"mini": {"softmax": "mini/softmax", "softpick": "mini/softpick"}}, "tasks": ["arc_easy"]}
    write_plan(folder, RunPlan(recipe="mini.yaml", resolved_recipe=recipe, cells=tuple(planned)))


def write_mini(folder: Path, documents: int = 40, labels: tuple[str, ...] = tuple(LABELS)) -> Path:
    """A run in which everything is well."""
    twins = [(attention, label) for attention in ("softmax", "softpick") for label in labels]
    write_plan_of(folder, [write_cell(folder, cell(*twin), samples_of(*twin, documents)) for twin in twins])
    return folder


def write_troubled(folder: Path, documents: int = 40) -> Path:
    """A run in which one cell failed, one failed its audit, one is missing, one is not offered, one saw other documents."""
    planned = [
        write_cell(folder, cell(a, "none-16"), samples_of(a, "none-16", documents)) for a in ("softmax", "softpick")
    ]
    planned.append(write_cell(folder, cell("softmax", "hqq-2-g64"), None))
    unquantized = cell("softpick", "hqq-2-g64")
    samples = samples_of("softpick", "hqq-2-g64", documents)
    audit = audit_of(unquantized, untouched=("model.layers.0.mlp.up_proj",))
    planned.append(write_cell(folder, unquantized, samples, audit=audit))
    planned.append(write_cell(folder, cell("softmax", "hqq-3-g64"), samples_of("softmax", "hqq-3-g64", documents)))
    planned.append(PlannedCell(cell=cell("softpick", "hqq-3-g64"), key="f" * 64))
    planned.append(write_cell(folder, cell("softmax", "bnb-4-nf4"), samples_of("softmax", "bnb-4-nf4", documents)))
    others = samples_of("softpick", "bnb-4-nf4", documents, seed=1)
    planned.append(write_cell(folder, cell("softpick", "bnb-4-nf4"), others))
    planned += [PlannedCell(cell=cell(a, "bnb-3"), key=None, not_offered=True) for a in ("softmax", "softpick")]
    write_plan_of(folder, planned)
    return folder
