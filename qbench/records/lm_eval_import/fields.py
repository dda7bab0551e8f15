"""Fields of lm-eval's JSON: unknown ones are ignored, and an error names the file and the place of a wrong one."""

import json
from collections.abc import Mapping
from typing import Any

from qbench.errors import InputError, shown
from qbench.records.limits import MAX_NUMBER


class LmEvalError(InputError):
    """Why output of lm-eval cannot be read, in a sentence."""


def parse(text: str | bytes, where: str) -> dict[str, Any]:
    """A JSON object. NaN is allowed, since documents may have it; scores are checked where they are used."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise LmEvalError(f"{where} is nested too deeply; lm-eval writes no such file.") from None
    except ValueError as problem:  # not UTF-8, not JSON, or a number with thousands of digits
        raise LmEvalError(f"{where} is not JSON; it may be truncated ({' '.join(str(problem).split())}).") from None
    if not isinstance(value, dict):
        raise LmEvalError(f"{where} is {shown(value)}; lm-eval writes a JSON object.")
    return value


def required(fields: Mapping[str, Any], name: str, kind: type | tuple[type, ...], where: str) -> Any:
    """A field that must be there."""
    if name not in fields:
        raise LmEvalError(f"{where} lacks the field {name!r}, which lm-eval writes.")
    return _of_kind(fields[name], name, kind, where)


def mapping(fields: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """A field that is a mapping; empty if it is missing."""
    value = fields.get(name)
    return {} if value is None else _of_kind(value, name, dict, where)


def text_of(fields: Mapping[str, Any], name: str) -> str:
    """A field as text; empty if it is missing."""
    value = fields.get(name)
    return "" if value is None else str(value)


def finite(value: Any, name: str, where: str) -> float:
    """A finite number."""
    if is_number(value) and abs(value) <= MAX_NUMBER:
        return float(value)
    raise LmEvalError(f"{where}: {name} is {shown(value)}; it must be a finite number.")


def is_number(value: Any) -> bool:
    """Whether a value is a number, including NaN."""
    return isinstance(value, bool | int | float)


def _of_kind(value: Any, name: str, kind: type | tuple[type, ...], where: str) -> Any:
    if isinstance(value, kind) and not (isinstance(value, bool) and kind is int):
        return value
    kinds = kind if isinstance(kind, tuple) else (kind,)
    words = {dict: "a mapping", str: "a string", int: "a whole number", list: "a list"}
    raise LmEvalError(f"{where}: {name} is {shown(value)}; it must be {' or '.join(words[own] for own in kinds)}.")
