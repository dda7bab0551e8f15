"""Chooses the heads to draw: those that the recipe names, or those in which the models of a family differ most."""

from collections.abc import Sequence

from qbench.recipe.schema import Recipe
from qbench.records.analysis import Analysis, AnalysisError
from qbench.records.analysis_metrics import differing_heads, largest_sinks
from qbench.records.audit import UNQUANTIZED
from qbench.records.store import StoredRecord

HEADS = 4  # if the recipe names none


def heads_to_draw(recipe: Recipe, analyses: Sequence[StoredRecord]) -> dict[str, list[tuple[int, int]]]:
    """(layer, head) by family. Leaves out a family if choosing needs analyses that are not done yet."""
    if (named := recipe.analysis.maps) is not None:
        return {family: [(place.layer, place.head) for place in named] for family in recipe.checkpoints}
    found = {}
    for family, variants in recipe.checkpoints.items():
        reference = recipe.reference if recipe.reference in variants else next(iter(variants))
        pair = [reference, *(variant for variant in variants if variant != reference)][:2]
        there = {stored.record.cell.attention: stored for stored in analyses if _is_of(stored, family)}
        if all(variant in there for variant in pair):
            found[family] = _chosen([there[variant].analysis() for variant in pair])
    return found


def _is_of(stored: StoredRecord, family: str) -> bool:
    cell = stored.record.cell
    return cell.family == family and cell.label == UNQUANTIZED and cell.step is None and stored.has_samples


def _chosen(analyses: Sequence[Analysis]) -> list[tuple[int, int]]:
    if len(analyses) == 1:
        return largest_sinks(analyses[0], HEADS)
    try:
        return differing_heads(analyses[0], analyses[1], HEADS)
    except AnalysisError:  # the models have different shapes and cannot be drawn side by side
        return []
