"""The Dockerfile, the Slurm script and the notebook: runs their commands as far as possible without Docker or Slurm."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
NOTEBOOK = json.loads((ROOT / "docs" / "colab.ipynb").read_text())


def tracked() -> list[Path]:
    """The files that a clone of the working folder has."""
    done = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True)
    if done.returncode:
        pytest.skip("not a git repository")
    return [Path(name) for name in done.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the tracked files."""
    for name in tracked():
        (tmp_path / "qbench" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "qbench" / name)
    return tmp_path / "qbench"


def runs() -> list[str]:
    """The commands of the Dockerfile."""
    return re.findall(r"^RUN (.*)$", DOCKERFILE, re.M)


def test_the_image_has_what_setup_needs() -> None:
    assert re.search(r"^FROM python:3\.1[123]-", DOCKERFILE, re.M)
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in DOCKERFILE
    assert re.search(r"^ARG TORCH=cuda$", DOCKERFILE, re.M)
    assert {"gcc", "make"} <= set(runs()[0].split())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_commands_of_the_dockerfile_run_in_a_clean_folder(clone: Path, tmp_path: Path) -> None:
    """With the CPU build, which is half the size; apt-get only simulates."""
    environment = os.environ | {"TORCH": "cpu", "HOME": str(tmp_path / "home"), "PYTHONPATH": ""}
    cache = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True).stdout.strip()
    environment |= {"PIP_CACHE_DIR": cache} if cache else {}
    for command in runs():
        if command.startswith("apt-get"):
            if shutil.which("apt-get") is None:
                continue
            command = command.replace("apt-get update && ", "").split(" && rm ")[0].replace("install", "install -s", 1)
        done = subprocess.run(["sh", "-ec", command], cwd=clone, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"RUN {command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    said = subprocess.run(
        [clone / ".venv" / "bin" / "qbench", "doctor"], env=environment, capture_output=True, text=True
    )
    assert said.returncode == 0, said.stdout
    assert re.search(r"packages +torch==.* all \d+ packages", " ".join(said.stdout.split()))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_slurm_script_is_sound() -> None:
    done = subprocess.run(["shellcheck", ROOT / "docs" / "slurm.sh"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("ends_with", [0, 1])
def test_the_slurm_script_runs_make_bench_and_ends_as_it_does(ends_with: int, tmp_path: Path) -> None:
    (tmp_path / "make").write_text(f'#!/bin/sh\necho "make $*, offline $HF_HUB_OFFLINE"\nexit {ends_with}\n')
    (tmp_path / "make").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", ROOT / "docs" / "slurm.sh", "my.yaml"], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout == "make bench RECIPE=my.yaml, offline 1\n"
    assert done.returncode == ends_with


def test_the_slurm_script_passes_on_the_signal_that_its_time_is_up(tmp_path: Path) -> None:
    (tmp_path / "make").write_text("#!/bin/sh\ntrap 'echo stopped; exit 130' TERM\necho started\nsleep 60 & wait $!\n")
    (tmp_path / "make").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job = subprocess.Popen(
        ["bash", ROOT / "docs" / "slurm.sh"], env=environment, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert job.stdout
    assert job.stdout.readline() == "started\n"
    job.terminate()
    assert job.stdout.readline() == "stopped\n"
    assert job.wait(timeout=30) != 0


def sources() -> list[str]:
    return ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def as_python(source: str) -> str:
    """A notebook cell as plain Python: lines that start with ! are for the shell."""
    return re.sub(r"^( *)!(.*)$", lambda line: f"{line[1]}_shell({line[2]!r})", source, flags=re.M)


def test_the_notebook_is_valid() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert all(cell["outputs"] == [] for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code")
    for source in sources():
        compile(as_python(source), "cell", "exec")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_notebook_runs_here(clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its cells, in a clone; `make setup` is a dry run, and the installed packages are used."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QBENCH_REPOSITORY", str(ROOT))
    monkeypatch.setenv("PYTHONPATH", f"{clone}:{clone / 'kernels'}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (clone / ".venv").symlink_to(sys.prefix)
    variables: dict[str, object] = {}
    shown = []

    def shell(command: str) -> None:
        command = command.replace("make setup", "make --dry-run setup")
        own = {name: value for name, value in variables.items() if isinstance(value, str)}
        done = subprocess.run(["sh", "-c", command], env=os.environ | own, capture_output=True, text=True)
        assert done.returncode == 0, f"!{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        shown.append(done.stdout)

    variables["_shell"] = shell
    for source in sources():
        exec(compile(as_python(source), "cell", "exec"), variables)
    assert any("Mini Arc Easy" in text for text in shown)
    assert len(variables["rows"]) > 5  # type: ignore[arg-type]
    assert "TFLOP/s" in (clone / "qbench-doctor.md").read_text()
