"""Lets the tests here `import cases`, and runs Triton kernels in its interpreter where there is no GPU."""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # with --import-mode=importlib a test's folder is not on sys.path
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined; tests that compile do so in a child process
