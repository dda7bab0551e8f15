"""Results that cannot be right, in records or published numbers: what looks copied, unquantized or impossible.

What the documents and audits of records say is judged in qbench.records.suspicious. Here are rules that follow from
arithmetic, and those on published scores, of which one coincidence proves nothing: they accuse only what chance would
do less than once in 10,000 times.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

from qbench.report.delta import Report
from qbench.report.metrics import BETTER, DOCUMENTS, Measure, base, in_tables, is_perplexity, is_share
from qbench.report.outcomes import Gap, Outcome, Score
from qbench.report.tables import number, signed

ROUNDING = 0.005  # what two decimals hide
MAX_CHANCE = 1e-4
UNKNOWN_DOCUMENTS = 100  # of a published task that we do not know; few, as few agree easily


@dataclass(frozen=True)
class Spread:
    """How far an honest cell is from the unquantized model, and from another cell of its width, at the very least."""

    flips: float  # share of answers that change from right to wrong or back
    log_perplexity: float  # standard deviation


# By the width in bits that a cell has at least. Each is on the small side of what results/mini (flips) and both it and
# results/paper (log perplexity) have, and centred on 0 though low bits do harm, so that chance is overstated.
#  8 bits: flips of 0 to 1.3% (mean 0.4%), log perplexity 0.0004 and more
#  4 bits: flips of 0.3% to 11% (mean 4.7%), 0.004 to 0.3
#  3 bits: flips of 4% to 24%, 0.07 to 1.0
#  2 bits: flips of 26% to 56%, 0.86 to 13
SPREADS = {8: Spread(0.0025, 0.0005), 4: Spread(0.01, 0.01), 3: Spread(0.05, 0.1), 1: Spread(0.2, 0.5)}
OTHER_MODEL = SPREADS[3]  # softmax and softpick differ more than this
LOSSLESS_SPREADS = 3  # nearer to the unquantized model than 3 standard deviations of an 8-bit cell: nearly lossless


@dataclass(frozen=True)
class Finding:
    """Something that cannot be right, and why."""

    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


def suspicious(report: Report) -> list[Finding]:
    """All that cannot be right, rule by rule."""
    rules: list[Callable[[Report], Iterator[Finding]]] = [
        *(_records, _same_scores, _low_bits_without_damage),
        *(_out_of_range, _not_of_whole_documents, _contradictory, _wrong_delta),
    ]
    return [finding for rule in rules for finding in rule(report)]


def _records(report: Report) -> Iterator[Finding]:
    """What the audits and documents of records say."""
    if report.outcomes.results:
        from qbench.records.integrity import altered  # published numbers need neither numpy nor pyarrow
        from qbench.records.suspicious import suspicious_records

        for stored in report.outcomes.results.current:
            yield from (Finding(stored.record.cell.name, reason) for reason in altered(stored))
        for found in suspicious_records(report.outcomes.results.current):
            yield Finding(found.cell.name, found.message)


def _same_scores(report: Report) -> Iterator[Finding]:
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
            what = f"the same scores in all {len(pairs)} metrics, so these are scores of one and the same model"
            yield Finding(f"{a.cell.name} and {b.cell.name}", f"{what} ({_by_chance(chance)}).")


def _low_bits_without_damage(report: Report) -> Iterator[Finding]:
    """A published cell of few bits that scores as a nearly lossless one in every task."""
    for outcome in _published(report):
        pairs = _pairs(report, outcome, report.outcomes.baseline(outcome))
        limits = {m: LOSSLESS_SPREADS * _deviation(m, y, SPREADS[8]) for m, _, y in pairs}
        lossless = all(abs(x.value - y.value) <= limits[m] + ROUNDING for m, x, y in pairs)
        if outcome.cell.bits >= 8 or not lossless:
            continue
        spread = _spread(outcome.cell.bits)
        chance = _joint((m, _chance_within(limits[m], m, y, spread)) for m, _, y in pairs)
        if chance < MAX_CHANCE:
            shown = ", ".join(f"{m.task} {m.metric} {number(x.value)} ({number(y.value)})" for m, x, y in pairs)
            what = f"these are scores of an unquantized or nearly lossless model, not of {outcome.cell.bits} bits"
            yield Finding(outcome.cell.name, f"{what} ({_by_chance(chance)}); unquantized in brackets: {shown}.")


def _out_of_range(report: Report) -> Iterator[Finding]:
    for outcome, m, score in _all(report):
        if is_share(m.metric) and not 0 <= score.value <= 100:
            yield _finding(outcome, m, f"{number(score.value)} is not a percentage.")
        if is_perplexity(m.metric) and score.value < 1:
            yield _finding(
                outcome, m, f"{number(score.value)} is below 1, the perplexity of a model that knows the text."
            )
        if m.better and m.better != BETTER.get(base(m.metric), m.better):
            yield _finding(outcome, m, f"{m.better} is said to be better.")


def _not_of_whole_documents(report: Report) -> Iterator[Finding]:
    """An accuracy that is not a number of right answers out of the number of documents."""
    for outcome, m, score in _all(report):
        count = score.documents or (None if outcome.stored else DOCUMENTS.get(m.task))
        if not is_share(m.metric) or not count or not _zeros_and_ones(report, outcome, m):
            continue
        nearest = 100 * round(score.value * count / 100) / count
        if abs(score.value - nearest) > (1e-6 if outcome.stored else ROUNDING + 1e-9):
            what = f"{score.value:g} is not a share of {count} documents; the nearest one is {nearest:.4f}."
            yield _finding(outcome, m, what)


def _contradictory(report: Report) -> Iterator[Finding]:
    """Metrics of one task that cannot go together."""
    for outcome, m, score in _all(report):
        values = {metric: s.value for (task, metric), s in outcome.scores.items() if task == m.task}
        if m.metric == "bits_per_byte" and "byte_perplexity" in values:
            expected = math.log2(max(values["byte_perplexity"], 1e-300))
            if abs(score.value - expected) > ROUNDING:
                yield _finding(outcome, m, f"{score.value:.4f} is not log2 of byte_perplexity, {expected:.4f}.")
        if m.metric == "word_perplexity" and values.get("byte_perplexity", 0) > score.value + ROUNDING:
            yield _finding(outcome, m, f"{number(score.value)} is below byte_perplexity, but words have bytes.")
        # A target that is not the likeliest has a probability of at most one half.
        if m.metric == "perplexity" and "acc" in values:
            least = 2 ** (1 - (values["acc"] + ROUNDING) / 100)
            if score.value < least - ROUNDING:
                what = f"{number(score.value)} is too low for acc {number(values['acc'])}: at least {number(least)}."
                yield _finding(outcome, m, what)


def _wrong_delta(report: Report) -> Iterator[Finding]:
    """Published differences that are not those of the published scores, whichever way these were rounded."""
    for row in report.deltas:
        published = report.outcomes.published_delta(row.quantized, row.measure)
        if published is None or isinstance(row.softmax, Gap) or isinstance(row.softpick, Gap):
            continue
        ours = row.softpick.value - row.softmax.value
        if abs(ours - published) > 3 * ROUNDING + 1e-9:
            where = f"{row.quantized.family} {row.quantized.label}, {row.measure.task} {row.measure.metric}"
            yield Finding(where, f"Δ is {signed(published)}, but softpick − softmax is {signed(ours)}.")


def _all(report: Report) -> Iterator[tuple[Outcome, Measure, Score]]:
    for outcome in report.outcomes.cells:
        for m in report.outcomes.measures:
            if score := outcome.scores.get((m.task, m.metric)):
                yield outcome, m, score


def _pairs(report: Report, a: Outcome, b: Outcome) -> list[tuple[Measure, Score, Score]]:
    """Scores that both have; one of those that say the same."""
    keys = [(m, (m.task, m.metric)) for m in in_tables(report.outcomes.measures)]
    return [(m, a.scores[key], b.scores[key]) for m, key in keys if key in a.scores and key in b.scores]


def _published(report: Report) -> list[Outcome]:
    """Cells with scores and without documents: records are judged by theirs."""
    return [o for o in report.outcomes.cells if o.scores and not (o.stored and o.stored.has_samples)]


def _spread(bits: int) -> Spread:
    return SPREADS[max(width for width in SPREADS if width <= bits)]


def _deviation(m: Measure, score: Score, spread: Spread) -> float:
    """The standard deviation of a score between honest cells: in percent, or in units of perplexity."""
    if is_share(m.metric):
        return 100 * math.sqrt(spread.flips / _documents(m, score))
    return spread.log_perplexity * score.value if is_perplexity(m.metric) else math.inf


def _chance_within(limit: float, m: Measure, score: Score, spread: Spread) -> float:
    """The probability that the scores of two honest cells are no further apart than this, once they are rounded."""
    deviation = _deviation(m, score, spread)
    if not math.isfinite(deviation):
        return 1.0  # of a metric of which we know nothing
    step = 50 / _documents(m, score) if is_share(m.metric) else 0.0  # half a document
    return math.erf((limit + ROUNDING + step) / deviation / math.sqrt(2)) if deviation else 1.0


def _joint(chances: Iterable[tuple[Measure, float]]) -> float:
    """The probability of all at once: tasks are independent; the metrics of one are not, so its rarest counts alone."""
    tasks: dict[str, float] = {}
    for m, chance in chances:
        tasks[m.task] = min(chance, tasks.get(m.task, 1.0))
    return math.prod(tasks.values())


def _documents(m: Measure, score: Score) -> int:
    return score.documents or DOCUMENTS.get(m.task, UNKNOWN_DOCUMENTS)


def _by_chance(chance: float) -> str:
    return f"the probability by chance is below {10.0 ** math.ceil(math.log10(max(chance, 1e-12))):.0e}"


def _zeros_and_ones(report: Report, outcome: Outcome, m: Measure) -> bool:
    """Whether each document is right or wrong, as far as is known."""
    task = report.evidence.documents.get(outcome.cell, {}).get(m.task)
    values = task.metrics.get(m.metric) if task else None
    return values is None or bool(((values.values == 0) | (values.values == 1)).all())


def _finding(outcome: Outcome, m: Measure, why: str) -> Finding:
    return Finding(f"{outcome.cell.name}, {m.task} {m.metric}", why)
