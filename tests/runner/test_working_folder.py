"""Folders in the working folder that have a package's name do not hide the package."""

import shutil
from pathlib import Path

import pytest
import yaml

from qbench.doctor.report import run_checks
from qbench.runner.child import without_working_folder

from .driver import events_of, run

NAMES = ("softpick", "qbench", "torch", "hqq")  # softpick is also a checkpoint
INIT = "raise ImportError('this is from the working folder')"


@pytest.fixture(params=[False, True], ids=["folders", "packages"])
def folder(request: pytest.FixtureRequest, matrix: Path, tmp_path: Path) -> Path:
    """A folder with a small recipe, and with folders named like packages: empty, or with an __init__.py."""
    folder = shutil.copytree(matrix, tmp_path / "here")
    for name in NAMES:
        (folder / name).mkdir(exist_ok=True)
        if request.param:
            (folder / name / "__init__.py").write_text(INIT)
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    quantizations = [{"method": "none"}, {"method": "hqq", "bits": 4, "options": {"group_size": 32}}]
    changed = {"quantizations": quantizations, "tasks": ["arc_easy"], "data": {"arc_easy": "arc_easy.jsonl"}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | changed))
    return folder


@pytest.mark.slow  # the test below and one in test_child.py are quick
def test_a_run_does_not_import_from_the_working_folder(folder: Path) -> None:
    code, events, errors = run(Path("recipe.yaml"), Path("out"), "--preflight", "--only", "softpick", cwd=folder)
    assert [event["reason"] for event in events_of(events, "finished")] == [None, None], errors
    assert code == 0, errors


@pytest.mark.slow
def test_the_doctor_does_not_import_from_the_working_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    checks = list(run_checks("cpu", ("hqq",)))
    assert len(checks) > 1
    assert [check.detail for check in checks if not check.ok] == []


def test_a_child_forgets_the_working_folder_of_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert without_working_folder(["", ".", "/usr/lib"]) == ["/usr/lib"]
    assert without_working_folder([str(tmp_path), "/usr/lib"]) == ["/usr/lib"]
    installed_from = ["/usr/lib", str(tmp_path)]  # an editable install adds its folder with a .pth file
    assert without_working_folder(["", *installed_from]) == installed_from
    monkeypatch.setenv("PYTHONPATH", f"/elsewhere:{tmp_path}")
    assert without_working_folder(["", str(tmp_path), "/usr/lib"]) == [str(tmp_path), "/usr/lib"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ray_workers_do_not_import_from_the_working_folder(folder: Path) -> None:
    pytest.importorskip("ray", reason="needs the package ray: pip install 'ray>=2.9'")
    options = ("--executor", "ray", "--no-preflight", "--only", "softpick-none")
    code, events, errors = run(Path("recipe.yaml"), Path("out"), *options, cwd=folder)
    assert [event["reason"] for event in events_of(events, "finished")] == [None], errors
    assert code == 0, errors
