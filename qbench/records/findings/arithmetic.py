"""Scores that no model can have, by arithmetic alone: in records and in published numbers."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from qbench.numbers import fixed, score, significant
from qbench.records.metrics import Better, facts_of, is_nats, is_perplexity, is_share

RECORD_PRECISION = 1e-8  # records have all digits; sums in another order differ in the last ones


@dataclass(frozen=True)
class ClaimedScore:
    """A score from a record or a paper, in the unit of records: accuracies are shares, not percent."""

    task: str
    metric: str
    value: float
    better: Better | None
    documents: int | None  # each is right or wrong; None if unknown
    precision: float = RECORD_PRECISION  # how far the value may be from the measured one by rounding

    @property
    def shown(self) -> float:
        """The value in the unit of tables: accuracies in percent."""
        return 100 * self.value if is_share(self.metric) else self.value


@dataclass(frozen=True)
class ImpossibleScore:
    """An impossible score, and why."""

    rule: str
    score: ClaimedScore
    why: str


def impossible_scores(scores: Sequence[ClaimedScore]) -> list[ImpossibleScore]:
    """Impossible scores of one cell, rule by rule."""
    rules: list[Callable[[Sequence[ClaimedScore]], Iterator[ImpossibleScore]]] = [
        out_of_range,
        other_direction,
        not_of_whole_documents,
        contradictory,
    ]
    return [found for rule in rules for found in rule(scores)]


def out_of_range(scores: Sequence[ClaimedScore]) -> Iterator[ImpossibleScore]:
    """Accuracies that are not within 0% and 100%, perplexities below 1, and KL below 0."""
    for claim in scores:
        if is_share(claim.metric) and not 0 <= claim.value <= 1:
            yield ImpossibleScore("out_of_range", claim, f"{score(claim.shown)} is not a percentage.")
        if is_perplexity(claim.metric) and claim.value < 1:
            why = f"{score(claim.value)} is below 1; a perplexity cannot be."
            yield ImpossibleScore("out_of_range", claim, why)
        if is_nats(claim.metric) and claim.value < -claim.precision:
            yield ImpossibleScore(
                "out_of_range", claim, f"{significant(claim.value)} is below 0; a divergence cannot be negative."
            )


def other_direction(scores: Sequence[ClaimedScore]) -> Iterator[ImpossibleScore]:
    """Metrics with the wrong direction."""
    for claim in scores:
        facts = facts_of(claim.metric)
        if facts and claim.better and claim.better != facts.better:
            yield ImpossibleScore(
                "wrong_direction", claim, f"better is {claim.better!r}, but {facts.better} is better."
            )


def not_of_whole_documents(scores: Sequence[ClaimedScore]) -> Iterator[ImpossibleScore]:
    """Accuracies that are not a number of right answers divided by the number of documents."""
    for claim in scores:
        if not is_share(claim.metric) or not claim.documents:
            continue
        nearest = round(claim.value * claim.documents) / claim.documents
        if abs(claim.value - nearest) > claim.precision:
            shown, possible = significant(claim.shown, 6), fixed(100 * nearest, 4)
            why = f"{shown} is impossible with {claim.documents} documents; the nearest possible value is {possible}."
            yield ImpossibleScore("not_of_whole_documents", claim, why)


def contradictory(scores: Sequence[ClaimedScore]) -> Iterator[ImpossibleScore]:
    """Metrics of one task that cannot go together."""
    tasks: dict[str, dict[str, ClaimedScore]] = {}
    for claim in scores:
        tasks.setdefault(claim.task, {})[claim.metric] = claim
    for own in tasks.values():
        yield from _other_bits_per_byte(own)
        yield from _words_below_bytes(own)
        yield from _too_sure(own)


def _other_bits_per_byte(own: Mapping[str, ClaimedScore]) -> Iterator[ImpossibleScore]:
    bits, perplexity = own.get("bits_per_byte"), own.get("byte_perplexity")
    if not bits or not perplexity:
        return
    expected = math.log2(max(perplexity.value, 1e-300))
    # d log2(x) = dx / (x ln 2), and a perplexity is at least 1.
    if abs(bits.value - expected) > bits.precision + perplexity.precision / math.log(2):
        why = f"{fixed(bits.value, 4)} is not log2 of byte_perplexity, {fixed(expected, 4)}."
        yield ImpossibleScore("not_log2_of_byte_perplexity", bits, why)


def _words_below_bytes(own: Mapping[str, ClaimedScore]) -> Iterator[ImpossibleScore]:
    words, perplexity = own.get("word_perplexity"), own.get("byte_perplexity")
    if words and perplexity and perplexity.value > words.value + words.precision:
        yield ImpossibleScore(
            "below_byte_perplexity",
            words,
            f"{score(words.value)} is below byte_perplexity, but a word has one byte or more.",
        )


def _too_sure(own: Mapping[str, ClaimedScore]) -> Iterator[ImpossibleScore]:
    """A target that is not the most likely text has a probability of at most one half, so acc limits the perplexity."""
    perplexity, accuracy = own.get("perplexity"), own.get("acc")
    if not perplexity or not accuracy:
        return
    least = 2 ** (1 - (accuracy.value + accuracy.precision))
    if perplexity.value < least - perplexity.precision:
        why = (
            f"{score(perplexity.value)} is too low for acc {score(accuracy.shown)}; it must be at least {score(least)}."
        )
        yield ImpossibleScore("too_sure", perplexity, why)
