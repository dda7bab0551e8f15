"""What may not change between a baseline and a run, whatever the scores: the audit, and numbers that are numbers."""

import math
from collections.abc import Iterator

import numpy as np

from qbench.errors import some
from qbench.gate.pairing import PairedDocuments
from qbench.gate.settings import GateSettings
from qbench.records.audit import Audit, LayerAudit
from qbench.records.samples import WEIGHT
from qbench.records.schema import Record


def audit_changes(before: Audit | None, after: Audit | None, settings: GateSettings) -> list[str]:
    """Sentences: which layers are quantized otherwise than in the baseline."""
    if before is None or after is None:
        return [] if before is after else [f"The audit is {'new' if before is None else 'gone'}."]
    changes = [
        f"{name} is {_shown(then)} in the baseline and {_shown(now)} in the run."
        for name in ("method", "bits", "activation_bits", "linear_weights")
        if (then := getattr(before, name)) != (now := getattr(after, name))
    ]
    old = {layer.name: layer for layer in before.layers}
    new = {layer.name: layer for layer in after.layers}
    lost, gained = [name for name in old if name not in new], [name for name in new if name not in old]
    if lost:
        changes.append(f"{len(new)} layers are quantized, {len(old)} were; no longer {some(lost)}.")
    if gained:
        changes.append(f"{len(gained)} more layers are quantized: {some(gained)}.")
    drifts = {name: drift for name in old if name in new and (drift := _drift(old[name], new[name], settings))}
    for what in dict.fromkeys(drifts.values()):
        changes.append(f"{what}: {some([name for name, drift in drifts.items() if drift == what])}.")
    return changes


def new_nans(paired: PairedDocuments) -> Iterator[str]:
    """Sentences: values that are no numbers any more, or weights that are others."""
    for column, (before, after) in paired.values.items():
        new = np.flatnonzero(np.isfinite(before) & ~np.isfinite(after))
        if len(new):
            yield (
                f"{paired.task} {column} is not a number for {len(new)} documents that had one, "
                f"the first being document {paired.ids[new[0]]}."
            )
        if column.endswith(WEIGHT) and not np.array_equal(before, after, equal_nan=True):
            yield f"{paired.task} {column}: what log-likelihoods are divided by is not the same in both runs."


def other_columns(paired: PairedDocuments) -> Iterator[str]:
    """Sentences: columns of values that only one of the records has. A hypothesis would vanish with its column."""
    if paired.lost:
        yield f"Its samples lack the columns {', '.join(paired.lost)}, which the baseline's have."
    if paired.gained:
        yield f"Its samples have the columns {', '.join(paired.gained)}, which the baseline's lack."


def other_metrics(before: Record, after: Record) -> Iterator[str]:
    """Sentences: metrics that only one of the records has, or that have another direction or aggregation."""
    then, now = ({(m.task, m.metric): m for m in record.metrics} for record in (before, after))
    for task, metric in dict.fromkeys([*then, *now]):
        old, new = then.get((task, metric)), now.get((task, metric))
        if old is None or new is None:
            has, lacks = ("run", "baseline") if old is None else ("baseline", "run")
            yield f"{task} {metric} is in the {has} and not in the {lacks}."
            continue
        for field, name in (("better", "direction (better)"), ("aggregation", "aggregation")):
            if getattr(old, field) != getattr(new, field):
                yield (
                    f"{task} {metric}: the {name} is {_shown(getattr(new, field))} in the run and "
                    f"{_shown(getattr(old, field))} in the baseline."
                )


def cost_warnings(before: Record, after: Record, settings: GateSettings) -> Iterator[str]:
    """Sentences: what got slower or larger. Seconds are compared on one machine only."""
    if before.cost is None or after.cost is None:
        return
    seconds = sum(before.cost.seconds.values()), sum(after.cost.seconds.values())
    same_machine = before.provenance.machine == after.provenance.machine
    if same_machine and seconds[0] > 0 and seconds[1] > settings.slower_ratio * seconds[0]:
        yield (
            f"It took {seconds[1]:.1f} s; the baseline took {seconds[0]:.1f} s "
            f"({seconds[1] / seconds[0]:.2f} times, {settings.slower_ratio:g} warns)."
        )
    sizes = before.cost.weight_bytes, after.cost.weight_bytes
    if sizes[0] and sizes[1] and sizes[1] > settings.larger_ratio * sizes[0]:
        yield (
            f"Its weights take {sizes[1]:,} bytes; the baseline's take {sizes[0]:,} "
            f"({sizes[1] / sizes[0]:.2f} times, {settings.larger_ratio:g} warns)."
        )


def _drift(before: LayerAudit, after: LayerAudit, settings: GateSettings) -> str | None:
    """What is different about a layer, in words that are the same for all layers with that difference."""
    for field, words in (("bits", "code width"), ("group_size", "group size"), ("packed_bytes", "bytes of codes")):
        then, now = getattr(before, field), getattr(after, field)
        if then != now:
            return f"The {words} is {_shown(now)}, it was {_shown(then)}"
    if not after.finite:
        return "Weights are NaN or infinite"
    if not abs(after.slope - before.slope) <= settings.slope_drift * abs(before.slope):  # NaN is a drift
        return f"Weights are on the whole of another size than they were (more than {settings.slope_drift:.1%} off)"
    then, now = _relative_error(before), _relative_error(after)
    if not abs(now - then) <= settings.error_drift * then:
        return f"The relative weight error is not what it was (more than {settings.error_drift:.0%} off)"
    return None


def _relative_error(layer: LayerAudit) -> float:
    return math.sqrt(layer.error_energy / layer.source_energy) if layer.source_energy else 0.0


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else str(value)
