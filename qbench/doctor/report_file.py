"""The file that `qbench doctor --report` writes: everything somebody else needs to know about this machine."""

import os
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from qbench.doctor.report import CheckResult, DoctorReport, render_check, render_report, verdict
from qbench.files import write_atomically

FILE = Path("qbench-doctor.md")
# The environment variables that are reported. Never all of them: some are tokens and keys.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_HOME",
    "LD_LIBRARY_PATH",
    "NVIDIA_DRIVER_CAPABILITIES",
    "OMP_NUM_THREADS",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "TRITON_INTERPRET",
    "BNB_CUDA_VERSION",
    "GPTQMODEL_DISABLE_GPTQ_CUDA",
    "SLURM_JOB_PARTITION",
)
TOOLS = ("cc", "nvcc", "nvidia-smi")


def write_report(report: DoctorReport, timings: list[CheckResult], file: Path = FILE) -> None:
    """Write the machine, the environment, tools, checks with their tracebacks, and timings."""
    checks = report.checks or []
    sections = {
        "Machine": render_report(report, all_packages=True),
        "Environment": "\n".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ),
        "Tools": "\n".join(f"{tool}: {_version(tool)}" for tool in TOOLS),
        "Checks": "\n".join([*map(render_check, checks), verdict(report)]),
        "Kernel timings": "\n".join(map(render_check, timings)),
        **{f"Traceback: {check.name}": check.traceback or check.detail for check in checks if not check.ok},
    }
    written = [f"## {title}\n\n```\n{text.strip() or 'none'}\n```\n" for title, text in sections.items()]
    head = f"# qbench doctor, {datetime.now(UTC).isoformat(timespec='seconds')}\n"
    write_atomically(file, "\n".join([head, *written]))


def _version(tool: str) -> str:
    """The tool's version: the first line for cc, the last two for the others, where nvcc prints its number."""
    if shutil.which(tool) is None:
        return "not found"
    try:
        done = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    lines = (done.stdout or done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[0] if tool == "cc" else "; ".join(lines[-2:])
