"""Whether numbers of quantized cells can be what their labels say: limits, and the measurements behind them.

Pure functions of arrays and numbers. All limits were measured on results/mini (52 quantized cells of two models, 8 to 2
bits, 400 documents per task), four more of the mini models (28 cells, 100 documents), and SmolLM2-135M (6 cells,
40 documents): "honest" below. "8 bits under 4" is the former's samples with the latter's label and audit.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from qbench.records.samples import Floats

# Log-likelihoods nearer to 0 coincide by chance: for a sure answer all models give -0.0 or -1.2e-7.
INFORMATIVE = 0.01
# Fewer documents with informative values say nothing: a median over 3 was 1/9 of the same cell's other tasks.
MIN_DOCUMENTS = 16

# KL per token of a quantized cell: honest, at least 2.4e-5 (8 bits); of an unquantized model from itself 5e-14.
MIN_KL = 1e-9
LOSSLESS = 1e-4  # relative weight error; 8 bits have 5e-3. Weights that lie on the grid already hardly change
# (2 · rms_change²) / KL is at most 1 by Pinsker's inequality: |Δp| ≤ TV ≤ √(KL / 2). Honest: 0.04 to 0.40.
MAX_PINSKER = 1.0 + 1e-6
# Pages of T tokens whose log-likelihood moved by Δ. A token moves with a variance of about 2 KL: Σ Δ² / Σ 2 T·KL is at
# least 0.48 (honest); with KL of 2 bits under 4 it is 0.03 and less, of 4 under 8 less than 0.01. Text that the model
# expects also gets less likely, by KL per token. Other text may not, so the lower limit leaves this part out: over
# pages of 7,000 tokens it is 100 times as large as the variance, if KL is 0.03.
MIN_SPREAD = 1 / 20
# Σ Δ² / Σ (2 T·KL + (T·KL)²): honest, 0.32 to 2.5. With KL of 8 bits under 4: 113 and more, with LLM.int8's on softmax
# 24. Moves that tokens share add up over a long page: of the variance, this share is allowed for.
MAX_SPREAD, MAX_SHARED = 12.0, 1e-3
# nats_before of cells of one model is of the same tokens: honest, equal to the last digit; 0.98 and 0.79 of two models.
MAX_NATS_APART = {"float32": 1e-4, "float64": 1e-4}
# How far a cell moves per unit of its weight error (`sensitivity`), by the median of its model's other cells. Median
# over tasks: honest, 0.62 (GPTQ, 8 bits) to 2.3; 8 bits under 4: 0.037 to 0.066, LLM.int8 under nf4 0.12; under 3 and 2
# less. 4 bits under 2 (0.15 to 0.22) are not found without a baseline: with a limit of 0.25, a fifth of made-up models
# whose cells move 0.5 to 5 times their weight error have a finding; with 0.15 two of 200, with 0.13 none.
MIN_SHARE = 0.13
# In a single task: honest, at least 0.46; 8 bits under 4: at most 0.066; LLM.int8 under nf4, 0.17, is not found.
MIN_SHARE_OF_A_TASK = 0.12
# Other cells say what is usual only if they agree. Honest, the largest and the smallest of a task differ by a factor of
# at most 3.7; a factor above 5 means that documents do not move as weights do, or that one of two others is mistaken.
MAX_SPREAD_OF_OTHERS, MIN_OTHERS = 5.0, 2
# Without other cells: of answers (median over tasks), and of pages by √KL. Answers: honest, 2.2 to 11 (SmolLM2: 4.0
# and more); pages: honest, 0.63 to 2.5 (SmolLM2 5.8 to 8.0). The unquantized model, rounded differently, is below 1e-3.
MIN_ANSWERS, MIN_PAGES = 0.03, 0.01

BySensitivity = Mapping[str, float]  # sensitivities by task


def stretched(loglikelihoods: Floats) -> Floats:
    """Log-likelihoods L in a scale in which noise of the weights moves all alike: 2√|L| - 2, and ln |L| above -1.

    Noise in logits moves ln(1 - p) of a sure token, and adds up as a random walk over unsure ones. Up to 2 bits, moves
    in this scale are proportional to the weight error; in units of min(|L|, √|L|) they grow up to 36 times as much.
    """
    size = np.maximum(np.abs(loglikelihoods), 1e-30)
    return np.where(size < 1, np.log(size), 2 * np.sqrt(size) - 2)


def distances(one: Floats, other: Floats) -> Floats:
    """How far two cells are apart in each informative document: [documents, choices], padded with NaN, to [some]."""
    counted = _informative(one) & _informative(other)
    with np.errstate(invalid="ignore"):
        apart = np.where(counted, np.abs(stretched(one) - stretched(other)), 0.0).sum(axis=1)
    counts = counted.sum(axis=1)
    return apart[counts > 0] / counts[counts > 0]


def sensitivity(quantized: Floats, unquantized: Floats, weight_error: float) -> float | None:
    """How far the log-likelihoods of a task moved, per unit of the audit's relative weight error; None: too few.

    If only some weights were quantized, weight_error · √(their share of all weights that are multiplied by).
    """
    moved = distances(quantized, unquantized)
    return float(np.median(moved)) / weight_error if len(moved) >= MIN_DOCUMENTS and weight_error > 0 else None


def page_sensitivity(kl: float, weight_error: float) -> float | None:
    """The same of a task of pages, by KL per token: √KL is what noise in the logits moves."""
    return math.sqrt(max(kl, 0.0)) / weight_error if weight_error > 0 else None


@dataclass(frozen=True)
class TooWide:
    """A cell that moved less than its weights changed: it was measured at more bits, or not at its own weights."""

    tasks: tuple[str, ...]  # empty: all of them
    found: float
    limit: float
    beside: Literal["nothing", "model"]  # what it was compared with


def too_wide(own: BySensitivity, others: Sequence[BySensitivity] = (), pages: Collection[str] = ()) -> TooWide | None:
    """Whether a cell's sensitivities by task are too small for its weight error.

    others: of the model's cells with other labels, one per label (the median over its draws), of this folder and of a
    baseline; only cells that quantize nothing but weights.
    """
    answers = [value for task, value in own.items() if task not in pages]
    values, limit = (answers, MIN_ANSWERS) if answers else (list(own.values()), MIN_PAGES)
    if values and (found := float(np.median(values))) < limit:
        return TooWide((), found, limit, "nothing")
    shares = _shares(own, others)
    if shares and (found := float(np.median(list(shares.values())))) < MIN_SHARE:
        return TooWide((), found, MIN_SHARE, "model")
    if small := {task: share for task, share in shares.items() if share < MIN_SHARE_OF_A_TASK}:
        return TooWide(tuple(small), min(small.values()), MIN_SHARE_OF_A_TASK, "model")
    return None


def _shares(own: BySensitivity, others: Sequence[BySensitivity]) -> dict[str, float]:
    """By task: the cell's sensitivity by the median of the others', if the others agree."""
    found = {}
    for task in own:
        usual = [other[task] for other in others if other.get(task)]
        if len(usual) >= MIN_OTHERS and max(usual) <= MAX_SPREAD_OF_OTHERS * min(usual):
            found[task] = own[task] / float(np.median(usual))
    return found


def kl_is_none(kl: float) -> bool:
    """Whether the KL of a cell with quantized weights is that of a model from itself."""
    return kl < MIN_KL


def kl_below_change(kl: float, rms_change: float) -> bool:
    """Whether the probabilities of the right tokens changed by more than KL allows, on the same tokens."""
    return 2 * rms_change**2 > MAX_PINSKER * kl


def kl_contradicts_pages(kl: float, change: Floats, tokens: Floats) -> bool:
    """Whether KL per token is of another size than the change of the pages' log-likelihoods; [pages] each."""
    moved, variance = float((change**2).sum()), 2 * tokens * kl
    most = float((variance * (1 + MAX_SHARED * tokens) + (tokens * kl) ** 2).sum())
    possible = MIN_SPREAD * float(variance.sum()) <= moved <= MAX_SPREAD * most
    return len(change) >= MIN_DOCUMENTS and not possible


def other_reference(nats_before: float, of_others: Sequence[float], dtype: str) -> bool:
    """Whether a cell's KL is from another model, or on other tokens, than that of most cells of its model."""
    apart = abs(nats_before - float(np.median(of_others))) if of_others else 0.0
    return dtype in MAX_NATS_APART and apart > MAX_NATS_APART[dtype]


def _informative(values: Floats) -> np.ndarray:
    return np.isfinite(values) & (np.abs(values) > INFORMATIVE)
