"""The worker: load ▸ quantize ▸ audit ▸ evaluate | analyze. It knows one cell and nothing about the matrix."""

import logging
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.attention.kinds import attentions
from qbench.checkpoint.fingerprint import checkpoint_fingerprint, commit_of, tokenizer_fingerprint
from qbench.errors import InputError, is_out_of_memory
from qbench.evaluate.facts import PAGES
from qbench.identity import Identity, TaskIdentity, cache_folder, json_hash
from qbench.quantizers.options import Quantization
from qbench.recipe.cells import Cell, model_packages
from qbench.records.audit import AuditError
from qbench.records.schema import Cost, Failure, FailureKind, MetricValue, Provenance, QuantizerFacts, Record

if TYPE_CHECKING:
    from lm_eval.api.task import Task

    from qbench.evaluate.evaluation import Evaluation
    from qbench.evaluate.scorer import Scorer
    from qbench.evaluate.state_cache import StateCache
    from qbench.records.store import Samples

LOG_TAIL = 4000  # characters of a failed cell's log that go into its record

# Called with the phase and the share of it that is done, from 0 to 1.
OnProgress = Callable[[str, float, str], None]  # the phase, its share that is done, and what is being done


class ChangedError(InputError):
    """Something changed after the run was planned."""


@dataclass(frozen=True)
class Job:
    """A cell to run, its identity, and facts about the run it belongs to."""

    cell: Cell
    identity: Identity
    git_commit: str | None
    machine: dict[str, Any] = field(default_factory=dict)
    precision: dict[str, str | bool] | None = None

    @property
    def name(self) -> str:
        """The cell's name."""
        return self.cell.ref.name

    def record(self, started: str, **result: Any) -> Record:
        """The cell's record with this result."""
        recipe, wanted = self.cell.recipe, self.cell.quantization
        assert isinstance(wanted, Quantization)  # cells that are not offered have no job
        return Record(
            cell=self.cell.ref,
            key=self.identity.key,
            identity=self.identity,
            quantizer=QuantizerFacts(title=wanted.quantizer.title, calibrated=wanted.is_calibrated),
            attention_title=attentions()[self.identity.what.attention].title,
            provenance=Provenance(
                recipe=recipe.file.name,
                resolved_recipe=recipe.content(),
                packages=self.identity.packages,
                git_commit=self.git_commit,
                machine=self.machine,
                precision=self.precision,
                started=started,
                finished=now(),
            ),
            **result,
        )

    def failed(self, started: str, failure: Failure) -> Record:
        """The record of a failed cell, which has no numbers."""
        return self.record(started, state="failed", failure=failure)


class Phases:
    """The current phase, its progress, and how long each phase took."""

    def __init__(self, on_progress: OnProgress) -> None:
        self.on_progress = on_progress
        self.current: str | None = None
        self.seconds: dict[str, float] = {}
        self.tokens = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase. If it fails, it stays the current one, so the record can name it."""
        from qbench.progress import listening

        self.current = name
        self.on_progress(name, 0.0, "")
        start = time.perf_counter()
        with listening(self._heard):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def _heard(self, unit: str, steps: int, done: int, total: int | None) -> None:
        from qbench.progress import current_part

        if unit == "token":
            self.tokens += steps
        assert self.current is not None
        part = current_part()
        self.on_progress(self.current, part.share(done / total if total else 0.0), part.name)


def run_cell(job: Job, on_progress: OnProgress = lambda phase, share, doing: None) -> "tuple[Record, Samples]":
    """Run a cell. Returns a finished record with its samples, or a failed one with the reason; never raises."""
    started, phases = now(), Phases(on_progress)
    try:
        return _run(job, started, phases)
    except Exception as error:
        logging.getLogger(__name__).exception("%s failed in the phase %s", job.name, phases.current)
        return job.failed(started, failure_of(error, phases.current)), None


def failure_of(error: Exception, phase: str | None) -> Failure:
    """Turn an exception into the reason of a failed record."""
    kind: FailureKind = "error"
    if isinstance(error, AuditError):
        kind = "audit"
    elif is_out_of_memory(error):
        kind = "out-of-memory"
    text = str(error).strip()
    reason = text if isinstance(error, InputError | AuditError) else f"{type(error).__name__}: {text}"
    return Failure(kind=kind, reason=reason, phase=phase)


def with_log_tail(record: Record, log: Path) -> Record:
    """Add the end of the log to a failed record; a finished one is returned unchanged."""
    if record.failure is None or not log.exists():
        return record
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 8 * LOG_TAIL))  # progress bars may have filled it
        text = stream.read().decode(errors="replace")
    lines = [line.rpartition("\r")[2] for line in text.split("\n")]  # only the last state of a progress bar
    failure = record.failure.model_copy(update={"log_tail": "\n".join(lines)[-LOG_TAIL:]})
    return record.model_copy(update={"failure": failure})


def now() -> str:
    """The time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _run(job: Job, started: str, phases: Phases) -> "tuple[Record, Samples]":
    import torch

    from qbench.evaluate.precision import set_precision

    cell, recipe = job.cell, job.cell.recipe
    job = replace(job, machine=job.machine | {"threads": torch.get_num_threads()})
    if recipe.resolved_device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        job = replace(job, precision=set_precision())
    with phases.phase("load"):
        tokenizer = load_tokenizer(cell, job.identity)  # first: what is wrong with it is known in a second
        model = load_model(cell, job.identity)
        tasks = {} if cell.ref.measured else load_cell_tasks(cell)
    states, reference = _state_cache(job), None
    if any(task.OUTPUT_TYPE == PAGES for task in tasks.values()):
        with phases.phase("kl"):
            reference = page_reference(cell, cell_scorer(cell, model, tokenizer), tasks, cache=states)
    audit = None
    if cell.ref.measured != "sensitivity":  # sensitivity quantizes one layer at a time
        with phases.phase("quantize"):
            model, audit = quantized_for_cell(cell, model, tokenizer)
    check_unchanged(cell, job.identity)  # after everything is read: the record must describe what was read
    states.save()
    budgets = None
    if cell.ref.measured:
        from qbench.runner.analyzing import measure

        with phases.phase(cell.ref.measured):
            found, samples = measure(cell, model, tokenizer)
        result: dict[str, Any] = {cell.ref.measured: found}
    else:
        lm = cell_scorer(cell, model, tokenizer)
        evaluation, result = _scores(job, lm, tasks, reference, audit, phases)
        audit = _audit_after_scoring(cell, audit, lm)
        samples, budgets = evaluation.samples, tuple(lm.budgets)
    cost = Cost(
        seconds=phases.seconds,
        tokens=phases.tokens or None,
        tokens_per_second=phases.tokens / phases.seconds["evaluate"] if phases.tokens else None,
        peak_host_bytes=_peak_host_bytes(),
        peak_device_bytes=torch.cuda.max_memory_allocated() if recipe.resolved_device == "cuda" else None,
        weight_bytes=weight_bytes(model, audit) if audit else None,
        batch_tokens=budgets,
    )
    return job.record(started, state="done", audit=audit, cost=cost, **result), samples


def _state_cache(job: Job) -> "StateCache":
    """The hidden states that earlier cells of the checkpoint kept: of the same code, packages, machine and settings."""
    from qbench.evaluate.state_cache import StateCache

    what, machine = job.identity.what, [job.machine.get(part) for part in ("cpu", "gpus", "threads")]
    computed_by = [job.identity.code, model_packages(what.attention), machine, job.precision]
    model = [what.checkpoint, what.attention, what.dtype, what.device, job.cell.batch_tokens]
    return StateCache(cache_folder() / "states", json_hash([model, computed_by]))


def page_reference(
    cell: Cell,
    lm: "Scorer",
    tasks: Mapping[str, "Task"],
    cache: "StateCache | None" = None,
) -> Any:
    """What is kept of the unquantized model to measure KL; None if no task scores whole pages."""
    from qbench.evaluate.divergence import keep_reference, pages

    requests = pages(tasks, _limits(cell, tasks), cell.recipe.seed)
    return keep_reference(lm, requests, cache=cache) if requests else None


def _scores(
    job: Job, lm: "Scorer", tasks: dict[str, "Task"], reference: Any, audit: Any, phases: Phases
) -> tuple[Any, dict[str, Any]]:
    """Score the model; returns the evaluation, with KL if there is a reference, and the fields of the record."""
    from qbench.evaluate.divergence import check_moved, compare, with_kl

    lm.wanted = reference.counts if reference else {}
    with phases.phase("evaluate"):
        evaluation = evaluate_model(job.cell, lm, tasks, job.identity.what.tasks)
    divergences: list[Any] = []
    if reference:
        with phases.phase("kl"):
            found = compare(reference, lm.states, lm.model.lm_head)
            evaluation, divergences = with_kl(evaluation, found)
            check_moved(evaluation.metrics, audit)
    return evaluation, {"metrics": _values(evaluation.metrics), "divergences": tuple(divergences)}


def _audit_after_scoring(cell: Cell, audit: Any, lm: "Scorer") -> Any:
    from qbench.quantizers.quantize import audit_after_scoring

    assert isinstance(cell.quantization, Quantization)  # cells that are not offered have no job
    return audit_after_scoring(audit, cell.quantization, lm.read)


def _values(metrics: Sequence[Any]) -> tuple[MetricValue, ...]:
    """The metrics of an evaluation in the form that records store."""
    found = [asdict(metric) for metric in metrics]
    return tuple(MetricValue(metric=own.pop("name"), **own) for own in found)


def check_unchanged(cell: Cell, planned: Identity) -> None:
    """Raise if a file, our code or a package has changed since the run was planned, or differs on this node."""
    what = planned.what
    source = cell.calibration
    found = {
        "checkpoint": checkpoint_fingerprint(cell.location, commit_of(what.checkpoint)),
        "tokenizer": tokenizer_fingerprint(cell.tokenizer, commit_of(what.tokenizer)),
        "calibration": source.content_hash(cell.ref.draw) if source else None,
    }
    changed = [f"The {part}" for part, value in found.items() if value != getattr(what, part)]
    if what.analysis is not None and what.analysis != {"measured": cell.ref.measured, **cell.analysis_settings()}:
        changed.append("The analysis text")
    if cell.code() != planned.code:
        changed.append("qbench's code")
    if cell.packages(what.attention) != planned.packages:
        changed.append("A package version")
    if changed:
        raise ChangedError(f"{changed[0]} has changed since the run was planned; start the run again.")


def load_model(cell: Cell, identity: Identity) -> Any:
    """The cell's model, unquantized."""
    import torch

    from qbench.checkpoint.load import load_checkpoint, local_folder

    folder = local_folder(cell.location, commit_of(identity.what.checkpoint))
    dtype = getattr(torch, cell.recipe.resolved_dtype)
    return load_checkpoint(folder, identity.what.attention, cell.recipe.resolved_device, dtype)


def load_tokenizer(cell: Cell, identity: Identity) -> Any:
    """The cell's tokenizer; an error if the cell's model cannot be scored with it, before the model is loaded."""
    from qbench.checkpoint.layout import CONFIG, config_sizes, read_json
    from qbench.checkpoint.load import local_folder
    from qbench.tokenizer import check_tokenizer, check_vocabulary, load_tokenizer

    tokenizer = load_tokenizer(cell.tokenizer, commit_of(identity.what.tokenizer))
    config = local_folder(cell.location, commit_of(identity.what.checkpoint)) / CONFIG
    check = check_vocabulary if cell.ref.measured else check_tokenizer  # only scores need a token before a text
    check(tokenizer, config_sizes(read_json(config), config).vocab_size, cell.tokenizer)
    return tokenizer


def quantized_for_cell(cell: Cell, model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Quantize the model as the cell asks; returns the model and its audit."""
    from qbench.quantizers.calibration import calibration_batches
    from qbench.quantizers.quantize import quantize

    recipe, wanted = cell.recipe, cell.quantization
    assert isinstance(wanted, Quantization)  # cells that are not offered have no job
    wanted.quantizer.check_kernels(recipe.resolved_device)
    calibration = None
    if source := cell.calibration:
        longest = min(model.config.max_position_embeddings, recipe.max_length or sys.maxsize)
        calibration = calibration_batches(source, tokenizer, longest, cell.ref.draw)
    return quantize(
        model,
        wanted.method,
        wanted.bits,
        calibration=calibration,
        execution=recipe.execution,
        progress=True,
        **wanted.arguments,
    )


def load_cell_tasks(cell: Cell) -> "dict[str, Task]":
    """The recipe's tasks, except passkey, whose documents depend on the tokenizer."""
    from qbench.evaluate.tasks import load_tasks

    recipe = cell.recipe
    folders = [recipe.locate(folder) for folder in recipe.task_folders]
    return load_tasks(recipe.task_names(), recipe.task_data(), folders, recipe.shots(), recipe.trust_task_code)


def cell_scorer(cell: Cell, model: Any, tokenizer: Any) -> "Scorer":
    """The lm-eval model that scores the cell's model."""
    from qbench.evaluate.scorer import Scorer

    return Scorer(
        model,
        tokenizer,
        max_length=cell.recipe.max_length,
        batch_tokens=cell.batch_tokens,
        token_cache=cache_folder() / "tokens",
    )


def _limits(cell: Cell, tasks: Iterable[str]) -> dict[str, int]:
    """How many documents of each task, if not all."""
    return {name: limit for name, limit in cell.recipe.limits(tasks).items() if limit}


def evaluate_model(
    cell: Cell, lm: "Scorer", tasks: Mapping[str, "Task"], planned: Mapping[str, TaskIdentity]
) -> "Evaluation":
    """Score the model on the recipe's tasks, which must match the plan."""
    from qbench.evaluate.evaluation import evaluate

    tasks = planned_tasks(cell, lm, tasks, planned)
    return evaluate(lm, tasks, _limits(cell, tasks), cell.recipe.seed)


def planned_tasks(
    cell: Cell,
    lm: "Scorer",
    tasks: Mapping[str, "Task"],
    planned: Mapping[str, TaskIdentity],
    limit: int | None = None,
) -> "dict[str, Task]":
    """The tasks, now with passkey; they must match the plan. limit: documents of each length of passkey."""
    from qbench.evaluate.passkey import passkey_tasks
    from qbench.evaluate.tasks import task_fingerprint

    recipe, limits = cell.recipe, _limits(cell, tasks)
    found = {name: task_fingerprint(task, limits.get(name)) for name, task in tasks.items()}
    made: Mapping[str, Task] = {}
    if passkey := recipe.passkey:
        found |= {name: own.fingerprint for name, own in passkey.summaries(recipe.limit).items()}
        made = passkey_tasks(passkey, lambda text: len(lm.tok_encode(text)), limit or recipe.limit)
    for name, fingerprint in found.items():
        if fingerprint != planned[name].fingerprint:
            raise ChangedError(f"The task {name} has changed since the run was planned; start the run again.")
    return {**tasks, **made}


def weight_bytes(model: Any, audit: Any) -> int:
    """The size of the saved model: packed layers as packed, everything else in its dtype."""
    packed = {layer.name for layer in audit.layers}
    rest = {
        tensor.data_ptr(): tensor.numel() * tensor.element_size()
        for name, tensor in model.state_dict(keep_vars=True).items()
        if not any(name.startswith(f"{layer}.") for layer in packed)
    }
    return audit.code_bytes + audit.metadata_bytes + sum(rest.values())


def _peak_host_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
