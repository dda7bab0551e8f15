"""What tables call metrics and tasks, and in which order they show them."""

from collections.abc import Iterable
from dataclasses import dataclass

from qbench.records.metrics import Better, base_name, facts_of

# lm-eval's `perplexity` is of each document's target (lambada's last word), unlike those by word or byte of a page.
METRIC_NAMES = {"perplexity": "Target Perplexity", "kl": "KL, nats/token", "": "all"}
TASK_NAMES = {"lambada_openai": "Lambada", "": "All tasks"}
METRIC_ORDER = ("acc_norm", "acc", "perplexity", "word_perplexity")  # the paper's
# The same sum of log-likelihoods as word_perplexity on another scale: in the CSV, but not in tables.
SAME_AS_WORD_PERPLEXITY = ("byte_perplexity", "bits_per_byte")


@dataclass(frozen=True)
class Measure:
    """What a score is of."""

    task: str
    metric: str
    better: Better | None  # None if it is not known


def measure(task: str, metric: str, better: Better | None) -> Measure:
    """A Measure; if no direction is given it is looked up."""
    facts = facts_of(metric)
    return Measure(task, metric, better or (facts.better if facts else None))


def metric_name(measure: Measure) -> str:
    """The metric with its better direction: Acc Norm ↑."""
    arrow = {"higher": " ↑", "lower": " ↓", None: ""}[measure.better]
    name, _, filter_name = measure.metric.partition(",")
    return METRIC_NAMES.get(name, _title(name)) + (f" ({filter_name})" if filter_name else "") + arrow


def task_name(task: str) -> str:
    """The task as papers write it: Arc Easy."""
    return TASK_NAMES.get(task, _title(task))


def in_order(measures: Iterable[Measure]) -> list[Measure]:
    """Tasks in their order, and within each the metrics in the paper's order."""
    known = list(dict.fromkeys(measures))
    tasks = list(dict.fromkeys(m.task for m in known))
    rank = {metric: i for i, metric in enumerate(METRIC_ORDER)}
    return sorted(known, key=lambda m: (tasks.index(m.task), rank.get(base_name(m.metric), len(METRIC_ORDER))))


def in_tables(measures: Iterable[Measure]) -> list[Measure]:
    """The measures that tables for people show."""
    known = list(measures)
    tasks = {m.task for m in known if m.metric == "word_perplexity"}
    return [m for m in known if not (m.task in tasks and m.metric in SAME_AS_WORD_PERPLEXITY)]


def first_of_each_task(measures: Iterable[Measure]) -> list[Measure]:
    """One measure per task: the first in the paper's order."""
    first: dict[str, Measure] = {}
    for m in in_order(measures):
        first.setdefault(m.task, m)
    return list(first.values())


def _title(name: str) -> str:
    return name.replace("_", " ").title()
