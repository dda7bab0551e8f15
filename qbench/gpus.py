"""The NVIDIA GPUs that this process may use, from the driver's library (NVML). Does not import torch or start CUDA.

NVML also works on WSL2, where there are no /dev/nvidia* files, and knows UUIDs and the parts of a GPU in MIG mode.
"""

import contextlib
import ctypes
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"
WSL = "/usr/lib/wsl/lib/libnvidia-ml.so.1"  # the library on WSL2; not always on the linker's path


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a part of one in MIG mode."""

    id: str  # for a worker's CUDA_VISIBLE_DEVICES: the entry of ours, or the UUID
    name: str
    memory: int  # bytes
    free: int  # bytes
    driver: str
    capability: tuple[int, int]
    mode: str = "default"  # or exclusive: one process at a time; or prohibited: none
    processes: int = 0  # computing on it now

    def as_json(self) -> dict[str, Any]:
        """The fields that a record stores."""
        return {
            "name": self.name,
            "memory_gib": round(self.memory / 2**30, 1),
            "driver": self.driver,
            "capability": ".".join(map(str, self.capability)),
        }


@dataclass(frozen=True)
class GpusFound:
    """The GPUs that this process may use; if there are none, the reason."""

    gpus: tuple[Gpu, ...]
    reason: str = ""


def find_gpus() -> GpusFound:
    """The GPUs of this machine that CUDA_VISIBLE_DEVICES shows."""
    import pynvml

    try:
        with _nvml():
            driver = pynvml.nvmlSystemGetDriverVersion()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
            if not handles:
                return GpusFound((), f"The NVIDIA driver ({driver}) is installed, but it finds no GPU.")
            return _chosen([_parts(handle, driver) for handle in handles])
    except pynvml.NVMLError_LibraryNotFound:
        return GpusFound((), "This machine has no NVIDIA driver (libnvidia-ml.so.1 not found).")
    except pynvml.NVMLError as error:
        return GpusFound(
            (), f"The NVIDIA driver does not answer ({error}): is it loaded, or was it updated without a restart?"
        )


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process may use."""
    return find_gpus().gpus


def torch_build() -> str:
    """torch's version with its build, such as 2.13.0+cpu; empty if it is not installed."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def has_cuda() -> bool:
    """Whether there is a usable GPU and a CUDA build of torch; does not import torch."""
    return "+cpu" not in torch_build() and bool(gpus())


def why_not_cuda() -> str:
    """One sentence on why cells cannot run on this machine's GPUs; empty if they can."""
    found = find_gpus()
    if not found.gpus:
        return found.reason
    if "+cpu" in torch_build():
        return (
            f"There is a GPU ({found.gpus[0].name}), but torch {torch_build()} is the CPU build. `make setup` on this "
            "machine, or `TORCH=cuda make setup` on any machine, installs the CUDA build."
        )
    for gpu in found.gpus:
        if gpu.mode == "prohibited" or (gpu.mode == "exclusive" and gpu.processes):
            busy = ", and another process is using it" if gpu.processes else ""
            return (
                f"{gpu.name} ({gpu.id}) is in compute mode {gpu.mode}{busy}. Allow several processes with "
                f"`nvidia-smi -c DEFAULT`, or choose another GPU with {VISIBLE}."
            )
    kinds = Counter(gpu.name for gpu in found.gpus)
    if len(kinds) > 1:
        most = kinds.most_common(1)[0][0]
        alike = ",".join(gpu.id for gpu in found.gpus if gpu.name == most)
        there = ", ".join(f"{n} × {name}" for name, n in kinds.items())
        return (
            f"There are {len(kinds)} kinds of GPU ({there}), which round differently, so their cells cannot be "
            f"compared. Choose one kind with `export {VISIBLE}={alike}`."
        )
    return ""


@contextlib.contextmanager
def _nvml() -> Iterator[None]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        with contextlib.suppress(OSError):
            ctypes.CDLL(WSL, mode=ctypes.RTLD_GLOBAL)  # now the linker finds it by name
        pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _parts(handle: Any, driver: str) -> list[Gpu]:
    """The whole GPU, followed by its MIG parts."""
    import pynvml

    whole = _gpu(handle, handle, driver)
    try:
        divided = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError:
        divided = False
    parts = []
    for n in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle) if divided else 0):
        with contextlib.suppress(pynvml.NVMLError):  # fewer than the maximum
            parts.append(_gpu(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, n), handle, driver))
    return [whole, *parts]


def _gpu(handle: Any, whole: Any, driver: str) -> Gpu:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    modes = {
        pynvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
        pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive",
        pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD: "exclusive",
    }
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(whole)
    return Gpu(
        id=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        memory=memory.total,
        free=memory.free,
        driver=driver,
        capability=(major, minor),
        mode=modes.get(_or(0, pynvml.nvmlDeviceGetComputeMode, whole), "default"),
        processes=len(_or([], pynvml.nvmlDeviceGetComputeRunningProcesses, handle)),
    )


def _or(otherwise: Any, ask: Any, handle: Any) -> Any:
    """NVML's answer, or a default if this GPU has none, as on WSL2."""
    import pynvml

    try:
        return ask(handle)
    except pynvml.NVMLError:
        return otherwise


def _chosen(found: list[list[Gpu]]) -> GpusFound:
    """The GPUs in CUDA_VISIBLE_DEVICES: indices or prefixes of UUIDs, up to the first that does not exist.

    A GPU in MIG mode stands for its parts: CUDA cannot use it as a whole.
    """
    named = os.environ.get(VISIBLE)
    if named is None:
        return GpusFound(tuple(gpu for whole, *parts in found for gpu in (parts or [whole])))
    chosen: list[Gpu] = []
    for token in (part.strip() for part in named.split(",")):
        if not (fitting := _fitting(token, found)):
            break
        chosen += fitting
    here = f"{len(found)} GPUs" if len(found) > 1 else "1 GPU"
    reason = f"This machine has {here}, but {VISIBLE}={named!r} selects none."
    return GpusFound(tuple(chosen), "" if chosen else reason)


def _fitting(token: str, found: list[list[Gpu]]) -> list[Gpu]:
    """The GPUs that one entry names; none for -1, an empty entry, or Slurm's NoDevFiles."""
    if token.isdecimal():
        groups = found[int(token) : int(token) + 1]
    elif token.startswith(("GPU-", "MIG-")):
        every = [*found, *([part] for _, *parts in found for part in parts)]
        groups = [group for group in every if group[0].id.startswith(token)]
    else:
        groups = []
    if len(groups) != 1:
        return []
    whole, *parts = groups[0]
    return parts or [replace(whole, id=token)]
