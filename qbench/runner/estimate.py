"""What a cell will take, before anything is loaded: from config.json and the size of the tasks."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qbench.checkpoint import layout
from qbench.checkpoint.layout import CheckpointError
from qbench.evaluate.facts import TaskSummary
from qbench.recipe.cells import Cell
from qbench.records.audit import UNQUANTIZED

CHARACTERS_PER_TOKEN = 4  # about what a vocabulary of 32k gives for English
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
OVERHEAD = 2**30  # interpreter, packages, one batch


@dataclass(frozen=True)
class Estimate:
    """Parameters, memory at the peak and floating-point operations of a cell."""

    parameters: int
    memory: int  # bytes
    work: float  # operations


def estimate(cell: Cell, tasks: Mapping[str, TaskSummary]) -> Estimate | None:
    """A rough estimate; None if the checkpoint is not on this machine."""
    parameters = parameter_count(cell)
    if parameters is None:
        return None
    tokens = sum(facts.characters for facts in tasks.values()) / CHARACTERS_PER_TOKEN
    memory = parameters * ITEM_BYTES[cell.recipe.resolved_dtype]
    if cell.ref.label != UNQUANTIZED:
        memory += memory  # the source weights, which the audit compares with, beside the quantized ones
    if calibration := cell.calibration:
        tokens += 5 * calibration.samples * calibration.length  # four stages of each layer, and its output
    return Estimate(parameters, memory + OVERHEAD, 2.0 * parameters * tokens)


def parameter_count(cell: Cell) -> int | None:
    """The parameters of a Llama with the checkpoint's config, in either layout; None if it is not here, or wrong."""
    file = _config(cell)
    try:
        return layout.parameter_count(file, cell.ref.attention) if file else None
    except CheckpointError:
        return None  # `checkpoint_note` says what is wrong with it


def checkpoint_note(cell: Cell) -> str:
    """What is wrong with the checkpoint's config, or doubtful; empty if nothing is, or it is not here."""
    file = _config(cell)
    return layout.config_note(file, cell.ref.attention) if file else ""


def _config(cell: Cell) -> Path | None:
    file = Path(cell.location, layout.CONFIG)
    if file.is_file():
        return file
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(cell.location, layout.CONFIG, revision=cell.source.revision)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None
