"""Make a virtual environment and install qbench into it, with the torch build that fits this machine.

python3 scripts/install.py .venv
"""

import platform
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def has_nvidia_gpu() -> bool:
    """Whether the driver's own tool lists a GPU."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True).stdout.startswith(b"GPU")


def pinned_torch() -> str:
    """The version of torch in pyproject.toml."""
    match = re.search(r'"torch==([^"]+)"', (ROOT / "pyproject.toml").read_text())
    if match is None:
        raise SystemExit('pyproject.toml does not pin torch; it must have a dependency "torch==VERSION".')
    return match.group(1)


def has_pip(python: Path) -> bool:
    """Whether the environment is whole: an interrupted set-up leaves one without pip."""
    return (
        python.exists() and subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True).returncode == 0
    )


def make_environment(folder: Path) -> None:
    """A new virtual environment, in place of what is there."""
    try:
        venv.create(folder, clear=True, with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"{folder} could not be made ({error}). On Debian and Ubuntu, install python3-venv."
        ) from error


def install_torch(python: Path) -> None:
    """The CUDA build where there is an NVIDIA GPU, else the CPU build, which is gigabytes smaller."""
    version = pinned_torch()
    if platform.system() != "Linux" or has_nvidia_gpu():
        pip(python, f"torch=={version}")
        return
    print("No NVIDIA GPU here: installing the CPU build of torch.", flush=True)
    if pip(python, f"torch=={version}+cpu", check=False):
        return
    # The index in use has no CPU build; uv knows where torch's own index is.
    pip(python, "uv")
    command = [str(python), "-m", "uv", "pip", "install", "--torch-backend=cpu", f"torch=={version}"]
    if subprocess.run(command).returncode:
        raise SystemExit(
            f"The CPU build of torch {version} could not be installed (see above). "
            f"Install it into {python.parents[1]} by hand, then call make again."
        )


def pip(python: Path, *packages: str, check: bool = True) -> bool:
    """Install packages; whether that worked."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    done = subprocess.run(command, capture_output=not check).returncode == 0
    if check and not done:
        raise SystemExit(f"pip could not install {' '.join(packages)} (see above).")
    return done


def main() -> None:
    """Install into the folder given."""
    if sys.version_info < (3, 11):  # noqa: UP036 (the system's Python may be older than what the project targets)
        raise SystemExit(f"qbench needs Python 3.11 or newer; this is {platform.python_version()}. Try make PYTHON=…")
    if len(sys.argv) != 2:
        raise SystemExit("usage: python3 scripts/install.py FOLDER")
    folder = Path(sys.argv[1]).resolve()
    python = folder / "bin" / "python"
    if not has_pip(python):
        make_environment(folder)
    install_torch(python)
    print("Installing qbench and its pinned packages: about 3 GB, some minutes.", flush=True)
    pip(python, "-e", f"{ROOT}[dev]")


if __name__ == "__main__":
    main()
