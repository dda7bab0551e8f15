"""How plots look: sizes, style, and one colour, marker and dashes for each kind of attention."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from qbench.attention.kinds import ATTENTIONS
from qbench.errors import InputError
from qbench.report.attentions import TWINS

COLUMN, PAGE = 3.03, 6.3  # inches: the width of a column of a paper (ACL's), and of its text
MIN_INCHES, MAX_INCHES = 2.0, 40.0  # of a figure
INK, FAINT = "#1b1f24", "#8a929c"
STYLE = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "legend.fontsize": 8,
    "figure.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.edgecolor": FAINT,
    "grid.color": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "qbench",
    "pdf.fonttype": 42,
    "text.parse_math": False,  # a family may be called $x
}


def figure_width(width: float | str) -> float:
    """The width of a figure in inches: a number, "column" or "page"."""
    named = {"column": COLUMN, "page": PAGE}
    try:
        inches = named[width] if isinstance(width, str) and width in named else float(width)
    except ValueError:
        inches = 0.0
    if not MIN_INCHES <= inches <= MAX_INCHES:
        allowed = f"column, page, or {MIN_INCHES:g} to {MAX_INCHES:g} inches"
        raise InputError(f"{width!r} is not a figure width; use {allowed}.")
    return inches


@dataclass(frozen=True)
class Look:
    """The style of a kind of attention."""

    colour: str
    marker: str
    hollow: bool  # filled markers look alike in print
    dashes: tuple[int, ...]  # of its unquantized level

    @property
    def line(self) -> dict[str, Any]:
        """As matplotlib's plot takes it."""
        face = "none" if self.hollow else self.colour
        return {"color": self.colour, "marker": self.marker, "markerfacecolor": face, "markersize": 4}


# Any two colours, and any colour and FAINT, differ by at least 23 (CIE 1976) with protanopia, deuteranopia and
# tritanopia (Machado 2009), and by 36 without; their contrast with white and with the dark page is at least 2.2.
LOOKS = (
    Look("#1f4e9c", "o", False, (6, 3)),  # softmax; page.css has these two as well
    Look("#e08214", "s", True, (2, 2)),  # softpick
    Look("#39c571", "^", False, (6, 2, 1, 2)),
    Look("#7f00ff", "D", True, (1, 2)),
    Look("#b70000", "v", False, (4, 1)),
    Look("#cb88dc", "P", True, (8, 2, 2, 2)),
    Look("#db19e5", "X", False, (3, 4)),
    Look("#774069", "<", True, (1, 4)),
    Look("#a93143", ">", False, (6, 2, 1, 2, 1, 2)),
)
Looks = Mapping[str, Look]  # by kind of attention


def looks(kinds: Sequence[str]) -> dict[str, Look]:
    """The look of each kind: a known kind has the same look in all plots, others get what is left in this one."""
    fixed = dict(zip(dict.fromkeys((*TWINS, *ATTENTIONS)), LOOKS, strict=False))
    used = [fixed[attention] for attention in kinds if attention in fixed]
    left = cycle([look for look in LOOKS if look not in used] or LOOKS)
    return {attention: fixed.get(attention) or next(left) for attention in kinds}
