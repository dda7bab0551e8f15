"""What reports call the kinds of attention."""

from collections.abc import Sequence

from qbench.attention.kinds import ATTENTIONS

# The first is the reference if nothing says otherwise. Results of these two have CSV columns of their own.
TWINS = ("softmax", "softpick")


def kind_title(attention: str) -> str:
    """A kind as headers and the beginnings of sentences have it."""
    return ATTENTIONS[attention].title if attention in ATTENTIONS else attention


def kind_name(attention: str) -> str:
    """The same within a sentence: softmax, ReLU softmax."""
    words = kind_title(attention).split(" ")
    return " ".join(word.lower() if word.istitle() else word for word in words)


def comparison(kinds: Sequence[str]) -> str:
    """Softpick against softmax, in the words of a title; kinds: the reference first."""
    reference, *others = kinds
    return f"{kind_name(others[0]) if len(others) == 1 else 'each attention'} against {kind_name(reference)}"
