"""Rules on published scores: what looks copied, unquantized or impossible. qbench.records.findings judges records.

One coincidence proves nothing: they report only what would happen by chance less than once in 10,000 times.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from qbench.numbers import magnitude, score, signed
from qbench.records.findings.arithmetic import ClaimedScore, impossible_scores
from qbench.records.findings.finding import Finding
from qbench.records.metrics import TASKS, is_perplexity, is_share
from qbench.report.attentions import kind_name
from qbench.report.metrics import Measure, in_tables
from qbench.report.published import ROUNDING
from qbench.report.results import CellResult, Gap, Score

if TYPE_CHECKING:
    from qbench.report.delta import ReportData

MAX_CHANCE = 1e-4
UNKNOWN_DOCUMENTS = 100  # of a published task that we do not know; a low guess, since few documents agree easily


@dataclass(frozen=True)
class Spread:
    """The least distance of a really quantized cell from the unquantized model, and from another cell of its width."""

    flips: float  # share of answers that change from right to wrong or back
    log_perplexity: float  # standard deviation


# By the minimum width of a cell in bits. Each is at the low end of what results/mini (flips, log perplexity) and
# results/paper (log perplexity) show, and centred on 0 although low bits do harm: this overstates chance.
#  8 bits: flips of 0 to 1.3% (mean 0.4%), log perplexity 0.0004 and more
#  4 bits: flips of 0.3% to 11% (mean 4.7%), 0.004 to 0.3
#  3 bits: flips of 4% to 24%, 0.07 to 1.0
#  2 bits: flips of 26% to 56%, 0.86 to 13
SPREADS = {8: Spread(0.0025, 0.0005), 4: Spread(0.01, 0.01), 3: Spread(0.05, 0.1), 1: Spread(0.2, 0.5)}
OTHER_MODEL = SPREADS[3]  # models of two attentions differ more than this; measured on softmax and softpick
LOSSLESS_SPREADS = 3  # within 3 standard deviations of an 8-bit cell of the unquantized model: nearly lossless


def published_findings(report: "ReportData") -> list[Finding]:
    """All that cannot be right, rule by rule."""
    rules: list[Callable[[ReportData], Iterator[Finding]]] = [
        _same_scores,
        _low_bits_without_damage,
        _impossible_scores,
        _wrong_delta,
    ]
    return [finding for rule in rules for finding in rule(report)]


def _same_scores(report: "ReportData") -> Iterator[Finding]:
    """Two published cells of one family with the same scores, more of them than chance explains."""
    for a, b in combinations(_published(report), 2):
        if a.cell.family != b.cell.family:
            continue
        pairs = _pairs(report, a, b)
        if not all(abs(x.value - y.value) <= ROUNDING for _, x, y in pairs):
            continue
        same_model = a.cell.attention == b.cell.attention
        spread = _spread(min(a.cell.bits, b.cell.bits)) if same_model else OTHER_MODEL
        chance = _joint((m, _chance_within(0.0, m, x, spread)) for m, x, _ in pairs)
        if chance < MAX_CHANCE:
            what = f"the same scores in all {len(pairs)} metrics, so both are scores of the same model"
            both = f"{a.cell.name} and {b.cell.name}"
            yield Finding("same_scores", (a.cell, b.cell), f"{what} ({_by_chance(chance)}).", where=both)


def _low_bits_without_damage(report: "ReportData") -> Iterator[Finding]:
    """A published low-bit cell that scores like a nearly lossless one in every task."""
    for result in _published(report):
        pairs = _pairs(report, result, report.results.unquantized(result))
        limits = {m: LOSSLESS_SPREADS * _deviation(m, y, SPREADS[8]) for m, _, y in pairs}
        lossless = all(abs(x.value - y.value) <= limits[m] + ROUNDING for m, x, y in pairs)
        if result.cell.bits >= 8 or not lossless:
            continue
        spread = _spread(result.cell.bits)
        chance = _joint((m, _chance_within(limits[m], m, y, spread)) for m, _, y in pairs)
        if chance < MAX_CHANCE:
            shown = ", ".join(f"{m.task} {m.metric} {score(x.value)} ({score(y.value)})" for m, x, y in pairs)
            what = f"these are scores of an unquantized or nearly lossless model, not of a {result.cell.bits}-bit one"
            message = f"{what} ({_by_chance(chance)}). Scores (unquantized in brackets): {shown}."
            yield Finding("no_damage", (result.cell,), message)


def _impossible_scores(report: "ReportData") -> Iterator[Finding]:
    """Published scores that no model can have."""
    for result in _published(report):
        scores = ((m, result.scores.get((m.task, m.metric))) for m in report.results.measures)
        for found in impossible_scores([_published_claim(m, own) for m, own in scores if own]):
            where = f"{result.cell.name}, {found.score.task} {found.score.metric}"
            yield Finding(found.rule, (result.cell,), found.why, where=where)


def _wrong_delta(report: "ReportData") -> Iterator[Finding]:
    """Published differences that do not match the published scores, however these were rounded."""
    for row in report.deltas:
        reference, *others = row.scores
        first = row.scores[reference]
        for attention in others:
            published = report.results.published_delta(row.quantization, attention, row.measure)
            second = row.scores[attention]
            if published is None or isinstance(first, Gap) or isinstance(second, Gap):
                continue
            ours = second.value - first.value
            if abs(ours - published) > 3 * ROUNDING + 1e-9:
                where = f"{row.quantization.family} {row.quantization.label}, {row.measure.task} {row.measure.metric}"
                what = f"{kind_name(attention)} − {kind_name(reference)}"
                cells = tuple(report.results.twin(row.quantization, kind).cell for kind in (attention, reference))
                message = f"Δ is {signed(published)}, but {what} is {signed(ours)}."
                yield Finding("wrong_delta", cells, message, where=where)


def _published_claim(m: Measure, own: Score) -> ClaimedScore:
    unit = 100 if is_share(m.metric) else 1
    documents = own.documents or (TASKS[m.task].documents if m.task in TASKS else None)
    return ClaimedScore(m.task, m.metric, own.value / unit, m.better, documents, (ROUNDING + 1e-9) / unit)


def _pairs(report: "ReportData", a: CellResult, b: CellResult) -> list[tuple[Measure, Score, Score]]:
    """Scores that both have; only one of metrics that carry the same information."""
    keys = [(m, (m.task, m.metric)) for m in in_tables(report.results.measures)]
    return [(m, a.scores[key], b.scores[key]) for m, key in keys if key in a.scores and key in b.scores]


def _published(report: "ReportData") -> list[CellResult]:
    """Cells with scores."""
    return [cell for cell in report.results.parts if cell.scores]


def _spread(bits: int) -> Spread:
    return SPREADS[max(width for width in SPREADS if width <= bits)]


def _deviation(m: Measure, own: Score, spread: Spread) -> float:
    """The standard deviation of a score between really quantized cells: in percent, or in units of perplexity."""
    if is_share(m.metric):
        return 100 * math.sqrt(spread.flips / _documents(m, own))
    return spread.log_perplexity * own.value if is_perplexity(m.metric) else math.inf


def _chance_within(limit: float, m: Measure, own: Score, spread: Spread) -> float:
    """The probability that the rounded scores of two really quantized cells are no further apart than this."""
    deviation = _deviation(m, own, spread)
    if not math.isfinite(deviation):
        return 1.0  # an unknown metric
    step = 50 / _documents(m, own) if is_share(m.metric) else 0.0  # half a document
    return math.erf((limit + ROUNDING + step) / deviation / math.sqrt(2)) if deviation else 1.0


def _joint(chances: Iterable[tuple[Measure, float]]) -> float:
    """The joint probability: tasks are independent; the metrics of a task are not, so only its rarest one counts."""
    tasks: dict[str, float] = {}
    for m, chance in chances:
        tasks[m.task] = min(chance, tasks.get(m.task, 1.0))
    return math.prod(tasks.values())


def _documents(m: Measure, own: Score) -> int:
    return own.documents or (TASKS[m.task].documents if m.task in TASKS else UNKNOWN_DOCUMENTS)


def _by_chance(chance: float) -> str:
    return f"probability of this by chance: below {magnitude(10.0 ** math.ceil(math.log10(max(chance, 1e-12))))}"
