"""Lists of names as people read them."""

from collections.abc import Sequence


def some(names: Sequence[str], most: int = 3) -> str:
    """The first of the names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
