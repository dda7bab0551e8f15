"""Seeded mutations of JSON, bytes and Parquet tables, and how a case ended."""

import json
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

SECONDS = 20  # for one case, on a busy machine
BAD: list[Any] = [
    *(None, True, False, 0, -1, 1, 3, 10**7, 2**31, 2**63, 10**30, 10**400, -(10**20), 0.5, 1e308, -1e308, 1e-320),
    *("", "64", "x" * 300, "a/../../b", "/etc/passwd", "a\nb::error::c", "\x1b[31m\x00", "=1+1", "nan", "中文 é"),
    *([], {}, [None], [[]], {"": None}, {"a": {"b": []}}, [1, "a", None], [1e308] * 3),
]


class Hang(BaseException):
    """A case took too long."""


@contextmanager
def time_limit(seconds: int = SECONDS) -> Iterator[None]:
    """Stop a case that hangs."""

    def stop(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside this one."""
    if isinstance(value, dict):
        return [path for key, own in value.items() for path in [(*at, key), *places(own, (*at, key))]]
    if isinstance(value, list):
        return [path for n, own in enumerate(value[:20]) for path in [(*at, n), *places(own, (*at, n))]]
    return []


def mutate_json(draw: random.Random, text: str) -> bytes:
    """A JSON text with one to three values replaced, removed, renamed or moved; or damaged as a text."""
    kind = draw.randrange(12)
    if kind == 0:
        return mutate_bytes(draw, text.encode())
    if kind == 1:  # deep nesting: anywhere, or as the whole
        depth = draw.choice([70, 190, 900, 100_000])
        deep = draw.choice(["[", '{"a":']) * depth + "1"
        deep += "".join({"[": "]", "{": "}"}[c] for c in reversed([c for c in deep if c in "[{"]))
        place = draw.choice([n for n, c in enumerate(text) if c == ":"] or [-1])
        return (
            deep if place < 0 or draw.random() < 0.3 else f'{text[: place + 1]}{deep},"zz":{text[place + 1 :]}'
        ).encode()
    if kind == 2:
        word = draw.choice(["NaN", "Infinity", "-Infinity", "1e999", "-0", '"\\ud800"', "0" * 5000 + "1", "1" * 5000])
        place = draw.choice([n for n, c in enumerate(text) if c == ":"] or [0])
        return f"{text[: place + 1]}{word},{text[place + 1 :]}".encode()
    value = json.loads(text)
    for _ in range(draw.randint(1, 3)):
        paths = places(value)
        if not paths:
            break
        path = draw.choice(paths)
        holder = value
        for step in path[:-1]:
            holder = holder[step]
        match draw.randrange(5):
            case 0:
                del holder[path[-1]]
            case 1 if isinstance(holder, dict):
                holder[draw.choice(["", "zz", path[-1] + "x"])] = holder.pop(path[-1])
            case 2:
                holder[path[-1]] = _at(value, draw.choice(paths))
            case _:
                holder[path[-1]] = draw.choice(BAD)
    try:
        return json.dumps(value).encode()
    except (ValueError, RecursionError):  # a value that was moved into itself
        return b"{}"


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    try:
        for step in path:
            value = value[step]
        return json.loads(json.dumps(value))
    except (KeyError, IndexError, TypeError, ValueError, RecursionError):
        return None


def mutate_bytes(draw: random.Random, content: bytes) -> bytes:
    """Bytes with some flipped, cut off, inserted or overwritten."""
    found = bytearray(content)
    place = draw.randrange(min(len(found), draw.choice([16, 2000, 10**9])) or 1)
    match draw.randrange(6):
        case 0:
            return bytes(found[:place])
        case 1:
            return draw.choice([b"", b"\0" * 100, b"\xff\xfe", bytes(found) * 2, draw.randbytes(200)])
        case 2:
            found[place:place] = draw.randbytes(draw.choice([1, 8, 100]))
        case 3:
            found[place : place + 8] = draw.choice([b"\xff" * 8, b"\0" * 8, (10**8).to_bytes(8, "little")])
        case _:
            for _ in range(draw.choice([1, 1, 3, 20])):
                if found:
                    found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
    return bytes(found)


def mutate_table(draw: random.Random, table: pa.Table) -> pa.Table:
    """A table with one column changed, removed, or of another type; or with other rows."""
    name = draw.choice(table.column_names)
    n = table.column_names.index(name)
    match draw.randrange(8):
        case 0:
            return table.drop_columns([name])
        case 1:
            return table.slice(0, draw.choice([0, 1, 2, 7]))
        case 2:
            return pa.concat_tables([table, table.slice(0, 5)])
        case 3:
            return table.take(sorted(range(len(table)), key=lambda _: draw.random()))
        case 4:
            kind = draw.choice([pa.string(), pa.int64(), pa.float32(), pa.null(), pa.list_(pa.float64()), pa.bool_()])
            return table.set_column(n, name, pa.nulls(len(table), kind))
        case 5:
            return table.rename_columns(
                [draw.choice(["zz", "acc", name]) if own == name else own for own in table.column_names]
            )
        case _:
            values = table[name].to_pylist()
            for row in draw.sample(range(len(values)), draw.choice([1, 3, len(values)])):
                values[row] = _other(draw, table.schema.field(name).type)
            return table.set_column(n, table.schema.field(name), pa.array(values, table.schema.field(name).type))


def _other(draw: random.Random, kind: pa.DataType) -> Any:
    """Another value of this type."""
    if pa.types.is_list(kind):
        return draw.choice([None, [], [_other(draw, kind.value_type)], [_other(draw, kind.value_type)] * 50])
    if pa.types.is_floating(kind):
        return draw.choice([None, float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 1e15, 0.0, -0.0, -5.0, 0.5])
    if pa.types.is_boolean(kind):
        return draw.choice([None, True, False])
    if pa.types.is_integer(kind):
        return draw.choice([None, 0, -1, 2**31 - 1, -(2**31), 7])
    return draw.choice([None, "", "x" * 1000, "a\n::error::b", "\x1b"])


def failures(cases: range, run: Callable[[random.Random], str]) -> list[str]:
    """The cases that did not end well: run gives a description if one did not, and nothing if it did."""
    found = []
    for seed in cases:
        try:
            with time_limit():
                problem = run(random.Random(seed))
        except Hang:
            problem = f"took more than {SECONDS} s"
        if problem:
            found.append(f"{seed}: {problem}")
    return found
