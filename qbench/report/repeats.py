"""How much a repeat of the same measurement changes a number: the noise by which we judge a published number.

Both sides scored the same documents, so the choice of documents explains nothing. They differ by the published
rounding, numerics (dtype, batches, kernels) and, for calibrated methods, the calibration draw.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import variance
from typing import Literal

from qbench.numbers import count
from qbench.records.metrics import TASKS, is_perplexity, is_share
from qbench.report.evidence import common_draws, one_draw
from qbench.report.metrics import Measure
from qbench.report.published import ROUNDING
from qbench.report.results import CellResult, Gap
from qbench.uncertainty import ChanceSource, Estimate

# What bfloat16 instead of float32 changes, by bits of the weights: the share of answers, each equally likely to become
# right or wrong, and one standard error of a perplexity's logarithm. Measured on mini's twins with HQQ and on
# unquantized SmolLM2, rounded up (benchmarks/repeats.py).
NUMERICS = {16: (0.01, 0.001), 8: (0.01, 0.002), 4: (0.03, 0.005), 3: (0.05, 0.007), 2: (0.11, 0.04)}
ONE_DRAW = "One calibration draw: how much another draw would move the score is unknown."

Nearer = Literal["unquantized", "quantized", "undecided"]


@dataclass(frozen=True)
class RepeatNoise:
    """How far a published number may be from ours and still be the same measurement, in the units of tables."""

    half_width: float
    one_draw: bool = False  # of a calibrated method: calibration noise is unknown, and not included

    def agrees(self, difference: float) -> bool | None:
        """Whether the noise explains a difference; None if calibration may."""
        return True if abs(difference) <= self.half_width else None if self.one_draw else False


def repeat_noise(measure: Measure, results: Sequence[CellResult], published: int | None = None) -> RepeatNoise | str:
    """The noise of one of our scores, or of the first − the others; or a sentence that says why it is unknown.

    published: the number of documents of the published number, if given.
    """
    whole = published or (TASKS[measure.task].documents if measure.task in TASKS else None)
    variances = []
    for result in results:
        score = result.score(measure)
        if isinstance(score, Gap):
            return score.reason
        if whole and score.documents not in (None, whole):
            own = count(score.documents or 0)
            return f"Not judged: ours uses {own} documents, the published number {count(whole)}."
        variances.append(_numerics(measure, score.value, score.documents or whole, result.cell.bits))
    known = [own for own in variances if own is not None]
    if len(known) < len(variances):
        return f"Not judged: the repeat noise of {measure.task} {measure.metric} is unknown."
    sources = (ChanceSource(sum(known), math.inf), *_calibration(measure, results))
    return RepeatNoise(Estimate(0.0, sources).half_width() + ROUNDING, one_draw(*results))


def nearer(measure: Measure, published: float, unquantized: float, quantized: float, noise: RepeatNoise) -> Nearer:
    """Which of our two scores a published number is nearer to; undecided if the noise could say otherwise.

    It must be further from their midpoint than the noise, and the two must be further apart than that.
    """
    middle = (unquantized + quantized) / 2
    if is_perplexity(measure.metric):
        middle = math.sqrt(unquantized * quantized)
    if abs(published - middle) <= noise.half_width or abs(unquantized - quantized) <= noise.half_width:
        return "undecided"
    return "quantized" if (published > middle) == (quantized > middle) else "unquantized"


def _numerics(measure: Measure, value: float, documents: int | None, bits: int) -> float | None:
    """The variance that another dtype adds to a score; None if unknown."""
    answers, perplexity = NUMERICS[max((known for known in NUMERICS if known <= bits), default=min(NUMERICS))]
    if is_perplexity(measure.metric):
        return (perplexity * value) ** 2
    return 100**2 * answers / documents if is_share(measure.metric) and documents else None


def _calibration(measure: Measure, results: Sequence[CellResult]) -> list[ChanceSource]:
    """How far another calibration draw is from our mean over draws; nothing unless there are several."""
    draws = common_draws(*results)
    if len(draws) < 2:
        return []
    values = []
    for draw in draws:
        first, *others = (result.of_draw(draw).scores[measure.task, measure.metric].value for result in results)
        values.append(first - sum(others))
    return [ChanceSource(variance(values) * (1 + 1 / len(values)), len(values) - 1)]
