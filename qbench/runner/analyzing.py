"""What the worker runs for an analysis instead of scoring: one function per `CellRef.measured`."""

import sys
from collections.abc import Callable
from typing import Any

from qbench.analysis.analyze import analyze
from qbench.analysis.maps import attention_maps
from qbench.analysis.sensitivity import sensitivity
from qbench.analysis.source import read_texts, token_ids
from qbench.analysis.texts import MIN_TOKENS
from qbench.quantizers.calibration import calibration_batches
from qbench.quantizers.options import Quantization
from qbench.recipe.cells import Cell
from qbench.records.analysis import sums_to_parquet
from qbench.records.analysis_facts import MapsFacts
from qbench.records.maps import maps_to_parquet
from qbench.records.schema import Measured

MAP_TOKENS = 256  # of the text used for maps: a picture could not show more

Measurement = tuple[Any, bytes | None]  # the field of the record, and the Parquet file next to it


def measure(cell: Cell, model: Any, tokenizer: Any) -> Measurement:
    """Run the cell's measurement."""
    assert cell.ref.measured
    return MEASURES[cell.ref.measured](cell, model, tokenizer)


def _analysis(cell: Cell, model: Any, tokenizer: Any) -> Measurement:
    settings = cell.recipe.analysis
    texts, notes = read_texts(cell.recipe.analysis_source(), tokenizer)
    found = analyze(model, texts, length=settings.length, lengths=settings.lengths, progress=True)
    facts = found.facts.model_copy(update={"notes": (*notes, *found.facts.notes)})
    return facts, sums_to_parquet(found)


def _maps(cell: Cell, model: Any, tokenizer: Any) -> Measurement:
    settings, source = cell.recipe.analysis, cell.recipe.analysis_source
    if settings.text:
        ids = token_ids(settings.text, tokenizer, MAP_TOKENS)
    else:
        texts, _ = read_texts(source(), tokenizer)
        ids = next((ids for ids in texts if len(ids) >= MIN_TOKENS), texts[0])[:MAP_TOKENS]
    maps = attention_maps(model, ids, cell.heads)
    tokens = tuple(tokenizer.convert_ids_to_tokens(ids.tolist()))
    return MapsFacts(tokens=tokens, heads=cell.heads), maps_to_parquet(maps)


def _sensitivity(cell: Cell, model: Any, tokenizer: Any) -> Measurement:
    wanted, recipe = cell.quantization, cell.recipe
    assert isinstance(wanted, Quantization)
    texts, _ = read_texts(cell.sensitivity_source(), tokenizer)
    calibration = None
    if source := cell.calibration:
        longest = min(model.config.max_position_embeddings, recipe.max_length or sys.maxsize)
        calibration = calibration_batches(source, tokenizer, longest, cell.ref.draw)
    return sensitivity(model, texts, wanted, calibration=calibration, progress=True), None


MEASURES: dict[Measured, Callable[[Cell, Any, Any], Measurement]] = {
    "analysis": _analysis,
    "maps": _maps,
    "sensitivity": _sensitivity,
}
