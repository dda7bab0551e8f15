"""The limits of qbench.records.plausible on the cells of results/mini: honest ones pass, and mistaken ones do not."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from qbench.records import plausible
from qbench.records.metrics import KL
from qbench.records.schema import Divergence
from qbench.records.store import StoredRecord, read_results

MINI = Path(__file__).parents[2] / "results" / "mini"
KINDS = ("softmax", "softpick")
PAGES = "mini_wikitext"
FLOAT32 = "float32"


@cache
def cells(attention: str) -> dict[str, list["Cell"]]:
    """The cells of one model by label, one per draw; of the calibrated ones, two draws."""
    found: dict[str, list[Cell]] = {}
    for stored in read_results(MINI).current:
        own = stored.record.cell
        if own.attention == attention and (own.draw or 1) < 3:
            found.setdefault(own.label, []).append(Cell(stored))
    return found


class Cell:
    def __init__(self, stored: StoredRecord) -> None:
        self.record = stored.record
        documents = stored.documents
        self.scores = {task: own.answers.loglikelihoods for task, own in documents.items()}
        self.kl = next(m.value for m in self.record.metrics if m.metric == KL)
        self.tokens = documents[PAGES].answers.tokens[:, 0]

    @property
    def error(self) -> float:
        assert self.record.audit
        return self.record.audit.relative_error or 0.0

    @property
    def figures(self) -> Divergence:
        return self.record.divergences[0]

    def change(self, unquantized: "Cell") -> np.ndarray:
        return (self.scores[PAGES] - unquantized.scores[PAGES])[:, 0]


def sensitivities(cell: Cell, unquantized: Cell, error: float) -> dict[str, float]:
    of_answers = {t: plausible.sensitivity(own, unquantized.scores[t], error) for t, own in cell.scores.items()}
    of_answers[PAGES] = plausible.page_sensitivity(cell.kl, error)
    return {task: value for task, value in of_answers.items() if value is not None}


def others(attention: str, label: str) -> list[Mapping[str, float]]:
    unquantized = cells(attention)["none-16"][0]
    found = []
    for other, draws in cells(attention).items():
        if other not in ("none-16", label):
            own = [sensitivities(draw, unquantized, draw.error) for draw in draws]
            found.append({task: float(np.median([values[task] for values in own])) for task in own[0]})
    return found


QUANTIZED = [(kind, label) for kind in KINDS for label in cells(kind) if label != "none-16"]


@pytest.mark.parametrize(("attention", "label"), QUANTIZED)
def test_honest_cells_pass(attention: str, label: str) -> None:
    unquantized, draws = cells(attention)["none-16"][0], cells(attention)[label]
    for cell in draws:
        own = sensitivities(cell, unquantized, cell.error)
        for beside in ([], others(attention, label), others(attention, label)[:1]):
            assert plausible.too_wide(own, beside, [PAGES]) is None
        # Twice as far from the limits, too.
        assert plausible.too_wide({t: v / 2 for t, v in own.items()}, others(attention, label), [PAGES]) is None
        change, figures = cell.change(unquantized), cell.figures
        assert not plausible.kl_is_none(cell.kl)
        assert not plausible.kl_below_change(cell.kl / 2, figures.rms_change)
        for factor in (0.5, 1, 2):
            assert not plausible.kl_contradicts_pages(factor * cell.kl, change, cell.tokens)
        assert not plausible.other_reference(figures.nats_before, [unquantized.figures.nats_before], FLOAT32)


WIDE = [("bnb-8", "bnb-4-nf4"), ("gptq-8-g128", "gptq-4-g128"), ("hqq-8-g64", "hqq-4-g64"), ("bnb-8", "hqq-4-g64")]
WIDE += [("hqq-8-g64", "hqq-3-g64"), ("gptq-8-g128", "gptq-2-g128")]


@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize(("measured", "under"), WIDE)
def test_more_bits_than_the_label_says(attention: str, measured: str, under: str) -> None:
    unquantized, error = cells(attention)["none-16"][0], cells(attention)[under][0].error
    wide = cells(attention)[measured][0]
    own, beside = sensitivities(wide, unquantized, error), others(attention, under)
    found = plausible.too_wide(own, beside, [PAGES])
    assert found
    assert found.found < found.limit
    # Compared with other cells alone, as in a folder of a model that moves more than these.
    moved = [{task: 3 * value for task, value in other.items()} for other in beside]
    relative = plausible.too_wide({task: 3 * value for task, value in own.items()}, moved, [PAGES])
    assert relative
    # Others that do not agree say nothing, and neither does one alone.
    split = [*moved[:1], *({task: value / 20 for task, value in other.items()} for other in moved[1:])]
    assert plausible.too_wide({task: 9 * value for task, value in own.items()}, split, [PAGES]) is None
    assert plausible.too_wide({task: 9 * value for task, value in own.items()}, moved[:1], [PAGES]) is None


@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("label", ["bnb-8", "gptq-2-g128", "hqq-4-g64"])
def test_the_unquantized_model_rounded_differently_without_other_cells(attention: str, label: str) -> None:
    unquantized, cell = (cells(attention)[own][0] for own in ("none-16", label))
    noise = np.random.default_rng(0)
    scores = {task: own * (1 + 1e-5 * noise.normal(size=own.shape)) for task, own in unquantized.scores.items()}
    own = {task: plausible.sensitivity(values, unquantized.scores[task], cell.error) for task, values in scores.items()}
    assert plausible.too_wide({task: value for task, value in own.items() if value is not None}, (), [PAGES])


def test_one_task_measured_at_more_bits() -> None:
    unquantized, four = (cells("softmax")[label][0] for label in ("none-16", "hqq-4-g64"))
    own = sensitivities(four, unquantized, four.error)
    own["mini_sciq"] = sensitivities(cells("softmax")["hqq-8-g64"][0], unquantized, four.error)["mini_sciq"]
    found = plausible.too_wide(own, others("softmax", "hqq-4-g64"), [PAGES])
    assert found
    assert found.tasks == ("mini_sciq",)


@pytest.mark.parametrize(
    ("label", "other"), [("hqq-4-g64", "hqq-8-g64"), ("bnb-4-nf4", "bnb-8"), ("hqq-4-g64", "hqq-2-g64")]
)
@pytest.mark.parametrize("attention", KINDS)
def test_kl_of_another_width(attention: str, label: str, other: str) -> None:
    unquantized, cell = cells(attention)["none-16"][0], cells(attention)[label][0]
    kl = cells(attention)[other][0].kl
    assert plausible.kl_contradicts_pages(kl, cell.change(unquantized), cell.tokens)
    assert plausible.kl_below_change(kl, cell.figures.rms_change) is (kl < cell.kl)


@pytest.mark.parametrize("drift", [-0.003, 0.0, 0.003, 0.03])
def test_long_pages_need_not_get_less_likely_by_kl(drift: float) -> None:
    """Text that the model does not expect, such as wikitext for a chat model: its mean log-likelihood may not move."""
    tokens, kl = np.full(60, 7000.0), 0.03
    change = -drift * tokens + np.sqrt(2 * kl * tokens) * np.random.default_rng(0).normal(size=60)
    assert not plausible.kl_contradicts_pages(kl, change, tokens)
    assert plausible.kl_contradicts_pages(100 * kl, change / 10, tokens)
    assert plausible.kl_contradicts_pages(kl / 10_000, change, tokens)


def test_kl_of_the_unquantized_model_from_itself() -> None:
    unquantized, cell = (cells("softmax")[label][0] for label in ("none-16", "hqq-8-g64"))
    for kl in (0.0, unquantized.kl):
        assert plausible.kl_is_none(kl)
        assert plausible.kl_below_change(kl, cell.figures.rms_change)
        assert plausible.kl_contradicts_pages(kl, cell.change(unquantized), cell.tokens)


def test_kl_from_another_model() -> None:
    softmax, softpick = (cells(kind)["none-16"][0].figures.nats_before for kind in KINDS)
    assert plausible.other_reference(softpick, [softmax] * 3, FLOAT32)
    assert not plausible.other_reference(softmax, [softmax, softpick, softmax], FLOAT32)
    assert not plausible.other_reference(softpick, [], FLOAT32)


def test_padding_and_infinite_values_are_ignored() -> None:
    one = np.array([[-1.0, -2.0, np.nan], [-np.inf, -3.0, -0.001]] * 10)
    assert plausible.distances(one, one).tolist() == [0.0] * 20
    assert plausible.sensitivity(one, one, 0.0) is None
    assert plausible.sensitivity(one[:4], one[:4], 0.1) is None
    assert pd.isna(plausible.distances(one, one)).sum() == 0
