"""What is known of metrics and tasks: their names in tables, units, directions and chance."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower"]

# Means of zeros and ones: shares in records, percent in tables.
SHARES = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match")
# exp of a mean; compared on the log scale.
PERPLEXITIES = ("perplexity", "word_perplexity", "byte_perplexity", "token_perplexity")
BETTER: dict[str, Better] = {
    **dict.fromkeys(SHARES, "higher"),
    **dict.fromkeys(PERPLEXITIES, "lower"),
    "bits_per_byte": "lower",
}
# lm-eval's `perplexity` is of each document's target (lambada's last word), unlike those by word or byte of a page.
NAMES = {"perplexity": "Target Perplexity", "": "all"}
TASK_NAMES = {"lambada_openai": "Lambada", "": "All tasks"}
METHOD_NAMES = {"none": "unquantized", "bnb": "BNB", "gptq": "GPTQ", "hqq": "HQQ"}
ORDER = ("acc_norm", "acc", "perplexity", "word_perplexity")
# The same sum of log-likelihoods as word_perplexity, on another scale: in the CSV, but not in tables beside it.
SAME_AS_WORD_PERPLEXITY = ("byte_perplexity", "bits_per_byte")
# The full tasks as lm-eval has them: for published numbers, which come without their documents.
CHOICES = {"arc_easy": 4, "piqa": 2, "sciq": 4}
DOCUMENTS = {"arc_easy": 2376, "lambada_openai": 5153, "piqa": 1838, "sciq": 1000}


@dataclass(frozen=True)
class Measure:
    """What a score is of."""

    task: str
    metric: str
    better: Better | None  # None where nobody said


def measure(task: str, metric: str, better: Better | None) -> Measure:
    """A Measure; a direction that is not given is looked up."""
    return Measure(task, metric, better or BETTER.get(base(metric)))


def base(metric: str) -> str:
    """The metric without its filter: exact_match of exact_match,strict-match."""
    return metric.partition(",")[0]


def is_share(metric: str) -> bool:
    """Whether tables show the metric in percent."""
    return base(metric) in SHARES


def is_perplexity(metric: str) -> bool:
    """Whether differences of the metric are tested on the log scale."""
    return base(metric) in PERPLEXITIES


def metric_name(measure: Measure) -> str:
    """The metric with the direction that is better: Acc Norm ↑."""
    arrow = {"higher": " ↑", "lower": " ↓", None: ""}[measure.better]
    name, _, filter_name = measure.metric.partition(",")
    return NAMES.get(name, _title(name)) + (f" ({filter_name})" if filter_name else "") + arrow


def task_name(task: str) -> str:
    """The task as papers write it: Arc Easy."""
    return TASK_NAMES.get(task, _title(task))


def method_name(method: str) -> str:
    """The method as papers write it: GPTQ."""
    return METHOD_NAMES.get(method, method)


def in_order(measures: Iterable[Measure]) -> list[Measure]:
    """Tasks as they come, and within each the metrics as the paper has them."""
    known = list(dict.fromkeys(measures))
    tasks = list(dict.fromkeys(m.task for m in known))
    rank = {metric: i for i, metric in enumerate(ORDER)}
    return sorted(known, key=lambda m: (tasks.index(m.task), rank.get(base(m.metric), len(ORDER))))


def in_tables(measures: Iterable[Measure]) -> list[Measure]:
    """Those of the measures that tables for people show."""
    known = list(measures)
    tasks = {m.task for m in known if m.metric == "word_perplexity"}
    return [m for m in known if not (m.task in tasks and m.metric in SAME_AS_WORD_PERPLEXITY)]


def headlines(measures: Iterable[Measure]) -> list[Measure]:
    """One measure a task: the first as the paper orders them."""
    first: dict[str, Measure] = {}
    for m in in_order(measures):
        first.setdefault(m.task, m)
    return list(first.values())


def _title(name: str) -> str:
    return name.replace("_", " ").title()
