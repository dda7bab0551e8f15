"""What else is different between two records of a cell: its identity, packages, options, commit, machine."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from qbench.errors import some
from qbench.records.schema import Record

# Names of runs, not reasons for numbers.
IGNORED = ("resolved_recipe.gate", "resolved_recipe.name", "machine.host")
SHOWN = 80
# Of an identity: what must be the baseline's, or scores cannot be compared; and what is worth knowing before them.
SETTINGS = ("dtype", "device", "seed", "max_length")
CHECKPOINT = "checkpoint"
PARTS = {
    CHECKPOINT: "Another checkpoint than the baseline's, so that scores alone are compared",
    "tokenizer": "Another tokenizer than the baseline's",
    "calibration": "Another calibration than the baseline's",
    "options": "Other options of the quantizer than the baseline's",
    "execution": "Another execution (dense or packed) than the baseline's",
    "batch_tokens": "Another token budget per batch than the baseline's",
}


def differences(before: Record, after: Record) -> Iterator[str]:
    """Lines such as `packages.torch: 2.13.0 → 2.14.0`."""
    then, now = _facts(before), _facts(after)
    for name in dict.fromkeys([*then, *now]):
        if then.get(name) != now.get(name) and not name.startswith(IGNORED):
            yield f"{name}: {_shown(then.get(name))} → {_shown(now.get(name))}"


def other_settings(before: Record, after: Record) -> Iterator[str]:
    """Sentences: settings without which two runs of a cell do not measure the same thing."""
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
            yield f"{task} is not the task that the baseline was scored on: its file or its documents changed."


def other_parts(before: Record, after: Record) -> list[str]:
    """Which of PARTS are not the baseline's: scores can be compared all the same, and a reader must know."""
    then, now = before.identity.what, after.identity.what
    return [part for part in PARTS if getattr(then, part) != getattr(now, part)]


def in_words(changed: Iterable[tuple[str, Sequence[str]]]) -> Iterator[str]:
    """Sentences, from cells' names with the parts of each that changed: one for each part."""
    changed = list(changed)
    for part, words in PARTS.items():
        if cells := [name for name, parts in changed if part in parts]:
            yield f"{words}: {some(cells)}." if len(cells) < len(changed) else f"{words}: all cells."


def other_versions(before: Record, after: Record) -> str:
    """The code and packages that are not the baseline's, in one line; empty if all are."""
    then, now = before.identity, after.identity
    names = sorted(then.packages.keys() | now.packages.keys())
    moved = [name for name in names if then.packages.get(name) != now.packages.get(name)]
    found = [f"{name} {_shown(then.packages.get(name))} → {_shown(now.packages.get(name))}" for name in moved]
    return ", ".join(["other code of qbench"] * (then.code != now.code) + found)


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
    text = "none" if value is None else str(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
