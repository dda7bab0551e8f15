"""One results_*.json: which model was evaluated, and its scores by task."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qbench.files import MAX_JSON_BYTES, read_content
from qbench.records.limits import MAX_COUNT, MAX_NUMBER
from qbench.records.lm_eval_import.fields import LmEvalError, finite, is_number, mapping, parse, required, text_of
from qbench.records.metrics import facts_of
from qbench.records.samples import AGGREGATIONS, FIELDS, WEIGHT

# The end of the names of all files that one evaluation writes: 2026-11-18T10-50-44.074984, or with colons.
DATE = re.compile(r"_(\d{4}-\d\d-\d\dT\d\d[-:]\d\d[-:]\d\d(?:\.\d+)?)$")
STDERR = "_stderr"
NO_SCORES = {"bypass", "sample_len", "samples"}  # what --predict_only has instead of metrics, and counts of documents


@dataclass(frozen=True)
class LmEvalScore:
    """One number as lm-eval wrote it."""

    metric: str
    filter: str  # "none" if nothing was filtered
    value: float
    stderr: float | None
    better: Literal["higher", "lower"] | None
    aggregation: str | None  # as the task's file names it

    @property
    def named_aggregation(self) -> str | None:
        """The one that the task's file names, or else the metric's own; None if neither is known."""
        facts = facts_of(self.metric)
        return self.aggregation or (facts.aggregation if facts else None)

    @property
    def is_weighted(self) -> bool:
        """Whether a document has two numbers, of which the second is a divisor. F1's two are labels."""
        return self.named_aggregation in AGGREGATIONS and AGGREGATIONS[self.named_aggregation].weighted

    @property
    def may_lack_values(self) -> bool:
        """Whether documents may have NaN: nanmean and functions of a task's own leave them out."""
        return self.named_aggregation is not None and self.named_aggregation not in AGGREGATIONS

    @property
    def name(self) -> str:
        """The metric as records name it: exact_match,strict-match, or acc without a filter."""
        return self.metric if self.filter == "none" else f"{self.metric},{self.filter}"


@dataclass(frozen=True)
class LmEvalTask:
    """What a results file says about a task, or about a group of tasks, which has no documents."""

    name: str
    scores: tuple[LmEvalScore, ...]
    version: str
    num_fewshot: int
    output_type: str  # empty if the file does not say
    target_delimiter: str
    documents: int | None  # how many were evaluated; None if the file does not say
    counted: bool  # whether that is a count; older releases compute it from --limit, whatever --samples chose
    is_group: bool


@dataclass(frozen=True)
class ResultsFile:
    """A results file that was read."""

    path: Path
    date: str  # as in the names of its sample files; empty if the name has none
    model: str  # as it was named to lm-eval
    model_args: str
    tasks: tuple[LmEvalTask, ...]
    content: Mapping[str, Any]  # all of it, for provenance

    def samples(self, task: str) -> Path:
        """Where the per-document results of a task are."""
        return self.path.parent / (f"samples_{task}_{self.date}.jsonl" if self.date else f"samples_{task}.jsonl")


def is_results_file(path: Path) -> bool:
    """Whether the name is a results file's: results_<date>.json, or <name>_<date>.json if --output_path was a file."""
    return path.suffix == ".json" and (path.stem.startswith("results") or bool(DATE.search(path.stem)))


def read_results_file(path: Path) -> ResultsFile:
    """Read a results file; an error if it is not one, or if it has no scores."""
    where = str(path)
    content = parse(read_content(path, LmEvalError, MAX_JSON_BYTES), where)
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise LmEvalError(f"{where} has a character that no file can hold (a lone surrogate).") from None
    results = required(content, "results", dict, where)
    groups = _groups(content, where)
    tasks = [_task(content, name, results, name in groups, where) for name in results]
    if not any(task.scores for task in tasks):
        raise LmEvalError(f"{where} has no scores; lm-eval writes none with --predict_only.")
    date = DATE.search(path.stem)
    return ResultsFile(
        path=path,
        date=date[1] if date else "",
        model=_model(content, path),
        model_args=_arguments(mapping(content, "config", where).get("model_args")),
        tasks=tuple(task for task in tasks if task.scores),
        content=content,
    )


def _groups(content: Mapping[str, Any], where: str) -> set[str]:
    """The names in `results` that are groups: they have subtasks, and no config."""
    subtasks = mapping(content, "group_subtasks", where)
    configs = mapping(content, "configs", where)
    named = {*mapping(content, "groups", where), *(name for name, own in subtasks.items() if own)}
    return {name for name in named if name not in configs}


def _task(content: Mapping[str, Any], name: str, results: Mapping[str, Any], is_group: bool, where: str) -> LmEvalTask:
    own = required(results, name, dict, f"{where}: results")
    config = mapping(mapping(content, "configs", where), name, f"{where}: configs")
    better = mapping(mapping(content, "higher_is_better", where), name, f"{where}: higher_is_better")
    listed = config["metric_list"] if isinstance(config.get("metric_list"), list) else []
    named = {m["metric"]: m for m in listed if isinstance(m, dict) and isinstance(m.get("metric"), str)}
    with_filters = any("," in key for key in own)  # then all other numbers are counts, such as sample_len
    scores = []
    for key, value in own.items():
        metric, comma, filter_name = key.partition(",")
        if metric.endswith(STDERR) or metric in NO_SCORES or not is_number(value) or (with_filters and not comma):
            continue
        if metric in FIELDS.names or metric.endswith(WEIGHT):
            raise LmEvalError(f"{where}: results.{name} has a metric called {metric}, which is the name of a field.")
        error = own.get(f"{metric}{STDERR},{filter_name}" if filter_name else f"{metric}{STDERR}")
        higher = better.get(metric, named.get(metric, {}).get("higher_is_better"))
        aggregation = named.get(metric, {}).get("aggregation")
        scores.append(
            LmEvalScore(
                metric,
                filter_name or "none",
                finite(value, f"results.{name}.{key}", where),
                float(error) if is_number(error) and abs(error) <= MAX_NUMBER else None,
                {True: "higher", False: "lower"}.get(higher) if isinstance(higher, bool) else None,  # type: ignore[arg-type]
                aggregation if isinstance(aggregation, str) else None,
            )
        )
    shots = mapping(content, "n-shot", where).get(name, config.get("num_fewshot"))
    return LmEvalTask(
        name=name,
        scores=tuple(scores),
        version=text_of(mapping(content, "versions", where), name),
        num_fewshot=shots if type(shots) is int and shots >= 0 else 0,
        output_type=text_of(config, "output_type"),
        target_delimiter=config["target_delimiter"] if isinstance(config.get("target_delimiter"), str) else " ",
        documents=_documents(content, name, own, where),
        counted="sample_len" in own,
        is_group=is_group,
    )


def _documents(content: Mapping[str, Any], name: str, own: Mapping[str, Any], where: str) -> int | None:
    counts = mapping(mapping(content, "n-samples", where), name, f"{where}: n-samples")
    count = own.get("sample_len", counts.get("effective"))
    return count if type(count) is int and 0 <= count <= MAX_COUNT else None


def _model(content: Mapping[str, Any], path: Path) -> str:
    """The model's name: older files have it in model_args only, and some not at all."""
    if name := text_of(content, "model_name"):
        return name
    config = content.get("config")
    arguments = config.get("model_args") if isinstance(config, dict) else None
    for key in ("peft", "delta", "pretrained", "model", "path", "engine"):
        if isinstance(arguments, dict) and arguments.get(key):
            return str(arguments[key])
        if isinstance(arguments, str) and (found := re.search(rf"(?:^|,){key}=([^,]+)", arguments)):
            return found[1]
    return path.parent.name


def _arguments(given: Any) -> str:
    """model_args in one form: releases write them as a mapping or as one text."""
    pairs = (
        [f"{key}={value}" for key, value in given.items()] if isinstance(given, dict) else str(given or "").split(",")
    )
    return ",".join(sorted(pairs))
