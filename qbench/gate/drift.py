"""What must not change between a baseline and a run, whatever the scores, and which changes a reader must know."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from qbench.errors import some
from qbench.gate.pairing import PairedDocuments
from qbench.gate.settings import GateSettings
from qbench.numbers import count, counted, duration, fixed, percent, significant
from qbench.records.audit import Audit, LayerAudit
from qbench.records.samples import WEIGHT
from qbench.records.schema import Record
from qbench.uncertainty import Estimate, of_two_samples

# Names of runs; they do not affect numbers.
IGNORED = ("resolved_recipe.gate", "resolved_recipe.name", "machine.host")
MIN_SLOWER = 10  # seconds; below that, other programs on the machine make more of a difference
MAX_SHOWN = 80  # characters of a value
# Parts of an identity. SETTINGS must equal the baseline's, or scores cannot be compared; PARTS are reported first.
SETTINGS = ("dtype", "device", "seed", "max_length")
CHECKPOINT, CALIBRATION = "checkpoint", "calibration"
PARTS = {
    CHECKPOINT: "The checkpoint differs from the baseline's, so only scores are compared",
    "tokenizer": "The tokenizer differs from the baseline's",
    CALIBRATION: "The calibration differs from the baseline's",
    "options": "The quantizer's options differ from the baseline's",
    "execution": "The execution (dense or packed) differs from the baseline's",
    "batch_tokens": "The token budget per batch differs from the baseline's",
}


def differences(before: Record, after: Record) -> Iterator[str]:
    """Lines such as `packages.torch: 2.13.0 → 2.14.0`."""
    then, now = _facts(before), _facts(after)
    # A cell may have failed before its threads were counted.
    ignored = (*IGNORED, "machine.threads") if after.state == "failed" else IGNORED
    for name in dict.fromkeys([*then, *now]):
        if then.get(name) != now.get(name) and not name.startswith(ignored):
            yield f"{name}: {_shown(then.get(name))} → {_shown(now.get(name))}"


def other_settings(before: Record, after: Record) -> Iterator[str]:
    """Sentences: settings that differ, so the two runs of a cell do not measure the same thing."""
    then, now = before.identity.what, after.identity.what
    for name in SETTINGS:
        old, new = getattr(then, name), getattr(now, name)
        if old != new:
            yield f"{name} is {_shown(new)} in the run and {_shown(old)} in the baseline."
    for task in dict.fromkeys([*then.tasks, *now.tasks]):
        content, shots = then.tasks.get(task, ("", None))
        new_content, new_shots = now.tasks.get(task, ("", None))
        if shots != new_shots:
            yield f"{task} has {_shown(new_shots)} few-shot examples in the run and {_shown(shots)} in the baseline."
        elif content != new_content:
            yield f"{task} is not the baseline's task: its file or its documents changed."


def other_parts(before: Record, after: Record) -> list[str]:
    """Which of PARTS differ from the baseline's: scores can still be compared, but a reader must know."""
    then, now = before.identity.what, after.identity.what
    return [part for part in PARTS if getattr(then, part) != getattr(now, part)]


def in_words(changed: Iterable[tuple[str, Sequence[str]]]) -> Iterator[str]:
    """One sentence per changed part, from the names of cells and what changed in each."""
    changed = list(changed)
    for part, words in PARTS.items():
        if cells := [name for name, parts in changed if part in parts]:
            yield f"{words} (in {some(cells) if len(cells) < len(changed) else 'all cells'})."


def other_versions(before: Record, after: Record) -> str:
    """The code and packages that differ from the baseline's, in one line; empty if none do."""
    then, now = before.identity, after.identity
    names = sorted(then.packages.keys() | now.packages.keys())
    moved = [name for name in names if then.packages.get(name) != now.packages.get(name)]
    found = [f"{name} {_shown(then.packages.get(name))} → {_shown(now.packages.get(name))}" for name in moved]
    if then.code != now.code:
        found.insert(0, "qbench's code")
    return ", ".join(found)


def _facts(record: Record) -> dict[str, Any]:
    provenance = record.provenance.model_dump(exclude={"started", "finished"})
    identity = {"what": record.identity.what.model_dump(), "code": record.identity.code[:12]}
    return dict(_flat({"checkpoint": record.cell.checkpoint, **provenance, **identity}))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    text = count(value) if type(value) is int else str(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def audit_changes(
    before: Audit | None, after: Audit | None, settings: GateSettings, of_other_draws: bool = False
) -> list[str]:
    """Sentences: which layers are quantized differently from the baseline.

    of_other_draws: the calibration draws differ, and weight scales and errors with them; draws_changes compares those.
    """
    if before is None or after is None:
        return [] if before is after else [f"The audit is {'new' if before is None else 'missing'}."]
    changes = [
        f"{name} is {_shown(then)} in the baseline and {_shown(now)} in the run."
        for name in ("method", "bits", "activation_bits", "linear_weights", "parts")
        if (then := getattr(before, name)) != (now := getattr(after, name))
    ]
    old = {layer.name: layer for layer in before.layers}
    new = {layer.name: layer for layer in after.layers}
    lost, gained = [name for name in old if name not in new], [name for name in new if name not in old]
    if lost:
        changes.append(f"{len(new)} layers are quantized instead of {len(old)}; missing: {some(lost)}.")
    if gained:
        changes.append(f"{counted(len(gained), 'more layer')} quantized: {some(gained)}.")
    both = [name for name in old if name in new]
    drifts = {name: _other_form(old[name], new[name]) for name in both}
    if not of_other_draws:
        drifts = {name: drifts[name] or _drift(old[name], new[name], settings) for name in both}
    return changes + _by_layers(drifts)


def draws_changes(pairs: Sequence[tuple[Audit, Audit]], settings: GateSettings, level: float) -> list[str]:
    """Sentences: layers whose weight scale or error, averaged over different calibration draws, differs from the
    baseline's by more than allowed and beyond chance. level: of one layer's p."""
    drifts: dict[str, str | None] = {}
    layers = [[{layer.name: layer for layer in audit.layers} for audit in side] for side in zip(*pairs, strict=True)]
    for name in layers[0][0]:
        before, after = ([own[name] for own in side if name in own] for side in layers)
        if len(before) < 2 or len(after) < 2:  # a missing layer is reported elsewhere
            continue
        for what, value, allowed in _drifting(settings):
            then, now = [value(layer) for layer in before], [value(layer) for layer in after]
            moved = Estimate(fmean(now) - fmean(then), (of_two_samples(then, now),))
            if abs(moved.value) > allowed * abs(fmean(then)) and moved.p <= level:
                drifts.setdefault(name, f"{what} changed by more than {percent(allowed)} on average over draws")
    return _by_layers(drifts)


def _by_layers(drifts: Mapping[str, str | None]) -> list[str]:
    """Each difference once, with its layers."""
    found = dict.fromkeys(what for what in drifts.values() if what)
    return [f"{what}: {some([name for name, own in drifts.items() if own == what])}." for what in found]


def new_nans(paired: PairedDocuments) -> Iterator[str]:
    """Sentences: values that are no longer numbers, or weights that changed."""
    for column, (before, after) in paired.values.items():
        new = np.flatnonzero(np.isfinite(before) & ~np.isfinite(after))
        if len(new):
            yield (
                f"{paired.task} {column} became NaN or infinite for {counted(len(new), 'document')} "
                f"(first: document {paired.ids[new[0]]})."
            )
        if column.endswith(WEIGHT) and not np.array_equal(before, after, equal_nan=True):
            yield f"{paired.task} {column}: the divisors of log-likelihoods differ from the baseline's."


def other_samples(paired: PairedDocuments, ignored: Collection[str] = ()) -> Iterator[str]:
    """Sentences: columns that only one record has (a hypothesis would silently disappear), or different answers."""
    lost, gained = ([name for name in names if name not in ignored] for names in (paired.lost, paired.gained))
    if lost:
        yield f"Its samples lack the columns {', '.join(lost)}, which the baseline's have."
    if gained:
        yield f"Its samples have the columns {', '.join(gained)}, which the baseline's lack."
    if paired.other_answers:
        documents = counted(paired.other_answers, "document")
        yield f"{paired.task}: the choices or right answers of {documents} differ from the baseline's."


def other_metrics(before: Record, after: Record, ignored: Collection[str] = ()) -> Iterator[str]:
    """Sentences: metrics that only one of the records has, or whose direction or aggregation differs."""
    then, now = ({(m.task, m.metric): m for m in record.metrics} for record in (before, after))
    for task, metric in dict.fromkeys([*then, *now]):
        if metric in ignored:
            continue
        old, new = then.get((task, metric)), now.get((task, metric))
        if old is None or new is None:
            has, lacks = ("run", "baseline") if old is None else ("baseline", "run")
            yield f"{task} {metric} is in the {has} but not in the {lacks}."
            continue
        for field, name in (("better", "direction (better)"), ("aggregation", "aggregation")):
            if getattr(old, field) != getattr(new, field):
                yield (
                    f"{task} {metric}: the {name} is {_shown(getattr(new, field))} in the run and "
                    f"{_shown(getattr(old, field))} in the baseline."
                )


def cost_warnings(before: Record, after: Record, settings: GateSettings) -> Iterator[str]:
    """Sentences: what got slower or larger. Seconds are compared only on the same machine."""
    if before.cost is None or after.cost is None:
        return
    seconds = sum(before.cost.seconds.values()), sum(after.cost.seconds.values())
    same_machine = before.provenance.machine == after.provenance.machine
    slower = seconds[1] > settings.slower_ratio * seconds[0] and seconds[1] - seconds[0] > MIN_SLOWER
    if same_machine and seconds[0] > 0 and slower:
        yield (
            f"It took {duration(seconds[1])}; the baseline took {duration(seconds[0])} "
            f"({fixed(seconds[1] / seconds[0])} times as long; the limit is {significant(settings.slower_ratio)})."
        )
    sizes = before.cost.weight_bytes, after.cost.weight_bytes
    if sizes[0] and sizes[1] and sizes[1] > settings.larger_ratio * sizes[0]:
        yield (
            f"Its weights take {count(sizes[1])} bytes; the baseline's take {count(sizes[0])} "
            f"({fixed(sizes[1] / sizes[0])} times as much; the limit is {significant(settings.larger_ratio)})."
        )


def _other_form(before: LayerAudit, after: LayerAudit) -> str | None:
    """How a layer's codes differ, in the same words for all layers with that difference."""
    for field, words in (("bits", "code width"), ("group_size", "group size"), ("packed_bytes", "code size in bytes")):
        then, now = getattr(before, field), getattr(after, field)
        if then != now:
            return f"The {words} changed from {_shown(then)} to {_shown(now)}"
    return None if after.finite else "Weights are NaN or infinite"


def _drift(before: LayerAudit, after: LayerAudit, settings: GateSettings) -> str | None:
    """The same for its weight scale and weight error."""
    for what, value, allowed in _drifting(settings):
        if not abs(value(after) - value(before)) <= allowed * abs(value(before)):  # NaN is a drift
            return f"{what} changed by more than {percent(allowed)}"
    return None


def _drifting(settings: GateSettings) -> list[tuple[str, Callable[[LayerAudit], float], float]]:
    """What may drift in a layer, its value, and the allowed relative drift."""
    return [
        ("Weight scale", lambda layer: layer.slope, settings.slope_drift),
        ("Relative weight error", lambda layer: layer.relative_error or 0.0, settings.error_drift),
    ]
