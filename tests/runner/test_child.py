"""The process that cells are forked from, and what becomes of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qbench.runner.child import HEAVY, PARENT, PRELOAD, PRELOAD_METHODS, how_it_died

from .driver import events_of, results, run

# A machine with a GPU, as far as imports can tell: whoever asks for more than whether there is one has started CUDA.
PRETEND = """
import os, torch

def start(*_, **__):
    raise SystemExit("CUDA was started")

def visible():
    return int(os.environ.get("CUDA_VISIBLE_DEVICES") != "")

torch.cuda.device_count = visible
torch.cuda.is_available = lambda: bool(visible())
for name in ("_lazy_init", "current_device", "get_device_capability", "get_device_properties", "mem_get_info"):
    setattr(torch.cuda, name, start)
"""


def in_a_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, PARENT: str(os.getpid()), **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


def test_preloading_leaves_a_gpu_alone_and_visible() -> None:
    end = "import qbench.runner.preload; print(os.environ['CUDA_VISIBLE_DEVICES'], torch.cuda.device_count())"
    preloaded = {PRELOAD: ",".join(HEAVY), PRELOAD_METHODS: "hqq"}
    done = in_a_process(PRETEND + end, **preloaded | {"CUDA_VISIBLE_DEVICES": "3"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3", "1"]


def test_a_preloaded_module_that_starts_cuda_is_an_error() -> None:
    code = "import torch; torch.cuda.is_initialized = lambda: True; import qbench.runner.preload"
    done = in_a_process(code, **{PRELOAD: ""})
    assert "A preloaded module has initialised CUDA, which cannot be forked." in done.stderr


def test_what_an_import_prints_shows_only_where_it_fails() -> None:
    assert in_a_process("import qbench.runner.preload", **{PRELOAD: "this"}).stdout == ""
    failing = in_a_process("import qbench.runner.preload", **{PRELOAD: "this,qbench.no_such_module"})
    assert "The Zen of Python" in failing.stderr
    assert "No module named 'qbench.no_such_module'" in failing.stderr


def test_a_process_whose_parent_is_gone_ends_at_once() -> None:
    assert in_a_process("import qbench.runner.preload", **{PARENT: "1", PRELOAD: ""}).returncode == 1


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (3, "ended with exit code 3 and no result."),
        (-9, "killed by signal 9, Killed (often the kernel's answer to a machine out of memory)."),
        (-11, "killed by signal 11, Segmentation fault."),
    ],
)
def test_how_a_process_died_is_a_sentence(code: int, sentence: str) -> None:
    assert how_it_died(code).endswith(sentence)


@pytest.mark.gpu
def test_cells_on_cuda_one_a_gpu(small: Path, tmp_path: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    code, events, errors = run(small, tmp_path / "out", "--device", "cuda")
    assert code == 0, errors
    assert len(events_of(events, "finished")) == 6
    running = most = 0
    for event in events:
        running += {"started": 1, "finished": -1}.get(event["event"], 0)
        most = max(most, running)
    assert most <= torch.cuda.device_count()
    for cell in results(tmp_path / "out").values():
        assert cell["identity"]["what"]["device"] == "cuda"
