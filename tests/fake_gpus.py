"""Simulated GPUs: a library that answers like the driver's, and a tool that prints what nvidia-smi prints."""

import ctypes
import functools
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pynvml
import pytest

SOURCE = Path(__file__).parent / "setup" / "fake_nvml.c"
LIBRARY = "libnvidia-ml.so.1"
NOT_SUPPORTED = -1


@dataclass(frozen=True)
class FakeGpu:
    """A GPU, or with `parts` one in MIG mode."""

    name: str = "NVIDIA A100-SXM4-80GB"
    uuid: str = "GPU-aaaa0000"
    mib: int = 81920
    free: int | None = None  # MiB; None: all of it
    capability: tuple[int, int] = (8, 0)
    mode: int = pynvml.NVML_COMPUTEMODE_DEFAULT
    processes: int = 0
    parts: tuple["FakeGpu", ...] = field(default=())
    mig: int = 0

    def lines(self) -> list[str]:
        """As fake_nvml.c reads it."""
        memory = [self.mib, self.mib if self.free is None else self.free]
        rest = [*self.capability, self.mode, self.processes, 1 if self.parts else self.mig]
        whole = ["gpu", self.uuid, self.name, *memory, *rest]
        parts = [["part", part.uuid, part.name, part.mib, part.mib] for part in self.parts]
        return ["|".join(map(str, line)) for line in (whole, *parts)]


def a100s(count: int) -> list[FakeGpu]:
    """This many GPUs of one kind."""
    return [FakeGpu(uuid=f"GPU-aaaa{n:04}") for n in range(count)]


MIG = FakeGpu(
    uuid="GPU-bbbb0000",
    parts=tuple(FakeGpu("NVIDIA A100-SXM4-80GB MIG 3g.40gb", f"MIG-cccc{n:04}", 40192) for n in range(2)),
)
# On WSL2 the driver is Windows' and does not answer all questions.
WSL2 = FakeGpu("NVIDIA GeForce RTX 4090", "GPU-dddd0000", 24564, None, (8, 9), NOT_SUPPORTED, NOT_SUPPORTED, (), -1)
TWO_KINDS = [*a100s(5), *(FakeGpu("NVIDIA H100 80GB HBM3", f"GPU-eeee{n:04}", capability=(9, 0)) for n in range(3))]


@functools.cache
def library() -> Path:
    """The library, compiled once per process, which then has it under the driver's name."""
    file = Path(tempfile.mkdtemp(prefix="fake-nvml-")) / LIBRARY
    subprocess.run(["cc", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", "-o", str(file), str(SOURCE)], check=True)
    ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    return file


class Driver:
    """What NVML and nvidia-smi say, in this process and in those that it starts."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        """With no driver at first."""
        self.folder, self.patch = folder, patch
        patch.setattr(pynvml, "nvmlLib", None)
        patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        patch.setenv("LD_LIBRARY_PATH", f"{library().parent}:{os.environ.get('LD_LIBRARY_PATH', '')}")
        for name in ("FAKE_NVML", "CUDA_VISIBLE_DEVICES"):
            patch.delenv(name, raising=False)

    def has(self, gpus: Sequence[FakeGpu], driver: str = "580.65.06") -> None:
        """This driver with these GPUs."""
        self._nvml([f"driver|{driver}", *(line for gpu in gpus for line in gpu.lines())])
        rows = [f"{gpu.name}, {driver}, {gpu.capability[0]}.{gpu.capability[1]}" for gpu in gpus]
        self.tool("\n".join(rows) if rows else "No devices were found", code=0 if rows else 6)

    def fails(self, code: int) -> None:
        """A driver that does not answer."""
        self._nvml([f"error|{code}"])
        self.tool("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", code=9)

    def tool(self, printed: str, code: int = 0) -> None:
        """An nvidia-smi that always prints this."""
        file = self.folder / "nvidia-smi"
        file.write_text(f"#!/bin/sh\ncat <<'END'\n{printed}\nEND\nexit {code}\n")
        file.chmod(0o755)
        self.patch.setenv("PATH", f"{self.folder}:{os.environ['PATH']}")

    def _nvml(self, lines: list[str]) -> None:
        file = self.folder / "nvml.txt"
        file.write_text("\n".join(lines) + "\n")
        self.patch.setenv("FAKE_NVML", str(file))


@pytest.fixture
def driver(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A machine whose driver the test chooses; at first it has none."""
    return Driver(tmp_path_factory.mktemp("driver"), monkeypatch)
