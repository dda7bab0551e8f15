"""Records made of lm-eval's output, in memory: scores as lm-eval wrote them, and the documents that prove them."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from qbench.identity import Identity, TaskIdentity, What, json_hash
from qbench.records.findings.record import ROUNDING, altered
from qbench.records.lm_eval_import.fields import LmEvalError, mapping, text_of
from qbench.records.lm_eval_import.output import ModelOutput
from qbench.records.lm_eval_import.results_file import LmEvalScore, LmEvalTask, ResultsFile
from qbench.records.lm_eval_import.samples_file import SamplesFile, read_samples_file
from qbench.records.samples import AGGREGATIONS, GROUP, WEIGHT, to_parquet
from qbench.records.schema import CellRef, Imported, ImportedTask, MetricValue, Provenance, Record
from qbench.records.store import StoredRecord

# Of an identity: what lm-eval does not write, or what its users may change between two models that they compare.
AS_EVALUATED = "as lm-eval ran it"
NANMEAN = "nanmean"  # the mean of the documents that have a value; tested if all have one
# Of its config, for provenance.
SETTINGS = ("model", "model_args", "model_dtype", "batch_size", "device", "limit", "gen_kwargs", "fewshot_seed")


def to_record(output: ModelOutput, cell: CellRef) -> StoredRecord:
    """The record of one model; an error names what does not fit together."""
    metrics: list[MetricValue] = []
    rows: list[dict[str, Any]] = []
    tasks: dict[str, ImportedTask] = {}
    for name, (file, task) in output.tasks.items():
        if task.is_group:
            metrics += [_of_group(name, score, task.documents) for score in task.scores]
            continue
        samples = read_samples_file(file.samples(name), task)
        _check_count(samples, task, file)
        metrics += [_metric(task, score, samples, file) for score in task.scores]
        rows += [document.row for document in samples.documents]
        tasks[name] = ImportedTask(
            file=str(samples.path),
            version=task.version,
            num_fewshot=task.num_fewshot,
            documents=samples.digest("doc_hash"),
            prompts=samples.digest("prompt_hash"),
            targets=samples.digest("target_hash"),
            generation=samples.generation,
        )
    imported = Imported(program="lm-eval", files=tuple(str(file.path) for file in output.files), tasks=tasks)
    identity = _identity(output, cell, tasks)
    record = Record(
        state="done",
        cell=cell,
        key=identity.key,
        identity=identity,
        metrics=tuple(metrics),
        provenance=_provenance(output),
        samples_sha256="in memory",  # of the file, once there is one
        imported=imported,
    )
    stored = StoredRecord(record, output.folder, to_parquet(rows))
    if reasons := altered(stored):
        raise LmEvalError(
            f"{output.folder}: {reasons[0].message} The results and the samples come from different evaluations."
        )
    return stored


def _check_count(samples: SamplesFile, task: LmEvalTask, file: ResultsFile) -> None:
    found = len(samples.documents)
    chosen = not task.counted and found <= max(document.row["doc_id"] for document in samples.documents)
    if task.documents is not None and found != task.documents and not chosen:
        raise LmEvalError(
            f"{samples.path} has {found} documents, but {file.path} counts {task.documents} of {task.name}; the file "
            "is truncated, or from another evaluation."
        )
    filters = {score.filter for score in task.scores}
    for document in samples.documents:
        if lacking := filters - document.filters.keys():
            line = max(document.filters.values())
            raise LmEvalError(
                f"{samples.path}, line {line}: document {document.row['doc_id']} lacks a line for the filter "
                f"{sorted(lacking)[0]}, which {file.path} has scores for."
            )


def _metric(task: LmEvalTask, score: LmEvalScore, samples: SamplesFile, file: ResultsFile) -> MetricValue:
    columns = {
        name: np.array([document.row.get(name, math.nan) for document in samples.documents])
        for name in (score.name, score.name + WEIGHT)
    }
    there = ~np.isnan(columns[score.name])
    values, weights = columns[score.name][there], columns[score.name + WEIGHT][there]
    return MetricValue(
        task=task.name,
        metric=score.name,
        value=score.value,
        stderr=score.stderr,
        better=score.better,
        aggregation=_aggregation(task, score, values, weights, len(there), f"{samples.path} and {file.path}"),
        documents=int(there.sum()) or len(samples.documents),
    )


def _aggregation(
    task: LmEvalTask, score: LmEvalScore, values: np.ndarray, weights: np.ndarray, count: int, where: str
) -> str:
    """How documents' values become the score: as the task's file or the metric says, or the mean if that is it.

    An error if the documents do not give lm-eval's score. Other ways (F1, BLEU, a function) only lm-eval can compute.
    count: of all documents, also of those without a value.
    """
    named = score.named_aggregation
    if named is None or named not in AGGREGATIONS:
        is_mean = len(values) and _close(AGGREGATIONS["mean"].value(values, np.ones(len(values))), score.value)
        if is_mean and (named is None or (named == NANMEAN and len(values) == count)):
            return "mean"
        return named if named and named.isidentifier() else "unknown"  # lm-eval writes the code of a function
    if not len(values):
        raise LmEvalError(
            f"{where}: {task.name} has {score.name}, but no line has a number in the field {score.metric!r}."
        )
    if score.is_weighted and np.isnan(weights).any():
        raise LmEvalError(
            f"{where}: {score.name} of {task.name} must be two numbers in each line, one of them a divisor."
        )
    again = AGGREGATIONS[named].value(values, weights if score.is_weighted else np.ones(len(values)))
    if not _close(again, score.value):
        raise LmEvalError(
            f"{where} come from different evaluations: {score.name} of {task.name} is {score.value:.6g}, but the "
            f"documents give {again:.6g}."
        )
    return named


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=ROUNDING, abs_tol=ROUNDING)


def _of_group(name: str, score: LmEvalScore, documents: int | None) -> MetricValue:
    return MetricValue(
        task=name,
        metric=score.name,
        value=score.value,
        stderr=score.stderr,
        better=score.better,
        aggregation=GROUP,
        documents=documents or 0,
    )


def _identity(output: ModelOutput, cell: CellRef, tasks: Mapping[str, ImportedTask]) -> Identity:
    newest = output.files[0]
    config = mapping(newest.content, "config", str(newest.path))
    pages = any(task.output_type == "loglikelihood_rolling" for _, task in output.tasks.values())
    length = newest.content.get("max_length")
    what = What(
        checkpoint=f"{output.model}@{text_of(config, 'model_sha')} ({newest.model_args})",
        tokenizer=AS_EVALUATED,
        attention=cell.attention,
        method=cell.method,
        bits=cell.bits,
        options={},
        calibration=None,
        tasks={name: TaskIdentity(_fingerprint(task), task.num_fewshot) for name, task in tasks.items()},
        dtype=AS_EVALUATED,
        execution=AS_EVALUATED,
        device=AS_EVALUATED,
        max_length=length if pages and type(length) is int else None,  # it decides the context of long pages only
        seed=0,  # what it decides is in the prompts
        batch_tokens=None,
    )
    versions = {"lm-eval": "lm_eval_version", "transformers": "transformers_version"}
    known = {name: text_of(newest.content, field) for name, field in versions.items()}
    return Identity(what=what, code=AS_EVALUATED, packages={name: own for name, own in known.items() if own})


def _fingerprint(task: ImportedTask) -> str:
    return json_hash(task.model_dump(exclude={"file", "num_fewshot"}))


def _provenance(output: ModelOutput) -> Provenance:
    newest = output.files[0]
    config = mapping(newest.content, "config", str(newest.path))
    limit = config.get("limit")
    settings = {name: _plain(config[name]) for name in SETTINGS if config.get(name) is not None}
    started, seconds = (_number(newest.content.get(name)) for name in ("date", "total_evaluation_time_seconds"))
    return Provenance(
        recipe=newest.path.name,
        resolved_recipe={"lm_eval": settings} | ({"limit": int(limit)} if limit and _is_count(limit) else {}),
        packages={"lm-eval": text_of(newest.content, "lm_eval_version") or "unknown"},
        git_commit=text_of(newest.content, "git_hash") or None,
        machine={},
        started=_time(started),
        finished=_time(started + seconds if started else 0.0),
    )


def _plain(value: Any) -> str | int | bool | list[str]:
    """A setting for a record: numbers and texts as they are."""
    if isinstance(value, Mapping):
        return [f"{key}={own}" for key, own in value.items()]
    return value if isinstance(value, bool | int | str) else str(value)


def _is_count(limit: Any) -> bool:
    """Whether a limit is a number of documents; below 1 it is a share of them."""
    return isinstance(limit, int | float) and 1 <= limit < 2**53


def _number(text: Any) -> float:
    """A number, also as text; 0 if it is not one."""
    try:
        number = float(text)
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return number if math.isfinite(number) else 0.0


def _time(seconds: float) -> str:
    """ISO 8601 in UTC; empty if it is not known."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds") if seconds else ""
    except (ValueError, OverflowError, OSError):
        return ""
