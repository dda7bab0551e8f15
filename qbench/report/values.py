"""The values of a record's documents as arrays; the only module of reports that reads samples."""

import hashlib
from dataclasses import dataclass
from functools import cache

import numpy as np

from qbench.records.kept import shared
from qbench.records.samples import WEIGHT, as_floats, lists, metric_columns, rows_of_tasks
from qbench.records.store import StoredRecord

PER_WORD = "word_perplexity"  # its values are log-likelihoods of pages, and its weights their words


@dataclass(frozen=True)
class Values:
    """A metric's value for each document, and the weights: the score is Σ values / Σ weights."""

    values: np.ndarray  # [documents]
    weights: np.ndarray  # [documents]; 0 if the document has no value


@dataclass(frozen=True)
class TaskDocuments:
    """The documents of one task in the order of their ids."""

    fingerprint: str  # of all ids and contents: equal if two cells saw the same documents
    count: int
    metrics: dict[str, Values]
    decisions: Values | None  # in nats: log-probabilities of what is right (docs/statistics.md); None if there are none
    chance: float | None  # the accuracy of guessing, in percent; None if there is nothing to choose from


def read_documents(stored: StoredRecord) -> dict[str, TaskDocuments]:
    """The documents of each task of a record; read once."""
    if "documents" not in stored.found:
        stored.found["documents"] = _read_documents(stored)
    return stored.found["documents"]


def _read_documents(stored: StoredRecord) -> dict[str, TaskDocuments]:
    table = stored.table
    golds, (scores, choices) = lists(table["gold"])[1], lists(table["loglikelihoods"])
    columns = _Columns(
        ids=as_floats(table["doc_id"]).astype(np.int64),
        hashes=np.array(table["doc_hash"].to_pylist(), dtype=object),
        choices=np.where(golds > 0, choices, np.nan),
        logprobs=np.where(golds > 0, stored.gold_logprobs, _only_scores(scores, choices)),
        metrics=metric_columns(table),
    )
    return {name: columns.task(rows) for name, rows in rows_of_tasks(table).items()}


@dataclass(frozen=True)
class _Columns:
    """The columns of a file, [rows] each."""

    ids: np.ndarray
    hashes: np.ndarray
    choices: np.ndarray  # how many; NaN if there is nothing to choose from
    logprobs: np.ndarray  # of the right choice among the choices, or of the target
    metrics: dict[str, np.ndarray]

    def task(self, rows: np.ndarray) -> TaskDocuments:
        """The documents of one task."""
        rows = rows[np.argsort(self.ids[rows], kind="stable")]
        identity = self.ids[rows].tobytes() + "\n".join(map(str, self.hashes[rows])).encode()
        found = {}
        for name, column in self.metrics.items():
            values = column[rows]
            if name.endswith(WEIGHT) or (unknown := np.isnan(values)).all():
                continue
            weights = self.metrics[name + WEIGHT][rows] if name + WEIGHT in self.metrics else _ones(len(rows))
            if unknown.any():
                values, weights = np.where(unknown, 0.0, values), np.where(unknown, 0.0, weights)
            found[name] = Values(shared(values), weights)
        return TaskDocuments(
            hashlib.sha256(identity).hexdigest(),
            len(rows),
            found,
            found.get(PER_WORD) or self._decisions(rows),
            _chance(self.choices[rows]),
        )

    def _decisions(self, rows: np.ndarray) -> Values | None:
        logprobs = self.logprobs[rows]
        return Values(shared(logprobs), _ones(len(rows))) if np.isfinite(logprobs).all() else None


@cache
def _ones(count: int) -> np.ndarray:
    """One shared array: its sums over resamples are computed only once."""
    return np.ones(count)


def _only_scores(scores: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The log-likelihood of documents that have one; NaN for others."""
    starts = np.minimum(np.cumsum(counts) - counts, max(len(scores) - 1, 0))
    return np.where(counts == 1, scores[starts] if len(scores) else np.nan, np.nan)


def _chance(choices: np.ndarray) -> float | None:
    return 100 * float(np.mean(1 / choices)) if np.all(choices > 1) else None  # NaN is not
