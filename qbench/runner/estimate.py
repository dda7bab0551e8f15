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
LINEARS = 7 * 24  # about as many linear layers as a model has: each is a pass of a sensitivity
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
    if cell.ref.measured:
        tokens = _analysis_tokens(cell)
    memory = parameters * ITEM_BYTES[cell.recipe.resolved_dtype]
    if cell.ref.label != UNQUANTIZED:
        memory += memory  # the source weights, which the audit compares with, beside the quantized ones
    if calibration := cell.calibration:
        tokens += 5 * calibration.samples * calibration.length  # four stages of each layer, and its output
    return Estimate(parameters, memory + OVERHEAD, 2.0 * parameters * tokens)


def _analysis_tokens(cell: Cell) -> float:
    settings = cell.recipe.analysis
    if cell.ref.measured == "maps":
        return settings.length
    if cell.ref.measured == "sensitivity":
        return LINEARS * cell.sensitivity_source().samples * settings.length
    return settings.samples * settings.length


def parameter_count(cell: Cell) -> int | None:
    """The parameters of a Llama with the checkpoint's config, in either layout; None if it is not here."""
    file = Path(cell.location, "config.json")
    if not file.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            found = try_to_load_from_cache(cell.location, "config.json", revision=cell.source.revision)
        except HFValidationError:
            return None
        if not isinstance(found, str):
            return None
        file = Path(found)
    try:
        return layout.parameter_count(file)
    except CheckpointError:
        return None  # the worker says what is wrong with it
