"""What the documents of recorded cells say about the weights that were measured: the evidence for the rules on weights.

Imports neither torch nor pandas: the gate runs it.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from qbench.identity import What
from qbench.numbers import significant
from qbench.records import plausible
from qbench.records.audit import UNQUANTIZED, Audit
from qbench.records.documents import Answers, TaskDocuments, Values, is_log_likelihood, pairing
from qbench.records.metrics import KL
from qbench.records.samples import Floats
from qbench.records.schema import CellRef, Divergence
from qbench.records.store import StoredRecord

# Log-likelihoods nearer to 0 coincide by chance: for a sure answer all models give -0.0 or -1.2e-7.
INFORMATIVE = 0.01
# At least this many documents must have informative values.
MIN_DOCUMENTS = 8
ANSWERS = ("acc", "acc_norm", "exact_match")
MIN_NATS = -math.log(100)  # per decision: a perplexity of 100


@dataclass(frozen=True)
class _Mean:
    """A mean over documents: what quantization costs or gains."""

    mean: float
    error: float  # standard error, of paired documents
    unit: str = "nats per decision"


@dataclass(frozen=True)
class _Comparison:
    """A quantized cell next to the unquantized model, by task; only tasks with enough documents in common."""

    sensitivities: Mapping[str, float]  # how far log-likelihoods moved, per unit of the audit's weight error
    gains: Mapping[str, _Mean]
    damages: Mapping[str, _Mean]
    other_kl: Mapping[str, str]  # why KL cannot be of these documents
    pages: Collection[str]  # tasks with KL


@dataclass(frozen=True)
class MeasuredCell:
    """A finished cell with its measurements."""

    cell: CellRef
    what: What  # was measured, by its identity
    weight_error: float | None  # ‖ŵ - w‖ / ‖w‖ by its audit; None without one
    read: Callable[[], Mapping[str, TaskDocuments]]  # its documents
    divergences: Mapping[str, Divergence] = field(default_factory=dict)  # by task
    same_as: str = ""  # the label of a cell that this one may equal, such as one without masked heads
    compared: dict[int, "_Comparison"] = field(default_factory=dict, compare=False, repr=False)  # by id of the other

    @classmethod
    def of(cls, stored: StoredRecord) -> "MeasuredCell":
        """A record's cell."""
        record = stored.record
        audit, divergences = record.audit, {own.task: own for own in record.divergences}
        error, same_as = (audit.relative_error, _same_as(audit)) if audit else (None, "")
        return cls(record.cell, record.identity.what, error, lambda: stored.documents, divergences, same_as)

    @property
    def documents(self) -> Mapping[str, TaskDocuments]:
        """Its documents by task; read again if other cells were read since."""
        return self.read()

    @cached_property
    def probes(self) -> "set[int]":
        """Hashes of family, task, document and log-likelihoods, of the few documents whose keys come first."""
        found = set()
        for task, documents in self.documents.items():
            contents, scores = documents.keys.contents, documents.answers.loglikelihoods
            rows = documents.keys.sample
            for row in rows[_informative(scores[rows]).any(axis=1)]:
                own = scores[row][~np.isnan(scores[row])]  # cells may be padded to different widths
                found.add(hash((self.cell.family, task, contents[row].item(), own.tobytes())))
        return found

    @cached_property
    def following(self) -> "dict[tuple[str, str], int]":
        """By task and metric: in how many documents it does not follow from the log-likelihoods."""
        return _following(self.documents)

    def compare(self, unquantized: "MeasuredCell") -> "_Comparison":
        """This cell next to the unquantized model; computed once."""
        if id(unquantized) not in self.compared:
            self.compared[id(unquantized)] = _comparison(self, unquantized)
        return self.compared[id(unquantized)]

    @property
    def base(self) -> str:
        """Its label without the parts that may change nothing."""
        return self.same_as or self.cell.label

    @property
    def model(self) -> tuple[str, str]:
        """The model that is quantized, in any run."""
        return self.cell.family, self.cell.attention

    @property
    def source(self) -> tuple[str, str]:
        """The checkpoint and how it runs: equal for two variants of a family that are one checkpoint."""
        return self.what.checkpoint, self.what.attention

    @property
    def is_quantized(self) -> bool:
        """Whether its name says that it is quantized."""
        return self.cell.label != UNQUANTIZED


@dataclass(frozen=True)
class Evidence:
    """The cells to judge, and those of a baseline."""

    cells: Sequence[MeasuredCell]
    references: Sequence[MeasuredCell] = ()

    @classmethod
    def of(cls, records: Sequence[StoredRecord], references: Sequence[StoredRecord] = ()) -> "Evidence":
        """Of the finished records of a folder and of its baseline."""
        cells, others = (
            [MeasuredCell.of(own) for own in side if own.record.state == "done" and own.has_samples]
            for side in (records, references)
        )
        return cls(cells, others)

    @cached_property
    def unquantized(self) -> "list[dict[tuple[str, str], MeasuredCell]]":
        """The unquantized models by family and variant: of the run, of its baseline."""
        return [{own.model: own for own in side if not own.is_quantized} for side in (self.cells, self.references)]

    def with_unquantized(self) -> Iterator[tuple[MeasuredCell, MeasuredCell]]:
        """Each quantized cell with the unquantized model of the same run."""
        for cell in self.cells:
            if cell.is_quantized and (found := self.unquantized[0].get(cell.model)):
                yield cell, found

    @cached_property
    def _by_name(self) -> "dict[str, list[tuple[MeasuredCell, list[dict[tuple[str, str], MeasuredCell]]]]]":
        """The cells of each name, with the unquantized models to compare them with."""
        found: dict[str, list[Any]] = {}
        for cells, against in ((self.cells, self.unquantized), (self.references, self.unquantized[1:])):
            for cell in cells:
                found.setdefault(cell.cell.name, []).append((cell, against))
        return found

    @np.errstate(invalid="ignore")  # -inf - -inf is NaN; such documents are ignored
    def read(self, name: str) -> None:
        """Compute what the rules need of a cell's documents, in the run and in its baseline: the results are small."""
        for cell, against in self._by_name.get(name, []):
            _ = cell.probes, cell.following
            for models in against if cell.is_quantized else ():
                if cell.model in models:
                    cell.compare(models[cell.model])

    def read_all(self) -> None:
        """The same for all cells."""
        for name in self._by_name:
            self.read(name)


def _same_as(audit: Audit) -> str:
    """The label of an audit without the parts that may change nothing, such as masked heads."""
    return "-".join([audit.weight_label, *(part.label for part in audit.parts if not part.may_change_nothing)])


def _comparison(cell: MeasuredCell, unquantized: MeasuredCell) -> _Comparison:
    sensitivities, gains, damages, other_kl, pages = {}, {}, {}, {}, []
    for task, (after, before) in common_documents(cell, unquantized).items():
        kl, moved = after.metrics.get(KL), None
        if kl is not None:
            pages.append(task)
            moved = plausible.page_sensitivity(_kl(kl), cell.weight_error or 0.0)
            if why := _other_kl(cell, unquantized, task, after, before):
                other_kl[task], moved = why, None
        elif not after.pages:
            then, now = same_width(before.answers, after.answers)
            moved = plausible.sensitivity(now, then, cell.weight_error or 0.0)
        if moved is not None:
            sensitivities[task] = moved
        gain, unit = _gain(after, before)
        if len(gain) >= MIN_DOCUMENTS:
            gains[task] = _mean(gain, unit)
        lost = _nats(before) - _nats(after)
        lost = lost[np.isfinite(lost)]
        if len(lost) >= MIN_DOCUMENTS:
            damages[task] = _mean(lost)
    return _Comparison(sensitivities, gains, damages, other_kl, pages)


def _kl(values: Values) -> float:
    known = values.known
    return float(known.values.sum() / known.weights.sum())


def _other_kl(
    cell: MeasuredCell, unquantized: MeasuredCell, task: str, after: TaskDocuments, before: TaskDocuments
) -> str:
    """Why KL cannot be of these documents and weights; empty if it can."""
    kl, tokens = _kl(after.metrics[KL]), np.nansum(after.answers.tokens, axis=1)
    change = after.answers.loglikelihoods[:, 0] - before.answers.loglikelihoods[:, 0]
    known = np.isfinite(change) & (tokens > 0)
    own, other = cell.divergences.get(task), unquantized.divergences.get(task)
    size = f"KL is {significant(kl)} nats per token"
    if plausible.kl_is_none(kl):
        changed = (cell.weight_error or 0.0) > plausible.LOSSLESS
        return f"{size}: that of a model from itself." if changed else ""
    if own and plausible.kl_below_change(kl, own.rms_change):
        return f"{size}, but the tokens' probabilities moved more than this allows ({significant(own.rms_change)})."
    if plausible.kl_contradicts_pages(kl, change[known], tokens[known]):
        return f"{size}, which contradicts the change of the log-likelihoods of the same pages."
    if own and other and plausible.other_reference(own.nats_before, [other.nats_before], cell.what.dtype):
        return (
            f"KL was measured from a model that has {significant(own.nats_before)} nats per token; the unquantized "
            f"model has {significant(other.nats_before)}."
        )
    return ""


def _nats(documents: TaskDocuments) -> Floats:
    """Nats per decision: of the right choice, of the target, or of a page per word."""
    return documents.decisions.values / documents.decisions.weights


def _mean(values: Floats, unit: str = "nats per decision") -> _Mean:
    return _Mean(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values)), unit)


def _gain(after: TaskDocuments, before: TaskDocuments) -> tuple[Floats, str]:
    """How much each document improved, and the unit.

    The unit is answers if there are any: noise makes a model less certain, so it gains nats where it was certain and
    wrong. Otherwise it is nats per word or target, if the model knows the text: noise also gives nats to one that does
    not.
    """
    for name in ANSWERS:
        if name in after.metrics and np.isfinite(after.metrics[name].values).any():
            gain = after.metrics[name].values - (before.metrics[name].values if name in before.metrics else np.nan)
            return gain[np.isfinite(gain)], "right answers per document"
    nats = _nats(before)
    gain = _nats(after) - nats
    known = np.nanmean(nats) > MIN_NATS if np.isfinite(nats).any() else False
    return gain[np.isfinite(gain)] if known else np.empty(0), "nats per decision"


def common_documents(a: MeasuredCell, b: MeasuredCell) -> dict[str, tuple[TaskDocuments, TaskDocuments]]:
    """The documents that two cells share, task by task and in one order."""
    found = {}
    for task, own in a.documents.items():
        if other := b.documents.get(task):
            one, two = pairing([own.keys, other.keys]).of([own, other])
            found[task] = one, two
    return found


def same_width(a: Answers, b: Answers) -> tuple[Floats, Floats]:
    """The log-likelihoods of the choices that both have."""
    choices = min(a.loglikelihoods.shape[1], b.loglikelihoods.shape[1])
    return a.loglikelihoods[:, :choices], b.loglikelihoods[:, :choices]


def equal_documents(a: Floats, b: Floats) -> tuple[int, int]:
    """How many documents have only equal values, and how many have informative ones."""
    informative = _informative(a) & _informative(b)
    counted = informative.any(axis=1)
    equal = ((a == b) | ~informative).all(axis=1)
    return int((equal & counted).sum()), int(counted.sum())


def _following(tasks: Mapping[str, TaskDocuments]) -> dict[tuple[str, str], int]:
    """By task and metric: how many documents' values do not follow from their log-likelihoods."""
    found = {}
    for task, documents in tasks.items():
        for metric, expected in _expected(documents).items():
            given = documents.metrics[metric].values
            counted = ~np.isnan(given)
            if counted.sum() >= MIN_DOCUMENTS:
                found[task, metric] = int((counted & (given != expected)).sum())  # NaN differs
    return found


def _expected(documents: TaskDocuments) -> dict[str, Floats]:
    """lm-eval's metrics computed from the log-likelihoods of the choices, of the target or of the page."""
    answers = documents.answers
    if not answers.loglikelihoods.shape[1]:
        return {}
    has_choices = ~np.isnan(answers.gold).all(axis=1)
    found: dict[str, Floats] = {}
    if has_choices.all():
        width = min(answers.loglikelihoods.shape[1], answers.characters.shape[1])
        values, lengths = answers.loglikelihoods[:, :width], answers.characters[:, :width]
        # lm-eval takes the first of equal ones; padding is never chosen.
        within = np.where(np.isnan(lengths), -np.inf, np.nan_to_num(values, nan=-np.inf))
        by_length = np.where(np.isnan(lengths), -np.inf, within / np.where(lengths > 0, lengths, 1.0))
        for name, ranked in (("acc", within), ("acc_norm", by_length)):
            found[name] = (ranked.argmax(1)[:, None] == answers.gold).any(1).astype(np.float64)
    elif not has_choices.any():
        found = {name: answers.loglikelihoods[:, 0] for name in documents.metrics if is_log_likelihood(name)}
    return {name: column for name, column in found.items() if name in documents.metrics}


def _informative(values: Floats) -> np.ndarray:
    return np.isfinite(values) & (np.abs(values) > INFORMATIVE)
