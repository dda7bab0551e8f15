"""The plan's estimate of a cell's work, time and memory, compared with what the cell takes."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from qbench import save_checkpoint
from qbench.attention.register import build_model
from qbench.evaluate.divergence import compare
from qbench.evaluate.facts import characters
from qbench.gpus import Gpu
from qbench.recipe.cells import Cell, Recipe, cells, load_recipe, recipe_tasks
from qbench.runner import speed
from qbench.runner.cell import (
    cell_scorer,
    evaluate_model,
    load_cell_tasks,
    load_model,
    load_tokenizer,
    page_reference,
)
from qbench.runner.estimate import characters_per_token, estimate, expected_seconds
from qbench.runner.plan import make_plan
from qbench.runner.plan_table import render_plan

from ..fake_gpus import Driver, a100s, driver

__all__ = ["driver"]

ROOT = Path(__file__).parents[2]
MINI = ROOT / "recipes" / "mini.yaml"
A100 = Gpu("0", "NVIDIA A100-SXM4-80GB", 80 * 2**30, 80 * 2**30, "580", (8, 0))
# The network of the paper's 340M checkpoints.
LARGE = {
    "model_type": "transformer",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_heads": 16,
    "vocab_size": 32000,
}


def mini(label: str = "none-16", **changes: object) -> Cell:
    """A cell of the softmax model; for a calibrated quantization, the first draw."""
    found = cells(load_recipe(MINI, **changes))
    return next(c for c in found if (c.ref.attention, c.ref.label) == ("softmax", label))


def test_a_context_is_read_once_however_many_continuations_it_has() -> None:
    question = "Which animal?"  # 13 characters
    assert characters([(question, " cat"), (question, " bird")]) == {
        "read": 13 + 4 + 5,
        "scored": 9,
        "attended": 13**2 // 2 + 4 * (13 + 2) + 5 * (13 + 2),
    }
    assert characters([("a page",)]) == {"read": 6, "scored": 6, "attended": 6 * 3}
    assert characters([("", "word")])["scored"] == 4
    assert characters([("prompt", {"until": ["."]})]) == {"read": 6, "scored": 0, "attended": 6 * 3}


def test_the_work_is_what_torch_counts() -> None:
    """The products of a real evaluation, counted by torch; the difference is padding."""
    cell = mini(limit=40)
    found = estimate(cell, recipe_tasks(cell.recipe))
    assert found
    model, tokenizer = load_model(cell, cell.identity()), load_tokenizer(cell, cell.identity())
    model.config._attn_implementation = "eager"  # the counter does not know torch's fused attention on the CPU
    lm, tasks = cell_scorer(cell, model, tokenizer), load_cell_tasks(cell)
    with FlopCounterMode(display=False) as counter:
        reference = page_reference(cell, lm, tasks)
        lm.wanted = reference.counts
        evaluate_model(cell, lm, tasks, cell.identity().what.tasks)
        compare(reference, lm.states, model.lm_head)
    assert found.work / counter.get_total_flops() == pytest.approx(1, abs=0.3)


def test_tokens_are_counted_by_the_cells_tokenizer() -> None:
    cell = mini(limit=40)
    tasks = recipe_tasks(cell.recipe)
    tokenizer = load_tokenizer(cell, cell.identity())
    sample = "\n".join(facts.sample for facts in tasks.values())
    ids = tokenizer(sample, add_special_tokens=False)["input_ids"]
    assert characters_per_token(cell, tasks.values()) == pytest.approx(len(sample) / len(ids), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("label", ["none-16", "bnb-8", "hqq-3-g64", "gptq-4-g128"])
def test_the_time_of_a_cell_is_within_a_factor_of_two(label: str, plan: ModuleType) -> None:
    """Of one core's CPU time, whatever else is running."""
    check_time(plan, mini(label))


@pytest.mark.slow
def test_the_time_of_a_cell_of_340m_is_within_a_factor_of_two(plan: ModuleType, tmp_path: Path) -> None:
    config = LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=24, num_attention_heads=16)
    save_checkpoint(build_model(config), tmp_path / "large", load_tokenizer(mini(), mini().identity()))
    recipe = {"extends": str(MINI), "checkpoints": {"mini": None, "large": {"softmax": "large"}}, "limit": 10}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    check_time(plan, cells(load_recipe(tmp_path / "recipe.yaml"))[0])


def check_time(plan: ModuleType, cell: Cell) -> None:
    torch.set_num_threads(1)
    pairs = plan.compare(cell).values()
    planned, taken = (sum(pair[n] for pair in pairs) for n in (0, 1))
    assert 0.5 < planned / taken < 2, f"{planned:.1f} s estimated, {taken:.1f} s of CPU taken"


@pytest.fixture
def plan() -> ModuleType:
    """benchmarks/plan.py."""
    spec = importlib.util.spec_from_file_location("benchmark_of_plans", ROOT / "benchmarks" / "plan.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestSpeed:
    def test_a_core_is_measured_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first = speed.core_rate()
        assert 1e8 < first < 1e13
        monkeypatch.setattr(speed, "_measure_core", lambda: 1.0)
        assert speed.core_rate() == first

    @pytest.mark.parametrize(
        ("name", "teraflops"),
        [
            ("NVIDIA A100-SXM4-80GB", 312),
            ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 312 * 3 / 7),
            ("NVIDIA A10", 125),
            ("NVIDIA A10G", 70),
            ("NVIDIA H100 80GB HBM3", 989),
            ("NVIDIA H100 PCIe", 756),
            ("NVIDIA GH200 480GB", 989),
            ("NVIDIA L4", 121),
            ("NVIDIA L40S", 362),
            ("NVIDIA RTX A4000", 50),  # not an A40: not listed
        ],
    )
    def test_a_gpu_has_its_published_peak(self, name: str, teraflops: float) -> None:
        gpu = Gpu("0", name, 2**30, 2**30, "580", (8, 0))
        found = speed.gpu_speed(gpu, "bfloat16")
        assert found.operations == pytest.approx(teraflops * 1e12)
        assert ("not listed" in found.name) is (teraflops == 50)
        assert speed.gpu_speed(gpu, "float32").operations < found.operations

    def test_twice_the_work_or_a_smaller_share_takes_longer(self) -> None:
        found = speed.gpu_speed(A100, "bfloat16")
        assert found.seconds(2e15) == pytest.approx(2 * found.seconds(1e15)) == pytest.approx(2e15 / 0.4 / 312e12)


@pytest.fixture
def large(matrix: Path, tmp_path: Path) -> Recipe:
    """The matrix with configs of the paper's size."""
    import shutil

    folder = shutil.copytree(matrix, tmp_path / "large")
    (folder / "softmax" / "config.json").write_text(json.dumps(LARGE))
    return load_recipe(folder / "recipe.yaml")


def test_the_plan_shows_the_time_on_this_machines_gpu(
    large: Recipe, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qbench.gpus.torch_build", lambda: "2.13.0")
    driver.has(a100s(8))
    recipe = load_recipe(large.file, device="cuda")
    text = render_plan(make_plan(recipe, tmp_path / "out"))
    (line,) = [line for line in text.splitlines() if line.startswith("time left: ")]
    assert " of " not in line.split("(")[0]
    assert all(part in line for part in ("8 cells at once", "load", "quantize", "evaluate"))
    (speed_line,) = [line for line in text.splitlines() if "TFLOP/s" in line]
    assert all(part in speed_line for part in ("A100", "40%", "312 TFLOP/s"))


def test_the_time_left_is_that_of_cells_that_can_run(large: Recipe, tmp_path: Path) -> None:
    def time_left() -> float:
        entries = make_plan(large, tmp_path / "out").entries
        to_do = [entry.cell for entry in entries if entry.state == "to do"]
        return sum(sum(own.values()) for own in expected_seconds(large, {}, to_do).values())

    both = time_left()
    (large.file.parent / "softpick" / "config.json").write_text("{}")
    assert 0 < time_left() < both
    assert "11 cannot run" in render_plan(make_plan(large, tmp_path / "out"))


def test_without_the_gpu_the_plan_says_why_and_shows_the_rest(large: Recipe, driver: Driver, tmp_path: Path) -> None:
    text = render_plan(make_plan(load_recipe(large.file, device="cuda"), tmp_path / "out"))
    assert "no NVIDIA driver" in text
    assert "TFLOP left" in text
    assert "time left" not in text


def test_calibration_and_solving_are_part_of_gptq(large: Recipe) -> None:
    tasks = recipe_tasks(large)
    by_label = {
        cell.ref.label: estimate(cell, tasks, speed.gpu_speed(A100, "bfloat16"))
        for cell in cells(large)
        if cell.ref.attention == "softmax" and cell.ref.label != "bnb-2"
    }
    gptq, hqq, none = (by_label[label] for label in ("gptq-4-g32", "hqq-4-g32", "none-16"))
    assert gptq
    assert hqq
    assert none
    # 4 samples of 64 tokens: 2.4 times through 302 million weights, and Hessians of 1024³ … 2816 columns
    assert gptq.work - hqq.work == pytest.approx(2 * 256 * (2.4 * 302e6 + 24 * (3 * 1024**2 + 2816**2)), rel=0.05)
    assert gptq.seconds["quantize"] > hqq.seconds["quantize"] > none.seconds["quantize"]
    assert gptq.seconds["evaluate"] == none.seconds["evaluate"]


def test_kl_is_part_of_cells_that_score_pages() -> None:
    """Mini has 8,000 tokens of pages and more: one pass of the model, and lm_head for both models."""
    cell = mini()
    tasks, one_core = recipe_tasks(cell.recipe), speed.speed_of(cell.recipe, 1)
    without = {name: own for name, own in tasks.items() if not own.pages}
    assert set(tasks) - set(without) == {"mini_wikitext"}
    found, other = estimate(cell, tasks, one_core), estimate(cell, without, one_core)
    assert found
    assert other
    assert found.seconds["kl"] > 0
    assert other.seconds["kl"] == 0
    assert found.total == sum(found.seconds.values())
