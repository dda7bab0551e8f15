"""A cache of values of limited size. Values that no longer fit are read again, so large folders need little memory."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np

T = TypeVar("T")


class Kept:
    """The latest values, up to a total size."""

    def __init__(self, most: int) -> None:
        """most: the largest total size to keep. The latest value is always kept."""
        self.most = most
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._total = 0

    def get(self, key: Hashable, read: Callable[[], T], size: Callable[[T], int]) -> T:
        """The value of a key; it is read if it is not kept."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key][0]
        value = read()
        self._values[key] = value, (own := size(value))
        self._total += own
        while self._total > self.most and len(self._values) > 1:
            self._total -= self._values.popitem(last=False)[1][1]
        return value


_ARRAYS: "WeakValueDictionary[tuple[str, tuple[int, ...], int], np.ndarray]" = WeakValueDictionary()


def shared(array: np.ndarray) -> np.ndarray:
    """This array, or an equal one that is already in use: cells of a folder share documents, and so memory."""
    content = array.tobytes()
    known = _ARRAYS.setdefault((array.dtype.str, array.shape, hash(content)), array)
    return known if known is array or known.tobytes() == content else array
