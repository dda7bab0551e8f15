"""Evaluation: lm-eval's requests, filters, metrics and aggregations around any of its models."""

import hashlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.model import LM
from lm_eval.api.registry import AGGREGATION_REGISTRY
from lm_eval.api.task import Task
from lm_eval.defaults import DEFAULT_OTHER_SEED

from qbench.errors import some
from qbench.evaluate.requests import Document, build_documents
from qbench.evaluate.stderr import standard_error
from qbench.progress import Part, working_on
from qbench.records.samples import WEIGHT, to_frame

WEIGHTED = ("weighted_perplexity", "bits_per_byte")  # aggregations of (log-likelihood, words or bytes)


class EvaluationError(ValueError):
    """A model's answers are not valid scores, explained in a sentence."""


@dataclass(frozen=True)
class Metric:
    """One number of one task, by lm-eval's name."""

    task: str
    name: str
    value: float
    stderr: float | None  # None for a single document, or if it is not defined
    better: Literal["higher", "lower"] | None  # None if the task does not say
    aggregation: str  # how documents' values are combined: lm-eval's name, as in samples.AGGREGATIONS
    documents: int


@dataclass(frozen=True)
class Evaluation:
    """What a model scored: the metrics, and the samples, one row per document, that they are computed from."""

    metrics: list[Metric]
    samples: pd.DataFrame


def evaluate(
    lm: LM,
    tasks: Mapping[str, Task],
    limit: int | Mapping[str, int] | None = None,
    seed: int = DEFAULT_OTHER_SEED,
) -> Evaluation:
    """Score a model on tasks from load_tasks.

    limit: take only the first documents of each task, or by task name. seed: decides the few-shot examples.
    """
    limits = limit if isinstance(limit, Mapping) else dict.fromkeys(tasks, limit)
    documents = {name: build_documents(task, limits.get(name), seed) for name, task in tasks.items()}
    requests = [request for found in documents.values() for document in found for request in document.requests]
    tokens = _answer(lm, requests)
    metrics: list[Metric] = []
    rows: list[dict[str, Any]] = []
    for name, task in tasks.items():
        task.apply_filters()
        values = [_values(task, document) for document in documents[name]]
        aggregations = _aggregations(task, values)
        metrics += [_metric(name, task, metric, function, values) for metric, function in aggregations.items()]
        for document, own in zip(documents[name], values, strict=True):
            columns = {k: v for metric, value in own.items() for k, v in _columns(metric, value, aggregations)}
            rows.append({"task": name, **_sample(task, document, tokens), **columns})
    return Evaluation(metrics, to_frame(rows))


def _answer(lm: LM, requests: Sequence[Instance]) -> dict[int, int]:
    """Put the model's answers into the requests; return the scored tokens per request, if the model counts them."""
    by_type: dict[str, list[Instance]] = defaultdict(list)
    for request in requests:
        by_type[request.request_type] += [request] * (request.repeats or 1)
    counts: dict[int, int] = {}
    for part, (kind, asked) in zip(_parts(by_type), by_type.items(), strict=True):
        with working_on(part):
            answers = getattr(lm, kind)(asked)
        for request, answer in zip(asked, answers, strict=True):
            _check_finite(request, answer)
            request.resps.append(answer)
        if hasattr(lm, "count_tokens") and kind != "generate_until":
            counts |= dict(zip(map(id, asked), lm.count_tokens(asked), strict=True))
    return counts


def _parts(by_type: Mapping[str, Sequence[Instance]]) -> Iterator[Part]:
    """For progress: the tasks that each type of request is for, and their share of the text."""
    sizes = [sum(len(str(text)) for request in asked for text in request.args) for asked in by_type.values()]
    ends = list(itertools.accumulate(sizes, initial=0))
    for asked, (begin, end) in zip(by_type.values(), itertools.pairwise(ends), strict=True):
        names = dict.fromkeys(str(request.task_name) for request in asked)
        yield Part(some(list(names)), begin / max(1, ends[-1]), end / max(1, ends[-1]))


def _check_finite(request: Instance, answer: Any) -> None:
    score = answer[0] if request.request_type == "loglikelihood" else answer
    if not isinstance(score, str) and not math.isfinite(score):
        raise EvaluationError(
            f"{request.task_name}, document {request.doc_id}: the model's log-likelihood is {score}; it must be finite."
        )


def _values(task: Task, document: Document) -> dict[str, Any]:
    """A document's value of each metric; a metric after a filter other than lm-eval's default is `metric,filter`."""
    values: dict[str, Any] = {}
    for filter_name in document.requests[0].filtered_resps:
        suffix = "" if filter_name == "none" else f",{filter_name}"
        answers = [request.filtered_resps[filter_name] for request in document.requests]
        values |= {metric + suffix: value for metric, value in task.process_results(document.content, answers).items()}
    return values


def _aggregations(task: Task, values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    known = task.aggregation()
    found = dict.fromkeys(metric for own in values for metric in own)
    return {metric: known.get(metric.partition(",")[0], mean) for metric in found}  # mean: as lm-eval


def _metric(name: str, task: Task, metric: str, aggregate: Any, values: Sequence[Mapping[str, Any]]) -> Metric:
    items = [own[metric] for own in values if metric in own]
    try:
        value = float(aggregate(items))
    except OverflowError:
        raise EvaluationError(f"{name}: {metric} is too large for a float; the model is broken.") from None
    stderr = standard_error(aggregate, items)
    higher = task.higher_is_better().get(metric.partition(",")[0])
    better: Literal["higher", "lower"] | None = None if higher is None else "higher" if higher else "lower"
    return Metric(name, metric, value, stderr, better, _name(aggregate), len(items))


def _name(aggregate: Any) -> str:
    return next((name for name, known in AGGREGATION_REGISTRY.items() if known is aggregate), str(aggregate.__name__))


def _columns(metric: str, value: Any, aggregations: Mapping[str, Any]) -> list[tuple[str, float]]:
    if _name(aggregations[metric]) in WEIGHTED:
        return [(metric, float(value[0])), (metric + WEIGHT, float(value[1]))]
    # What is not a number (f1's pair of labels, a list of probabilities) follows from gold and the log-likelihoods.
    return [] if isinstance(value, tuple | list) else [(metric, float(value))]


def _sample(task: Task, document: Document, tokens: Mapping[int, int]) -> dict[str, Any]:
    """A document's row of samples, without its metrics."""
    content = json.dumps(document.content, sort_keys=True, default=str).encode()
    row: dict[str, Any] = {"doc_id": document.id, "doc_hash": hashlib.sha256(content).hexdigest()[:16]}
    row |= dict.fromkeys(("gold", "target", "response", "is_greedy", "characters", "bytes", "tokens"))
    requests = document.requests
    answers = [request.resps[0] for request in requests]
    if task.OUTPUT_TYPE == "generate_until":
        return row | {"target": str(task.doc_to_target(document.content)), "response": answers[0]}
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        row["loglikelihoods"] = answers
        texts = [requests[0].args[0]]
    else:
        row["loglikelihoods"], row["is_greedy"] = map(list, zip(*answers, strict=True))
        texts = document.choices or [requests[0].args[1]]
        row["gold"], row["target"] = document.gold, None if document.choices else texts[0]
    row["characters"], row["bytes"] = [len(text) for text in texts], [len(text.encode()) for text in texts]
    row["tokens"] = [tokens[id(request)] for request in requests] if tokens else None
    return row
