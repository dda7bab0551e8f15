"""Variants: the models of a family that are compared with each other, and what their names may be. Imports no torch.

A variant named as an attention kind must be trained with it. Any other name says nothing about the attention.
"""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from qbench.attention.kinds import attentions

SOFTMAX = "softmax"  # the default reference
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")  # part of file names, of CSV and of patterns for --only
NAME_RULE = "letters, digits and . _ + - (64 at most, the first a letter or digit)"
SIMILAR = 0.81  # softmx and softmax are more alike than this; rated and gated, softmax-base and softmax are not


def required_attention(variant: str) -> str | None:
    """The attention kind that a variant must be trained with; None if its name is not a kind's."""
    return variant if variant in attentions() else None


def misspelled_kind(variant: str) -> str | None:
    """The attention kind that a name is close to, without being equal; None if it is none's, such as base.

    A kind with another word after it, such as softpick-v2, is a name.
    """
    kinds = {_letters(kind): kind for kind in attentions()}
    near = get_close_matches(_letters(variant), kinds, n=1, cutoff=SIMILAR)
    if not near or variant in attentions():
        return None
    kind = kinds[near[0]]
    has_own_word = _letters(variant) != near[0] and re.match(rf"{re.escape(kind)}[\W_]", variant)
    return None if has_own_word else kind


def default_reference(families: Iterable[Mapping[str, Any]]) -> str:
    """Softmax; if no family has it, the first variant of the first family with several."""
    families = list(families)
    several = [variants for variants in families if len(variants) > 1]
    return next(iter(several[0])) if several and not any(SOFTMAX in variants for variants in families) else SOFTMAX


def _letters(name: str) -> str:
    """The name without what people write differently: case, spaces, hyphens and underscores."""
    return re.sub(r"[\W_]", "", name).casefold()
