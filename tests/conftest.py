"""What all tests share."""

import os
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
