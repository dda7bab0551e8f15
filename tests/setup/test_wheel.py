"""The wheel: its name and content, and that it works in a new environment outside the clone."""

import os
import re
import subprocess
import sys
import sysconfig
import time
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import qbench
from qbench.cli import main

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEXTS = ("*.py", "*.md", "*.yml", "*.toml", "*.txt", "Makefile", "Dockerfile", "*.ipynb", "*.sh")


def test_the_distribution_is_not_the_one_that_is_taken() -> None:
    assert PROJECT["name"] == qbench.DISTRIBUTION != "qbench"
    assert PROJECT["scripts"] == {"qbench": "qbench.cli:main"}


def test_no_text_tells_to_install_another_projects_package() -> None:
    wrong = re.compile(r"""(pip install|pip3 install|uv add|uv pip install)[^\n]*[\s'"]qbench\b(?!-)|"qbench\[""")
    assert wrong.search("pip install 'qbench[ray]'")
    assert not wrong.search("pip install 'qbench-harness[ray]'")
    done = subprocess.run(["git", "ls-files", "-z", "--", *TEXTS], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("not a git repository")
    names = [name for name in done.stdout.decode().split("\0") if name and name != "tests/setup/test_wheel.py"]
    assert len(names) > 300
    assert [name for name in names if wrong.search((ROOT / name).read_text(encoding="utf-8"))] == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"qbench {qbench.__version__}\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools writes next to what it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("qbench", "kernels", "recipes"):
        subprocess.run(["cp", "-r", ROOT / name, folder / name], check=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", ROOT / name, folder / name], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "made", "."]
    subprocess.run(command, cwd=folder, check=True)
    (made,) = (folder / "made").glob("*.whl")
    return made


@pytest.mark.slow
def test_the_wheel_has_mini_and_its_types(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    starter = "qbench/recipe/starter"
    for name in ("mine.yaml", "mini.yaml", "mini/softpick/model.safetensors", "mini/tasks/mini_piqa.jsonl"):
        assert f"{starter}/{name}" in names
    assert {"qbench/py.typed", "softpick/py.typed", "qbench/report/page.html"} <= set(names)
    assert wheel.stat().st_size < 8e6
    assert wheel.name.startswith("qbench_harness-")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_new_environment_outside_the_clone(wheel: Path, tmp_path: Path) -> None:
    """With this environment's packages on its path: they are the pinned ones, and have gigabytes."""
    started = time.monotonic()
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel]
    subprocess.run(command, env=clean, check=True)
    (packages,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    own = sum(file.stat().st_size for file in packages.rglob("*") if file.is_file())
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = clean | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    (tmp_path / "work").mkdir()

    def shell(command: str) -> str:
        done = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path / "work", env=environment, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    assert str(tmp_path) in shell("python -c 'import qbench, softpick; print(qbench.__file__)'")
    assert shell("qbench --version") == f"qbench {PROJECT['version']}\n"
    shell("qbench init && qbench plan recipes/mine.yaml && qbench fetch recipes/mini.yaml")
    shell("qbench run recipes/mine.yaml --limit 5")
    assert "hqq" in shell("qbench runs results/runs/mine")
    shell("qbench run recipes/mini.yaml --limit 5 --only '*-hqq-[34]*' && qbench audit results/runs/mini")
    shell("qbench table results/runs/mine && qbench table results/runs/mine --format html --out r.html")
    shell("qbench accept results/runs/mine --baseline results/base --reason first")
    assert "PASS" in shell("qbench check results/runs/mine --baseline results/base").upper()
    # The section of the docs for another repository: the baseline, then what the job does.
    section = (ROOT / "docs/gate.md").read_text(encoding="utf-8").partition("## In your own repository")[2]
    (baseline,) = re.findall(r"```\n(.*?)```", section, re.DOTALL)[:1]
    shell(baseline)
    run, check = re.findall(r"- run: (qbench .* quant/.*)", section)
    shell(run)
    assert "PASS" in shell(check)
    print(
        f"{time.monotonic() - started:.0f} s; wheel {wheel.stat().st_size / 1e6:.1f} MB, installed {own / 1e6:.1f} MB"
    )
