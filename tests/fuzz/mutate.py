"""Seeded damage to structured content and to its text: the same seed always makes the same file."""

import copy
import random
from collections.abc import Callable
from typing import Any

import yaml

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 10**30, -(10**30), 0.5, 1e308, -1e-320, float("nan"), float("inf")),
    *("", " ", "x", "softmax", "../..", "/", ".", "~", "/dev/null", "/dev/zero", "a/b", "a/b/c", "none-16", "1e999"),
    *(
        "\ud800",
        "\x00",
        "a\nb",
        "\n::error::x",
        "\x1b[31m",
        "é漢🙂",
        "{{1/0}}",
        "{% raw %}",
        "%s %n",
        "=1+1",
        "\\input{x}",
    ),
    *("y" * 300, "z/" * 3000, "*", "[", "&a", "!!bool x", "<<"),
    *([], [[]], {}, {"": None}, [None], ["x"] * 3, {"x": {"y": []}}, {1: 2}, {None: 1}, [1, "1", 1.0], {"a\nb": 1}),
)
SCRAPS = (
    *(
        "*a",
        "&a ",
        "!!bool x",
        "!!int ",
        "!!binary |\n  x",
        "? ",
        "- ",
        ": ",
        "\t",
        "---\n",
        "...\n",
        "{",
        "]",
        "'",
        '"',
    ),
    *(
        "\\ud800",
        "\x00",
        "\u2028",
        "%YAML 9.9\n",
        "!function os.system",
        "<<: *a\n",
        "# ",
        "| ",
        "> ",
        "0x",
        "1_000",
        "~",
    ),
)
Place = tuple[Any, Any]  # a container and a key or an index in it


def mutated(content: Any, rng: random.Random) -> Any:
    """A copy of the content with one to three changes to its structure."""
    changed = copy.deepcopy(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if places := _places(changed):
            rng.choice(CHANGES)(changed, rng.choice(places), rng)
    return changed


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The bytes with one to three of them flipped, removed, repeated or followed by scraps of YAML."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(changed) + 1)
        to = min(len(changed), at + rng.choice((1, 1, 8, 100)))
        how = rng.choice(("flip", "remove", "repeat", "insert", "insert", "cut"))
        if how == "flip" and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif how == "remove":
            del changed[at:to]
        elif how == "repeat":
            changed[at:at] = changed[at:to]
        elif how == "insert":
            changed[at:at] = rng.choice(SCRAPS).encode()
        elif how == "cut" and rng.random() < 0.2:
            del changed[at:]
    return bytes(changed)


def mutated_yaml(content: Any, seed: int) -> bytes:
    """A YAML file with the content after damage to its structure, its text, or both."""
    rng = random.Random(seed)
    how = rng.random()
    text = yaml.safe_dump(mutated(content, rng) if how < 0.8 else content, sort_keys=False).encode()
    return damaged(text, rng) if how > 0.6 else text


def _places(content: Any) -> list[Place]:
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [place for key, value in inner for place in ((content, key), *_places(value))]


def _replace(_: Any, place: Place, rng: random.Random) -> None:
    place[0][place[1]] = copy.deepcopy(rng.choice(ODD))


def _remove(_: Any, place: Place, rng: random.Random) -> None:
    del place[0][place[1]]


def _wrap(_: Any, place: Place, rng: random.Random) -> None:
    value = place[0][place[1]]
    place[0][place[1]] = rng.choice(([value], {"x": value}, [value, value], str(value)))


def _nest(_: Any, place: Place, rng: random.Random) -> None:
    value = place[0][place[1]]
    for _ in range(rng.choice((3, 60))):
        value = [value]
    place[0][place[1]] = value


def _swap(content: Any, place: Place, rng: random.Random) -> None:
    """Put a copy of another value here."""
    there = rng.choice(_places(content))
    place[0][place[1]] = copy.deepcopy(there[0][there[1]])


def _rename(_: Any, place: Place, rng: random.Random) -> None:
    container, key = place
    if isinstance(container, dict):
        names = [name for name in ODD if isinstance(name, str | int | None)]
        container[rng.choice(names)] = container.pop(key)
    else:
        container.append(copy.deepcopy(container[key]))


def _scale(_: Any, place: Place, rng: random.Random) -> None:
    value = place[0][place[1]]
    if isinstance(value, int | float):
        place[0][place[1]] = value * rng.choice((-1, 0, 0.5, 10**6, 10**12))
    elif isinstance(value, str):
        place[0][place[1]] = value[::-1] if rng.random() < 0.5 else value * rng.choice((2, 100))


CHANGES: tuple[Callable[[Any, Place, random.Random], None], ...] = (
    _replace,
    _replace,
    _replace,
    _remove,
    _wrap,
    _nest,
    _swap,
    _rename,
    _scale,
)
