"""Which choices are right. lm-eval writes `target` as text: an index, a list of them, or the text of a choice."""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Gold = list[int] | None  # None if it is not known: the log-probability of the right answer is then not compared


@dataclass(frozen=True)
class Choices:
    """The choices of a document with its target, and how they were judged."""

    texts: Sequence[str]
    loglikelihoods: Sequence[float]
    target: Any
    accuracy: Any  # None if the task has no acc

    def agrees(self, gold: Gold) -> bool:
        """Whether these choices being right would give the accuracy that lm-eval computed."""
        if gold is None or self.accuracy not in (0, 1):
            return True
        likeliest = max(range(len(self.loglikelihoods)), key=lambda i: self.loglikelihoods[i], default=-1)
        return (likeliest in gold) == bool(self.accuracy)


def right_choices(documents: Sequence[Choices]) -> list[Gold]:
    """The right choices of each document: the first way to read all targets that agrees with all accuracies."""
    ways: list[Callable[[Choices], Gold]] = [_as_indices, _as_texts, _of_two]
    for way in ways:
        found = [way(own) for own in documents]
        if any(found) and all(own.agrees(gold) for own, gold in zip(documents, found, strict=True)):
            return found
    return [None] * len(documents)


def _as_indices(document: Choices) -> Gold:
    try:
        value = ast.literal_eval(str(document.target))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    indices = value if isinstance(value, list) else [value]
    known = [own for own in indices if type(own) is int and 0 <= own < len(document.texts)]
    return known if known and len(known) == len(indices) else None


def _as_texts(document: Choices) -> Gold:
    return [document.texts.index(document.target)] if document.target in document.texts else None


def _of_two(document: Choices) -> Gold:
    """From whether the more likely of two choices was right. Winogrande's choices are contexts of the same target."""
    if len(document.loglikelihoods) != 2 or document.accuracy not in (0, 1):
        return None
    likelier = int(document.loglikelihoods[1] > document.loglikelihoods[0])
    return [likelier if document.accuracy else 1 - likelier]
