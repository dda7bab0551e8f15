"""An analysis on the simulated device: the same results as on the CPU, and no wait per block of rows."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qbench import analyze, load_checkpoint
from qbench.analysis import rows
from qbench.analysis.heads import dead_heads
from qbench.analysis.maps import attention_maps
from qbench.analysis.sensitivity import sensitivity
from qbench.quantizers.options import quantization
from qbench.records.analysis_metrics import figures

from .device import PretendedCuda

TEXTS = [torch.randint(2048, (n,), generator=torch.Generator().manual_seed(n)) for n in (100, 40, 9, 9)]


@pytest.mark.parametrize(
    "kind",
    ["scaled_softpick", "gpt_oss_sink", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("softmax", "gated"))],
)
def test_results_equal_those_of_the_cpu(cuda: PretendedCuda, folders: Callable[[str, int], Path], kind: str) -> None:
    there, here = (load_checkpoint(folders(kind, 2), device=device, dtype=torch.float32) for device in ("cuda", "cpu"))
    found, wanted = (figures(analyze(model, TEXTS, batch_tokens=200)) for model in (there, here))
    assert [f.value for f in found] == pytest.approx([f.value for f in wanted], rel=1e-5, abs=1e-6)
    assert dead_heads(there, TEXTS, 1e-6) == dead_heads(here, TEXTS, 1e-6)
    (one,), (other,) = (attention_maps(model, TEXTS[2], [(1, 3)]) for model in (there, here))
    assert one.weights == pytest.approx(other.weights, abs=1e-6)
    assert len(sensitivity(there, TEXTS[2:], quantization("hqq", 3))) == 14


def test_the_host_does_not_wait_for_blocks(
    cuda: PretendedCuda, folders: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_checkpoint(folders("softpick", 2), device="cuda", dtype=torch.bfloat16)
    waits = []
    for budget in (2**24, 1):
        monkeypatch.setitem(rows.BLOCK_WEIGHTS, "cuda", budget)
        before = cuda.syncs.total()
        analyze(model, TEXTS, batch_tokens=200)
        waits.append(cuda.syncs.total() - before)
    assert waits[0] == waits[1]
