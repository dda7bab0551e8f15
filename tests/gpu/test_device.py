"""The simulated device refuses, counts and runs out of memory as a real one does."""

import numpy as np
import pytest
import torch

from .device import CUDA, GIB, PretendedCuda, pretend


def test_tensors_report_their_device(cuda: PretendedCuda) -> None:
    for tensor in (torch.ones(2, device="cuda"), torch.ones(2).to("cuda"), torch.tensor([1.0, 2.0], device=CUDA)):
        assert tensor.is_cuda
        assert tensor.device == CUDA
        assert (tensor + 1).device == CUDA
        assert tensor.cpu().device.type == "cpu"
    assert torch.nn.Linear(2, 2).to("cuda").weight.device == CUDA


def test_tensors_of_two_devices_cannot_be_mixed(cuda: PretendedCuda) -> None:
    here, there = torch.ones(3, 3), torch.ones(3, 3, device="cuda")
    for meet in (
        lambda: here + there,
        lambda: there @ here,
        lambda: torch.cat([here, there]),
        lambda: there.add_(here),
    ):
        with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
            meet()
    index = torch.tensor([0, 1])
    with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
        there.index_select(0, index)
    with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
        torch.nn.functional.embedding(index, there)
    with pytest.raises(TypeError, match="numpy"):
        np.asarray(there.numpy())
    assert (there * torch.tensor(2.0)).device == CUDA  # numbers and indices may be on the CPU
    assert there[index].device == CUDA
    here.copy_(there)


def test_what_cuda_has_no_kernel_for_is_refused(cuda: PretendedCuda) -> None:
    codes = torch.ones(4, 4, dtype=torch.int32, device="cuda")
    with pytest.raises(NotImplementedError, match="int32"):
        codes @ codes
    half = torch.ones(4, 4, device="cuda", dtype=torch.float16)
    with pytest.raises(RuntimeError, match="dtype"):
        half @ half.float()


WAITS = {
    "item": lambda x: x.sum().item(),
    "a branch": lambda x: bool(x.any()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to cuda": lambda x: torch.ones(2).to("cuda"),
    "new from a list": lambda x: torch.tensor([1, 2], device="cuda"),
    "pageable in the background": lambda x: torch.ones(2).to("cuda", non_blocking=True),
    "a mask": lambda x: x[x > 0],
    "a CPU index": lambda x: x[torch.tensor([0, 1])],
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x + 1),
    "synchronize": lambda x: torch.cuda.synchronize(),
}
DOES_NOT_WAIT = {
    "arithmetic": lambda x: (x * 2 + x).softmax(0),
    "an index": lambda x: x[x.argsort()],
    "a mask that is filled": lambda x: x.masked_fill_(x > 0, 1),
    "one value under a mask": lambda x: x.__setitem__(x > 0, 1),
    "pinned in the background": lambda x: torch.ones(2).pin_memory().to("cuda", non_blocking=True),
    "another dtype": lambda x: x.half(),
    "made there": lambda x: torch.zeros(3, device="cuda"),
}


@pytest.mark.parametrize("name", [*WAITS, *DOES_NOT_WAIT])
def test_synchronizations_are_counted(cuda: PretendedCuda, name: str) -> None:
    x = torch.arange(1.0, 5.0, device="cuda")
    cuda.syncs.clear()
    (WAITS | DOES_NOT_WAIT)[name](x)
    assert cuda.syncs.total() == (name in WAITS), cuda.syncs


@pytest.mark.parametrize("clone", ["qbench", "kernels/softpick", "a b"])
def test_a_file_in_a_clone_is_not_a_file_of_the_package(cuda: PretendedCuda, clone: str) -> None:
    cuda.syncs.clear()
    exec(compile("x.item()", f"/home/{clone}/tests/test_x.py", "exec"), {"x": torch.ones((), device=CUDA)})
    assert [where.rpartition(" in ")[2] for where in cuda.syncs] == ["elsewhere"]


def test_memory_is_counted_and_released(cuda: PretendedCuda) -> None:
    x = torch.zeros(2**18, device="cuda")  # 1 MiB
    view, y = x.view(2, -1), x + 1
    assert torch.cuda.memory_allocated() == 2 * 2**20
    del x, y
    assert torch.cuda.memory_allocated() == 2**20  # the view holds it
    del view
    assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (0, 2 * 2**20)
    assert cuda.asked["max_memory_allocated"] == 1


def test_memory_runs_out_at_a_chosen_allocation(cuda: PretendedCuda) -> None:
    third = cuda.allocations + 3
    cuda.fail = lambda number, size: number == third
    kept = [torch.zeros(4, device="cuda") for _ in range(2)]
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(4, device="cuda")
    assert len([*kept, torch.zeros(4, device="cuda")]) == 3  # once


def test_a_card_holds_no_more_than_it_has(ready: None) -> None:
    with pretend(memory=GIB):
        assert torch.cuda.mem_get_info() == (GIB, GIB)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
