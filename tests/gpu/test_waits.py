"""How often the host waits for the device, by phase; planted mistakes are found."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from qbench.checkpoint import load
from qbench.evaluate import forward, scorer
from qbench.evaluate.precision import FP32_PRECISION, set_precision
from qbench.quantizers import measure
from qbench.quantizers.bnb.layers import Bnb4Linear
from qbench.quantizers.gptq import GptqOptions, layer
from qbench.quantizers.hqq.layer import HqqLinear

from .cells import Cell, run
from .device import PretendedCuda

Folders = Callable[[str, int], Path]

LOAD_A_TENSOR = 2  # its copy, and the check that it is finite
# Reading its scores, and transformers' check for packed sequences or for what a mask hides.
SCORE_A_BATCH = 2
# Two hashes and a copy of each tensor, and the audit's measurements of a layer.
QUANTIZE_A_LINEAR = 40
HQQ_STEPS = 20  # of the solver, each with its error
SOLVE_A_STAGE, SOLVE_A_GROUP = 16, 10  # GPTQ: factors of the Hessian; each group's range


def check_load(cell: Cell) -> None:
    tensors = len(list(cell.model.state_dict()))
    assert cell.waits("load") <= LOAD_A_TENSOR * tensors + 4, cell.syncs["load"]


def check_scores(cell: Cell) -> None:
    assert cell.waits("evaluate") <= SCORE_A_BATCH * cell.batches, cell.syncs["evaluate"]


def check_quantize(cell: Cell, linears: int = 7, more: int = 0) -> None:
    assert cell.waits("quantize") <= (QUANTIZE_A_LINEAR + more) * linears + 20, cell.syncs["quantize"]


@pytest.mark.parametrize("kind", ["softmax", "softpick", "scaled_softpick"])
def test_the_host_waits_for_a_batch_no_more_than_stated(cuda: PretendedCuda, folders: Folders, kind: str) -> None:
    cell = run(cuda, folders(kind, 1), batch_tokens=128)
    assert cell.batches > 5
    check_load(cell)
    check_scores(cell)
    assert cell.waits("quantize") <= 4  # copying the probe to the device and its logits back


@pytest.mark.parametrize(("method", "bits", "more"), [("bnb", 4, 0), ("bnb", 8, 4), ("hqq", 4, HQQ_STEPS)])
def test_the_host_waits_for_a_linear_no_more_than_stated(
    cuda: PretendedCuda, folders: Folders, method: str, bits: int, more: int
) -> None:
    cell = run(cuda, folders("softpick", 1), method, bits)
    check_quantize(cell, more=more)
    check_scores(cell)


def solve_one_stage(columns: int = 64, group_size: int = 32) -> None:
    draw = torch.Generator().manual_seed(0)
    linear = nn.Linear(columns, 32, bias=False).to("cuda", torch.bfloat16)
    inputs = torch.randn(1, 256, columns, generator=draw).to("cuda", torch.bfloat16)
    layer.solve({"q_proj": linear}, iter([inputs]), 4, GptqOptions(group_size=group_size))


def check_solver(device: PretendedCuda, groups: int = 2) -> None:
    assert device.syncs.total() <= SOLVE_A_STAGE + SOLVE_A_GROUP * groups, device.syncs


@pytest.mark.parametrize(("columns", "groups"), [(64, 2), (128, 4)])
def test_gptqs_solver_waits_for_a_group_and_not_for_a_column(cuda: PretendedCuda, columns: int, groups: int) -> None:
    set_precision()
    solve_one_stage(columns)
    check_solver(cuda, groups)
    assert cuda.syncs.total() < columns
    assert torch.backends.cuda.matmul.fp32_precision == FP32_PRECISION  # the library changes it and restores it


# Planted mistakes ----------------------------------------------------------------------------------


def test_an_item_in_the_loop_over_batches_is_found(cuda: PretendedCuda, folders: Folders, monkeypatch) -> None:
    score = scorer.score_targets

    def with_item(model: Any, hidden: torch.Tensor, *rest: Any) -> Any:
        assert hidden.abs().max().item() < 1e4
        return score(model, hidden, *rest)

    monkeypatch.setattr(scorer, "score_targets", with_item)
    cell = run(cuda, folders("softmax", 1), batch_tokens=128)
    with pytest.raises(AssertionError, match=r"_local_scalar_dense"):
        check_scores(cell)


def test_copies_that_the_host_waits_for_are_found(cuda: PretendedCuda, folders: Folders, monkeypatch) -> None:
    monkeypatch.setattr(forward, "to_device", lambda tensor, device: tensor.to(device))
    with pytest.raises(AssertionError, match="copy to the device"):
        check_scores(run(cuda, folders("softpick", 1), batch_tokens=128))


def test_a_solver_that_reads_the_device_for_each_column_is_found(cuda: PretendedCuda, monkeypatch) -> None:
    monkeypatch.setattr(layer, "_keep_on_host", lambda quantizer: None)
    solve_one_stage()
    with pytest.raises(AssertionError, match=r"gptq/layer\.py"):
        check_solver(cuda)


def test_a_tensor_of_the_model_left_on_the_cpu_is_refused(cuda: PretendedCuda, folders: Folders, monkeypatch) -> None:
    read = load._read_tensor

    def left_behind(file: Path, name: str, device: torch.device, *rest: Any) -> torch.Tensor:
        return read(file, name, torch.device("cpu") if name.endswith("norm.weight") else device, *rest)

    monkeypatch.setattr(load, "_read_tensor", left_behind)
    with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
        run(cuda, folders("softpick", 1))


def test_frequencies_left_on_the_cpu_are_found(cuda: PretendedCuda, folders: Folders, monkeypatch) -> None:
    """transformers copies them in each forward pass, so nothing fails, but the host waits."""
    monkeypatch.setattr(LlamaRotaryEmbedding, "to", lambda self, *_: self)
    with pytest.raises(AssertionError, match="copy to the device"):
        check_scores(run(cuda, folders("softpick", 1), batch_tokens=128))


def test_an_index_of_a_batch_left_on_the_cpu_is_refused(cuda: PretendedCuda, folders: Folders, monkeypatch) -> None:
    monkeypatch.setattr(forward, "to_device", lambda tensor, device: tensor)
    with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
        run(cuda, folders("softmax", 1))


def test_scales_left_on_the_cpu_are_refused(cuda: PretendedCuda, folders: Folders, monkeypatch) -> None:
    made = Bnb4Linear.from_linear.__func__

    def left_behind(cls: type, *arguments: Any) -> Bnb4Linear:
        packed = made(cls, *arguments)
        packed.quant_state.absmax = packed.quant_state.absmax.cpu()
        packed.quant_state.to = lambda device: None
        return packed

    monkeypatch.setattr(Bnb4Linear, "from_linear", classmethod(left_behind))
    with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
        run(cuda, folders("softmax", 1), "bnb", 4)


def test_a_source_weight_that_the_audit_leaves_on_the_cpu_is_refused(
    cuda: PretendedCuda, folders: Folders, monkeypatch
) -> None:
    chunks = measure._chunks

    def on_cpu(width: int, codes: Any, weight: Any, exact: Any, source: torch.Tensor) -> Iterator[Any]:
        return chunks(width, codes, weight, exact, source.cpu())

    monkeypatch.setattr(measure, "_chunks", on_cpu)
    with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
        run(cuda, folders("softmax", 1), "hqq", 4)


@pytest.mark.parametrize("execution", ["dense", "packed"])
def test_a_weight_in_the_wrong_dtype_is_refused(
    cuda: PretendedCuda, folders: Folders, monkeypatch, execution: str
) -> None:
    if execution == "dense":
        monkeypatch.setattr(HqqLinear, "dequantize", HqqLinear.dequantize_float32)
    else:
        monkeypatch.setattr(HqqLinear, "forward", lambda self, x: nn.functional.linear(x, self.dequantize_float32()))
    with pytest.raises(RuntimeError, match="dtype"):
        run(cuda, folders("softmax", 1), "hqq", 4, execution=execution)
