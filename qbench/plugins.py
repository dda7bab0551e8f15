"""What other packages declare for qbench through entry points. Imports no torch."""

from functools import cache
from importlib import metadata
from typing import TypeVar

from qbench.errors import InputError, one_line

T = TypeVar("T")


@cache
def declared(group: str, kind: type[T], error: type[InputError]) -> list[tuple[metadata.EntryPoint, T]]:
    """The entry points of a group with the objects that they name, which must be of that kind; sorted by name."""
    points = sorted(metadata.entry_points(group=group), key=lambda point: point.name)
    return [(point, _load(point, kind, error)) for point in points]


def _load(point: metadata.EntryPoint, kind: type[T], error: type[InputError]) -> T:
    what = f"The {kind.__name__.lower()} {point.name} ({point.value})"
    try:
        found = point.load()
    except Exception as cause:  # whatever another package's import raises
        raise error(
            f"{what} cannot be imported: {one_line(cause)}. Fix or uninstall the package that declares it."
        ) from cause
    if not isinstance(found, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise error(f"{what} is a {type(found).__name__}; it must be {article} {kind.__name__}.")
    return found
