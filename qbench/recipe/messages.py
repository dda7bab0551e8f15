"""What pydantic found wrong with a recipe, as a sentence with the file, the line, the field and what is allowed."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from qbench.errors import did_you_mean
from qbench.recipe.yaml import Field, RecipeError, RecipeFile
from qbench.validation import choices, wanted, wanted_by


def as_sentence(read: RecipeFile, error: ValidationError, fields_at: Callable[[Field], Sequence[str]]) -> RecipeError:
    """The first error to show; fields_at: the names that are allowed at a field."""
    # A misspelled field is also missing under its right name; the misspelled one has a line to show.
    found = sorted(error.errors(), key=lambda e: e["type"] not in ("extra_forbidden", "invalid_key"))
    first = found[0]
    kind, field = first["type"], written_field(read.content, first["loc"], first["type"])
    if kind == "invalid_key" or first["loc"][-1] == "[key]":
        return read.error(field, f"the name is {shown(first['input'])}; it must {wanted(first)}.")
    if kind == "extra_forbidden":
        allowed = fields_at(field[:-1])
        return read.error(field, f"unknown field.{did_you_mean(field[-1], allowed)} Allowed: {', '.join(allowed)}.")
    if kind == "missing":
        *around, name = field
        return read.error(tuple(around), f"{'has' if around else 'the recipe has'} no `{name}`.")
    if kind == "value_error":
        return read.error(field, f"{first['ctx']['error']}.")
    # A union gives one error for each type that the value could have had.
    alike = [e for e in found if written_field(read.content, e["loc"], e["type"]) == field]
    hint = did_you_mean(first["input"], choices(first)) if kind == "literal_error" else ""
    hint += f" Allowed: {', '.join(fields_at(field))}." if kind == "model_type" else ""
    return read.error(field, f"is {shown(first['input'])}; it must {wanted_by(alike)}.{hint}")


def must(what: str) -> PydanticCustomError:
    """The error of a validator: what the value must be or have."""
    return PydanticCustomError("must", "{what}", {"what": what})


def written_field(content: Any, location: Iterable[int | str], kind: str) -> Field:
    """The part of pydantic's location that exists in the recipe, and the name of a field that is missing there."""
    field: Field = ()
    *_, last = location
    for part in location:
        if isinstance(content, list) and part in content and isinstance(part, str):
            part = content.index(part)  # a task in a list; the model has it by name
        if _inside(content, part):
            content = content[part]
        elif kind != "missing" or part is not last:
            continue  # pydantic's name for one type of a union, or a field that a string abbreviates
        field = (*field, part)
    return field


def _inside(content: Any, part: int | str) -> bool:
    if isinstance(content, list):
        return isinstance(part, int) and part < len(content)
    return isinstance(content, dict) and part in content


def shown(value: Any) -> str:
    """A value as YAML would have it, on one line and not too long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:79] + "…"
