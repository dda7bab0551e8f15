"""All losses of a cell as one: finds many small losses in the same direction, of which none is significant alone."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from qbench.gate.hypotheses import Documents, Hypothesis
from qbench.gate.settings import GateSettings
from qbench.gate.sign_flip import ratio
from qbench.records.kept import shared
from qbench.records.samples import AGGREGATIONS, Floats

ALL_TASKS, POOLED = "all_tasks", "pooled"


def with_pooled(cell: Sequence[Hypothesis], settings: GateSettings) -> list[Hypothesis]:
    """The hypotheses of one cell, and the mean of their losses if there are several."""
    return [*cell, pooled(cell, settings)] if len(cell) > 1 else list(cell)


def pooled(cell: Sequence[Hypothesis], settings: GateSettings) -> Hypothesis:
    """The mean of a cell's losses, each in units of its tolerance.

    A document has one sign for all metrics of its task: if before and after are swapped, they are in all of them.
    """
    tasks = [_of_task(list(own), len(cell)) for _, own in groupby(cell, lambda h: h.task)]
    losses, weights = (np.concatenate(side) for side in zip(*tasks, strict=True))
    first = cell[0]
    parts = sorted(((f"{h.task} {h.metric}", _in_tolerances(h)) for h in cell), key=lambda part: -part[1])
    return Hypothesis(
        cell=first.cell,
        task=ALL_TASKS,
        metric=POOLED,
        kind="pooled",
        aggregation=AGGREGATIONS["mean"],
        tolerance=settings.tolerance("pooled", ALL_TASKS, POOLED),
        threshold=settings.tolerance("pooled", ALL_TASKS, POOLED),
        alpha=settings.level(ALL_TASKS, POOLED),
        before=0.0,
        after=ratio(losses, weights),
        losses=losses,
        weights=shared(weights),
        groups=shared(np.arange(len(losses))),
        documents=Documents(len(losses), ()),
        draws=first.draws,
        by_draw=_by_draw(cell),
        margin=settings.margin("pooled", ALL_TASKS, POOLED),
        parts=tuple(parts),
        lost_answers=max(_lost_answers(list(own), len(cell)) for _, own in groupby(cell, lambda h: h.task)),
        only_answers=all(h.kind == "accuracy" for h in cell),
    )


def _of_task(own: Sequence[Hypothesis], count: int) -> tuple[Floats, Floats]:
    """[documents] what each adds to the mean of `count` losses, and its weight in them; all weights add up to 1."""
    size = 1 + max(int(h.groups[-1]) for h in own)
    losses, weights = np.zeros(size), np.zeros(size)
    for h in own:
        total = count * h.weights.sum()
        losses[h.groups] += h.losses / (total * h.unit)
        weights[h.groups] += h.weights / total
    return losses[weights > 0], weights[weights > 0]


def _lost_answers(own: Sequence[Hypothesis], count: int) -> float:
    """What a document of the task adds to the mean of `count` losses if all accuracies lose its answer."""
    return float(sum(1 / (count * len(h.weights) * h.unit) for h in own if h.kind == "accuracy"))


def _in_tolerances(h: Hypothesis) -> float:
    return ratio(h.losses, h.weights) / h.unit


def _by_draw(cell: Sequence[Hypothesis]) -> tuple[Floats, Floats] | None:
    """[draws] the same mean of each draw, before and after; None if the draws are not a source of chance."""
    known = [(h.unit, h.by_draw) for h in cell if h.by_draw]
    if not known:
        return None
    before, after = (sum(means[side] / unit for unit, means in known) / len(cell) for side in (0, 1))
    return np.asarray(before), np.asarray(after)
