"""The absolute gate: a run's quantized models compared with its own unquantized ones (gate.max_damage)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from qbench.errors import did_you_mean
from qbench.gate.hypotheses import Hypothesis, hypotheses, mean_loss
from qbench.gate.pairing import CheckError
from qbench.gate.settings import EVERY, GateSettings, Limits, Margins
from qbench.records.audit import UNQUANTIZED
from qbench.records.paired import OtherDocuments, Pair, draws_of_cells, pair_documents
from qbench.records.schema import CellRef
from qbench.records.store import Results


def damages(run: Results, pairs: Sequence[Pair], settings: GateSettings) -> Iterator[Hypothesis]:
    """'The damage to this metric of this cell is above its limit', for each cell that has a limit.

    pairs: the run's cells and the baseline's. lm-eval's output does not say what is quantized: a model that has no name
    of a cell is compared with the baseline's, by the limits of every quantization.
    """
    done = [stored for stored in run.current if stored.record.state == "done"]
    unquantized = {_model(s.record.cell): s for s in done if s.record.cell.label == UNQUANTIZED}
    labels = dict.fromkeys(
        cell.label for cell in (*(s.record.cell for s in run.current), *(m.cell for m in run.missing))
    )
    wanted = dict(settings.max_damage)
    if every := wanted.pop(EVERY, None):
        yield from (h for pair in pairs if pair[1].record.cell.unnamed for h in _of_cell([pair], every, settings))
        wanted = dict.fromkeys((label for label in labels if label != UNQUANTIZED), every) | wanted
    for label, limits in wanted.items():
        cells = [stored for stored in done if stored.record.cell.label == label]
        if label not in labels:
            unnamed = any(stored.record.cell.unnamed for stored in run.current)
            has = "lm-eval's output has no labels, so leave the label out" if unnamed else f"it has {', '.join(labels)}"
            near = did_you_mean(label, labels)
            raise CheckError(f"gate.max_damage.{label}: {run.folder} has no such quantization; {has}.{near}")
        for stored in cells:
            if _model(stored.record.cell) not in unquantized:
                todo = "import it too" if stored.record.imported else "add `method: none` to the recipe's quantizations"
                raise CheckError(
                    f"gate.max_damage needs the unquantized model of {stored.record.cell.name}, and {run.folder} has "
                    f"no finished one; {todo}."
                )
        own_pairs = [(unquantized[_model(stored.record.cell)], stored) for stored in cells]
        for own in draws_of_cells(own_pairs):
            yield from _of_cell(own, limits, settings)


def _model(cell: CellRef) -> tuple[str, str]:
    return cell.family, cell.attention


def _of_cell(pairs: list[Pair], limits: Limits, settings: GateSettings) -> Iterator[Hypothesis]:
    before, after = pairs[0]
    absolute = settings.model_copy(update={"noninferiority": Margins(), "overrides": {}})
    for paired in pair_documents(*pairs):
        if isinstance(paired, OtherDocuments):
            raise CheckError(
                f"{after.record.cell.name}, {paired.task}: its documents differ from those of the unquantized model, "
                "so gate.max_damage cannot be checked; run both again."
            )
        metrics = tuple(metric for metric in before.record.metrics if metric.task == paired.task)
        for found in hypotheses(after.record.cell.of_all_draws, paired, metrics, absolute):
            limit = getattr(limits, found.kind, None)
            if limit is not None:
                yield _beyond(found, limit)


def _beyond(found: Hypothesis, limit: float) -> Hypothesis:
    """The same losses counted from the limit, so a sign flip tests whether the damage is above it."""
    start = mean_loss(found.kind, limit)
    losses = found.losses - start * found.weights
    by_draw = found.by_draw and (found.by_draw[0] + np.float64(start), found.by_draw[1])
    return replace(
        found,
        tolerance=limit,
        threshold=start,
        limit=start,
        losses=losses,
        damages=found.losses,
        by_draw=by_draw,
    )
