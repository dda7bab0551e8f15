"""Doctor's checks of kernels and quantizers as they run where there is a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qbench.attention.kinds import attentions
from qbench.doctor.checks import cases
from qbench.quantizers.options import quantizers

from .device import PretendedCuda

ROOT = Path(__file__).parents[2]
FEW = {"bnb": 2, "gptq": 1, "hqq": 5}  # widths that take seconds
# In its own process: autograd starts its threads for the devices that there are when it first runs.
ATTENTION = """
import sys, pathlib
from tests.gpu import device
from tests.gpu.conftest import replace_kernels
device.register_guard(pathlib.Path(sys.argv[1]))
replace_kernels()
from qbench.doctor.checks import main
with device.pretend(gradients=True):
    main("attention", "cuda", sys.argv[2])
"""


def widths() -> list:
    """Each quantizer's; those beyond the few are slow."""
    found = []
    for method in quantizers():
        for n, bits in enumerate(quantizers()[method].widths):
            if method != "none":
                slow = n >= FEW[method]
                found.append(pytest.param(method, n, id=f"{method}-{bits}", marks=pytest.mark.slow if slow else ()))
    return found


@pytest.mark.parametrize(("method", "number"), widths())
def test_quantizers(cuda: PretendedCuda, method: str, number: int) -> None:
    _, check = list(cases(method, "cuda"))[number]
    assert "bits per weight" in check()


def test_attention_kernels_with_gradients(ready: None, tmp_path: Path, tmp_path_factory) -> None:
    base = tmp_path_factory.getbasetemp()
    guard = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", ATTENTION, str(guard), str(tmp_path / "lines")]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    ended = [line for line in lines if "ok" in line]
    assert [line for line in ended if not line["ok"]] == []
    # All but softmax: the kernel in three dtypes, and a model.
    assert len(ended) == (len(attentions()) - 1) * 4
    assert any("triton bfloat16" in line["name"] for line in ended)
