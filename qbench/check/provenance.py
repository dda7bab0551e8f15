"""What else is different between two records of a cell: packages, options, commit, machine."""

from collections.abc import Iterator, Mapping
from typing import Any

from qbench.store import Record

# Names of runs, not reasons for numbers.
IGNORED = ("resolved_recipe.gate", "resolved_recipe.name", "machine.host")
SHOWN = 80


def differences(before: Record, after: Record) -> Iterator[str]:
    """Lines such as `packages.torch: 2.13.0 → 2.14.0`."""
    then, now = _facts(before), _facts(after)
    for name in dict.fromkeys([*then, *now]):
        if then.get(name) != now.get(name) and not name.startswith(IGNORED):
            yield f"{name}: {_shown(then.get(name))} → {_shown(now.get(name))}"


def _facts(record: Record) -> dict[str, Any]:
    provenance = record.provenance.model_dump(exclude={"started", "finished"})
    identity = {"what": record.identity.what, "code": record.identity.code[:12]}
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
