"""`qbench doctor`: what this machine has, what it can run and why not the rest, and whether kernels work."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from qbench import DISTRIBUTION
from qbench.attention.kinds import attentions
from qbench.checkpoint.layout import CheckpointError
from qbench.gpus import gpus, has_cuda, why_not_cuda
from qbench.identity import PACKAGES
from qbench.machine import machine
from qbench.numbers import counted
from qbench.output import print_styled
from qbench.quantizers.options import quantizers
from qbench.recipe.cells import Cell, cells
from qbench.recipe.schema import Recipe

WRAPPED = ("attention", "packages")  # long lists, also in logs
CHECK_TIMEOUT = 600  # seconds for a group: the first Triton compilation takes a minute


@dataclass(frozen=True)
class Package:
    """A package that qbench requires. extra: the optional part of qbench that needs it; empty: qbench itself."""

    name: str
    wanted: str
    installed: str | None
    extra: str = ""

    @property
    def required(self) -> bool:
        """Whether qbench needs it to run at all."""
        return not self.extra

    @property
    def state(self) -> str:
        """What to do about it; empty if it matches the pin."""
        if self.installed is None:
            return f"pip install '{self.name}{self.wanted}'"
        if Requirement(f"{self.name}{self.wanted}").specifier.contains(self.installed, prereleases=True):
            return ""
        return f"results may differ from those with {self.wanted}: pip install '{self.name}{self.wanted}'"


@dataclass(frozen=True)
class Support:
    """A method or an attention backend, and whether it runs on this machine or why not."""

    name: str
    widths: tuple[int, ...]  # of a method
    runs: bool
    note: str


@dataclass(frozen=True)
class CheckResult:
    """The result of trying a kernel or a quantizer on a small case."""

    name: str
    ok: bool
    detail: str
    seconds: float = 0.0
    traceback: str = ""


@dataclass(frozen=True)
class DoctorReport:
    """What this machine has and can run. checks: None if they were not run."""

    machine: dict[str, Any]
    device: str
    notes: list[str]
    packages: list[Package]
    methods: list[Support]
    attention: list[Support]  # backends
    checks: list[CheckResult] | None = None
    unusable: str = ""  # why the given recipe cannot run on this machine

    @property
    def missing(self) -> list[str]:
        """The required packages that are not installed."""
        return [package.name for package in self.packages if package.required and package.installed is None]

    @property
    def failed(self) -> list[str]:
        """The checks that failed."""
        return [check.name for check in self.checks or [] if not check.ok]

    def as_json(self) -> str:
        """The whole report as JSON."""
        packages = [asdict(package) | {"state": package.state} for package in self.packages]
        return json.dumps(asdict(self) | {"packages": packages}, indent=1)


def doctor(
    checks_wanted: bool | None = None,
    recipe: Recipe | None = None,
    *,
    all_packages: bool = False,
    as_json: bool = False,
    report_wanted: bool = False,
) -> bool:
    """Print what this machine has and can run. True if everything works, or with a recipe everything it uses.

    checks_wanted: by default only on a GPU. report_wanted: also write the report file, which always has the checks.
    """
    report = examine(recipe)
    if not as_json:
        _print_report(report, all_packages)
    wanted = report_wanted or (report.device == "cuda" if checks_wanted is None else checks_wanted)
    if wanted and not report.unusable:
        groups = groups_of(recipe) if recipe else None
        dtype = recipe.resolved_dtype if recipe and report.device == "cuda" else ""  # CPU kernels are for float32
        report = replace(report, checks=[_shown(c, as_json) for c in run_checks(report.device, groups, dtype)])
    print(report.as_json() if as_json else verdict(report))
    if report_wanted:
        from qbench.doctor.report_file import FILE, write_report

        timings = () if report.unusable else run_checks(report.device, ("timings",))
        write_report(report, [_shown(check, as_json) for check in timings])
        print(f"report: {FILE}", file=sys.stderr)
    return not (report.unusable or report.missing or report.failed)


def _print_report(report: DoctorReport, all_packages: bool) -> None:
    from qbench.report.terminal import draws_tables

    if draws_tables():
        print_styled(report_on_screen(report, all_packages=all_packages))
        sys.stdout.flush()
    else:
        print(render_report(report, all_packages=all_packages), flush=True)


def _shown(check: CheckResult, as_json: bool) -> CheckResult:
    if not as_json:
        print(render_check(check), flush=True)
    return check


def examine(recipe: Recipe | None = None) -> DoctorReport:
    """The report without the checks."""
    device = recipe.resolved_device if recipe else "cuda" if has_cuda() else "cpu"
    reason = why_not_cuda() if recipe and device == "cuda" else ""
    return DoctorReport(
        machine=machine(),
        device=device,
        notes=[*notes(), *slow_attentions()],
        packages=packages(),
        methods=methods(),
        attention=backends(),
        unusable=f"{recipe.file.name}: the device is cuda. {reason}" if recipe and reason else "",
    )


def groups_of(recipe: Recipe) -> tuple[str, ...]:
    """The groups of checks that a recipe needs: its kinds of attention, and its methods at its widths."""
    kinds = dict.fromkeys(kind for kind in map(_attention, cells(recipe)) if kind and not attentions()[kind].is_softmax)
    widths: dict[str, dict[str, None]] = {}
    for method in methods():
        bits = {c.ref.bits for c in cells(recipe) if c.ref.method == method.name} & set(method.widths)
        if bits and method.name != "none":
            widths[method.name] = dict.fromkeys(map(str, sorted(bits)))
    attention = [f"attention:{','.join(kinds)}"] if kinds else []
    return (*attention, *(f"{method}:{','.join(bits)}" for method, bits in widths.items()))


def _attention(cell: Cell) -> str | None:
    """The attention kind of a checkpoint; None if its config is not on this machine, or wrong."""
    try:
        return cell.attention
    except CheckpointError:  # `qbench plan` says what is wrong with it
        return None


def notes() -> list[str]:
    """Why this machine's GPU cannot be used, if so."""
    reason = why_not_cuda()
    return [reason if gpus() else f"{reason} Cells run on the CPU."] if reason else []


def packages() -> list[Package]:
    """The packages that the installed qbench requires, with their versions; without development tools."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return [Package(DISTRIBUTION, "", None)]
    extras = [extra for extra in metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or [] if extra != "dev"]
    found = []
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        extra = next((extra for extra in ("", *extras) if not marker or marker.evaluate({"extra": extra})), None)
        if extra is not None:
            version = installed_version(requirement.name)
            found.append(Package(requirement.name, str(requirement.specifier), version, extra))
    return found


def installed_version(name: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def methods() -> list[Support]:
    """Each method with its widths; a method runs if its library is installed."""
    found = []
    for name, method in quantizers().items():
        note = "" if method.is_installed else f"needs {method.library}: pip install {method.library}"
        found.append(Support(name, tuple(method.widths), method.is_installed, note))
    return found


def slow_attentions() -> list[str]:
    """The kinds of attention that have no kernel."""
    return [
        f"{kind.title} attention has no kernel and is slow: {kind.function} computes it on every device"
        for kind in attentions().values()
        if kind.function
    ]


def backends() -> list[Support]:
    """Each backend of our attention kernels on this machine."""
    triton, cuda = find_spec("triton") is not None, has_cuda()
    note = "" if triton and cuda else "needs a GPU; TRITON_INTERPRET=1 runs it on the CPU, slowly"
    return [
        Support("triton", (), triton and cuda, note if triton else "needs triton (Linux only): pip install triton"),
        Support("cpu", (), True, "used for models on the CPU"),
        Support("sdpa", (), True, "torch's softmax attention: any device"),
        Support("reference", (), True, "plain reference code: any device, slow"),
    ]


def run_checks(device: str, groups: tuple[str, ...] | None = None, dtype: str = "") -> Iterator[CheckResult]:
    """The cases of each group, in one process per group, so a crash does not end the report."""
    here = [method.name for method in methods() if method.runs and method.name != "none"]
    for group in ("attention", *here) if groups is None else groups:
        yield from run_group(group, device, dtype)


def run_group(group: str, device: str, dtype: str) -> list[CheckResult]:
    """The cases of one group, in a separate process."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if device == "cpu":
        env["TRITON_INTERPRET"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.jsonl")
        results.touch()
        command = [sys.executable, "-P", "-m", "qbench.doctor.checks", group, device, str(results), dtype]
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=CHECK_TIMEOUT, check=False)
            end = _how_it_ended(done)
        except subprocess.TimeoutExpired:
            end = f"it took longer than {CHECK_TIMEOUT} s"
        lines = [json.loads(line) for line in results.read_text().splitlines()]
    by_name = {line["name"]: line for line in lines}
    checks = [CheckResult(**({"ok": False, "detail": end} | line)) for line in by_name.values()]
    return checks or [CheckResult(group, False, end)]


def _how_it_ended(done: subprocess.CompletedProcess[str]) -> str:
    last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    if done.returncode < 0:
        return f"the process was killed by {signal.Signals(-done.returncode).name}: {last}"
    return f"the process ended with code {done.returncode}: {last}"


def render_report(report: DoctorReport, *, all_packages: bool = False) -> str:
    """The report without the checks as text for logs; its table has all packages, or just mismatched ones."""
    from tabulate import tabulate

    lines = [_wrapped(f"{name:<10}", text) if name in WRAPPED else f"{name:<10}{text}" for name, text in facts(report)]
    for header, rows in report_tables(report, all_packages=all_packages):
        lines += ["", tabulate(rows, headers=header, disable_numparse=True)]
    return "\n".join([*lines, ""])


def report_on_screen(report: DoctorReport, *, all_packages: bool = False) -> str:
    """The same for a terminal, at its width."""
    from qbench.report.tables import Column, Field, Table
    from qbench.report.terminal import Screen

    screen = Screen()
    for name, text in facts(report):
        screen.paragraph(text, first=f"{name:<10}")
    for header, rows in report_tables(report, all_packages=all_packages):
        screen.blank()
        fields = [[Field(text) for text in row] for row in rows]
        screen.grid(Table("doctor", "", "", [], [Column(title, "l") for title in header], heads=0, rows=fields))
    return screen.text() + "\n"


def facts(report: DoctorReport) -> list[tuple[str, str]]:
    """What the machine has, one name and text per line."""
    here = report.machine
    gpus_found = [
        f"{gpu['name']}, {gpu['memory_gib']} GiB, driver {gpu['driver']}, compute capability {gpu['capability']}"
        for gpu in here["gpus"]
    ] or ["none"]
    return [
        ("machine", f"{here['cpu']}, {counted(here['cores'], 'core')}, {here['memory_gib']} GiB"),
        *(("GPU", gpu) for gpu in gpus_found),
        ("software", f"Python {here['python']}, {here['platform']}"),
        *(("note", note) for note in report.notes),
        ("attention", ", ".join(kind.title for kind in attentions().values())),
        ("packages", packages_in_short(report.packages)),
    ]


def report_tables(report: DoctorReport, *, all_packages: bool) -> Iterator[tuple[list[str], list[list[str]]]]:
    """The headers and rows of the tables: packages, if any is to be listed, and what runs."""
    listed = [package for package in report.packages if all_packages or package.state]
    if listed:
        yield (
            ["package", "wanted", "installed", "extra", ""],
            [[p.name, p.wanted, p.installed or "-", p.extra, p.state] for p in listed],
        )
    yield (
        ["method or kernel", "bits", "runs here", ""],
        [
            *([o.name, ", ".join(map(str, o.widths)), _yes(o.runs), o.note] for o in report.methods),
            *([f"attention on {o.name}", "", _yes(o.runs), o.note] for o in report.attention),
        ],
    )


def packages_in_short(found: list[Package]) -> str:
    """The versions of the packages that compute numbers, and how many packages match their pins.

    An optional package that is not installed does not count.
    """
    found = [package for package in found if package.installed or package.required]
    computing = {*PACKAGES, *(method.library for method in quantizers().values())}
    versions = [f"{p.name}=={p.installed}" for p in found if p.name in computing and p.installed]
    fine = sum(not package.state for package in found)
    count = f"{fine} of {len(found)}" if fine < len(found) else f"all {fine}"
    return ", ".join([*versions, f"{count} packages match their pins (--packages lists all)"])


def _wrapped(head: str, text: str) -> str:
    return textwrap.fill(text, 120, initial_indent=head, subsequent_indent=" " * 10, break_on_hyphens=False)


def _yes(runs: bool) -> str:
    return "yes" if runs else "no"


def render_check(check: CheckResult) -> str:
    """A check result on one line."""
    return f"{'ok    ' if check.ok else 'FAILED'}  {check.name:<40} {check.seconds:5.1f} s  {check.detail}"


def verdict(report: DoctorReport) -> str:
    """The last line: whether results from this machine can be trusted."""
    if report.unusable:
        return report.unusable
    if report.missing:
        return f"qbench cannot run on this machine; not installed: {', '.join(report.missing)}."
    if report.checks is None:
        return "Kernels and quantizers were not checked; add --checks to check them."
    if report.failed:
        count = f"{len(report.failed)} of {counted(len(report.checks), 'check')} FAILED"
        wrong = f"{count}: {', '.join(report.failed)}. Results that depend on them would be wrong or missing."
        return f"{wrong} `qbench doctor --report` writes a report that you can send us."
    return f"All checks passed ({len(report.checks)})."
