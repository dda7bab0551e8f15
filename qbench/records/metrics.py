"""Known metrics and tasks by lm-eval's names: one entry per metric, and one per task."""

import re
from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower"]
Unit = Literal["share", "perplexity", "bits", "nats"]


@dataclass(frozen=True)
class MetricFacts:
    """What a metric means."""

    better: Better
    aggregation: str  # lm-eval's name of how the values of documents become one
    unit: Unit  # share: a mean of zeros and ones; perplexity: exp of a mean, compared on the log scale


KL = "kl"  # per token, from the unquantized model: a metric of ours, of tasks that score whole pages
METRICS = {
    "acc": MetricFacts("higher", "mean", "share"),
    "acc_norm": MetricFacts("higher", "mean", "share"),
    "acc_bytes": MetricFacts("higher", "mean", "share"),
    "acc_mutual_info": MetricFacts("higher", "mean", "share"),
    "exact_match": MetricFacts("higher", "mean", "share"),
    "perplexity": MetricFacts("lower", "perplexity", "perplexity"),
    "word_perplexity": MetricFacts("lower", "weighted_perplexity", "perplexity"),
    "byte_perplexity": MetricFacts("lower", "weighted_perplexity", "perplexity"),
    "token_perplexity": MetricFacts("lower", "weighted_perplexity", "perplexity"),
    "bits_per_byte": MetricFacts("lower", "bits_per_byte", "bits"),
    KL: MetricFacts("lower", "weighted_mean", "nats"),
}
PASS_AT_K = MetricFacts("higher", "mean", "share")  # of generated code: pass@1, pass@10; lm-eval does not list them


@dataclass(frozen=True)
class TaskFacts:
    """A whole task as in lm-eval: for published numbers, which come without documents."""

    documents: int
    choices: int | None = None  # None if there is nothing to choose from


TASKS = {
    "arc_easy": TaskFacts(2376, choices=4),
    "lambada_openai": TaskFacts(5153),
    "piqa": TaskFacts(1838, choices=2),
    "sciq": TaskFacts(1000, choices=4),
}

PASSKEY = "passkey"  # one task per length: passkey_512


def passkey_task(length: int) -> str:
    """The task of one length in tokens."""
    return f"{PASSKEY}_{length}"


def passkey_length(task: str) -> int | None:
    """The length in tokens of a passkey task; None for all other tasks."""
    name, _, length = task.rpartition("_")
    return int(length) if name == PASSKEY and length.isdecimal() else None


def base_name(metric: str) -> str:
    """The metric without its filter: exact_match of exact_match,strict-match."""
    return metric.partition(",")[0]


def facts_of(metric: str) -> MetricFacts | None:
    """What is known about a metric, with or without a filter; None if nothing."""
    name = base_name(metric)
    return PASS_AT_K if re.fullmatch(r"pass@\d+", name) else METRICS.get(name)


def is_share(metric: str) -> bool:
    """Whether the metric is a share of documents, which tables show in percent."""
    facts = facts_of(metric)
    return facts is not None and facts.unit == "share"


def is_nats(metric: str) -> bool:
    """Whether the metric is a mean of nats, whose size is not known in advance."""
    facts = facts_of(metric)
    return facts is not None and facts.unit == "nats"


def is_perplexity(metric: str) -> bool:
    """Whether differences of the metric are tested on the log scale."""
    facts = facts_of(metric)
    return facts is not None and facts.unit == "perplexity"
