"""The whole matrix through real processes, real quantizers and real lm-eval."""

import json
import shutil
from pathlib import Path

import pynvml
import pytest

from qbench.cli import main
from qbench.machine import machine
from qbench.recipe.cells import load_recipe
from qbench.records.store import read_results
from qbench.runner.local import Slot
from qbench.runner.lock import RunError
from qbench.runner.places import make_slots
from qbench.runner.plan import Plan, make_plan

from ..fake_gpus import MIG, TWO_KINDS, Driver, FakeGpu, a100s, driver
from .conftest import documents
from .driver import left_behind, run_here

__all__ = ["driver"]


def test_the_whole_matrix(matrix: Path, tmp_path: Path) -> None:
    code, _ = run_here(matrix / "recipe.yaml", tmp_path)
    assert code == 0
    found = read_results(tmp_path)
    assert len(found.current) == 22
    assert not found.missing
    assert {(entry.cell.method, entry.cell.bits) for entry in found.not_offered} == {("bnb", 2)}
    for stored in found.current:
        record = stored.record
        assert record.audit is not None
        assert record.cost is not None
        assert bool(record.audit.layers) == (record.cell.method != "none")
        assert list(record.cost.seconds) == ["load", "kl", "quantize", "evaluate"]
        assert record.cost.tokens
        assert record.provenance.machine["threads"] == 1
    measured = {metric.task for stored in read_results(tmp_path).current for metric in stored.record.metrics}
    assert measured == set(documents())
    assert not left_behind(tmp_path)


def test_slots_are_shares_of_the_cores(matrix: Path, tmp_path: Path) -> None:
    shared = make_slots(make_plan(load_recipe(matrix / "recipe.yaml"), tmp_path))
    assert {slot.threads for slot in shared} == {1}
    assert len(shared) <= machine()["cores"]
    assert (
        make_slots(make_plan(load_recipe(matrix / "recipe.yaml", workers=3, threads=2), tmp_path))
        == [Slot(threads=2)] * 3
    )


@pytest.fixture
def on_cuda(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A machine with a driver and a CUDA build of torch."""
    monkeypatch.setattr("qbench.gpus.torch_build", lambda: "2.13.0")
    return driver


def planned(matrix: Path, out: Path) -> Plan:
    return make_plan(load_recipe(matrix / "recipe.yaml", device="cuda"), out)


def test_a_slot_is_one_gpu_by_its_name(
    matrix: Path, tmp_path: Path, on_cuda: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cuda.has(a100s(8))
    assert [slot.gpu for slot in make_slots(planned(matrix, tmp_path))] == [f"GPU-aaaa{n:04}" for n in range(8)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7")
    assert make_slots(planned(matrix, tmp_path)) == [Slot(gpu="5"), Slot(gpu="7")]
    on_cuda.has([MIG])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [slot.gpu for slot in make_slots(planned(matrix, tmp_path))] == ["MIG-cccc0000", "MIG-cccc0001"]


def no_place(matrix: Path, out: Path) -> str:
    with pytest.raises(RunError) as stopped:
        make_slots(planned(matrix, out))
    assert "\n" not in str(stopped.value)
    return str(stopped.value)


def test_what_is_wrong_with_the_gpus_is_one_sentence(matrix: Path, tmp_path: Path, on_cuda: Driver) -> None:
    assert "no NVIDIA driver" in no_place(matrix, tmp_path)
    on_cuda.has([])
    assert "finds no GPU" in no_place(matrix, tmp_path)
    on_cuda.has(TWO_KINDS)
    assert "2 kinds" in no_place(matrix, tmp_path)
    on_cuda.has([FakeGpu(mode=pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, processes=1)])
    assert "exclusive" in no_place(matrix, tmp_path)
    on_cuda.has([FakeGpu(free=300, processes=2)])
    full = no_place(matrix, tmp_path)
    assert all(part in full for part in ("80.0 GiB", "0.3 GiB", "2 processes", "CUDA_VISIBLE_DEVICES"))


def test_a_card_with_8_gb_is_too_small_for_the_models_of_1_8b(matrix: Path, tmp_path: Path, on_cuda: Driver) -> None:
    """The config is a Llama of the paper's size; it fits on a card with 24 GB."""
    folder = shutil.copytree(matrix, tmp_path / "large")
    sizes = {"hidden_size": 2048, "num_hidden_layers": 32, "num_heads": 32, "vocab_size": 32000}
    for kind in ("softmax", "softpick"):
        file = folder / kind / "config.json"
        attention = {"attn_impl": "naive_softpick_attn"} if kind == "softpick" else {}
        fields = {"model_type": "transformer"} | sizes | attention
        file.write_text(json.dumps(fields))
    on_cuda.has([FakeGpu("NVIDIA GeForce RTX 3070", mib=8192, free=8100, capability=(8, 6))])
    small = no_place(folder, tmp_path)
    assert all(part in small for part in ("RTX 3070", "8.0 GiB", "larger GPU"))
    on_cuda.has([FakeGpu("NVIDIA GeForce RTX 3090", mib=24576, free=24000, capability=(8, 6))])
    assert len(make_slots(planned(folder, tmp_path))) == 1


def test_a_recipe_for_cuda_stops_before_anything_is_fetched(
    driver: Driver, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.has(a100s(1))
    monkeypatch.setattr("qbench.gpus.torch_build", lambda: "2.13.0+cpu")
    monkeypatch.setattr("qbench.runner.matrix.make_plan", lambda *_, **__: pytest.fail("it fetches datasets"))
    monkeypatch.setattr("qbench.runner.hub.needs_hub", lambda recipe, to_analyze: False)
    recipe = Path(__file__).parents[2] / "recipes" / "paper-340m.yaml"
    assert main(["run", str(recipe), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert all(part in said for part in ("paper-340m.yaml", "2.13.0+cpu", "TORCH=cuda"))
