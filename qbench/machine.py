"""What this machine is: for records, and for `qbench doctor`. Imports no torch."""

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

NVIDIA = Path("/dev/nvidiactl")  # there where the driver is


def machine() -> dict[str, Any]:
    """CPU, cores, memory, GPUs with their driver, Python and platform."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus(),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def cpu_name() -> str:
    """The CPU's name as the kernel gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def gpus() -> list[dict[str, str]]:
    """Name, memory and driver of each NVIDIA GPU, as nvidia-smi tells; empty where there is none."""
    if not shutil.which("nvidia-smi"):
        return []
    fields = ("name", "memory.total", "driver_version")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    rows = [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return [dict(zip(("name", "memory", "driver"), row, strict=False)) for row in rows]


def visible_gpus() -> int:
    """How many GPUs this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(gpus()) if visible is None else len([part for part in visible.split(",") if part not in ("", "-1")])


def has_cuda() -> bool:
    """Whether there is an NVIDIA GPU and a torch that was built for it, without importing torch.

    CUDA_VISIBLE_DEVICES hides what it does not name.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return NVIDIA.exists() and visible not in ("", "-1") and "+cpu" not in torch_build()


def torch_build() -> str:
    """torch's version with its build, such as 2.13.0+cpu; empty where there is none."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def git_commit() -> str | None:
    """The commit of qbench's own tree, with a + where the tree has changes; None outside of a repository."""
    folder = Path(__file__).resolve().parents[1]
    if not (folder / ".git").exists():
        return None
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return commit + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()
