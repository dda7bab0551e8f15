"""What this machine is: for records, and for `qbench doctor`. Imports no torch."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

from qbench.gpus import gpus


def machine() -> dict[str, Any]:
    """CPU, cores, memory, GPUs with their driver, Python and platform."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [gpu.as_json() for gpu in gpus()],
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


def git_commit() -> str | None:
    """The commit of qbench's source tree, with a + if the tree has changes; None outside a repository."""
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
