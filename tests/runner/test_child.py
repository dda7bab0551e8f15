"""The process that cells are forked from, and how cells end."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qbench.runner import cuda
from qbench.runner.child import HEAVY, PARENT, PRELOAD, PRELOAD_METHODS, how_it_died

from .driver import events_of, results, run

# To imports this looks like a machine with a GPU: any call except asking for its existence starts CUDA.
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


def test_a_script_without_a_guard_runs_once(small: Path, tmp_path: Path) -> None:
    """multiprocessing would import it in every child, and each would begin a run."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import qbench

print("begun", flush=True)
done = qbench.run({str(small)!r}, {str(tmp_path / "out")!r}, only="*none-16", limit=2)
print(all(stored.record.state == "done" for stored in done.current))
""")
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("begun") == 1
    assert ended.stdout.split()[-1] == "True"


@pytest.mark.slow
def test_preloading_leaves_a_gpu_alone_and_visible() -> None:
    end = "import qbench.runner.preload; print(os.environ['CUDA_VISIBLE_DEVICES'], torch.cuda.device_count())"
    preloaded = {PRELOAD: ",".join(HEAVY), PRELOAD_METHODS: "hqq"}
    done = in_a_process(PRETEND + end, **preloaded | {"CUDA_VISIBLE_DEVICES": "3"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3", "1"]


LOOK = """
import os, sys
from qbench.runner import child
from qbench.runner.hub import OFFLINE_VARIABLES

class Look:
    def __call__(self, send):
        offline = [os.environ.get(name) for name in OFFLINE_VARIABLES]
        gpu = [os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")]
        here = [place for place in sys.path if place in ("", os.getcwd())]
        send((offline, gpu, os.environ[child.PRELOAD_METHODS], "bitsandbytes" in sys.modules, here))
"""

SERVER = """
import os, sys
from pathlib import Path
from multiprocessing.connection import wait
from qbench.runner import child
from qbench.runner.hub import OFFLINE_VARIABLES
from look import Look  # children do not import this script

if __name__ == "__main__":
    child.HEAVY = ()  # importing them takes seconds
    sys.path.insert(0, "")  # as `python -m` and notebooks do
    worker = child.Child(child.fork_server({"bnb"}, sys.argv[1]), Look(), log=Path(sys.argv[2]), gpu="3")
    worker.start()
    wait([worker.process.sentinel])
    print(worker.messages()[0], [name for name in OFFLINE_VARIABLES if name in os.environ])
    worker.end()
"""


@pytest.mark.parametrize(
    ("device", "seen"),
    [
        ("cpu", "(['1', '1', '1', '1'], ['3', 'PCI_BUS_ID'], 'bnb', True, []) []"),
        ("cuda", "(['1', '1', '1', '1'], ['3', 'PCI_BUS_ID'], '', False, []) []"),  # otherwise no CUDA kernels
    ],
)
def test_cells_are_offline_without_the_working_folder_and_on_cuda_import_their_libraries_themselves(
    device: str, seen: str, tmp_path: Path
) -> None:
    hidden = tmp_path / "here" / "bitsandbytes"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('this is from the working folder')")
    (tmp_path / "look.py").write_text(LOOK)
    (tmp_path / "server.py").write_text(SERVER)
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE", "TRANSFORMERS_OFFLINE")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = [sys.executable, tmp_path / "server.py", device, tmp_path / "log.txt"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=hidden.parent)
    assert done.stdout.strip() == seen, done.stderr + (tmp_path / "log.txt").read_text()


def test_what_all_cells_on_cuda_would_find_out_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another process; if that fails, cells find out themselves."""
    asked = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command[-2:])
        return subprocess.CompletedProcess(command, 0, 'a banner\n{"GPTQMODEL_DISABLE_GPTQ_CUDA": "1"}\n')

    cuda.cuda_environment.cache_clear()
    monkeypatch.setattr(cuda.subprocess, "run", run)
    for _ in range(3):
        assert cuda.cuda_environment(("gptq", "hqq")) == {"GPTQMODEL_DISABLE_GPTQ_CUDA": "1"}
    assert asked == [["gptq", "hqq"]]
    cuda.cuda_environment.cache_clear()
    monkeypatch.setattr(cuda.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, ""))
    assert cuda.cuda_environment(("gptq",)) == {}
    cuda.cuda_environment.cache_clear()


@pytest.mark.slow
def test_gptqmodels_extension_is_tried_in_a_separate_process() -> None:
    """This machine has no CUDA to compile it for."""
    cuda.cuda_environment.cache_clear()
    assert cuda.cuda_environment(("gptq", "hqq")) == {"GPTQMODEL_DISABLE_GPTQ_CUDA": "1"}
    cuda.cuda_environment.cache_clear()


def test_a_preloaded_module_that_starts_cuda_is_an_error() -> None:
    code = "import torch; torch.cuda.is_initialized = lambda: True; import qbench.runner.preload"
    done = in_a_process(code, **{PRELOAD: ""})
    assert done.returncode != 0
    assert re.search("preloaded module .*CUDA", done.stderr)


def test_what_an_import_prints_is_shown_only_if_it_fails() -> None:
    assert in_a_process("import qbench.runner.preload", **{PRELOAD: "this"}).stdout == ""
    failing = in_a_process("import qbench.runner.preload", **{PRELOAD: "this,qbench.no_such_module"})
    assert "The Zen of Python" in failing.stderr
    assert "No module named 'qbench.no_such_module'" in failing.stderr


def test_a_process_whose_parent_is_gone_ends_at_once() -> None:
    assert in_a_process("import qbench.runner.preload", **{PARENT: "1", PRELOAD: ""}).returncode == 1


@pytest.mark.parametrize(
    ("code", "facts"),
    [
        (3, ("exit code 3",)),
        (-9, ("signal 9", "Killed", "out of memory")),
        (-11, ("signal 11", "Segmentation fault")),
    ],
)
def test_how_a_process_died(code: int, facts: tuple[str, ...]) -> None:
    assert all(fact in how_it_died(code) for fact in facts)
    assert ("memory" in how_it_died(code)) == (code == -9)


@pytest.mark.gpu
def test_one_cell_per_gpu_on_cuda(small: Path, tmp_path: Path) -> None:
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
