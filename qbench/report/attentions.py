"""What reports call the kinds of attention."""

from collections.abc import Iterable, Sequence

from qbench.attention.kinds import ATTENTIONS
from qbench.records.schema import Record

# The first is the default reference. Results of these two have their own CSV columns.
TWINS = ("softmax", "softpick")
# Titles of kinds that other packages declare. Reports do not import those packages; the titles are from the records.
_TITLES: dict[str, str] = {}


def learn_titles(records: Iterable[Record]) -> None:
    """Remember the titles that records give to kinds that are not in our table."""
    _TITLES.update(
        {record.identity.what.attention: record.attention_title for record in records if record.attention_title}
    )


def kind_title(attention: str) -> str:
    """A kind as written in headers and at the start of a sentence; its name if no record gives a title."""
    return ATTENTIONS[attention].title if attention in ATTENTIONS else _TITLES.get(attention, attention)


def kind_name(attention: str) -> str:
    """The same within a sentence: softmax, ReLU softmax."""
    title = kind_title(attention)
    if title == attention:  # a variant's name, or a kind without a title: as written
        return title
    words = title.split(" ")
    return " ".join(word.lower() if word.istitle() else word for word in words)


def comparison(kinds: Sequence[str]) -> str:
    """Softpick against softmax, in the words of a title; kinds: the reference first."""
    reference, *others = kinds
    return f"{kind_name(others[0]) if len(others) == 1 else 'each attention'} against {kind_name(reference)}"
