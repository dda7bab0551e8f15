"""Results made up for tests of reports: small ones, complete or with everything that can go wrong."""

from pathlib import Path

import pandas as pd

from qbench.records.schema import CellRef, PlannedCell, RunPlan
from qbench.records.store import cell_folder, write_plan, write_record
from qbench.report.kinds import KINDS

from ..example_records import TASKS, audit_of, cell_ref, make_record, make_samples

# The kinds of tables that every set of results has rows for.
SOMETIMES = ("passkey", "kl", "analysis", "causes", "lowbit", "sensitivity")  # kinds that results may have nothing for
ALWAYS = [name for name in KINDS if name not in SOMETIMES]
PAPER = Path(__file__).parents[2] / "results" / "paper"
LABELS = {"none-16": ("none", 16), "bnb-4-nf4": ("bnb", 4), "hqq-2-g64": ("hqq", 2), "hqq-3-g64": ("hqq", 3)}
# What an attention gets wrong unquantized, and how much of a quantization's loss it has.
ATTENTIONS = {"softmax": (0.0, 1.0), "softpick": (0.03, 0.6), "gated": (0.01, 0.3)}
LOSSES = {"none-16": 0.0, "bnb-4-nf4": 0.02, "hqq-2-g64": 0.4, "hqq-3-g64": 0.1}


def cell(attention: str, label: str, family: str = "mini") -> CellRef:
    """A cell by its label."""
    method, bits, *_ = label.split("-")
    return cell_ref(attention, method, int(bits), label, family)


def samples_of(attention: str, label: str, documents: int = 40, seed: int = 0) -> pd.DataFrame:
    """The documents of a cell: softpick is a little worse to begin with, and loses half as much."""
    first, share = ATTENTIONS[attention]
    return make_samples(documents, first + share * LOSSES[label], seed=seed)


def write_cell(folder: Path, cell: CellRef, samples: pd.DataFrame | None, **changes: object) -> PlannedCell:
    """Write a record, with an audit if it is quantized; returns its entry in the plan."""
    record = make_record(cell, samples, **changes)
    write_record(cell_folder(folder, cell, record.key), record, samples)
    return PlannedCell(cell=cell, key=record.key)


def write_plan_of(folder: Path, planned: list[PlannedCell], **changes: object) -> None:
    """run.json; changes: to its recipe."""
    recipe = {"checkpoints": {"mini": {"softmax": "mini/softmax", "softpick": "mini/softpick"}}, "tasks": ["arc_easy"]}
    write_plan(folder, RunPlan(recipe="mini.yaml", resolved_recipe=recipe | changes, cells=tuple(planned)))


def write_mini(
    folder: Path,
    documents: int = 40,
    labels: tuple[str, ...] = tuple(LABELS),
    tasks: tuple[str, ...] = tuple(TASKS),
    family: str = "mini",
    attentions: tuple[str, ...] = ("softmax", "softpick"),
    **recipe: object,
) -> Path:
    """A run in which everything worked; recipe: fields for its plan's recipe."""
    planned = []
    for attention, label in ((attention, label) for attention in attentions for label in labels):
        samples = samples_of(attention, label, documents)
        samples = samples[samples["task"].isin(tasks)]
        planned.append(write_cell(folder, cell(attention, label, family), samples))
    write_plan_of(folder, planned, **recipe)
    return folder


def write_troubled(folder: Path, documents: int = 40, tasks: tuple[str, ...] = tuple(TASKS)) -> Path:
    """A run with cells that failed, failed their audit, are missing, are not offered, or saw other documents."""
    twins = ("softmax", "softpick")

    def finished(attention: str, label: str, seed: int = 0, **changes: object) -> PlannedCell:
        samples = samples_of(attention, label, documents, seed)
        return write_cell(folder, cell(attention, label), samples[samples["task"].isin(tasks)], **changes)

    not_quantized = audit_of(cell("softpick", "hqq-2-g64"), untouched=("model.layers.0.mlp.up_proj",))
    planned = [finished(attention, "none-16") for attention in twins]
    planned += [PlannedCell(cell=cell(attention, "bnb-3"), key=None, not_offered=True) for attention in twins]
    planned += [
        finished("softmax", "bnb-4-nf4"),
        finished("softpick", "bnb-4-nf4", seed=1),
        write_cell(folder, cell("softmax", "hqq-2-g64"), None),
        finished("softpick", "hqq-2-g64", audit=not_quantized),
        finished("softmax", "hqq-3-g64"),
        PlannedCell(cell=cell("softpick", "hqq-3-g64"), key="f" * 64),
    ]
    write_plan_of(folder, planned)
    return folder
