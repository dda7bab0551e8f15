"""Progress of long work: a bar on a terminal, and calls to listeners."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tqdm.std import TqdmWarning

with warnings.catch_warnings():
    warnings.simplefilter("ignore", TqdmWarning)  # in Jupyter without ipywidgets, its bars are text
    from tqdm.auto import tqdm

# unit, steps just done, steps done so far, total steps if known
Listener = Callable[[str, int, int, int | None], None]

_listeners: list[Listener] = []


@dataclass(frozen=True)
class Part:
    """A part of the work that is being done, such as the tasks being scored: its name, and its share of the whole."""

    name: str = ""
    begin: float = 0.0
    end: float = 1.0

    def share(self, own: float) -> float:
        """The share of the whole that is done, from the share of this part."""
        return self.begin + (self.end - self.begin) * own


_parts = [Part()]


@contextmanager
def working_on(part: Part) -> Iterator[None]:
    """Set what the bars inside count."""
    _parts.append(part)
    try:
        yield
    finally:
        _parts.pop()


def current_part() -> Part:
    """What the bars count now."""
    return _parts[-1]


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call the listener at every step of every bar."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def said_by_tenths(say: Callable[[str], None], noun: str) -> Listener:
    """A listener for logs: a line for each tenth of the work, such as 21 of 210 layers (10%)."""
    said = 0

    def listener(_: str, steps: int, done: int, total: int | None) -> None:
        nonlocal said
        if total and (tenth := 10 * done // total) > said:
            said = tenth
            say(f"{done} of {total} {noun} ({done / total:.0%})")

    return listener


class Bar(tqdm):
    """tqdm's bar on a terminal or in Jupyter, if `shown`; listeners are called in any case."""

    def __init__(self, *args: Any, unit: str, shown: bool = True, **options: Any) -> None:
        self.steps, self.counted = 0, unit
        on_terminal_only = None if "ipykernel" not in sys.modules else False
        super().__init__(*args, unit=unit, disable=on_terminal_only if shown else True, **options)

    def __iter__(self) -> Iterator[Any]:
        for item in self.iterable:
            yield item
            self.update()
        self.close()

    def reset(self, total: float | None = None) -> None:
        """Start again with a new total."""
        self.steps, self.total = 0, total
        super().reset(total)

    def update(self, n: float | None = 1) -> bool | None:
        """Count n steps."""
        self.steps += int(n or 0)
        for listener in _listeners:
            listener(self.counted, int(n or 0), self.steps, None if self.total is None else int(self.total))
        return super().update(n)
