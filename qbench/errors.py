"""Errors that are sentences for the person who called, and what a typo was meant to be."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Something given by the caller is wrong: the command line shows the sentence and exits with 2."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """' Did you mean arc_easy?' where a known name is close, else nothing: to be put after a sentence."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {close[0]}?" if close else ""
