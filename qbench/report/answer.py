"""The headline for people and for programs: sentences above the summary, a table of its figures, and rows."""

from collections.abc import Sequence
from itertools import groupby

from qbench.numbers import counted, needed_decimals, p_value, score, signed, signed_interval
from qbench.report.attentions import kind_name, kind_title
from qbench.report.delta import ReportData, Tone
from qbench.report.headline import ALPHA, Headline
from qbench.report.layouts import tones_of
from qbench.report.results import NOTHING
from qbench.report.tables import Column, Field, Table, number_field
from qbench.report.tidy import DataRow

UNITS = {"nats": "nats per decision", "points": "points of accuracy"}
READ_HEADLINE = (
    "How much less an attention lost than {reference}, averaged over tasks and methods; a positive number means that "
    "it lost less. Nats per decision: the log-probability of the right choice (softmax over choices), of the target, "
    "or per word of a page."
)
READ_HEADLINE_INTERVAL = (
    "The 95% intervals are not adjusted. They cover the choice of documents and, if there are several, "
    f"calibration draws and training seeds. p is adjusted for all rows (Holm); p ≤ {ALPHA:g} counts as a difference."
)
READ_CLAIMS = (
    "The 95% intervals of the verdicts above are not adjusted. A verdict claims a difference if p ≤ "
    f"{ALPHA:g} after adjustment for {{comparisons}} (Holm)."
)
READ_SCALES = (
    "Points and logits: the same difference, in points and in logits of accuracy. Damage ratio: damage ÷ "
    "{reference}'s damage, in nats; it says nothing if {reference} lost almost nothing."
)
READ_PUBLISHED = (
    "Published numbers have no per-document results. The intervals therefore ignore that all models saw the same "
    "documents, which makes them too wide. They do not cover the choice of calibration text."
)


def answer(report: ReportData) -> list[str]:
    """One sentence per bit width. Empty if there is nothing to compare."""
    lines = report.headlines
    found = []
    for (families, _), own in groupby(lines, lambda line: (line.families, line.bits)):
        same = list(own)
        named = f"{' and '.join(families)}: " if len({line.families for line in lines}) > 1 else ""
        found.append(named + _sentence(same))
    return found or _nothing(report)


def caveats(report: ReportData) -> list[str]:
    """What to know about these sentences."""
    return _remarks(report.headlines) if report.headlines else []


def headline_tables(report: ReportData) -> list[Table]:
    """All figures behind the sentences."""
    lines = report.headlines
    if not lines:
        return []
    reference, unit = kind_name(lines[0].reference), lines[0].unit
    published = unit == "points"
    scales = ["Logits"] if published else ["Points", "Logits", "Damage ratio"]
    table = Table(
        name="headline",
        title="Headline",
        caption=f"How much less each attention lost than {reference}, in {UNITS[unit]}.",
        reading=[
            READ_HEADLINE.format(reference=reference),
            READ_HEADLINE_INTERVAL,
            f"{tones_of(list(dict.fromkeys([lines[0].reference, *(line.attention for line in lines)])))}.",
            READ_PUBLISHED if published else READ_SCALES.format(reference=reference),
        ],
        columns=[
            *(Column(title, "l") for title in ("Family", "Bits", "Attention")),
            Column(unit.capitalize()),
            *(Column(title, about_previous=True) for title in ("95% interval", "p", *scales)),
        ],
        heads=2,
    )
    for line in lines:
        table.rows.append(_fields(table, line, published))
    return [table]


def headline_rows(report: ReportData) -> list[DataRow]:
    """The same, unrounded."""
    return [
        {
            "family": " ".join(line.families),
            "attention": line.attention,
            "reference": line.reference,
            "bits": line.bits,
            "unit": line.unit,
            "value": line.value,
            "low": line.interval[0],
            "high": line.interval[1],
            "p": line.estimate.p if line.judged else None,
            "adjusted_p": line.adjusted_p if line.judged else None,
            "claims": line.claims,
            "points": line.value if line.unit == "points" else line.scales.points,
            "logits": line.scales.logits,
            "ratio": line.scales.ratio,
            "calibration_draws": line.draws,
            "trained_pairs": len(line.families),
        }
        for line in report.headlines
    ]


def _fields(table: Table, line: Headline, published: bool) -> list[Field]:
    low, high = line.interval
    decimals = _decimals(line)
    tone: Tone | None = ("better" if line.value > 0 else "worse") if line.claims else None
    notes = [*line.notes, *([] if line.judged else ["One calibration draw: not judged."])]
    scales = [line.scales.logits] if published else [line.scales.points, line.scales.logits]
    fields = [
        Field(" and ".join(line.families)),
        Field(f"{line.bits}", line.bits),
        Field(kind_title(line.attention)),
        Field(signed(line.value, decimals), line.value, tone, marks=table.mark(notes)),
        Field(signed_interval(low, high, decimals), high - low),
        Field(p_value(line.adjusted_p), line.adjusted_p) if line.judged else Field(NOTHING),
        *(number_field(value, signed) for value in scales),
    ]
    return fields if published else [*fields, number_field(line.scales.ratio, score)]


def _decimals(line: Headline) -> int:
    """Enough to show the ends of an interval that excludes zero, or else two digits of its width."""
    low, high = line.interval
    return max(map(needed_decimals, (line.value, low, high))) if low * high > 0 else needed_decimals((high - low) / 10)


def _sentence(lines: Sequence[Headline]) -> str:
    """The sentence about all attentions at one width."""
    reference, bits = kind_name(lines[0].reference), lines[0].bits
    unit = UNITS[lines[0].unit]
    claims = [line for line in lines if line.claims]
    others = [line for line in lines if not line.claims]
    parts = [
        f"{kind_name(line.attention)} lost {_size(line)} {_direction(line)} {unit} than {reference} {_interval(line)}"
        f"{_opposed(line)}"
        for line in claims
    ]
    if others and len(lines) == 1:
        (line,) = others
        parts.append(
            f"there is no evidence that {kind_name(line.attention)} lost more or less than {reference}{_why(line)}: "
            f"{_size(line)} {_direction(line)} {unit} {_interval(line)}"
        )
    elif others:
        names = ", ".join(kind_name(line.attention) for line in others)
        parts.append(f"there is no evidence either way for {names}")
    alone = len(lines) == 1 and bool(claims)
    first = "the answer depends on the scale: " if alone and claims[0].depends_on_scale else ""
    agreeing = _agreeing(claims[0]) if alone else ""
    return f"At {bits} bits {first}{'; '.join(parts)}{_of_what(lines[0])}.{agreeing}"


def _why(line: Headline) -> str:
    """Why nothing is claimed, if the interval does not show it."""
    if not line.judged:
        return ", because one calibration draw says nothing about others"
    return " after adjustment for all comparisons" if line.interval[0] * line.interval[1] > 0 else ""


def _size(line: Headline) -> str:
    return f"{abs(line.value):.{_decimals(line)}f}"


def _direction(line: Headline) -> str:
    return "fewer" if line.value >= 0 else "more"


def _interval(line: Headline) -> str:
    """The interval in the direction of the sentence."""
    low, high = line.interval if line.value >= 0 else (-line.interval[1], -line.interval[0])
    decimals = _decimals(line)
    return f"[{low:.{decimals}f}, {high:.{decimals}f}]"


def _of_what(line: Headline) -> str:
    pairs = len(line.families)
    return f" (mean of {pairs} trained pairs)" if pairs > 1 else " (one trained pair)"


def _opposed(line: Headline) -> str:
    """The scales on which a claim has the opposite sign: ', but 4.94 more points of accuracy'."""
    opposed = _on_other_scales(line, less=line.value < 0)
    return f", but {opposed}" if opposed else ""


def _agreeing(line: Headline) -> str:
    """The scales that agree with a claim, as a sentence."""
    agreeing, ratio = _on_other_scales(line, less=line.value >= 0), line.scales.ratio
    parts = [f"also lost {agreeing}"] if agreeing else []
    if ratio is not None:
        parts.append(f"lost {score(ratio)} times as many nats as {kind_name(line.reference)}")
    return f" {kind_title(line.attention)} {', and '.join(parts)}." if parts else ""


def _on_other_scales(line: Headline, *, less: bool) -> str:
    """What the attention lost less of, or else more of: '4.94 more points and 1.28 more logits of accuracy'."""
    scales = {"points": line.scales.points, "logits": line.scales.logits}
    amount = "fewer" if less else "more"
    found = [f"{score(abs(own))} {amount} {name}" for name, own in scales.items() if own and (own > 0) == less]
    return f"{' and '.join(found)} of accuracy" if found else ""


def _start_levels(lines: Sequence[Headline]) -> list[str]:
    """Why scales disagree, if they do: one sentence per family."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for line in lines:
        if line.claims and line.depends_on_scale and line.level:
            names = kind_name(line.reference), kind_name(line.attention)
            found.setdefault(line.families, {}).update(zip(names, map(score, line.level), strict=True))
    return [
        f"The unquantized {' and '.join(families)} models start at different mean accuracies "
        f"({', '.join(f'{level}% for {name}' for name, level in levels.items())}), so scales can disagree."
        for families, levels in found.items()
    ]


def _remarks(lines: Sequence[Headline]) -> list[str]:
    found = [*_start_levels(lines), *dict.fromkeys(note for line in lines for note in line.notes)]
    if judged := [line for line in lines if line.judged]:
        found.append(READ_CLAIMS.format(comparisons=counted(len(judged), "comparison")))
    if lines[0].unit == "points":
        found.append(READ_PUBLISHED)
    return found


def _nothing(report: ReportData) -> list[str]:
    """Why there is no headline, if a reader could expect one."""
    results = report.results
    lone = [family for family in results.families if len(results.kinds_of(family)) == 1]
    if lone:
        return [f"No headline: {', '.join(lone)} has only one model, so there is nothing to compare."]
    return ["No headline: the cells share no documents with log-likelihoods."] if report.damages else []
