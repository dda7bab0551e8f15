"""Rules on a run and its baseline: what must not change, whatever the scores, and which changes a reader must know."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, Protocol

import numpy as np

from qbench.errors import some
from qbench.numbers import count, counted, duration, fixed, percent, significant
from qbench.records.audit import Audit, LayerAudit
from qbench.records.findings.finding import Finding
from qbench.records.paired import OtherDocuments, Pair, PairedDocuments
from qbench.records.samples import WEIGHT
from qbench.records.schema import CellRef, Record
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
# A layer's codes by fields of its audit, in words.
FORM = {"bits": "code width", "group_size": "group size", "packed_bytes": "code size in bytes"}

Problem = tuple[str, str]  # a rule, and a sentence
Sides = tuple[str, str]  # what two records are, for messages: the later one, and what it is compared with
RUN_AND_BASELINE: Sides = ("the run", "the baseline")
# Of a metric: the field, its name and the rule.
COMPARED = (
    ("better", "direction (better)", "other_direction"),
    ("aggregation", "aggregation", "other_aggregation_than_baseline"),
)


class Limits(Protocol):
    """How far numbers other than scores may be from the baseline's; relative."""

    @property
    def slope_drift(self) -> float:
        """Of a layer's weight scale."""

    @property
    def error_drift(self) -> float:
        """Of a layer's relative weight error."""

    @property
    def slower_ratio(self) -> float:
        """Of seconds, on the same machine."""

    @property
    def larger_ratio(self) -> float:
        """Of the bytes of weights."""


def of_records(before: Record, after: Record, ignored: Collection[str] = ()) -> list[Finding]:
    """Settings and metrics that differ, so two records of a cell do not measure the same thing.

    ignored: metrics.
    """
    problems = [*other_settings(before, after), *other_metrics(before, after, ignored=ignored)]
    return [Finding(rule, (after.cell,), message) for rule, message in problems]


def of_documents(cell: CellRef, paired: PairedDocuments, ignored: Collection[str] = ()) -> list[Finding]:
    """Values that are no longer numbers, columns that only one side has, or different answers."""
    problems = [*_other_samples(paired, ignored), *_new_nans(paired)]
    return [Finding(rule, (cell,), message) for rule, message in problems]


def of_other_documents(cell: CellRef, other: OtherDocuments) -> Finding:
    """Documents that differ, so that their scores cannot be compared."""
    if other.between_draws:
        message = (
            f"{other.task}: the calibration draws did not see the same documents: {other.before} in one, {other.after} "
            f"in another, {other.common} in both. Its scores were not compared."
        )
        return Finding("other_draws_documents", (cell,), message)
    message = (
        f"{other.task}: the documents differ from the baseline's: {other.after} in the run, {other.before} in the "
        f"baseline, {other.common} in both. Its scores were not compared."
    )
    return Finding("other_documents", (cell,), message)


def of_audits(pairs: Sequence[Pair], limits: Limits, alpha: float) -> list[Finding]:
    """How the audits of a cell differ from the baseline's: draw by draw, or on average if the draws differ.

    alpha: of all layers of the cell.
    """
    other_draws = len(pairs) > 1 and CALIBRATION in other_parts(pairs)
    found = [
        Finding(rule, (after.record.cell,), change, "audit")
        for before, after in pairs
        for rule, change in audit_changes(before.record.audit, after.record.audit, limits, other_draws)
    ]
    audits = [(before.record.audit, after.record.audit) for before, after in pairs]
    both = [(before, after) for before, after in audits if before and after]
    if other_draws and len(both) > 1:
        level = alpha / (2 * max(len(both[0][0].layers), 1))  # two numbers of each layer
        cell = pairs[0][1].record.cell.of_all_draws
        found += [Finding(rule, (cell,), change, "audit") for rule, change in draws_changes(both, limits, level)]
    return found


def of_costs(before: Record, after: Record, limits: Limits) -> list[Finding]:
    """What got slower or larger."""
    return [Finding(rule, (after.cell,), message, "cost") for rule, message in _costs(before, after, limits)]


def other_parts(pairs: Sequence[Pair]) -> list[str]:
    """Which of PARTS differ from the baseline's, in any draw: scores can still be compared, but a reader must know."""
    both = [(before.record.identity.what, after.record.identity.what) for before, after in pairs]
    return [part for part in PARTS if any(getattr(then, part) != getattr(now, part) for then, now in both)]


def of_parts(changed: Iterable[tuple[CellRef, Sequence[str]]]) -> Iterator[Finding]:
    """One finding per changed part, from the cells and what changed in each."""
    changed = list(changed)
    for part, words in PARTS.items():
        if cells := [cell for cell, parts in changed if part in parts]:
            where = some([cell.name for cell in cells]) if len(cells) < len(changed) else "all cells"
            rule = "other_checkpoint" if part == CHECKPOINT else "other_part"
            yield Finding(rule, tuple(cells), f"{words} (in {where}).", "change")


def differences(before: Record, after: Record) -> Iterator[str]:
    """Lines such as `packages.torch: 2.13.0 → 2.14.0`."""
    then, now = _facts(before), _facts(after)
    # A cell may have failed before its threads were counted.
    ignored = (*IGNORED, "machine.threads") if after.state == "failed" else IGNORED
    for name in dict.fromkeys([*then, *now]):
        if then.get(name) != now.get(name) and not name.startswith(ignored):
            yield f"{name}: {_shown(then.get(name))} → {_shown(now.get(name))}"


def other_versions(before: Record, after: Record) -> str:
    """The code and packages that differ from the baseline's, in one line; empty if none do."""
    then, now = before.identity, after.identity
    names = sorted(then.packages.keys() | now.packages.keys())
    moved = [name for name in names if then.packages.get(name) != now.packages.get(name)]
    found = [f"{name} {_shown(then.packages.get(name))} → {_shown(now.packages.get(name))}" for name in moved]
    if then.code != now.code:
        found.insert(0, "qbench's code")
    return ", ".join(found)


def other_settings(before: Record, after: Record, sides: Sides = RUN_AND_BASELINE) -> Iterator[Problem]:
    """Settings that differ."""
    then, now = before.identity.what, after.identity.what
    here, there = sides
    for field in SETTINGS:
        old, new = getattr(then, field), getattr(now, field)
        if old != new:
            yield "other_setting", f"{field} is {_shown(new)} in {here} and {_shown(old)} in {there}."
    for task in [own for own in then.tasks if own in now.tasks]:
        (content, shots), (new_content, new_shots) = then.tasks[task], now.tasks[task]
        if shots != new_shots:
            shown = f"{_shown(new_shots)} few-shot examples in {here} and {_shown(shots)} in {there}"
            yield "few_shot", f"{task} has {shown}."
        elif content != new_content:
            yield "other_task", f"{task} is not the task of {there}: its file or its documents changed."


def audit_changes(
    before: Audit | None, after: Audit | None, limits: Limits, of_other_draws: bool = False
) -> list[Problem]:
    """Sentences: which layers are quantized differently from the baseline.

    of_other_draws: the calibration draws differ, and weight scales and errors with them; draws_changes compares those.
    """
    if before is None or after is None:
        what = "new" if before is None else "missing"
        return [] if before is after else [("audit_new_or_missing", f"The audit is {what}.")]
    changes = [
        ("audit_form", f"{name} is {_shown(then)} in the baseline and {_shown(now)} in the run.")
        for name in ("method", "bits", "activation_bits", "linear_weights", "parts")
        if (then := getattr(before, name)) != (now := getattr(after, name))
    ]
    old = {layer.name: layer for layer in before.layers}
    new = {layer.name: layer for layer in after.layers}
    lost, gained = [name for name in old if name not in new], [name for name in new if name not in old]
    if lost:
        message = f"{len(new)} layers are quantized instead of {len(old)}; missing: {some(lost)}."
        changes.append(("audit_lost_layers", message))
    if gained:
        message = f"{counted(len(gained), 'more layer')} quantized: {some(gained)}."
        changes.append(("audit_more_layers", message))
    both = [name for name in old if name in new]
    drifts = {name: _other_form(old[name], new[name]) for name in both}
    if not of_other_draws:
        drifts = {name: drifts[name] or _drift(old[name], new[name], limits) for name in both}
    return changes + _by_layers(drifts)


def draws_changes(pairs: Sequence[tuple[Audit, Audit]], limits: Limits, level: float) -> list[Problem]:
    """Sentences: layers whose weight scale or error, averaged over different calibration draws, differs from the
    baseline's by more than allowed and beyond chance. level: of one layer's p."""
    drifts: dict[str, Problem | None] = {}
    layers = [[{layer.name: layer for layer in audit.layers} for audit in side] for side in zip(*pairs, strict=True)]
    for name in layers[0][0]:
        before, after = ([own[name] for own in side if name in own] for side in layers)
        if len(before) < 2 or len(after) < 2:  # a missing layer is reported elsewhere
            continue
        for what, value, allowed in _drifting(limits):
            then, now = [value(layer) for layer in before], [value(layer) for layer in after]
            moved = Estimate(fmean(now) - fmean(then), (of_two_samples(then, now),))
            if abs(moved.value) > allowed * abs(fmean(then)) and moved.p <= level:
                message = f"{what} changed by more than {percent(allowed)} on average over draws"
                drifts.setdefault(name, ("audit_drift_of_draws", message))
    return _by_layers(drifts)


def _by_layers(drifts: Mapping[str, Problem | None]) -> list[Problem]:
    """Each difference once, with its layers."""
    found = dict.fromkeys(own for own in drifts.values() if own)
    return [
        (rule, f"{what}: {some([name for name, own in drifts.items() if own == (rule, what)])}.")
        for rule, what in found
    ]


def _new_nans(paired: PairedDocuments) -> Iterator[Problem]:
    for column, (before, after) in paired.values.items():
        new = np.flatnonzero(np.isfinite(before) & ~np.isfinite(after))
        if len(new):
            message = (
                f"{paired.task} {column} became NaN or infinite for {counted(len(new), 'document')} "
                f"(first: document {paired.ids[new[0]]})."
            )
            yield "new_nans", message
        if column.endswith(WEIGHT) and not np.array_equal(before, after, equal_nan=True):
            message = f"{paired.task} {column}: the divisors of log-likelihoods differ from the baseline's."
            yield "other_divisors", message


def _other_samples(paired: PairedDocuments, ignored: Collection[str]) -> Iterator[Problem]:
    """Without a column, a hypothesis would silently disappear."""
    lost, gained = ([name for name in names if name not in ignored] for names in (paired.lost, paired.gained))
    if lost:
        yield "lost_columns", f"Its samples lack the columns {', '.join(lost)}, which the baseline's have."
    if gained:
        yield "new_columns", f"Its samples have the columns {', '.join(gained)}, which the baseline's lack."
    if paired.other_answers:
        documents = counted(paired.other_answers, "document")
        yield "other_answers", f"{paired.task}: the choices or right answers of {documents} differ from the baseline's."


def other_metrics(
    before: Record, after: Record, sides: Sides = RUN_AND_BASELINE, ignored: Collection[str] = ()
) -> Iterator[Problem]:
    """Tasks and metrics that only one of the records has, and metrics whose direction or aggregation differs."""
    then, now = ({(m.task, m.metric): m for m in record.metrics} for record in (before, after))
    tasks, new_tasks = ({task for task, _ in own} for own in (then, now))
    here, there = sides
    for task in sorted(tasks ^ new_tasks):
        rule, has, lacks = ("lost_task", there, here) if task in tasks else ("new_task", here, there)
        yield rule, f"{task} is in {has} but not in {lacks}."
    for task, metric in dict.fromkeys([*then, *now]):
        if metric in ignored or task not in tasks & new_tasks:
            continue
        old, new = then.get((task, metric)), now.get((task, metric))
        if old is None or new is None:
            rule, has, lacks = ("lost_metric", there, here) if old else ("new_metric", here, there)
            yield rule, f"{task} {metric} is in {has} but not in {lacks}."
            continue
        for field, name, rule in COMPARED:
            if getattr(old, field) != getattr(new, field):
                shown = f"{_shown(getattr(new, field))} in {here} and {_shown(getattr(old, field))} in {there}"
                yield rule, f"{task} {metric}: the {name} is {shown}."


def _costs(before: Record, after: Record, limits: Limits) -> Iterator[Problem]:
    """Seconds are compared only on the same machine."""
    if before.cost is None or after.cost is None:
        return
    seconds = sum(before.cost.seconds.values()), sum(after.cost.seconds.values())
    same_machine = before.provenance.machine == after.provenance.machine
    slower = seconds[1] > limits.slower_ratio * seconds[0] and seconds[1] - seconds[0] > MIN_SLOWER
    if same_machine and seconds[0] > 0 and slower:
        message = (
            f"It took {duration(seconds[1])}; the baseline took {duration(seconds[0])} "
            f"({fixed(seconds[1] / seconds[0])} times as long; the limit is {significant(limits.slower_ratio)})."
        )
        yield "slower", message
    sizes = before.cost.weight_bytes, after.cost.weight_bytes
    if sizes[0] and sizes[1] and sizes[1] > limits.larger_ratio * sizes[0]:
        message = (
            f"Its weights take {count(sizes[1])} bytes; the baseline's take {count(sizes[0])} "
            f"({fixed(sizes[1] / sizes[0])} times as much; the limit is {significant(limits.larger_ratio)})."
        )
        yield "larger", message


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


def _other_form(before: LayerAudit, after: LayerAudit) -> Problem | None:
    """How a layer's codes differ, in the same words for all layers with that difference."""
    for field, words in FORM.items():
        then, now = getattr(before, field), getattr(after, field)
        if then != now:
            return "audit_layer_form", f"The {words} changed from {_shown(then)} to {_shown(now)}"
    return None if after.finite else ("audit_not_finite", "Weights are NaN or infinite")


def _drift(before: LayerAudit, after: LayerAudit, limits: Limits) -> Problem | None:
    """The same for its weight scale and weight error."""
    for what, value, allowed in _drifting(limits):
        if not abs(value(after) - value(before)) <= allowed * abs(value(before)):  # NaN is a drift
            return "audit_drift", f"{what} changed by more than {percent(allowed)}"
    return None


def _drifting(limits: Limits) -> list[tuple[str, Callable[[LayerAudit], float], float]]:
    """What may drift in a layer, its value, and the allowed relative drift."""
    return [
        ("Weight scale", lambda layer: layer.slope, limits.slope_drift),
        ("Relative weight error", lambda layer: layer.relative_error or 0.0, limits.error_drift),
    ]
