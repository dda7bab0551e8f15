"""Numbers, verdicts and findings stay what they were: tests/frozen/expected, compared with what is computed now.

After an intended change, list it in EXCEPTIONS; or, when the list is long, review it, add it to changes.txt with its
reason, and renew the expected numbers with `python -m tests.frozen.numbers --write`.
"""

import copy
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .folders import MAKERS
from .numbers import EXPECTED, compute

SHOWN = 20
RELATIVE, ABSOLUTE = 1e-9, 1e-12
RELATIVE_P = 1e-6  # six digits: a test may be computed in another way
# Intended changes: the difference as the test prints it, and the reason.
EXCEPTIONS: dict[str, str] = {}

Content = dict[str, Any]


def expected(name: str) -> Content:
    """What was frozen."""
    return json.loads((EXPECTED / f"{name}.json").read_text(encoding="utf-8"))


def differences(old: Any, new: Any, path: str) -> Iterator[str]:
    """Lines `path: old → new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from differences(old.get(key, "nothing"), new.get(key, "nothing"), f"{path}/{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from differences(before, after, f"{path}/{i}")
    elif not _equal(old, new, RELATIVE_P if "/p/" in path else RELATIVE):
        yield f"{path}: {json.dumps(old, ensure_ascii=False)} → {json.dumps(new, ensure_ascii=False)}"


def _equal(old: Any, new: Any, relative: float) -> bool:
    if all(type(own) in (int, float) for own in (old, new)):
        return math.isclose(old, new, rel_tol=relative, abs_tol=ABSOLUTE)
    return type(old) is type(new) and old == new


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_changed(name: str) -> None:
    listed = {line for line in EXCEPTIONS if line.startswith(f"{name}/")}
    found = list(differences(expected(name), compute(name), name))
    unlisted = [line for line in found if line not in listed]
    assert not unlisted, f"{len(unlisted)} differences:\n" + "\n".join(unlisted[:SHOWN])
    assert listed <= set(found), "these exceptions no longer differ"


def _swap_variants(content: Content) -> None:
    columns = content["tables"]["run"]["damage"]["columns"]
    content["tables"]["run"]["damage"]["columns"] = [
        own.replace("softmax", "x").replace("softpick", "softmax").replace("x_", "softpick_") for own in columns
    ]


def _move(content: Content, by: float, *path: str) -> None:
    *first, last = path
    for name in first:
        content = content[name]
    content[last][1] *= 1 + by


CELL = "mini-softmax-hqq-4-g64"
SABOTAGES: dict[str, Callable[[Content], object]] = {
    "another document": lambda own: own["documents"].update(run="0" * 16),
    "p": lambda own: _move(own, 1e-5, "check", "recipe", "p", f"{CELL} arc_easy gold_logprob"),
    "a damage": lambda own: _move(own, 1e-8, "power", "run", "arc_easy acc"),
    "a verdict": lambda own: own["check"]["recipe"]["tested"][f"{CELL} arc_easy acc"].__setitem__(1, "better"),
    "a finding less": lambda own: own["check"]["recipe"]["failures"].pop(),
    "a row less": lambda own: own["tables"]["run"]["damage"]["rows"].popitem(),
    "an exit code": lambda own: own["check"]["unchanged"].update(exit=1),
    "other variants": _swap_variants,
}


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_each_change_is_found(sabotage: str) -> None:
    old = expected("gate")
    new = copy.deepcopy(old)
    SABOTAGES[sabotage](new)
    assert 1 <= len(list(differences(old, new, "gate"))) < 20


def test_rounding_is_not_a_change() -> None:
    assert not list(differences({"a": [1.0, 0.0]}, {"a": [1.0 + 1e-12, 1e-14]}, ""))
    assert list(differences({"a": True}, {"a": 1}, ""))
