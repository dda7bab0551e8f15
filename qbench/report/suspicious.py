"""Results that cannot be right: what looks unquantized, copied or impossible in records or published numbers.

One coincidence proves nothing: accuracies move in steps, and among dozens of cells some meet. A rule therefore either
follows from arithmetic, or asks for several scores to be equal at once.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

from qbench.report.delta import Report
from qbench.report.metrics import BETTER, DOCUMENTS, Measure, base, in_tables, is_perplexity, is_share
from qbench.report.outcomes import Gap, Outcome, Score, audit_failures
from qbench.report.tables import number, signed

ROUNDING = 0.005  # what two decimals hide
# The noise of quantization grows by 6 dB for each bit less, so that log perplexity moves 256 times as far at 4 bits as
# at 8. The paper's 8-bit models are within 0.05% to 1% of the unquantized, and its honest 4-bit ones at 5% to 11%.
LOW_BITS = 4
SAME_PERPLEXITY = 0.002
# So many scores must agree at once; more where they are accuracies on few documents, which agree easily.
MIN_SAME, MIN_SAME_FEW = 3, 6
FEW_DOCUMENTS = 200


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
        *(_same_scores, _low_bits_without_damage, _not_proved),
        *(_out_of_range, _not_of_whole_documents, _contradictory, _wrong_delta, _not_its_samples),
    ]
    return [finding for rule in rules for finding in rule(report)]


def _same_scores(report: Report) -> Iterator[Finding]:
    """Two cells of one family with the same scores: the same weights were measured twice."""
    done = [outcome for outcome in report.outcomes.cells if outcome.scores]
    for a, b in combinations(done, 2):
        if a.cell.family != b.cell.family:
            continue
        recorded = bool(a.stored and b.stored)
        # Two wide cells of one model may well agree to the second decimal, though not to the last one.
        if not recorded and a.cell.attention == b.cell.attention and min(a.cell.bits, b.cell.bits) > LOW_BITS:
            continue
        pairs, tolerance = _pairs(report, a, b), 0.0 if recorded else ROUNDING
        if len(pairs) >= _enough(pairs) and all(abs(x.value - y.value) <= tolerance for _, x, y in pairs):
            what = f"the same scores in all {len(pairs)} metrics; different weights cannot have them."
            yield Finding(f"{a.cell.name} and {b.cell.name}", what)


def _low_bits_without_damage(report: Report) -> Iterator[Finding]:
    """A cell of few bits that scores as if nothing had been quantized, and has no audit to the contrary."""
    for outcome in report.outcomes.cells:
        baseline = report.outcomes.baseline(outcome)
        audited = outcome.stored is not None and outcome.stored.record.audit is not None
        if not outcome.scores or outcome.cell.bits > LOW_BITS or audited:
            continue
        pairs = _pairs(report, outcome, baseline)
        same = [pair for pair in pairs if _same(*pair)]
        decisive = [pair for pair in pairs if is_perplexity(pair[0].metric)] or pairs
        if len(same) >= _enough(pairs) and all(pair in same for pair in decisive):
            shown = ", ".join(f"{m.task} {m.metric} {number(x.value)} ({number(y.value)})" for m, x, y in same)
            what = f"with {outcome.cell.bits}-bit weights it scores as the unquantized model does: {shown}."
            yield Finding(outcome.cell.name, what)


def _not_proved(report: Report) -> Iterator[Finding]:
    for outcome in report.outcomes.cells:
        record = outcome.stored.record if outcome.stored else None
        if record is None or record.state != "done" or record.cell.method == "none":
            continue
        if record.audit is None:
            yield Finding(record.cell.name, "it has no audit: that it was quantized is not proved.")
        elif reasons := audit_failures(record, record.audit):
            yield Finding(record.cell.name, f"it has scores, but did not pass its audit: {reasons[0]}")


def _out_of_range(report: Report) -> Iterator[Finding]:
    for outcome, m, score in _all(report):
        if is_share(m.metric) and not 0 <= score.value <= 100:
            yield _finding(outcome, m, f"{number(score.value)} is no percentage.")
        if is_perplexity(m.metric) and score.value < 1:
            yield _finding(outcome, m, f"{number(score.value)} is below 1, the perplexity of who knows the text.")
        if m.better and m.better != BETTER.get(base(m.metric), m.better):
            yield _finding(outcome, m, f"{m.better} is said to be better.")


def _not_of_whole_documents(report: Report) -> Iterator[Finding]:
    """An accuracy that is no number of right answers out of the number of documents."""
    for outcome, m, score in _all(report):
        count = score.documents or (None if outcome.stored else DOCUMENTS.get(m.task))
        if not is_share(m.metric) or not count or not _zeros_and_ones(report, outcome, m):
            continue
        nearest = 100 * round(score.value * count / 100) / count
        if abs(score.value - nearest) > (1e-6 if outcome.stored else ROUNDING + 1e-9):
            what = f"{score.value:g} is no share of {count} documents; the nearest one is {nearest:.4f}."
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


def _not_its_samples(report: Report) -> Iterator[Finding]:
    """A record's score that its own documents do not add up to."""
    for outcome, m, score in _all(report):
        again = report.evidence.recomputed(m, outcome)
        if again is not None and not math.isclose(again, score.value, rel_tol=1e-6, abs_tol=1e-9):
            yield _finding(outcome, m, f"{score.value:.6g} in the record, but its documents amount to {again:.6g}.")


def _all(report: Report) -> Iterator[tuple[Outcome, Measure, Score]]:
    for outcome in report.outcomes.cells:
        for m in report.outcomes.measures:
            if score := outcome.scores.get((m.task, m.metric)):
                yield outcome, m, score


def _pairs(report: Report, a: Outcome, b: Outcome) -> list[tuple[Measure, Score, Score]]:
    """Scores that both have; one of those that say the same."""
    keys = [(m, (m.task, m.metric)) for m in in_tables(report.outcomes.measures)]
    return [(m, a.scores[key], b.scores[key]) for m, key in keys if key in a.scores and key in b.scores]


def _same(m: Measure, x: Score, y: Score) -> bool:
    tolerance = SAME_PERPLEXITY * y.value if is_perplexity(m.metric) else 0.0
    return abs(x.value - y.value) <= max(tolerance, ROUNDING)


def _enough(pairs: list[tuple[Measure, Score, Score]]) -> int:
    few = all(is_share(m.metric) and (x.documents or math.inf) < FEW_DOCUMENTS for m, x, _ in pairs)
    return MIN_SAME_FEW if few else MIN_SAME


def _zeros_and_ones(report: Report, outcome: Outcome, m: Measure) -> bool:
    """Whether each document is right or wrong, as far as is known."""
    task = report.evidence.documents.get(outcome.cell, {}).get(m.task)
    values = task.metrics.get(m.metric) if task else None
    return values is None or bool(((values.values == 0) | (values.values == 1)).all())


def _finding(outcome: Outcome, m: Measure, why: str) -> Finding:
    return Finding(f"{outcome.cell.name}, {m.task} {m.metric}", why)
