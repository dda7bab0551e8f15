"""What a cell will take, before anything is loaded: from config.json and the size of the tasks."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qbench.evaluate.facts import TaskFacts
from qbench.recipe.cells import Cell

CHARACTERS_PER_TOKEN = 4  # about what a vocabulary of 32k gives for English
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
OVERHEAD = 2**30  # interpreter, packages, one batch


@dataclass(frozen=True)
class Estimate:
    """Parameters, memory at the peak and floating-point operations of a cell."""

    parameters: int
    memory: int  # bytes
    work: float  # operations


def estimate(cell: Cell, tasks: Mapping[str, TaskFacts]) -> Estimate | None:
    """A rough estimate; None if the checkpoint is not on this machine."""
    parameters = parameter_count(cell)
    if parameters is None:
        return None
    tokens = sum(facts.characters for facts in tasks.values()) / CHARACTERS_PER_TOKEN
    memory = parameters * ITEM_BYTES[cell.recipe.resolved_dtype]
    if cell.ref.method != "none":
        memory += memory  # the source weights, which the audit compares with, beside the quantized ones
    calibration = cell.recipe.calibration
    if cell.ref.method == "gptq" and calibration:
        tokens += 5 * calibration.samples * calibration.length  # four stages of each layer, and its output
    return Estimate(parameters, memory + OVERHEAD, 2.0 * parameters * tokens)


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
        return count_parameters(json.loads(file.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # the worker says what is wrong with it


def count_parameters(config: dict[str, Any]) -> int:
    """Parameters of embeddings, layers, norms and head."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config.get("num_attention_heads") or config["num_heads"]
    kv_heads = config.get("num_key_value_heads") or config.get("num_kv_heads") or heads
    # FLA: two thirds of four times the hidden size, rounded up to a multiple of 256.
    inner = config.get("intermediate_size") or (int(hidden * config.get("hidden_ratio", 4) * 2 / 3) + 255) // 256 * 256
    head = config.get("head_dim") or hidden // heads
    attention = 2 * hidden * heads * head + 2 * hidden * kv_heads * head
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return embeddings + layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden
