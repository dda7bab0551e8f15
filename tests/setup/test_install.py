"""Setup: which build of torch a machine gets, and one sentence for each machine that no build fits."""

import importlib.util
import os
import shutil
import subprocess
import sys
import urllib.request
from collections import namedtuple
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ..fake_gpus import MIG, TWO_KINDS, WSL2, Driver, FakeGpu, a100s, driver

__all__ = ["driver"]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "install.py"
V100 = FakeGpu("Tesla V100-SXM2-16GB", capability=(7, 0))
B200 = FakeGpu("NVIDIA B200", capability=(10, 0))
RTX_5090 = FakeGpu("NVIDIA GeForce RTX 5090", capability=(12, 0))
K80 = FakeGpu("Tesla K80", capability=(3, 7))
FUTURE = FakeGpu("NVIDIA X100", capability=(15, 0))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "install", module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def environment(folder: Path, torch: str) -> Path:
    """A folder that looks like an environment with this torch."""
    packages = folder / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    (packages / f"torch-{torch}.dist-info").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("gpus", "version", "tag"),
    [
        (a100s(1), "550.54.15", "cu126"),
        (a100s(1), "570.86.15", "cu126"),
        (a100s(1), "580.65.06", "cu130"),
        (a100s(8), "580.65.06", "cu130"),
        ([MIG], "580.65.06", "cu130"),
        ([WSL2], "581.15", "cu130"),
        ([WSL2], "566.36", "cu126"),
        (TWO_KINDS, "580.65.06", "cu130"),
        ([V100], "580.65.06", "cu126"),  # CUDA 13 has no code for it
        ([V100, *a100s(1)], "590.1", "cu126"),
        ([RTX_5090], "580.65.06", "cu130"),
        ([], "580.65.06", "cpu"),
    ],
)
def test_the_driver_and_the_gpus_decide_the_build(
    gpus: list[FakeGpu], version: str, tag: str, install: ModuleType, driver: Driver
) -> None:
    driver.has(gpus, version)
    assert install.choose_build(install.find_gpus(), "").tag == tag


def test_without_a_driver_it_is_the_cpu_build(install: ModuleType, driver: Driver) -> None:
    driver.fails(9)
    assert install.find_gpus() == []
    assert install.choose_build([], "").tag == "cpu"


@pytest.mark.parametrize(
    ("gpus", "version", "parts"),
    [
        (a100s(1), "470.57", ["470.57", "525.60.13", "580", "TORCH=cpu"]),
        ([B200], "570.86", ["B200", "10.0", "580", "570.86", "TORCH=cpu"]),
        ([K80], "580.65", ["K80", "3.7", "CUDA 12.6", "TORCH=cpu"]),
        ([FUTURE], "999.1", ["X100", "15.0", "CUDA 13.0", "12.0"]),
        ([V100, B200], "580.65", ["V100", "7.0", "CUDA_VISIBLE_DEVICES"]),
    ],
)
def test_what_no_build_runs_on_is_one_sentence(
    gpus: list[FakeGpu], version: str, parts: list[str], install: ModuleType, driver: Driver
) -> None:
    driver.has(gpus, version)
    with pytest.raises(SystemExit) as stopped:
        install.choose_build(install.find_gpus(), "")
    assert all(part in str(stopped.value) for part in parts)
    assert "\n" not in str(stopped.value)


def test_a_driver_too_old_to_report_the_architecture(install: ModuleType, driver: Driver) -> None:
    driver.tool("x")
    tool = driver.folder / "nvidia-smi"
    tool.write_text('#!/bin/sh\ncase "$1" in *compute_cap*) echo bad; exit 2;; *) echo "Tesla T4, 450.80.02";; esac\n')
    assert install.find_gpus() == [install.Gpu("Tesla T4", "450.80.02", None)]


@pytest.mark.parametrize(("wanted", "tag"), [("cpu", "cpu"), ("cuda", "cu130"), ("cu126", "cu126"), ("auto", "cpu")])
def test_torch_decides_if_no_gpu_is_visible(wanted: str, tag: str, install: ModuleType) -> None:
    assert install.choose_build([], wanted).tag == tag


def test_an_unknown_value_of_torch(install: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"'rocm'.*cu130"):
        install.choose_build([], "rocm")


@pytest.mark.parametrize(
    ("installed", "gpus", "version", "wanted", "fits"),
    [
        ("2.13.0+cpu", a100s(1), "580.1", "", False),  # made on a login node
        ("2.13.0", a100s(1), "580.1", "", True),
        ("2.13.0+cu130", a100s(1), "580.1", "", True),
        ("2.13.0", a100s(1), "550.1", "", False),
        ("2.13.0+cu126", a100s(1), "550.1", "", True),
        ("2.13.0", [], "", "", True),  # made on a GPU node, used on the login node
        ("2.13.0", [], "", "cuda", True),
        ("2.13.0+cu126", [], "", "cuda", True),
        ("2.13.0", [], "", "cpu", False),
        ("2.13.0+cpu", [], "", "cuda", False),
        ("2.13.0+cpu", [], "", "", True),
        ("2.12.0+cpu", [], "", "", False),
        ("", a100s(1), "580.1", "", True),  # nothing installed: the stamp decides
    ],
)
def test_a_torch_of_the_wrong_build_is_noticed(
    installed: str, gpus: list[FakeGpu], version: str, wanted: str, fits: bool, driver: Driver, tmp_path: Path
) -> None:
    driver.has(gpus, version or "1")
    folder = environment(tmp_path, installed) if installed else tmp_path
    done = subprocess.run([sys.executable, SCRIPT, "--fits", folder], env=os.environ | {"TORCH": wanted})
    assert (done.returncode == 0) is fits


def test_make_sets_up_again_if_the_build_is_wrong(driver: Driver, tmp_path: Path) -> None:
    """What make would run if the stamp is newer than all its dependencies."""
    (environment(tmp_path, "2.13.0+cpu") / "installed").touch()
    os.utime(tmp_path / "installed", (2**32, 2**32))
    command = ["make", "--dry-run", "setup", f"VENV={tmp_path}", f"PYTHON={sys.executable}"]

    def would_install() -> bool:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return f"scripts/install.py {tmp_path}" in done.stdout

    driver.has([])
    assert not would_install()
    driver.has(a100s(1))
    assert would_install()


def calls(install: ModuleType, monkeypatch: pytest.MonkeyPatch, has: tuple[str, ...] = ("",)) -> list[tuple[str, ...]]:
    """Record pip's arguments; it finds packages that start with one of `has`."""
    asked: list[tuple[str, ...]] = []

    def pip(folder: Path, *packages: str, must: bool = True) -> bool:
        asked.append(packages)
        return packages[0].startswith(has)

    monkeypatch.setattr(install, "pip", pip)
    monkeypatch.setattr(install, "make_environment", lambda folder: None)
    monkeypatch.setattr(install, "is_whole", lambda folder: True)
    return asked


def test_a_wrong_build_is_replaced_and_the_steps_are_shown(
    install: ModuleType,
    driver: Driver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    driver.has(a100s(1))
    asked = calls(install, monkeypatch)
    install.install(environment(tmp_path, "2.13.0+cpu"), "")
    assert asked == [("torch===2.13.0",), ("-e", f"{ROOT}[dev]")]  # === is not satisfied by 2.13.0+cpu
    first, second, third, last = capsys.readouterr().out.splitlines()
    assert all(part in first for part in ("[1/3]", "A100", "580.65.06"))
    assert all(part in second for part in ("[2/3]", "CUDA 13.0", "2.13.0+cpu", "5.9 GB"))
    assert "[3/3]" in third
    assert all(part in last for part in (str(tmp_path), " GB", " s"))


def test_the_right_build_stays(install: ModuleType, driver: Driver, tmp_path: Path, monkeypatch: Any) -> None:
    driver.has(a100s(1), "550.1")
    asked = calls(install, monkeypatch)
    install.install(environment(tmp_path, "2.13.0+cu126"), "")
    assert asked == [("-e", f"{ROOT}[dev]")]


@pytest.mark.parametrize("tag", ["cu126", "cpu"])
def test_if_the_index_lacks_the_build_pytorchs_index_is_used(
    tag: str, install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = calls(install, monkeypatch, has=("nothing",))
    install.install_torch(tmp_path, install.choose_build([], tag))
    name = f"torch==2.13.0+{tag}"
    assert asked == [(name,), (name, "--index-url", f"https://download.pytorch.org/whl/{tag}")]


def test_the_real_pip_shows_what_it_does_and_fails_with_a_sentence(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(install, "PROGRESS", 0.1)
    assert not install.pip(tmp_path, "--no-index", "no-such-package-qbench", must=False)
    assert " s  " in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"install\.log"):
        install.pip(tmp_path, "--no-index", "no-such-package-qbench")
    assert "no-such-package-qbench" in capsys.readouterr().err


LOG = """$ pip install -e .[dev]
Collecting hqq==0.2.8.post1 (from qbench-harness==0.1.0)
  Downloading hqq-0.2.8.post1-py3-none-any.whl (1.5 MB)
Collecting torch (from hqq)
  Downloading https://host/whl/cpu/torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl (185.5 MB)
"""


@pytest.mark.parametrize(
    ("more", "facts"),
    [
        ("", ["downloading torch (185.5 MB)", "187 MB"]),
        ("Collecting gptqmodel==7.6.0\n", ["looking for gptqmodel", "187 MB"]),
        ("  Building wheel for pypcre (pyproject.toml): started\n", ["building pypcre"]),
        ("Installing collected packages: hqq, torch, qbench-harness\n", ["installing 3 packages"]),
    ],
)
def test_progress_says_what_pip_does(more: str, facts: list[str], install: ModuleType) -> None:
    assert all(fact in install.doing(LOG + more) for fact in facts), install.doing(LOG + more)


def test_what_was_installed_under_the_former_name_is_removed(install: ModuleType, tmp_path: Path) -> None:
    """Or two distributions would own the same command."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    (tmp_path / "bin/python").chmod(0o755)
    packages = tmp_path / "lib/python3.11/site-packages"
    (packages / "qbench_harness-0.1.0.dist-info").mkdir(parents=True)
    install.remove_former_name(tmp_path)
    assert not (tmp_path / "asked").exists()
    (packages / "qbench-0.1.0.dist-info").mkdir()
    install.remove_former_name(tmp_path)
    assert (tmp_path / "asked").read_text().split()[-1] == "qbench"


@pytest.mark.parametrize(
    ("lacks", "names"),
    [
        ("compiler", ["C compiler", "apt install gcc.", "dnf install gcc.", "c-compiler"]),
        ("headers", ["Python.h", f"python3.{sys.version_info[1]}-dev", "python3-devel"]),
        ("both", ["C compiler", "Python.h", f"apt install gcc python3.{sys.version_info[1]}-dev."]),
    ],
)
def test_a_missing_compiler_is_reported_before_anything_is_made(
    lacks: str, names: list[str], install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks != "headers":
        monkeypatch.setenv("PATH", str(tmp_path))
    if lacks != "compiler":
        monkeypatch.setattr(install.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    asked = calls(install, monkeypatch)
    with pytest.raises(SystemExit) as stopped:
        install.install(tmp_path / "venv", "")
    assert all(name in str(stopped.value) for name in names)
    assert asked == []


@pytest.mark.parametrize(
    ("free", "wanted", "there", "stops"),
    [
        (5.8e9, "cuda", "", True),
        (6e9, "cuda", "", False),
        (2.9e9, "cpu", "", True),
        (3.1e9, "cpu", "", False),
        (3e9, "cuda", "2.13.0+cpu", False),  # the installed build is replaced
        (1e9, "cuda", "2.13.0", False),
    ],
)
def test_a_full_disk(
    free: float, wanted: str, there: str, stops: bool, install: ModuleType, tmp_path: Path, monkeypatch: Any
) -> None:
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(install.shutil, "disk_usage", lambda _: Usage(1e12, 1e12 - free, free))
    calls(install, monkeypatch)
    folder = environment(tmp_path, there) if there else tmp_path / "deep" / "venv"
    if not stops:
        install.install(folder, wanted)
        return
    with pytest.raises(SystemExit) as stopped:
        install.install(folder, wanted)
    size = install.choose_build([], wanted).gigabytes
    assert all(part in str(stopped.value) for part in (f"{size} GB", f"{free / 1e9:.1f} GB", str(tmp_path)))


@pytest.mark.parametrize(
    ("version", "fine"), [((3, 10, 13), False), ((3, 11, 0), True), ((3, 13, 9), True), ((3, 14, 0), False)]
)
def test_pythons(version: tuple[int, ...], fine: bool, install: ModuleType) -> None:
    if fine:
        install.check_python(version)
        return
    with pytest.raises(SystemExit) as stopped:
        install.check_python(version)
    assert all(part in str(stopped.value) for part in (".".join(map(str, version)), "3.11", "3.14", "PYTHON="))


def test_the_bounds_are_those_of_pyproject(install: ModuleType) -> None:
    low, high = (".".join(map(str, bound)) for bound in install.PYTHONS)
    assert f'requires-python = ">={low},<{high}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("minor", [8, 9, 10])
def test_an_old_python_can_read_the_script(minor: int) -> None:
    """A real one if it is installed; otherwise only the syntax is checked."""
    places = [*Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"), shutil.which(f"/usr/bin/python3.{minor}")]
    python = next(filter(None, places), None)
    if python is None:
        import ast

        ast.parse(SCRIPT.read_text(), feature_version=(3, minor))
        return
    done = subprocess.run([python, SCRIPT, "--gpus"], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"this is 3.{minor}." in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("tag", ["cu130", "cu126", "cpu"])
def test_pip_has_these_wheels(tag: str, install: ModuleType) -> None:
    """With the script's arguments, one index after the other."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps"]
    command += ["--retries", "0", "--timeout", "10"]
    said = ""
    for asked in install.torch_commands(install.choose_build([], tag)):
        done = subprocess.run([*command, *asked], capture_output=True, text=True)
        if done.returncode == 0:
            wheel = "2.13.0" if asked == ["torch===2.13.0"] else f"2.13.0+{tag}"
            assert f"Would install torch-{wheel}\n" in done.stdout
            return
        said += done.stderr
    index = f"{install.INDEX}/{tag}/torch/"
    try:
        urllib.request.urlopen(index, timeout=10).close()
    except OSError as error:
        pytest.skip(f"{index} cannot be reached ({error}), and the index in use does not have the build")
    pytest.fail(said)
