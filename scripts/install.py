"""Create a virtual environment and install qbench into it, with the build of torch that fits this machine.

python3 scripts/install.py .venv           installs what is missing, and replaces a wrong build of torch
python3 scripts/install.py --fits .venv    exits with 1 if its torch does not fit this machine
python3 scripts/install.py --gpus          lists this machine's GPUs, one per line

TORCH=cpu, cuda, cu130 or cu126 chooses the build, for a .venv that is made on a node without a GPU.
Uses only the standard library and syntax that an old Python can read, so it can report a Python that is too old.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WSL = "/usr/lib/wsl/lib"  # where nvidia-smi is on WSL2; not always on PATH
PYTHONS = ((3, 11), (3, 14))  # from, and below: numpy's pin has no wheel for 3.14
INDEX = "https://download.pytorch.org/whl"
TERMINAL = sys.stdout.isatty()
PROGRESS = 0.2 if TERMINAL else 20  # seconds between progress lines


@dataclass(frozen=True)
class Build:
    """A build of torch: the oldest driver that runs it, and the GPU architectures it has code for."""

    tag: str  # in wheels' versions: 2.13.0+cu126
    title: str
    driver: tuple[int, ...] = ()
    architectures: tuple[tuple[int, int], ...] = ()

    @property
    def is_cuda(self) -> bool:
        """Whether it runs on GPUs."""
        return self.tag != "cpu"

    @property
    def gigabytes(self) -> float:
        """The measured size of .venv with this build."""
        return 5.9 if self.is_cuda else 3.0


# For Linux on x86, https://github.com/pytorch/pytorch/blob/main/RELEASE.md. PyPI has the first one.
CUDA_BUILDS = (
    Build("cu130", "CUDA 13.0", (580,), ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0))),
    Build("cu126", "CUDA 12.6", (525, 60, 13), ((5, 0), (6, 0), (7, 0), (7, 5), (8, 0), (8, 6), (9, 0))),
)
CPU_BUILD = Build("cpu", "CPU")


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi describes it."""

    name: str
    driver: str
    capability: tuple[int, int] | None  # None: the driver is too old to report it


def find_gpus() -> list[Gpu]:
    """The GPUs that nvidia-smi lists; none if there is no driver. A GPU in MIG mode counts as one."""
    tool = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=WSL)
    if tool is None:
        return []
    for fields in ("name,driver_version,compute_cap", "name,driver_version"):  # old drivers lack the last
        done = subprocess.run(
            [tool, f"--query-gpu={fields}", "--format=csv,noheader"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        rows = [line.split(", ") for line in done.stdout.decode().splitlines()]
        if done.returncode == 0 and all(len(row) == fields.count(",") + 1 for row in rows):
            return [Gpu(row[0], row[1], _capability(row[2:])) for row in rows]
    return []


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _capability(field: list[str]) -> tuple[int, int] | None:
    found = _numbers(field[0]) if field else ()
    return (found[0], found[1]) if len(found) == 2 else None


def choose_build(gpus: list[Gpu], wanted: str) -> Build:
    """The build for these GPUs. wanted: the value of TORCH, or empty."""
    named = {build.tag: build for build in (*CUDA_BUILDS, CPU_BUILD)}
    if wanted in named:
        return named[wanted]
    if wanted not in ("", "auto", "cuda"):
        raise SystemExit(f"TORCH is {wanted!r}; it must be cpu, cuda, {' or '.join(b.tag for b in CUDA_BUILDS)}.")
    if platform.system() != "Linux" or (wanted == "cuda" and not gpus):
        return CUDA_BUILDS[0]
    if not gpus:
        return CPU_BUILD
    driven = [build for build in CUDA_BUILDS if _numbers(gpus[0].driver) >= build.driver]
    for build in driven:
        if all(_has_code(build, gpu) for gpu in gpus):
            return build
    raise SystemExit(_no_build(gpus, driven))


def _has_code(build: Build, gpu: Gpu) -> bool:
    """Whether the build runs on the GPU: code runs on later GPUs of the same major version."""
    if gpu.capability is None:
        return True
    return any(major == gpu.capability[0] and minor <= gpu.capability[1] for major, minor in build.architectures)


def _no_build(gpus: list[Gpu], driven: list[Build]) -> str:
    driver = gpus[0].driver
    newest = ".".join(map(str, CUDA_BUILDS[0].driver))
    oldest = ".".join(map(str, CUDA_BUILDS[-1].driver))
    instead = "or run on the CPU: TORCH=cpu make setup"
    if not driven:
        return f"The NVIDIA driver is {driver}; torch needs {oldest} or newer. Update it to {newest}, {instead}."
    lacking = next(gpu for gpu in gpus if not all(_has_code(build, gpu) for build in driven))
    where = f"{lacking.name} (compute capability {'.'.join(map(str, lacking.capability or ()))})"
    if _has_code(CUDA_BUILDS[0], lacking):
        return f"{where} needs NVIDIA driver {newest} or newer, but the driver is {driver}. Update it, {instead}."
    names = ", ".join(f"{build.title} for {_list(build)}" for build in driven)
    return (
        f"No single build of torch {pinned_torch()} supports all GPUs of this machine: {where} is not among {names}. "
        f"Choose the build with TORCH ({', '.join(b.tag for b in CUDA_BUILDS)}) and the GPUs with "
        f"CUDA_VISIBLE_DEVICES, {instead}."
    )


def _list(build: Build) -> str:
    return " ".join(f"{major}.{minor}" for major, minor in build.architectures)


def pinned_torch() -> str:
    """The version of torch in pyproject.toml."""
    match = re.search(r'"torch==([^"]+)"', (ROOT / "pyproject.toml").read_text())
    if match is None:
        raise SystemExit('pyproject.toml does not pin torch; it must have a dependency "torch==VERSION".')
    return match.group(1)


def installed_torch(folder: Path) -> str:
    """The version of torch in an environment, with its build, such as 2.13.0+cpu; empty if there is none."""
    found = sorted(folder.glob("lib/python3*/site-packages/torch-*.dist-info"))
    return found[0].name[len("torch-") : -len(".dist-info")] if found else ""


def is_right(installed: str, build: Build, gpus: list[Gpu], wanted: str) -> bool:
    """Whether the installed torch fits. Without a visible GPU, a CUDA build stays: a GPU node may share the disk."""
    version, _, tag = installed.partition("+")
    tag = tag or CUDA_BUILDS[0].tag
    stays = not gpus and wanted in ("", "auto", "cuda") and tag != "cpu"
    return version == pinned_torch() and (tag == build.tag or stays)


def check_machine(folder: Path, build: Build) -> None:
    """Stop with one sentence if something that setup needs is missing."""
    if platform.system() == "Linux":
        _check_compiler()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(there).free / 1e9
    needed = build.gigabytes - (_build_of(folder).gigabytes if installed_torch(folder) else 0)
    if free < needed:
        raise SystemExit(
            f"{folder} needs {needed:.1f} GB of disk, but {there} has {free:.1f} GB free. Free some space, or choose "
            "another folder: make VENV=FOLDER."
        )


def _build_of(folder: Path) -> Build:
    return CPU_BUILD if installed_torch(folder).endswith("+cpu") else CUDA_BUILDS[0]


def _check_compiler() -> None:
    """A dependency of gptqmodel is built from source, and Triton compiles a launcher on its first call."""
    major, minor = sys.version_info[:2]
    missing = []
    if not any(shutil.which(name) for name in (os.environ.get("CC", "cc").split()[0], "gcc", "clang")):
        missing.append(("a C compiler (cc)", "gcc", "gcc", "c-compiler"))
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        missing.append((f"Python's headers ({header})", f"python{major}.{minor}-dev", "python3-devel", "python"))
    if missing:
        debian, fedora, conda = (" ".join(names[system] for names in missing) for system in (1, 2, 3))
        raise SystemExit(
            f"Missing: {', '.join(names[0] for names in missing)}. Debian, Ubuntu: apt install {debian}. "
            f"Fedora: dnf install {fedora}. conda: conda install -c conda-forge {conda}."
        )


def check_python(version: tuple[int, ...]) -> None:
    """Stop if the packages do not support this Python."""
    (first, below) = (".".join(map(str, bound)) for bound in PYTHONS)
    if not PYTHONS[0] <= tuple(version[:2]) < PYTHONS[1]:
        raise SystemExit(
            f"qbench needs Python {first} or newer, but below {below}; this is {'.'.join(map(str, version[:3]))}. "
            f"Choose another: make PYTHON=python3.12, or conda create -n qbench python=3.12."
        )


def is_whole(folder: Path) -> bool:
    """Whether the environment is for this Python and has pip, which an interrupted setup may lack."""
    major, minor = sys.version_info[:2]
    if not (folder / "bin" / "python").exists() or not (folder / "lib" / f"python{major}.{minor}").is_dir():
        return False
    command = [str(folder / "bin" / "python"), "-m", "pip", "--version"]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def make_environment(folder: Path) -> None:
    """Create a new virtual environment; replaces the folder."""
    try:
        venv.create(folder, clear=True, with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"{folder} could not be created ({error}). On Debian and Ubuntu, install python3-venv."
        ) from error


def torch_commands(build: Build) -> list[list[str]]:
    """pip's arguments for torch: first for the index in use, then for PyTorch's index if that lacks the build."""
    version = pinned_torch()
    if build is CUDA_BUILDS[0]:
        return [[f"torch==={version}"], [f"torch=={version}+{build.tag}", "--index-url", f"{INDEX}/{build.tag}"]]
    name = f"torch=={version}+{build.tag}"
    return [[name], [name, "--index-url", f"{INDEX}/{build.tag}"]]


def install_torch(folder: Path, build: Build) -> None:
    """Install the build, replacing another one."""
    first, second = torch_commands(build)
    if not pip(folder, *first, must=False):
        pip(folder, *second)


def pip(folder: Path, *packages: str, must: bool = True) -> bool:
    """Install packages and show progress; returns whether it worked. install.log has pip's whole output."""
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    log = folder / "install.log"
    with log.open("a") as out:
        out.write(f"$ pip install {' '.join(packages)}\n")
        out.flush()
        work = subprocess.Popen(
            [*command, "--progress-bar", "off", *packages], stdout=out, stderr=subprocess.STDOUT, cwd=str(ROOT)
        )
        with Progress(log) as progress:
            done = work.wait() == 0
    if must and not done:
        print(log.read_text()[-2000:], file=sys.stderr)
        raise SystemExit(f"pip could not install {packages[0]}; the end of {log} is above.")
    if done:
        print(f"      {progress.done()}", flush=True)
    return done


class Progress:
    """A line with the time and what pip is doing; updated in place on a terminal, repeated otherwise."""

    def __init__(self, log: Path) -> None:
        self.log, self.begun, self.ended = log, time.monotonic(), threading.Event()
        self.start = log.stat().st_size  # earlier calls of pip have written to it too
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Progress:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    def text(self) -> str:
        """Pip's log so far."""
        with self.log.open("rb") as file:
            file.seek(self.start)
            return file.read().decode(errors="replace")

    def _run(self) -> None:
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns - 1
        while not self.ended.wait(PROGRESS):
            line = f"  {time.monotonic() - self.begun:4.0f} s  {doing(self.text())}"
            print(f"\r{line[:width]:<{width}}" if terminal else line, end="" if terminal else "\n", flush=True)
        if terminal:
            print(f"\r{'':<{width}}\r", end="", flush=True)

    def done(self) -> str:
        """What was done, and how long it took."""
        return f"{totals(self.text())} in {time.monotonic() - self.begun:.0f} s"


UNITS = {"kB": 1e-3, "MB": 1.0, "GB": 1e3}
DOWNLOAD = re.compile(r"^ *Downloading (?:\S*/)?([\w.]+?)-\d\S* \(([\d.]+) (kB|MB|GB)\)", re.MULTILINE)
INSTALL = re.compile(r"^Installing collected packages: (.*)$", re.MULTILINE)


def totals(log: str) -> str:
    """How much pip has downloaded and installed, from its log."""
    packages = sum(len(names.split(",")) for names in INSTALL.findall(log))
    return f"{packages} packages installed, {downloaded(log)} downloaded"


def downloaded(log: str) -> str:
    """The size of all downloads in pip's log."""
    return f"{sum(float(size) * UNITS[unit] for _, size, unit in DOWNLOAD.findall(log)):,.0f} MB"


def doing(log: str) -> str:
    """What pip is doing, from the end of its log: the package, and its size if it is downloaded."""
    for line in reversed(log.splitlines()):
        if found := DOWNLOAD.match(line):
            return f"downloading {found.group(1)} ({found.group(2)} {found.group(3)}), {downloaded(log)} in all"
        if found := INSTALL.match(line):
            return f"installing {len(found.group(1).split(','))} packages, {downloaded(log)} downloaded"
        if found := re.match(r"Collecting ([\w.-]+)", line):
            return f"looking for {found.group(1)}, {downloaded(log)} downloaded"
        if found := re.match(r" *Building (?:wheel|editable) for ([\w.-]+)", line):
            return f"building {found.group(1)}"
    return "starting pip"


def step(number: int, text: str) -> None:
    """Print the next step."""
    print(f"[{number}/3] {text}", flush=True)


def install(folder: Path, wanted: str) -> None:
    """Run all steps; keep what is already right."""
    begun = time.monotonic()
    gpus = find_gpus()
    build = choose_build(gpus, wanted)
    check_machine(folder, build)
    here = ", ".join(dict.fromkeys(gpu.name for gpu in gpus)) or "no NVIDIA GPU"
    driver = f", driver {gpus[0].driver}" if gpus else ""
    before = installed_torch(folder)
    step(1, f"{folder}: Python {platform.python_version()}; {here}{driver}")
    if not is_whole(folder):
        make_environment(folder)
        before = ""
    if before and is_right(before, build, gpus, wanted):
        step(2, f"torch {before} is already installed")
    else:
        instead = f", replacing {before}" if before else ""
        step(2, f"torch {pinned_torch()}, {build.title} build{instead}; .venv will take {build.gigabytes} GB")
        if build.is_cuda and not gpus and platform.system() == "Linux":
            driver = ".".join(map(str, build.driver))
            print(f"  This machine has no GPU; a machine that runs it needs driver {driver} or newer.", flush=True)
        install_torch(folder, build)
    step(3, "qbench and its pinned packages")
    remove_former_name(folder)
    pip(folder, "-e", f"{ROOT}[dev]")
    print(f"{folder} is ready: {size(folder) / 1e9:.1f} GB, in {duration(time.monotonic() - begun)}", flush=True)


def remove_former_name(folder: Path) -> None:
    """Uninstall qbench from when its distribution was called qbench, or it would stay beside qbench-harness."""
    if any(folder.glob("lib/python3*/site-packages/qbench-*.dist-info")):
        command = [str(folder / "bin" / "python"), "-m", "pip", "uninstall", "--quiet", "--yes", "qbench"]
        subprocess.run(command, check=True)


def size(folder: Path) -> int:
    """Bytes on disk."""
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())


def duration(seconds: float) -> str:
    """45 s, 3 min 10 s."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def main() -> None:
    """Install into the given folder, or answer a question about this machine."""
    check_python(sys.version_info)
    wanted = os.environ.get("TORCH", "").strip().lower()
    arguments = sys.argv[1:]
    if arguments == ["--gpus"]:
        print("\n".join(gpu.name for gpu in find_gpus()))
    elif len(arguments) == 2 and arguments[0] == "--fits":
        found, gpus = installed_torch(Path(arguments[1])), find_gpus()
        sys.exit(bool(found) and not is_right(found, choose_build(gpus, wanted), gpus, wanted))
    elif len(arguments) == 1 and not arguments[0].startswith("-"):
        install(Path(arguments[0]).resolve(), wanted)
    else:
        raise SystemExit(f"usage:\n{(__doc__ or '').split(chr(10) * 2)[1]}")


if __name__ == "__main__":
    main()
