"""`qbench doctor`: what this machine has and can run, why not the rest, and whether kernels and quantizers work."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from qbench.identity import PACKAGES
from qbench.machine import gpus, has_cuda, machine, torch_build
from qbench.quantizers.options import OFFERED

LIBRARIES = {"bnb": "bitsandbytes", "gptq": "gptqmodel", "hqq": "hqq"}
GROUPS = ("attention", *LIBRARIES)
CHECK_TIMEOUT = 600  # seconds for a group: the first Triton compilation takes a minute


@dataclass(frozen=True)
class Package:
    """A package that qbench asks for. extra: the part of qbench that needs it; empty: all of it."""

    name: str
    wanted: str
    installed: str | None
    extra: str = ""

    @property
    def state(self) -> str:
        """What to do about it; empty where all is well."""
        if self.installed is None:
            return f"pip install 'qbench[{self.extra}]'" if self.extra else f"pip install '{self.name}{self.wanted}'"
        fits = Requirement(f"{self.name}{self.wanted}").specifier.contains(self.installed, prereleases=True)
        return (
            ""
            if fits
            else f"other numbers than with {self.wanted} may come out: pip install '{self.name}{self.wanted}'"
        )


@dataclass(frozen=True)
class Offer:
    """A method or an attention backend, whether it runs here, and why not."""

    name: str
    widths: tuple[int, ...]  # of a method
    runs: bool
    note: str


@dataclass(frozen=True)
class Check:
    """A kernel or a quantizer that was tried on a small case."""

    name: str
    ok: bool
    detail: str
    seconds: float = 0.0


def doctor(checks_wanted: bool | None = None, *, all_packages: bool = False, as_json: bool = False) -> bool:
    """Print what this machine has and can run; whether all of it works. checks_wanted: by default on a GPU."""
    wanted = has_cuda() if checks_wanted is None else checks_wanted
    report: dict[str, Any] = {
        "machine": machine(),
        "device": "cuda" if has_cuda() else "cpu",
        "notes": notes(),
        "packages": [asdict(package) | {"state": package.state} for package in packages()],
        "methods": [asdict(offer) for offer in methods()],
        "attention": [asdict(offer) for offer in backends()],
        "checks": None,
    }
    if not as_json:
        print(render(report, all_packages=all_packages), flush=True)
    checks = []
    for check in run_checks("cuda" if has_cuda() else "cpu") if wanted else ():
        checks.append(check)
        if not as_json:
            print(render_check(check), flush=True)
    if as_json:
        print(json.dumps(report | {"checks": [asdict(check) for check in checks] if wanted else None}, indent=1))
    else:
        print(verdict(checks, report["packages"]))
    missing = any(package["installed"] is None and not package["extra"] for package in report["packages"])
    return not missing and all(check.ok for check in checks)


def notes() -> list[str]:
    """What stands between this machine and its GPU."""
    found = gpus()
    if found and "+cpu" in torch_build():
        return [
            f"There is a GPU, but torch {torch_build()} is the CPU build: `make clean setup` installs the CUDA one."
        ]
    if found and not has_cuda():
        return ["There is a GPU, but CUDA_VISIBLE_DEVICES hides it, or the driver is not loaded (/dev/nvidiactl)."]
    return [] if found else ["There is no NVIDIA GPU, or nvidia-smi does not find it: cells run on the CPU."]


def packages() -> list[Package]:
    """What the installed qbench asks for, beside what is there; development tools apart."""
    try:
        lines = metadata.requires("qbench") or []
    except metadata.PackageNotFoundError:
        return [Package("qbench", "", None)]
    extras = [extra for extra in metadata.metadata("qbench").get_all("Provides-Extra") or [] if extra != "dev"]
    found = []
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        extra = next((extra for extra in ("", *extras) if not marker or marker.evaluate({"extra": extra})), None)
        if extra is not None:
            found.append(Package(requirement.name, str(requirement.specifier), _version(requirement.name), extra))
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def methods() -> list[Offer]:
    """Each method with its widths; it runs where its library is."""
    found = []
    for method, widths in OFFERED.items():
        library = LIBRARIES.get(method)
        here = library is None or find_spec(library) is not None
        found.append(Offer(method, tuple(widths), here, "" if here else f"needs {library}: pip install {library}"))
    return found


def backends() -> list[Offer]:
    """Each backend of softpick attention on this machine."""
    triton, cuda = find_spec("triton") is not None, has_cuda()
    note = "" if triton and cuda else "needs a GPU; TRITON_INTERPRET=1 runs it on the CPU, slowly"
    return [
        Offer(
            "triton", (), triton and cuda, note if triton else "needs triton, which is for Linux: pip install triton"
        ),
        Offer("cpu", (), True, "used for models on the CPU"),
        Offer("reference", (), True, "the definition: any device, slow"),
    ]


def run_checks(device: str, groups: tuple[str, ...] = GROUPS) -> Iterator[Check]:
    """The cases of each group, in a process a group: one that crashes does not end the report."""
    here = {offer.name for offer in methods() if offer.runs}
    for group in groups:
        if group in here or group not in LIBRARIES:
            yield from _run_group(group, device)


def _run_group(group: str, device: str) -> list[Check]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if device == "cpu":
        env["TRITON_INTERPRET"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.jsonl")
        results.touch()
        command = [sys.executable, "-P", "-m", "qbench.doctor.checks", group, device, str(results)]
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=CHECK_TIMEOUT, check=False)
            end = _how_it_ended(done)
        except subprocess.TimeoutExpired:
            end = f"it took longer than {CHECK_TIMEOUT} s"
        lines = [json.loads(line) for line in results.read_text().splitlines()]
    by_name = {line["name"]: line for line in lines}
    checks = [Check(**({"ok": False, "detail": end} | line)) for line in by_name.values()]
    return checks or [Check(group, False, end)]


def _how_it_ended(done: subprocess.CompletedProcess[str]) -> str:
    last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    if done.returncode < 0:
        return f"the process was killed by {signal.Signals(-done.returncode).name}: {last}"
    return f"the process ended with code {done.returncode}: {last}"


def render(report: dict[str, Any], *, all_packages: bool = False) -> str:
    """The report without its checks, for people; its table of packages has those that are amiss, or all."""
    from tabulate import tabulate

    here = report["machine"]
    cards = [f"{gpu['name']}, {gpu['memory']}, driver {gpu['driver']}" for gpu in here["gpus"]] or ["none"]
    lines = [
        f"machine   {here['cpu']}, {here['cores']} cores, {here['memory_gib']} GiB",
        *(f"GPU       {card}" for card in cards),
        f"software  Python {here['python']}, {here['platform']}",
        *(f"note      {note}" for note in report["notes"]),
        packages_in_short(report["packages"]),
        "",
    ]
    told = [package for package in report["packages"] if all_packages or package["state"]]
    if rows := [[p["name"], p["wanted"], p["installed"] or "-", p["extra"], p["state"]] for p in told]:
        lines += [tabulate(rows, headers=["package", "wanted", "installed", "extra", ""], disable_numparse=True), ""]
    offers = [
        *([f"{o['name']}", ", ".join(map(str, o["widths"])), _yes(o["runs"]), o["note"]] for o in report["methods"]),
        *([f"softpick on {o['name']}", "", _yes(o["runs"]), o["note"]] for o in report["attention"]),
    ]
    lines += [tabulate(offers, headers=["method or kernel", "bits", "runs here", ""], disable_numparse=True), ""]
    return "\n".join(lines)


def packages_in_short(found: list[dict[str, Any]]) -> str:
    """The versions of what computes numbers, and how many packages are as they should be."""
    versions = [f"{p['name']}=={p['installed']}" for p in found if p["name"] in PACKAGES and p["installed"]]
    fine = sum(not package["state"] for package in found)
    count = f"{fine} of {len(found)}" if fine < len(found) else f"all {fine}"
    text = ", ".join([*versions, f"{count} packages as pinned (--packages lists them)"])
    return textwrap.fill(text, 120, initial_indent="packages  ", subsequent_indent=" " * 10, break_on_hyphens=False)


def _yes(runs: bool) -> str:
    return "yes" if runs else "no"


def render_check(check: Check) -> str:
    """A check on one line."""
    return f"{'ok    ' if check.ok else 'FAILED'}  {check.name:<40} {check.seconds:5.1f} s  {check.detail}"


def verdict(checks: list[Check], wanted: list[dict[str, Any]]) -> str:
    """The last line: whether this machine can be trusted with a run."""
    failed = [check.name for check in checks if not check.ok]
    missing = [package["name"] for package in wanted if package["installed"] is None and not package["extra"]]
    if missing:
        return f"qbench cannot run here: {', '.join(missing)} not installed."
    if failed:
        return (
            f"{len(failed)} of {len(checks)} checks FAILED: {', '.join(failed)}. Their numbers would be wrong or none."
        )
    if checks:
        return f"All {len(checks)} checks passed."
    return "Kernels and quantizers were not tried; --checks does."
