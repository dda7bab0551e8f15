"""Memory of the simulated device: the budget does not depend on it, and running out of it is handled and recorded."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qbench import Scorer, load_checkpoint, quantize
from qbench.evaluate.batches import BATCH_TOKENS
from qbench.evaluate.scorer import ScoringError
from qbench.quantizers.declaration import QuantizeError
from qbench.quantizers.gptq import layer
from qbench.quantizers.options import Quantization
from qbench.recipe.cells import Cell, cells, load_recipe
from qbench.records.schema import Record
from qbench.runner.cell import Job, run_cell
from qbench.tokenizer import load_tokenizer

from ..runner.conftest import checkpoints, matrix
from .cells import PAIRS, instances, run
from .device import GIB, PretendedCuda, pretend

__all__ = ["checkpoints", "matrix"]

Folders = Callable[[str, int], Path]


@pytest.fixture
def recipe_folder(matrix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    return shutil.copytree(matrix, tmp_path / "recipe")


def planned(folder: Path, **changes: object) -> list[Cell]:
    recipe = load_recipe(folder / "recipe.yaml", device="cuda", **changes)
    return [cell for cell in cells(recipe) if isinstance(cell.quantization, Quantization)]


def one_cell(folder: Path, name: str, **changes: object) -> Record:
    (cell,) = [cell for cell in planned(folder, **changes) if cell.ref.name.startswith(name)]
    record, _ = run_cell(Job(cell, cell.identity(), git_commit=None))
    return record


@pytest.mark.parametrize("memory", [24, 40, 80])
def test_the_budget_is_the_same_on_every_card_and_for_every_cell(
    ready: None, folders: Folders, recipe_folder: Path, memory: int
) -> None:
    with pretend(memory=memory * GIB):
        folder = folders("softmax", 1)
        model = load_checkpoint(folder, device="cuda", dtype=torch.bfloat16)
        assert Scorer(model, load_tokenizer(folder)).budgets == [16384] == [BATCH_TOKENS["cuda"]]
        every = planned(recipe_folder)
        assert len(every) == 2 * (1 + 2 + 4 + 4)
        assert {cell.batch_tokens for cell in every} == {16384}
        assert {cell.identity().what.batch_tokens for cell in every} == {16384}


def test_a_budget_in_the_recipe_changes_the_key_on_cuda_only(recipe_folder: Path) -> None:
    def keys(**changes: object) -> list[str]:
        recipe = load_recipe(recipe_folder / "recipe.yaml", **changes)
        return [cell.identity().key for cell in cells(recipe) if cell.ref.label == "none-16"]

    assert keys(device="cuda", batch_tokens=512) != keys(device="cuda")
    assert keys(device="cpu", batch_tokens=512) == keys(device="cpu")


def test_a_cell_asks_for_memory_and_records_what_was_set(cuda: PretendedCuda, recipe_folder: Path) -> None:
    record = one_cell(recipe_folder, "tiny-softpick-hqq-4", limit=2)
    assert record.state == "done", record.failure
    assert cuda.asked["reset_peak_memory_stats"] == 1
    assert record.cost.peak_device_bytes == cuda.peak > record.cost.weight_bytes
    assert record.cost.batch_tokens == (16384,)
    assert record.identity.what.batch_tokens == 16384
    assert record.provenance.precision["fp32_precision"] == "ieee"
    assert not any(record.provenance.precision[f"{dtype}_reduced_precision_reduction"] for dtype in ("fp16", "bf16"))


def test_a_halving_is_in_the_record(cuda: PretendedCuda, recipe_folder: Path, monkeypatch) -> None:
    score, tried = Scorer.loglikelihood, []

    def fail_once(self: Scorer, *arguments: object, **options: object) -> object:
        if not tried:
            tried.append(cuda.allocations)
            cuda.fail = lambda number, size: number == tried[0] + 9
        return score(self, *arguments, **options)

    monkeypatch.setattr(Scorer, "loglikelihood", fail_once)
    record = one_cell(recipe_folder, "tiny-softmax-none", limit=2)
    assert record.state == "done", record.failure
    assert record.cost.batch_tokens == (16384, 8192)
    assert cuda.asked["empty_cache"] >= 1


@pytest.mark.parametrize("allocation", [1, 10, 40])
def test_scores_survive_memory_that_runs_out_at_any_allocation(
    cuda: PretendedCuda, folders: Folders, allocation: int
) -> None:
    cell = run(cuda, folders("softpick", 1))
    lm = Scorer(cell.model, cell.lm.tokenizer, batch_tokens=256)
    failing = cuda.allocations + allocation
    cuda.fail = lambda number, size: number == failing
    found = lm.loglikelihood(instances(PAIRS))
    assert lm.budgets == [256, 128]
    values = [torch.tensor([score for score, _ in scores]) for scores in (found, cell.scores[: len(PAIRS)])]
    torch.testing.assert_close(*values, rtol=2e-2, atol=5e-2)  # bfloat16 rounds differently in other batches


def test_memory_that_never_suffices_is_a_sentence(cuda: PretendedCuda, folders: Folders) -> None:
    cell = run(cuda, folders("softmax", 1))
    cuda.fail = lambda number, size: True
    with pytest.raises(ScoringError, match="one sequence at a time"):
        cell.lm.loglikelihood(instances(PAIRS))


def test_quantizing_without_memory_is_a_sentence(cuda: PretendedCuda, folders: Folders) -> None:
    model = load_checkpoint(folders("softmax", 1), device="cuda", dtype=torch.bfloat16)
    cuda.fail = lambda number, size: size > 2**17
    with pytest.raises(QuantizeError, match=r"memory.*hqq-4-g32"):
        quantize(model, "hqq", 4, group_size=32)


def test_calibration_runs_in_larger_batches_on_cuda(cuda: PretendedCuda) -> None:
    samples = list(torch.zeros(20, 2048, dtype=torch.long).split(1))
    sizes = {
        device: [batch.numel() for batch in layer.batches(samples, torch.device(device))] for device in ("cuda", "cpu")
    }
    assert sizes == {"cuda": [16384, 16384, 8192], "cpu": [2048] * 20}
