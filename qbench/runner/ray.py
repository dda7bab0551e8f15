"""Runs cells as tasks of a Ray cluster. On a node, a cell runs as on a single machine; the driver writes the records.

The cluster is the one that RAY_ADDRESS names or that runs on this machine; if there is none, one is started.
Its nodes need the same qbench installation, and the recipe's files, checkpoints and caches under the same paths.
"""

import contextlib
import importlib.util
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qbench.errors import some
from qbench.gpus import VISIBLE
from qbench.machine import machine
from qbench.records.schema import Failure, Record
from qbench.records.store import LOG, RECORD, Samples, StoredRecord, cell_folder, read_record, write_record
from qbench.runner.cell import Job, failure_of, now
from qbench.runner.estimate import estimate
from qbench.runner.local import TICK, Slot, run_local
from qbench.runner.lock import RunError
from qbench.runner.plan import Plan
from qbench.runner.preflight import PREFLIGHT, by_checkpoint, failed_preflight, is_short, try_checkpoint
from qbench.runner.view import PlainView

Result = tuple[Record, Samples, bytes]
RETRIES = 2  # for a cell whose node died


def run_ray(jobs: Sequence[Job], plan: Plan, view: PlainView, timeout: float, wanted: bool | None) -> None:
    """Run all jobs on the cluster; each writes a record, finished or failed.

    timeout: seconds allowed per cell. wanted: whether to run the preflight; None: unless the run is short.
    """
    with _cluster() as ray:
        demand = _demand(ray, jobs, plan)
        view.slots = _slots(ray, demand)
        threads = int(demand["num_cpus"]) if "num_gpus" not in demand else None
        options = ray.remote(max_retries=RETRIES, **demand)
        place = Slot(threads=threads) if threads else Slot(gpu="the task's")
        with view:
            if wanted or (wanted is None and not is_short(plan, jobs, [place] * view.slots)):
                view.preflight(PREFLIGHT)
                tried = options(try_remotely)
                groups = by_checkpoint(jobs)
                trials = {tried.remote(group, os.getcwd(), threads, timeout): name for name, group in groups.items()}
                waiting = list(trials)
                while waiting:
                    view.trying(len(trials) - len(waiting), len(trials), some([trials[trial] for trial in waiting]))
                    _, waiting = ray.wait(waiting, timeout=TICK)
                if problems := [problem for own in ray.get(list(trials)) for problem in own]:
                    raise failed_preflight(problems)
                view.tried()
            task = options(run_remotely)
            cells = {task.remote(job, os.getcwd(), threads, timeout): (job, now()) for job in jobs}
            while cells:
                ready, _ = ray.wait(list(cells), num_returns=1)
                job, submitted = cells.pop(ready[0])
                view.finished(job.name, _keep(ray, ready[0], job, submitted, plan.out))


def run_remotely(job: Job, folder: str, threads: int | None, timeout: float) -> Result:
    """On a node: run a cell in its own process. Returns its record, its samples and its log."""
    os.chdir(folder)  # relative paths are relative to the driver's folder
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary)
        run_local([replace(job, machine=machine())], out, [_slot(threads)], Unwatched(), timeout)
        place = cell_folder(out, job.cell.ref, job.identity.key)
        stored = StoredRecord(read_record(place / RECORD), place)
        return stored.record, stored.samples_content() if stored.has_samples else None, (place / LOG).read_bytes()


def try_remotely(jobs: Sequence[Job], folder: str, threads: int | None, timeout: float) -> list[str]:
    """On a node: the preflight of one checkpoint."""
    os.chdir(folder)
    with tempfile.TemporaryDirectory() as temporary:
        return try_checkpoint(jobs, Path(temporary, LOG), _slot(threads), timeout)


def _slot(threads: int | None) -> Slot:
    """The cores or the GPU that Ray gave this task."""
    return Slot(threads=threads) if threads else Slot(gpu=os.environ[VISIBLE])


class Unwatched:
    """A watcher that does nothing: the driver gets the result when the task returns."""

    def started(self, name: str) -> None:
        """A cell has started."""

    def progress(self, name: str, phase: str, share: float, doing: str) -> None:
        """This share of a cell's phase is done."""

    def finished(self, name: str, record: Record) -> None:
        """A cell has ended with this record."""


@contextlib.contextmanager
def _cluster() -> Iterator[Any]:
    if importlib.util.find_spec("ray") is None:
        raise RunError("--executor ray needs the package ray, which is not installed: pip install 'ray>=2.9'.")
    import ray

    ours = not ray.is_initialized()
    if ours:
        try:
            with contextlib.chdir("/"):  # Ray puts the working folder on its workers' path
                ray.init(log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise RunError(f"Cannot connect to the Ray cluster: {error}") from None
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()  # stops running tasks


def _demand(ray: Any, jobs: Sequence[Job], plan: Plan) -> dict[str, float]:
    """What a cell needs from a node: a GPU, or cores and its estimated memory."""
    if plan.recipe.resolved_device == "cuda":
        return {"num_gpus": 1, "num_cpus": 1}
    most = max((found.memory for job in jobs if (found := estimate(job.cell, plan.tasks))), default=0)
    largest = max(node["Resources"].get("memory", 0) for node in ray.nodes() if node["Alive"])
    # A task that asks for more memory than the largest node has would wait forever, so it asks for all of it.
    return {"num_cpus": plan.recipe.threads or 1, "memory": min(most, int(largest))}


def _slots(ray: Any, demand: dict[str, float]) -> int:
    """How many cells the cluster can run at once."""
    there = ray.cluster_resources()
    names = {"num_gpus": "GPU", "num_cpus": "CPU", "memory": "memory"}
    fitting = min(int(there.get(names[kind], 0) // amount) for kind, amount in demand.items() if amount)
    if "num_gpus" in demand and not there.get("GPU"):
        raise RunError("The recipe's device is cuda, but the Ray cluster has no GPU.")
    return max(1, fitting)


def _keep(ray: Any, result: Any, job: Job, submitted: str, out: Path) -> Record:
    """Write the record that a task returned, or a failed one if its node kept dying."""
    folder = cell_folder(out, job.cell.ref, job.identity.key)
    try:
        record, samples, log = ray.get(result)
    except ray.exceptions.RayTaskError as error:
        record, samples, log = job.failed(submitted, failure_of(error.cause, None)), None, b""
    except ray.exceptions.RayError as error:
        first = str(error).strip().splitlines()[0]
        reason = f"The node or the Ray worker that ran it died {RETRIES + 1} times: {first}"
        record, samples, log = job.failed(submitted, Failure(kind="killed", reason=reason)), None, b""
    (folder / RECORD).unlink(missing_ok=True)  # left by an earlier failure
    with contextlib.suppress(OSError):  # write_record reports what is wrong with the folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOG).write_bytes(log)
    write_record(folder, record, samples)
    return record
