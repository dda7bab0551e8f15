"""Which GPUs are found, and why others are not; with a fake driver library."""

import subprocess
import sys

import pynvml
import pytest

from qbench import gpus as found
from qbench.machine import machine

from ..fake_gpus import MIG, TWO_KINDS, WSL2, Driver, FakeGpu, a100s, driver

__all__ = ["driver"]


@pytest.fixture(autouse=True)
def _cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found, "torch_build", lambda: "2.13.0")


def ids() -> list[str]:
    return [gpu.id for gpu in found.gpus()]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-aaaa0000", "GPU-aaaa0001", "GPU-aaaa0002"]),
        ("2, 0", ["2", "0"]),
        ("GPU-aaaa0001", ["GPU-aaaa0001"]),
        ("GPU-aaaa0001,0", ["GPU-aaaa0001", "0"]),
        ("GPU-aaaa", []),  # ambiguous: three match
        ("GPU-bbbb", []),
        ("1,7,0", ["1"]),  # CUDA stops at the first that does not exist
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_what_cuda_visible_devices_shows(
    visible: str | None, expected: list[str], driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.has(a100s(3))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert ids() == expected
    assert found.has_cuda() is bool(expected)
    if not expected:
        assert all(part in found.why_not_cuda() for part in ("3 GPUs", "CUDA_VISIBLE_DEVICES", repr(visible)))


@pytest.mark.parametrize("visible", [None, "0", "GPU-bbbb0000", "MIG-cccc0000,MIG-cccc0001"])
def test_a_gpu_in_mig_mode_is_its_parts(visible: str | None, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.has([MIG])
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert ids() == ["MIG-cccc0000", "MIG-cccc0001"]
    assert [gpu.memory for gpu in found.gpus()] == [40192 * 2**20] * 2
    assert found.gpus()[0].capability == (8, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-cccc0001")
    assert ids() == ["MIG-cccc0001"]


def test_wsl2_has_no_device_files_and_does_not_answer_everything(driver: Driver) -> None:
    driver.has([WSL2], driver="581.15")
    assert found.has_cuda()
    (gpu,) = found.gpus()
    assert (gpu.name, gpu.capability, gpu.mode, gpu.processes) == ("NVIDIA GeForce RTX 4090", (8, 9), "default", 0)
    assert found.why_not_cuda() == ""


def test_a_record_says_which_gpu_it_was(driver: Driver) -> None:
    driver.has(a100s(1))
    assert machine()["gpus"] == [
        {"name": "NVIDIA A100-SXM4-80GB", "memory_gib": 80.0, "driver": "580.65.06", "capability": "8.0"}
    ]


def test_no_driver(driver: Driver) -> None:
    assert not found.has_cuda()
    assert "no NVIDIA driver" in found.why_not_cuda()


def test_a_driver_that_is_not_loaded(driver: Driver) -> None:
    driver.fails(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert not found.has_cuda()
    assert "Driver Not Loaded" in found.why_not_cuda()


def test_a_driver_without_a_gpu(driver: Driver) -> None:
    driver.has([], driver="570.1")
    assert not found.has_cuda()
    assert "570.1" in found.why_not_cuda()


def test_the_cpu_build_of_torch(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.has(a100s(1))
    monkeypatch.setattr(found, "torch_build", lambda: "2.13.0+cpu")
    assert not found.has_cuda()
    assert all(part in found.why_not_cuda() for part in ("2.13.0+cpu", "A100", "make setup"))


@pytest.mark.parametrize(
    ("mode", "processes", "fine"),
    [
        (pynvml.NVML_COMPUTEMODE_DEFAULT, 3, True),
        (pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, 0, True),  # a cell is one process
        (pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, 1, False),
        (pynvml.NVML_COMPUTEMODE_PROHIBITED, 0, False),
    ],
)
def test_a_gpu_in_exclusive_or_prohibited_mode(mode: int, processes: int, fine: bool, driver: Driver) -> None:
    driver.has([*a100s(1), FakeGpu(uuid="GPU-ffff", mode=mode, processes=processes)])
    reason = found.why_not_cuda()
    assert (reason == "") is fine
    if not fine:
        assert all(part in reason for part in ("GPU-ffff", "nvidia-smi -c", "CUDA_VISIBLE_DEVICES"))


def test_gpus_of_two_kinds(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command in the message chooses those of one kind."""
    driver.has(TWO_KINDS)
    reason = found.why_not_cuda()
    assert all(part in reason for part in ("5 × NVIDIA A100-SXM4-80GB", "3 × NVIDIA H100 80GB HBM3"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", reason.split("CUDA_VISIBLE_DEVICES=")[1].split("`")[0])
    assert found.why_not_cuda() == ""
    assert len(ids()) == 5


def test_in_another_process_too(driver: Driver) -> None:
    driver.has(a100s(8))
    code = "from qbench.gpus import gpus; import sys; print(len(gpus()), 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "8 False\n"
