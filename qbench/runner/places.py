"""Slots for cells: the GPUs, or as many shares of the cores as fit into memory; and why a GPU cannot be used."""

from collections.abc import Sequence

import psutil

from qbench.gpus import VISIBLE, Gpu, find_gpus, why_not_cuda
from qbench.machine import machine
from qbench.recipe.schema import Recipe
from qbench.runner.estimate import Estimate, estimate
from qbench.runner.local import Slot
from qbench.runner.lock import RunError
from qbench.runner.plan import Plan


def make_slots(plan: Plan) -> list[Slot]:
    """Slots for cells.

    They depend on the recipe and the machine, not on what is left to do: sums depend on the number of threads.
    """
    recipe = plan.recipe
    if recipe.resolved_device == "cuda":
        gpus = usable_gpus(recipe)
        check_memory(plan, gpus)
        return [Slot(gpu=gpu.id) for gpu in gpus[: recipe.workers]]
    cores = machine()["cores"]
    cells = [entry.cell for entry in plan.entries if entry.identity]
    largest = max((found.memory for cell in cells if (found := estimate(cell, plan.tasks))), default=1)
    fitting = psutil.virtual_memory().total // largest
    workers = recipe.workers or max(1, min(len(cells), cores // (recipe.threads or 1), fitting))
    return [Slot(threads=recipe.threads or max(1, cores // workers))] * workers


def usable_gpus(recipe: Recipe) -> tuple[Gpu, ...]:
    """The GPUs for a recipe whose device is cuda; RunError says what is wrong with them."""
    if reason := why_not_cuda():
        raise RunError(
            f"{recipe.file.name}: the device is cuda. {reason} `qbench doctor` shows what this machine has; "
            "--device cpu runs the recipe on the CPU, slowly."
        )
    return find_gpus().gpus


def check_memory(plan: Plan, gpus: Sequence[Gpu]) -> None:
    """RunError if the largest cell does not fit into the smallest GPU, before hours are spent."""
    smallest = min(gpus, key=lambda gpu: gpu.free)
    name, need = _largest(plan)
    if need is None or need.memory <= smallest.free:
        return
    there = f"{smallest.name} ({smallest.id}) has {_gib(smallest.memory)}"
    if need.memory > smallest.memory:
        do = "use a larger GPU, a smaller max_length or smaller checkpoints"
    else:
        there += f", of which {_gib(smallest.free)} is free"
        users = f" ({smallest.processes} processes)" if smallest.processes > 1 else ""  # some drivers do not report it
        do = f"stop what is using it{users}, or choose another GPU with {VISIBLE}"
    raise RunError(f"{name} needs about {_gib(need.memory)} of GPU memory, but {there}: {do}.")


def _largest(plan: Plan) -> tuple[str, Estimate | None]:
    found = [(e.cell.ref.name, estimate(e.cell, plan.tasks)) for e in plan.entries if e.identity]
    return max(found, key=lambda each: each[1].memory if each[1] else 0, default=("", None))


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
