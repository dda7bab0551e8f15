"""A quantizer is added in one place: a folder in qbench, or another package with an entry point."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = f"""
checkpoints: {{mini: {{softmax: {ROOT}/recipes/mini/softmax}}}}
quantizations: [{{method: none}}, {{methods: [minmax], bits: [3, 4], options: {{group_size: 32}}}}]
tasks: {{mini_piqa: {{data: {ROOT}/recipes/mini/tasks/mini_piqa.jsonl}}}}
task_folders: [{ROOT}/recipes/mini/tasks]
limit: 4
device: cpu
"""
SAVE_AND_LOAD = """
import sys
import torch
from qbench import load_checkpoint, quantize, save_quantized
from qbench.quantizers.packed import packed_form
model, audit = quantize(load_checkpoint(sys.argv[1]), "minmax", 4, group_size=32)
save_quantized(model, "saved")
loaded, ids = load_checkpoint("saved"), torch.arange(64).reshape(2, 32)
assert packed_form(loaded).quantization.label == audit.label == "minmax-4-g32"
with torch.no_grad():
    assert (loaded(ids).logits - model(ids).logits).abs().max() <= 1e-5
"""
COMMANDS = """
from qbench.cli import main
assert main(["plan", "recipe.yaml"]) == 0
print("next command")
assert main(["run", "recipe.yaml", "--out", "out"]) == 0
print("next command")
assert main(["plan", "recipe.yaml", "--out", "out"]) == 0
print("next command", flush=True)
assert main(["table", "out", "--kind", "damage", "--format", "csv"]) == 0
"""
IMPORTS_NO_TORCH = """
import sys
from qbench.quantizers.options import quantizers
print(*quantizers())
assert not {"torch", "transformers", "bitsandbytes", "hqq", "gptqmodel"} & set(sys.modules)
"""


def documented_files(package: str) -> dict[str, str]:
    """The min-max quantizer of docs/quantizers.md, as files of a package."""
    page = (ROOT / "docs" / "quantizers.md").read_text(encoding="utf-8")
    blocks = re.findall(r"`qbench/quantizers/minmax/([\w.]+)`:\n\n```python\n(.*?)^```", page, re.M | re.S)
    assert [name for name, _ in blocks] == ["__init__.py", "layer.py"]
    return {name: text.replace("qbench.quantizers.minmax", package) for name, text in blocks}


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def inside(folder: Path) -> list[Path]:
    """A copy of qbench with one additional folder."""
    shutil.copytree(ROOT / "qbench", folder / "qbench", ignore=shutil.ignore_patterns("__pycache__"))
    write(folder / "qbench" / "quantizers" / "minmax", documented_files("qbench.quantizers.minmax"))
    return [folder]


def outside(folder: Path, value: str = "nearest:QUANTIZER") -> list[Path]:
    """An installed third-party package."""
    write(folder / "nearest", documented_files("nearest"))
    metadata = "Metadata-Version: 2.1\nName: nearest\nVersion: 0.3\n"
    entry_points = f"[qbench.quantizers]\nminmax = {value}\n"
    write(folder / "nearest-0.3.dist-info", {"METADATA": metadata, "entry_points.txt": entry_points})
    return [folder, ROOT]


class Here:
    """A working folder, and what Python imports from it."""

    def __init__(self, folder: Path, path: list[Path]) -> None:
        folder.mkdir()
        self.folder = folder
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT / "kernels"])),
            "HF_HUB_OFFLINE": "1",
        }

    def python(self, *arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment,
            text=True,
            capture_output=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == code, f"{arguments}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def qbench(self, *arguments: str, code: int = 0) -> str:
        return self.python("-m", "qbench.cli", *arguments, code=code)


ADDED = [outside, inside]


@pytest.mark.slow  # make test has the tutorial, which adds it inside, and the entry points below
@pytest.mark.parametrize("add", ADDED)
def test_one_place_is_enough_to_plan_run_tabulate_save_and_load(
    add: Callable[[Path], list[Path]], tmp_path: Path
) -> None:
    here = Here(tmp_path / "work", add(tmp_path / "added"))
    (here.folder / "recipe.yaml").write_text(RECIPE)
    assert sorted(here.python("-c", IMPORTS_NO_TORCH).split()) == ["bnb", "gptq", "hqq", "minmax", "none", "rtn"]
    planned, _, again, table = here.python("-c", COMMANDS).split("next command\n")
    assert re.search("mini-softmax-minmax-4-g32 +to do", planned)
    assert re.search("mini-softmax-minmax-3 +not offered", planned)
    assert re.search("mini-softmax-minmax-4-g32 +done", again)
    assert "minmax" in table
    (file,) = (here.folder / "out").glob("*minmax-4*/record.json")
    assert json.loads(file.read_text())["quantizer"] == {"title": "Min-max", "calibrated": False}
    here.python("-c", SAVE_AND_LOAD, str(ROOT / "recipes/mini/softmax"))


def test_another_version_of_a_package_makes_its_own_cells_stale(tmp_path: Path) -> None:
    here = Here(tmp_path / "work", outside(tmp_path / "added"))
    show = """
from qbench.quantizers.options import quantization
print(*quantization("minmax", 4).packages().items(), quantization("none", 16).packages(), sep="\\n")
"""
    (minmax, none), layer = here.python("-c", show).splitlines(), tmp_path / "added" / "nearest" / "layer.py"
    assert minmax.startswith("('nearest', '0.3 (")
    assert none == "{}"
    layer.write_text(layer.read_text() + "\n\n# a comment\n")
    assert here.python("-c", show).splitlines()[0] == minmax
    layer.write_text(layer.read_text() + "\nSTEPS = 2\n")
    assert here.python("-c", show).splitlines()[0] != minmax


@pytest.mark.parametrize(
    ("value", "facts"),
    [
        ("nearest:NOTHING", ["minmax", "nearest:NOTHING", "AttributeError"]),
        ("nearest:MinMax", ["minmax", "nearest:MinMax", "Quantizer"]),
        ("qbench.quantizers.hqq:QUANTIZER", ["hqq", "qbench.quantizers.hqq:QUANTIZER"]),
    ],
)
def test_an_entry_point_that_is_wrong_is_named(tmp_path: Path, value: str, facts: list[str]) -> None:
    here = Here(tmp_path / "work", outside(tmp_path / "added", value))
    (here.folder / "recipe.yaml").write_text(RECIPE)
    said = here.qbench("plan", "recipe.yaml", code=2)
    assert all(fact in said for fact in facts)
    assert "Traceback" not in said
