"""What pydantic found wrong with a value, in plain words: what the value must be or have."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from qbench.errors import shown

# By pydantic's error type.
MUST = {
    "string_type": "be a string",
    "int_type": "be a whole number",
    "int_parsing": "be a whole number",
    "int_from_float": "be a whole number",
    "float_type": "be a number",
    "float_parsing": "be a number",
    "finite_number": "be a finite number",
    "bool_type": "be true or false",
    "bool_parsing": "be true or false",
    "tuple_type": "be a list",
    "dict_type": "be a mapping",
    "model_type": "be a mapping",
    "greater_than": "be more than {gt:g}",
    "greater_than_equal": "be {ge:g} or more",
    "less_than": "be less than {lt:g}",
    "less_than_equal": "be {le:g} or less",
    "multiple_of": "be a multiple of {multiple_of}",
    "too_short": "have at least one entry",
    "string_too_short": "be a string that is not empty",
    "invalid_key": "be a string",
}


def wanted(error: Mapping[str, Any]) -> str:
    """What a value must be or have: 'be a multiple of 8'."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "literal_error":
        return f"be one of {', '.join(choices(error))}"
    if kind == "must":
        return error["msg"]
    return MUST[kind].format(**context) if kind in MUST else f"be valid: {error['msg']}"


def wanted_by(errors: Iterable[Mapping[str, Any]]) -> str:
    """The same for the errors of one value, which a union gives for each type that the value could have had."""
    first, *others = dict.fromkeys(map(wanted, errors))
    return " or ".join([first, *(own.removeprefix("be ") for own in others)])


def problem(error: Mapping[str, Any]) -> str:
    """The value, and what it must be: 'is 7; it must be a multiple of 8.'"""
    if error["type"] == "extra_forbidden":
        return "is not a known field."
    if error["type"] == "missing":
        return "is missing."
    if error["type"] == "value_error":
        return f"is {shown(error['input'])}; {error['ctx']['error']}."
    return f"is {shown(error['input'])}; it must {wanted(error)}."


def choices(error: Mapping[str, Any]) -> list[str]:
    """The values that a Literal allows."""
    expected = re.findall(r"'[^']*'|-?\d+", error["ctx"]["expected"])
    return [own.strip("'") for own in expected]
