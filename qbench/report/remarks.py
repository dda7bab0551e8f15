"""What a reader must know about the results as a whole: trials, missing models, other versions."""

import shlex
from collections.abc import Mapping
from typing import Any

from qbench.errors import some
from qbench.numbers import counted
from qbench.report.attentions import kind_name
from qbench.report.delta import ReportData
from qbench.report.results import CellResult


def remarks(report: ReportData) -> list[str]:
    """One sentence each."""
    found = [_trial(limits) for recipe in report.results.recipes().values() if (limits := _limits(recipe))]
    found = [*dict.fromkeys(found), *remarks_on_imported(report), *_draws(report)]
    if older := report.results.of_other_versions():
        found.append(f"Some cells were measured with other code or packages than the latest one: {some(older)}.")
    return found


def remarks_on_suspicious(report: ReportData) -> list[str]:
    """Cells that have scores and cannot be right; the page has a section on them."""
    scored = {part.cell for part in report.results.parts if part.scores}
    at_fault = [found.cells[:1] if report.results.records else found.cells for found in report.findings]
    names = [cell.name for cells in at_fault for cell in cells if cell in scored]
    if not names:
        return []
    why = f"`qbench audit {shlex.quote(str(report.results.source))}` says why."
    use = "recorded" if report.results.records else "published"
    return [f"Suspicious: {some(list(dict.fromkeys(names)))}; {why} All tables and claims here use them as {use}."]


def remarks_on_delta(report: ReportData) -> list[str]:
    """What to look at instead if Δ tables contain only dashes."""
    results = report.results
    instead = "so there is no Δ; see --kind damage and --kind summary."
    return [
        f"The family {family} has no {kind_name(attention)} model, {instead}"
        for family in results.families
        for attention in results.compared_kinds(family)
        if attention not in results.kinds_of(family)
    ]


def settings_used(report: ReportData) -> list[str]:
    """What the cells were measured on and calibrated on."""
    records = [part.stored.record for part in report.results.parts if part.stored and part.scores]
    devices = {f"{own.identity.what.device} in {own.identity.what.dtype}" for own in records if not own.imported}
    found = [f"Measured on {' and '.join(sorted(devices))}."] if devices else []
    titles: dict[str, dict[str, None]] = {}  # of the methods, by their text
    for result in report.results.cells:
        if draws := result.calibration_draws:
            provenance = next(part.stored.record.provenance for part in result.parts if part.stored and part.scores)
            settings = provenance.resolved_recipe.get("calibration")
            text = calibration_text(settings, draws) if isinstance(settings, Mapping) else "not in the records"
            titles.setdefault(text, {})[_title(report, result)] = None
    return found + [f"Calibration text of {some(list(own))}: {text}." for text, own in titles.items()]


def calibration_text(settings: Mapping[str, Any], draws: int) -> str:
    """A recipe's calibration: wikitext2, 3 draws of 128 samples of up to 2,048 tokens. Models may take fewer tokens."""
    samples, length = counted(settings["samples"], "sample"), counted(settings["length"], "token")
    return f"{settings['source']}, {counted(draws, 'draw')} of {samples} of up to {length}"


def _title(report: ReportData, result: CellResult) -> str:
    """The method as papers write it, or the label if more than the weights is quantized."""
    return result.cell.label if result.has_axes else report.results.method_titles[result.cell.method]


def remarks_on_imported(report: ReportData) -> list[str]:
    """What is not known about results of another program."""
    cells = [c.cell for c in report.results.parts if c.stored and c.stored.record.imported]
    unnamed = [cell.name for cell in cells if cell.unnamed]
    found = []
    if cells:
        which = some([cell.name for cell in cells])
        found.append(f"From lm-eval, so not audited (nothing proves what was quantized) and of unknown cost: {which}.")
    if unnamed:
        found.append(f"No quantization was given for these, so they are shown as unquantized: {some(unnamed)}.")
    return found


def _draws(report: ReportData) -> list[str]:
    """How many calibration draws the numbers are means of, if there are several."""
    several = [result for result in report.results.cells if result.draws]
    if not several:
        return []
    counts = sorted({len(result.draws) for result in several})
    titles = dict.fromkeys(_title(report, own) for own in several)
    how_many = " or ".join(map(str, counts))
    return [f"{' and '.join(titles)}: means over {how_many} calibration draws; intervals include their spread."]


def _limits(recipe: Mapping[str, Any]) -> dict[str, int]:
    """How many documents of each task are read, if not all."""
    tasks = recipe.get("tasks")
    settings = tasks if isinstance(tasks, Mapping) else {}  # a list of names has no limits
    limits = {name: task["limit"] for name, task in settings.items() if task and task.get("limit")}
    if whole := recipe.get("limit"):
        limits["each other task" if limits else "each task"] = whole
    return limits


def _trial(limits: Mapping[str, int]) -> str:
    parts = [f"{counted(limit, 'document')} of {what}" for what, limit in limits.items()]
    return f"A trial: only the first {', '.join(parts)}."
