"""Rules on weights: documents that cannot be of the model that their cell names.

The log-likelihoods of the documents say which weights were measured: identical to the last bit for equal weights, and
as far from the unquantized model's as the weights are. All limits were set on the 20 quantized cells of results/mini (5
tasks with 400 documents each), with a wide margin.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qbench.errors import some
from qbench.numbers import significant
from qbench.records import plausible
from qbench.records.findings.finding import Finding
from qbench.records.findings.measured import (
    MIN_DOCUMENTS,
    Evidence,
    MeasuredCell,
    common_documents,
    equal_documents,
    same_width,
)
from qbench.records.schema import CellRef

# Share of a task's documents that are equal to the last bit. Between different cells of mini it is 0 in 1,154 of
# 1,155 comparisons, and 0.6% (1 of 158 documents) in the other; it is 1 for the same weights.
MAX_EQUAL = 0.5
# The largest significant gain of a quantized cell over the unquantized model that may pass: right answers per document,
# or nats per decision. The most in mini is 0.010 (gptq-4, lambada, t = 0.9) and 0.0086 (bnb-4, wikitext, t = 8.4), in
# results/paper 0.008 (bnb-4, sciq) and 0.0089 (gptq-8, lambada).
MAX_GAIN = 0.05
SURE_T = 5.0
# Damage large enough to notice that it is gone: nats per decision in a task. A run may have 1/16 of it, two bits' noise
# (6 dB each). A cell of mini with one bit more has 1/2.6 to 1/9.5 of the damage, with two bits more 1/17 to 1/53.
LARGE_DAMAGE = 0.1
MAX_RECOVERY = 16.0


Rule = Callable[[Evidence], Iterator[Finding]]


@np.errstate(invalid="ignore")
def other_weights(evidence: Evidence) -> list[Finding]:
    """The cells whose documents contradict their name, with the plainest reason for each.

    Once there is a finding on a cell, the later rules leave it out.
    """
    evidence.read_all()
    kl = list(_other_kl(evidence))  # may be wrong although the weights are right
    found: dict[CellRef, Finding] = {}
    rules: list[Rule] = [
        _same_weights,
        _too_near,
        _too_good,
        _recovered,
        _not_its_log_likelihoods,
    ]
    for rule in rules:
        for finding in rule(evidence):
            found.setdefault(finding.cell, finding)
        evidence = replace(evidence, cells=[cell for cell in evidence.cells if cell.cell not in found])
    return [*found.values(), *(own for own in kl if own.cell not in found)]


def _same_weights(evidence: Evidence) -> Iterator[Finding]:
    """Two cells of one family whose documents are equal to the last bit: one of them was not measured.

    The suspicious one is the one that differs from the baseline; if that does not decide, the one with fewer bits, or
    the later draw of calibration. A cell that equals a baseline cell with fewer bits is not suspicious: there the
    baseline is wrong.
    """
    known: set[CellRef] = set()  # in a folder full of copies, comparing every pair would take minutes
    for cell, other in _sharing_a_document(evidence.cells, evidence.cells):
        narrow, wide = sorted((cell, other), key=lambda c: (c.cell.bits, -(c.cell.draw or 0)))
        if narrow.cell not in known and (found := _equal_task(narrow, wide)):
            forged, real = (wide, narrow) if _as_in(evidence.references, narrow, found.task) else (narrow, wide)
            known.add(forged.cell)
            yield Finding("same_weights", (forged.cell, real.cell), _measured_twice(found, real.cell.name))
    for cell, other in _sharing_a_document(evidence.cells, evidence.references):
        if cell.cell.bits <= other.cell.bits and (found := _equal_task(cell, other)):
            message = _measured_twice(found, f"the baseline's {other.cell.name}")
            yield Finding("same_weights", (cell.cell,), message)


def _sharing_a_document(
    cells: Sequence[MeasuredCell], others: Sequence[MeasuredCell]
) -> list[tuple[MeasuredCell, MeasuredCell]]:
    """The pairs of different cells of one family that have equal log-likelihoods in one of a few documents.

    Only a few documents, because comparing all documents of a hundred cells takes many seconds, and hardly any pair is
    equal in one.
    """
    known: dict[Any, list[int]] = {}
    for i, other in enumerate(others):
        for probe in other.probes:
            known.setdefault(probe, []).append(i)
    pairs = {(i, j) for i, cell in enumerate(cells) for probe in cell.probes for j in known.get(probe, ())}
    if others is cells:
        pairs = {(i, j) for i, j in pairs if i < j}
    found = [(cells[i], others[j]) for i, j in sorted(pairs)]
    return [(a, b) for a, b in found if a.cell.name != b.cell.name and not _may_be_equal(a, b)]


def _may_be_equal(a: MeasuredCell, b: MeasuredCell) -> bool:
    """Whether two cells have the same weights by what they say: of one quantization, checkpoint and calibration."""
    same_model = a.model == b.model or a.source == b.source
    return a.base == b.base and same_model and a.what.calibration == b.what.calibration


@dataclass(frozen=True)
class _EqualTask:
    """A task in which two cells have the same log-likelihoods."""

    task: str
    equal: int
    informative: int  # of this many documents


def _measured_twice(found: _EqualTask, other: str) -> str:
    return (
        f"in {found.task} the log-likelihoods of {found.equal} of {found.informative} documents are equal to the last "
        f"bit to those of {other}: the same weights were measured."
    )


def _as_in(references: Sequence[MeasuredCell], cell: MeasuredCell, task: str) -> bool:
    """Whether the same cell of the baseline has the same log-likelihoods in the task."""
    own = [other for other in references if other.cell.name == cell.cell.name]
    return any(found.task == task for other in own for found in _equal_tasks(cell, other))


def _equal_task(cell: MeasuredCell, other: MeasuredCell) -> _EqualTask | None:
    """The first task in which two cells are equal; None if there is none."""
    return next(_equal_tasks(cell, other), None)


def _equal_tasks(cell: MeasuredCell, other: MeasuredCell) -> Iterator[_EqualTask]:
    for task, (a, b) in common_documents(cell, other).items():
        equal, informative = equal_documents(*same_width(a.answers, b.answers))
        if informative >= MIN_DOCUMENTS and equal > MAX_EQUAL * informative:
            yield _EqualTask(task, equal, informative)


def _other_kl(evidence: Evidence) -> Iterator[Finding]:
    """Cells whose KL contradicts their documents."""
    for cell, unquantized in evidence.with_unquantized():
        for task, why in cell.compare(unquantized).other_kl.items():
            yield Finding("other_kl", (cell.cell,), f"in {task} {why}")


def _not_its_log_likelihoods(evidence: Evidence) -> Iterator[Finding]:
    """Metrics that do not follow from their log-likelihoods, although they do in most cells.

    A task may define acc differently from lm-eval; then few cells agree, if any, and none is suspicious.
    """
    every = (*evidence.cells, *evidence.references)
    agreeing = Counter(key for cell in every for key, off in cell.following.items() if not off)
    differing = Counter(key for cell in every for key, off in cell.following.items() if off)
    for cell in evidence.cells:
        for (task, metric), off in cell.following.items():
            if off and agreeing[task, metric] > differing[task, metric]:
                message = f"in {task} {metric} does not follow from the log-likelihoods of {off} documents."
                yield Finding("does_not_follow", (cell.cell,), message)


def _too_near(evidence: Evidence) -> Iterator[Finding]:
    """Quantized cells that are nearer to the unquantized model, the run's or the baseline's, than their weights are."""
    known = _sensitivities(evidence.cells) | {
        (*key, "baseline"): own for key, own in _sensitivities(evidence.references).items()
    }
    for cell, unquantized in _with_unquantized(evidence):
        beside = [own for (model, label, *_), own in known.items() if model == cell.model and label != cell.cell.label]
        compared = cell.compare(unquantized)
        found = plausible.too_wide(compared.sensitivities, () if cell.what.parts else beside, compared.pages)
        if found:
            where = f"in {some(found.tasks)} its" if found.tasks else "its"
            alone = found.beside == "nothing"
            moved = f"by {significant(found.found)} times it" if alone else f"{significant(found.found)} times as far"
            usual = "in correct cells" if alone else "beside the model's other cells"
            message = (
                f"{where} log-likelihoods are too close to the unquantized model's: for the audit's relative weight "
                f"error ({significant(cell.weight_error or 0.0)}) they moved {moved}; {usual} it is at least "
                f"{significant(found.limit)}. Were weights with more bits measured?"
            )
            yield Finding("too_near", (cell.cell,), message)


def _with_unquantized(evidence: Evidence) -> Iterator[tuple[MeasuredCell, MeasuredCell]]:
    """Each quantized cell with the unquantized models of the run and of its baseline."""
    for models in evidence.unquantized:
        for cell in evidence.cells:
            if cell.is_quantized and cell.weight_error and cell.model in models:
                yield cell, models[cell.model]


def _sensitivities(cells: Sequence[MeasuredCell]) -> dict[tuple[tuple[str, str], str], dict[str, float]]:
    """By model and label: the sensitivities by task, the median over draws, of cells of which only weights changed."""
    found: dict[tuple[tuple[str, str], str], dict[str, list[float]]] = {}
    for cell, unquantized in Evidence(cells).with_unquantized():
        if not cell.what.parts:
            for task, own in cell.compare(unquantized).sensitivities.items():
                found.setdefault((cell.model, cell.cell.label), {}).setdefault(task, []).append(own)
    return {key: {task: float(np.median(values)) for task, values in own.items()} for key, own in found.items()}


def _too_good(evidence: Evidence) -> Iterator[Finding]:
    """Quantized cells that are significantly better than the unquantized model."""
    for cell, unquantized in evidence.with_unquantized():
        for task, gain in cell.compare(unquantized).gains.items():
            mean, error = gain.mean, gain.error
            if mean > MAX_GAIN and mean > SURE_T * error:
                message = (
                    f"in {task} it is better than the unquantized model by {significant(mean)} {gain.unit} "
                    f"(standard error {significant(error)}); the limit is {MAX_GAIN:g}, and correct cells gain at most "
                    "a fifth of it."
                )
                yield Finding("too_good", (cell.cell,), message)


def _recovered(evidence: Evidence) -> Iterator[Finding]:
    """Cells that have almost none of the damage that the same cell has in the baseline."""
    damages = {
        (cell.cell.name, cell.what.checkpoint): cell.compare(unquantized).damages
        for cell, unquantized in Evidence(evidence.references).with_unquantized()
    }
    for cell, unquantized in evidence.with_unquantized():
        then, now = damages.get((cell.cell.name, cell.what.checkpoint), {}), cell.compare(unquantized).damages
        large = [t for t, d in then.items() if t in now and d.mean > max(LARGE_DAMAGE, SURE_T * d.error)]
        before, after = sum(then[task].mean for task in large), sum(now[task].mean for task in large)
        error = math.sqrt(sum(now[task].error ** 2 for task in large))
        if large and after + 2 * error < before / MAX_RECOVERY:
            message = (
                f"quantization costs it {after:.3f} nats per decision (sum over {', '.join(large)}), but {before:.3f} "
                f"in the baseline. One bit more would leave at least 1/{MAX_RECOVERY:.0f} of that."
            )
            yield Finding("recovered", (cell.cell,), message)
