"""What all tests share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Triton kernels run in its interpreter. Here and not beside their tests: it must be set before anything imports
    # triton. Tests that compile do so in a child process.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with fixtures and data beside the project; it is no part of the repository."""
    folder = Path(__file__).resolve().parents[1].parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the ../shared folder, which is not here")
    return folder


@pytest.fixture(scope="session")
def optimum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with optimum for PYTHONPATH: transformers needs it to read GPTQ folders, and qbench does not."""
    folder = tmp_path_factory.mktemp("optimum")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, "optimum==2.3.0"]
    subprocess.run(install, check=True, timeout=200)
    return folder
