"""Break cells on purpose. What finds it: the cell's own audit, the gate's audit, or the scores?

    python benchmarks/sabotage.py recipes/mini.yaml --baseline results/mini --only '*hqq-3*'

If the cell's own audit stops it, the gate reports a failed cell. The cell then runs again with that audit switched off,
so that the gate itself has to find the problem. Without --baseline, the unbroken cells run first.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from qbench.gate.settings import UNITS, GateSettings
from qbench.gate.verdict import GateReport, check
from qbench.quantizers.options import quantizer
from qbench.quantizers.quantize import quantize
from qbench.recipe.cells import load_recipe
from qbench.records.schema import CellRef
from qbench.records.store import cell_folder, write_record
from qbench.runner.cell import run_cell
from qbench.runner.matrix import make_jobs
from qbench.runner.plan import PlanEntry, choose, make_plan

PART = GateSettings(baseline_may_hold_more=True)
SCALES = {"hqq": "scale", "gptq": "scales"}  # the tensor that holds them

# Breaks a model after the layers with these names are packed; the last argument has the original layers.
Spoil = Callable[[nn.Module, list[str], dict[str, nn.Module]], None]


def main() -> int:
    """Print a table of sabotages; exit code 1 if nothing finds one of them."""
    options = _options()
    recipe = load_recipe(options.recipe)
    torch.set_num_threads(recipe.threads or 1)
    with tempfile.TemporaryDirectory() as scratch:
        entries = choose(make_plan(recipe, Path(scratch) / "none").entries, options.only)
        baseline = options.baseline or run(entries, Path(scratch) / "baseline")
        rows = []
        for entry in entries:
            for number, (name, broken) in enumerate(sabotages(entry.cell.ref).items()):
                rows.append(found_by(name, broken, entry, baseline, Path(scratch) / f"{entry.cell.ref.name}-{number}"))
    print(tabulate(rows, "keys", tablefmt="github"))
    return int(any(all(by.startswith("no") for by in list(row.values())[2:]) for row in rows))


def sabotages(cell: CellRef) -> dict[str, AbstractContextManager[Any]]:
    """The ways to break a cell. It is broken while the context is open."""
    found: dict[str, AbstractContextManager[Any]] = {}
    if scales := SCALES.get(cell.method):
        found["one layer left unquantized"] = _spoiled(cell.method, _leave_first)
        found["scales of one layer off by 2%"] = _spoiled(cell.method, _scale(scales, 1))
        found["all scales off by 2%"] = _spoiled(cell.method, _scale(scales, None))
        found["two layers swapped"] = _spoiled(cell.method, _swap_first)
    found["two blocks swapped after the audit"] = patch("qbench.quantizers.quantize.quantize", _quantize_and_swap)
    if cell.attention == "softpick":
        found["softpick run as softmax"] = patch("softpick.normalized_attention", _softmax_attention)
    return found


def found_by(
    name: str, broken: AbstractContextManager[Any], entry: PlanEntry, baseline: Path, folder: Path
) -> dict[str, str]:
    """Run a broken cell, and report what finds it."""
    with broken:
        report = check(run([entry], folder / "audited"), baseline, PART)
        own = [failure.message for failure in report.failures if failure.message.startswith("The cell failed (audit)")]
        if own:
            with patch("qbench.quantizers.quantize.failures", lambda audit: []):
                report = check(run([entry], folder / "unaudited"), baseline, PART)
    return {
        "sabotage": name,
        "cell": entry.cell.ref.name,
        "the cell's own audit": "yes: " + own[0].splitlines()[0].rpartition(" failed: ")[2] if own else "no",
        "the gate's audit": "; ".join(f.message for f in report.failures) or "no",
        "the scores": scores(report),
    }


def scores(report: GateReport) -> str:
    """How many scores got worse, and the largest loss among them."""
    count = f"{len(report.worse)} of {len(report.tested)}"
    if not report.worse:
        return f"no: {count}"
    worst = max((outcome.hypothesis for outcome in report.worse), key=lambda h: h.loss / h.tolerance)
    return f"yes: {count}, {worst.task} {worst.metric} by {worst.loss:.3g}{UNITS[worst.kind]}"


def run(entries: list[PlanEntry], folder: Path) -> Path:
    """Run cells in this process, so that they can be broken."""
    for job in make_jobs(entries):
        record, samples = run_cell(job)
        write_record(cell_folder(folder, record.cell, record.key), record, samples)
    return folder


def _spoiled(method: str, spoil: Spoil) -> AbstractContextManager[Any]:
    found = quantizer(method)
    whole = found.quantize_linears

    def broken(model: nn.Module, *arguments: Any, targets: list[str], **others: Any) -> None:
        sources = {name: model.get_submodule(name) for name in targets}
        whole(model, *arguments, targets=targets, **others)
        spoil(model, targets, sources)

    return patch.object(found, "quantize_linears", broken)


def _leave_first(model: nn.Module, targets: list[str], sources: dict[str, nn.Module]) -> None:
    model.set_submodule(targets[0], sources[targets[0]])


def _scale(tensor: str, count: int | None) -> Spoil:
    def scale(model: nn.Module, targets: list[str], sources: dict[str, nn.Module]) -> None:
        for name in targets[:count]:
            getattr(model.get_submodule(name), tensor).mul_(1.02)

    return scale


def _swap_first(model: nn.Module, targets: list[str], sources: dict[str, nn.Module]) -> None:
    """Swap the first layer and the next one of the same shape."""
    shapes = {name: (sources[name].in_features, sources[name].out_features) for name in targets}
    first, second = [name for name in targets if shapes[name] == shapes[targets[0]]][:2]
    layers = model.get_submodule(first), model.get_submodule(second)
    model.set_submodule(first, layers[1])
    model.set_submodule(second, layers[0])


def _quantize_and_swap(*arguments: Any, **options: Any) -> Any:
    model, audit = quantize(*arguments, **options)
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    for index, layer in enumerate(layers):  # where its keys are in the cache
        layer.self_attn.layer_idx = index
    return model, audit


def _softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, *, normalizer: str, scale: float | None, causal: bool, key_mask: Tensor | None
) -> Tensor:
    """Softmax instead of softpick; the queries are the last positions of the keys."""
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    mask = mask.tril(k.shape[2] - q.shape[2]) if causal else mask
    mask = mask if key_mask is None else mask & key_mask[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", metavar="RECIPE")
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="a run of the recipe; default: run it first")
    parser.add_argument("--only", metavar="PATTERN", help="only cells whose name matches")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
