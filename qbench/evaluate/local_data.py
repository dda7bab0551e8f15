"""Local data files of tasks: one JSON object per line with the fields of the Hub dataset, checked line by line."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from qbench.errors import InputError, did_you_mean


class TaskError(InputError):
    """A task or its data cannot be used, explained in a sentence."""


def read_dataset(file: Path, task: str, needed: Iterable[str] = ()) -> datasets.Dataset:
    """The documents of a .jsonl file; `needed` are the fields that the task's templates use in every document."""
    rows: list[dict[str, Any]] = []
    first: dict[str, str] = {}
    start = 1
    for number, line in enumerate(_read_text(file, task).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        row = _parse(line, where)
        kinds = _kinds(row)
        if not rows:
            first, start = kinds, number
        _check_needed(row, needed, where, task)
        _check_alike(kinds, first, where, start)
        rows.append(row)
    if not rows:
        raise TaskError(f"{file}: the data file of {task} is empty; it must have one JSON object per line.")
    try:
        return datasets.Dataset.from_list(rows)
    except (pa.ArrowException, OverflowError) as error:
        raise TaskError(f"{file}: a field has values of different kinds on different lines: {error}.") from error


def _read_text(file: Path, task: str) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise TaskError(f"{file}: the data file of {task} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise TaskError(f"{file}: the data file of {task} is not UTF-8 text (byte {error.start}).") from None


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # web text has them, but no tokenizer and no table takes them
        half = error.object[error.start]
        raise TaskError(
            f"{where}: {half!r} is half of a character (a surrogate); replace it, for example by \\ufffd."
        ) from None
    except RecursionError:
        raise TaskError(f"{where}: the JSON is nested too deeply.") from None
    except ValueError as error:
        raise TaskError(f"{where}: not JSON ({error}); there must be one JSON object per line.") from None
    if not isinstance(row, dict):
        raise TaskError(f"{where}: this is a JSON {type(row).__name__}; there must be one JSON object per line.")
    return row


def _kinds(value: Any, name: str = "") -> dict[str, str]:
    """The kind of each field, nested ones by dotted names."""
    if isinstance(value, dict):
        inner = (_kinds(child, f"{name}.{key}" if name else key) for key, child in value.items())
        return {key: kind for kinds in inner for key, kind in kinds.items()}
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}
    return {name: kinds.get(type(value), "null")}


def _check_needed(row: dict[str, Any], needed: Iterable[str], where: str, task: str) -> None:
    for field in needed:
        if field not in row:
            raise TaskError(
                f"{where}: the field {field!r}, which {task} needs, is missing; the line has {', '.join(row)}."
                + did_you_mean(field, row)
            )
        if row[field] is None:  # a template would write 'None'
            raise TaskError(f"{where}: the field {field!r}, which {task} needs, is null.")


def _check_alike(kinds: dict[str, str], first: dict[str, str], where: str, start: int) -> None:
    """Every row of a table has the same columns: missing fields would silently become nulls."""
    for field, kind in first.items():
        if field not in kinds:
            raise TaskError(
                f"{where}: the field {field!r} is missing, but line {start} has it; all lines need the same fields."
            )
        if "null" not in (kind, kinds[field]) and kind != kinds[field]:
            raise TaskError(f"{where}: the field {field!r} is {kinds[field]}; on line {start} it is {kind}.")
    if extra := sorted(kinds.keys() - first.keys()):
        raise TaskError(f"{where}: the field {extra[0]!r} is not on line {start}; all lines need the same fields.")
