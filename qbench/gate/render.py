"""The gate's report as plain text, Markdown, JSON, JUnit XML and GitHub annotations."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from tabulate import tabulate

from qbench.errors import first_of, some
from qbench.gate.hypotheses import POWER
from qbench.gate.settings import UNITS, MetricKind
from qbench.gate.verdict import GateReport, TestedHypothesis
from qbench.github import annotation
from qbench.numbers import count, counted, p_value, percent, signed_significant, significant
from qbench.output import on_one_line
from qbench.records.findings.finding import Finding

MAX_DIFFERENCES, MAX_UNCLEAR, MAX_PARTS = 20, 5, 10  # shown to people; JSON has all
SCORE = ("cell", "task", "metric", "before", "after")
DAMAGED = "Failures: damage above its limit (gate.max_damage; before: unquantized, after: quantized, tolerance: limit)"
NOT_EXCLUDED = (
    "Failures: losses above the required margin that cannot be excluded at 95% (gate.noninferiority; tolerance: margin)"
)
LOST_MOST = "Documents that lost most (document's id: its value before → after)"
LOST_TOGETHER = "Losses behind each pooled loss that failed, in units of their tolerances"
WITH_POWER = f"such a loss with a probability of {percent(POWER, 0)}, if nothing got worse"
ASK_FOR_MORE = (
    "To fail if there are too few documents to exclude such losses, set --noninferiority or --min-documents, or the "
    "same in the recipe's gate."
)
HEADER = (*SCORE, "loss", "95% interval", "at most (95%)", "tolerance", "p", "adjusted p")


@dataclass(frozen=True)
class ReportSection:
    """A part of a report for people: a title, then a table or lines."""

    title: str
    outcomes: tuple[TestedHypothesis, ...] = ()
    lines: tuple[str, ...] = ()

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The table, under HEADER."""
        return [row(outcome) for outcome in self.outcomes]


def headline(report: GateReport) -> str:
    """The verdict in one line."""
    found = []
    scores = sum(outcome.hypothesis.is_score for outcome in report.tested)
    worse = [outcome.hypothesis for outcome in report.worse]
    damaged, pooled = sum(h.limit is not None for h in worse), sum(bool(h.parts) for h in worse)
    if own := len(worse) - pooled - damaged:
        found.append(f"{own} of {counted(scores, 'score')} got worse")
    if pooled:
        found.append(f"the pooled loss of {counted(pooled, 'cell')} is above its tolerance")
    if damaged:
        found.append(f"the damage to {counted(damaged, 'score')} is above its limit")
    missed = [outcome.hypothesis for outcome in report.not_excluded]
    if own := sum(h.is_score for h in missed):
        found.append(f"{counted(own, 'score')} may be worse by more than the required margin")
    if pooled := len(missed) - own:
        found.append(f"the pooled loss of {counted(pooled, 'cell')} may be above the required margin")
    audits = sum(failure.found_by == "audit" for failure in report.failures)
    if audits:
        found.append(f"{counted(audits, 'failure')} in the audit")
    if others := len(report.failures) - audits:
        found.append(f"{counted(others, 'failure')} in the records")
    limits = sum(outcome.hypothesis.limit is not None for outcome in report.tested)
    kept = f", and none of {counted(limits, 'damage')} is above its limit" if limits else ""
    what = ", ".join(found) or f"none of {counted(scores, 'score')} got worse{kept}"
    alone = " (judged by scores alone: the checkpoint differs from the baseline's)" if report.by_scores_alone else ""
    return f"{'PASS' if report.passed else 'FAIL'}{alone}: {what} ({report.run} compared with {report.baseline})"


def explanation(report: GateReport) -> str:
    """What the verdict means."""
    alphas = {outcome.hypothesis.alpha for outcome in report.tested} or {report.settings.alpha}
    able = sum(outcome.hypothesis.smallest_p < 1 for outcome in report.tested)
    adjusted = (
        f"adjusted by Holm's method for the {able} of {len(report.tested)} hypotheses, scores and pooled losses, that "
        "can fail"
        if able
        else "no change is large enough to fail"
    )
    margins = any(outcome.hypothesis.margin is not None for outcome in report.tested)
    required = (
        " A score also fails if a loss above its required margin cannot be excluded; if there are too few documents, "
        "this happens although nothing got worse."
    )
    return (
        "A score fails if its loss is above its tolerance and statistically significant. If nothing got worse, at most "
        f"{100 * max(alphas):g}% of checks fail{' for this reason' if margins else ''} (paired sign flips; {adjusted})."
        f"{required if margins else ''}"
    )


def statement(report: GateReport) -> str:
    """How large a loss a pass excludes; empty if the check failed, or without scores.

    The statement is about all scores together. It is wrong only if the upper end for the largest true loss is too low,
    which happens in 5% of cases.
    """
    worst = report.least_sure
    if worst is None or not report.passed:
        return ""
    h = worst.hypothesis
    if not math.isfinite(h.upper):
        return f"How much worse the scores may be is unknown: {h.name} has {counted(len(h.losses), 'document')}."
    if h.is_unchanged:
        return f"At 95% confidence, {h.name} is {not_worse(worst)}."
    times, unchanged = significant(max(h.upper_in_tolerances, 0.0)), len(report.unchanged)
    included = f" This leaves out {counted(unchanged, 'score')} of which no document changed." if unchanged else ""
    return (
        f"At 95% confidence, no score is worse by more than {times} times its tolerance. The least certain is "
        f"{h.name}: {not_worse(worst)}.{included}"
    )


def not_worse(outcome: TestedHypothesis) -> str:
    """What the check shows about one score."""
    h = outcome.hypothesis
    if h.is_unchanged:
        n = len(h.losses)
        share = 100 * (
            1 - 0.05 ** (1 / n)
        )  # if this share changes, n documents show no change with a probability of 5%
        return f"unchanged in all {counted(n, 'document')}, so fewer than {significant(share)}% of new ones change"
    return f"not worse by more than {significant(max(h.upper, 0.0))}{UNITS[h.kind]}"


def sections(report: GateReport) -> Iterator[ReportSection]:
    """The report's parts, the worst first; empty ones are left out."""
    if report.changed:
        yield ReportSection("Before you read the scores", lines=report.changed)
    for by in ("audit", "records"):
        if lines := _by_message([f for f in report.failures if f.found_by == by]):
            yield ReportSection(f"Failures in the {by}", lines=lines)
    if report.worse:
        for title, damage in (("Failures in the scores", False), (DAMAGED, True)):
            own = [outcome for outcome in report.worse if (outcome.hypothesis.limit is not None) == damage]
            if own:
                yield ReportSection(title, outcomes=tuple(own))
        for title, pooled in ((LOST_MOST, False), (LOST_TOGETHER, True)):
            own = [outcome for outcome in report.worse if bool(outcome.hypothesis.parts) == pooled]
            if lines := tuple(f"{outcome.hypothesis.name}: {changed(outcome)}" for outcome in own):
                yield ReportSection(title, lines=lines)
    if report.not_excluded:
        yield ReportSection(NOT_EXCLUDED, outcomes=report.not_excluded, lines=_documents_needed(report.not_excluded))
    for cells, differing in _by_differences(report):
        yield ReportSection(f"What else differs from the baseline in {cells}", lines=differing)
    if report.better:
        yield ReportSection("Improvements beyond the tolerance", outcomes=report.better)
    if report.unclear:
        shown = sorted(report.unclear, key=lambda outcome: outcome.p)[:MAX_UNCLEAR]
        title = f"Losses above the tolerance that may be chance ({len(shown)} of {len(report.unclear)})"
        asks = report.settings.min_documents or any(margin is not None for _, margin in report.settings.noninferiority)
        yield ReportSection(title, outcomes=tuple(shown), lines=() if asks else (ASK_FOR_MORE,))
    if report.warnings:
        yield ReportSection("Warnings", lines=_by_message(report.warnings))
    if report.notes:
        yield ReportSection("Notes", lines=report.notes)


def _documents_needed(outcomes: Sequence[TestedHypothesis]) -> tuple[str, ...]:
    """In one line: how many documents of each task would exclude its margins."""
    needed: dict[str, tuple[int, int]] = {}
    for h in (outcome.hypothesis for outcome in outcomes):
        if h.documents_needed:
            needed[h.task] = max(needed.get(h.task, (0, 0)), (h.documents_needed, len(h.losses)))
    tasks = [f"{task} {_about(most)} (it has {own})" for task, (most, own) in needed.items()]
    return (f"Documents that would exclude {WITH_POWER}: {', '.join(first_of(tasks, MAX_PARTS))}.",) if tasks else ()


def _about(number: int) -> str:
    return f"about {count(int(float(significant(number, 2))))}"


def _by_message(findings: Sequence[Finding]) -> tuple[str, ...]:
    """One line per message, with all cells that have it."""
    cells: dict[str, list[str]] = {}
    for finding in findings:
        cells.setdefault(finding.message, []).append(finding.cell.name)
    return tuple(f"{', '.join(names)}: {message}" for message, names in cells.items())


def row(outcome: TestedHypothesis) -> tuple[str, ...]:
    """An outcome under HEADER."""
    h = outcome.hypothesis
    low, high = h.interval
    unit = UNITS[h.kind]
    return (
        h.cell.name,
        h.task,
        h.what,
        value(h.kind, h.before),
        value(h.kind, h.after),
        f"{signed_significant(h.loss)}{unit}",
        f"{signed_significant(low)} to {signed_significant(high)}",
        f"{signed_significant(h.upper)}{unit}" if h.is_bounded else "unknown",
        amount(h.kind, h.tolerance if h.margin is None or outcome.verdict != "not_excluded" else h.margin),
        p_value(outcome.p),
        p_value(outcome.adjusted_p),
    )


def sentence(outcome: TestedHypothesis) -> str:
    """An outcome in one line."""
    h = outcome.hypothesis
    low, high = h.interval
    if outcome.verdict == "not_excluded" and h.margin is not None:
        margin = amount(h.kind, h.margin)
        known = not_worse(outcome)
        if h.is_unchanged:  # a pooled loss: the most that its answers alone may lose is known
            n, most = counted(len(h.losses), "document"), f"{significant(h.upper)}{UNITS[h.kind]}"
            known = f"unchanged in all {n}; of so few, answers alone may lose {most}"
        said = f"{h.metric} of {h.task} is only known to be {known} (95%); {margin} is required."
        own, needed = counted(len(h.losses), "document"), h.documents_needed
        few = f" {own} are too few: {_about(needed)} would exclude {WITH_POWER}." if needed else ""
        return said + few
    if h.parts:
        what = f"The mean loss of its {len(h.parts)} scores, in units of their tolerances, is {significant(h.loss)}"
        return (
            f"{what} (95% interval {significant(low)} to {significant(high)}, tolerance "
            f"{significant(h.tolerance, 6)}), adjusted p {p_value(outcome.adjusted_p)}."
        )
    before, after = value(h.kind, h.before), value(h.kind, h.after)
    what, most = (f"went from {before} to {after}: a loss", "tolerance")
    if h.limit is not None:
        what, most = f"is {after}, and {before} unquantized: a damage", "limit"
    return (
        f"{h.metric} of {h.task} {what} of {significant(h.loss)}{UNITS[h.kind]} (95% interval {significant(low)} to "
        f"{significant(high)}, {most} {significant(h.tolerance, 6)}), adjusted p {p_value(outcome.adjusted_p)}."
    )


def value(kind: MetricKind, number: float) -> str:
    """A metric as people read it: accuracies in percent."""
    return percent(number, 2) if kind == "accuracy" else significant(number, 5)


def amount(kind: MetricKind, setting: float) -> str:
    """A tolerance, limit or margin with its unit: 0.5 points, 1 point."""
    unit = UNITS[kind]
    return f"{significant(setting, 6)}{unit.removesuffix('s') if setting == 1 else unit}"


def changed(outcome: TestedHypothesis) -> str:
    """The ten documents that lost most, in one line; of a pooled loss the ten metrics, in units of their tolerances."""
    if parts := outcome.hypothesis.parts:
        return ", ".join(f"{name}: {signed_significant(loss)} tolerances" for name, loss in parts[:MAX_PARTS])
    documents = outcome.hypothesis.documents.most_changed
    return ", ".join(f"{i}: {significant(before, 4)} → {significant(after, 4)}" for i, before, after in documents)


def _by_differences(report: GateReport) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Cells grouped by their differences; usually there is one group."""
    cells: dict[tuple[str, ...], list[str]] = {}
    for cell, differing in report.differences.items():
        cells.setdefault(differing, []).append(cell)
    for differing, names in cells.items():
        yield some(names), tuple(first_of(differing, MAX_DIFFERENCES)) or ("nothing in the records",)


def to_text(report: GateReport) -> str:
    """The report as plain text, for logs."""
    parts = [headline(report), *filter(None, (statement(report), explanation(report)))]
    for section in sections(report):
        parts += ["", section.title]
        if section.rows:
            table = tabulate(section.rows, HEADER, tablefmt="simple", disable_numparse=True)
            parts += [f"  {line}" for line in table.splitlines()]
        parts += [f"  {line}" for line in section.lines]
    return "\n".join(parts) + "\n"


def to_markdown(report: GateReport) -> str:
    """The report for a page."""
    parts = [f"## {'✅' if report.passed else '❌'} {_escaped(headline(report))}", ""]
    parts.append(_escaped(" ".join(filter(None, (statement(report), explanation(report))))))
    for section in sections(report):
        parts += ["", f"### {_escaped(section.title)}", ""]
        if section.rows:
            rows = [[_escaped(cell) for cell in row] for row in section.rows]
            parts.append(tabulate(rows, HEADER, tablefmt="github", disable_numparse=True))
        parts += [f"- {_escaped(line)}" for line in section.lines]
    return "\n".join(parts) + "\n"


def _escaped(text: str) -> str:
    """Text shown literally: escaped, on one line."""
    text = on_one_line(text)
    for sign in "\\`*_|<[":
        text = text.replace(sign, f"\\{sign}")
    return text


def to_json(report: GateReport) -> str:
    """The report for programs."""
    content = {
        "passed": report.passed,
        "run": str(report.run),
        "baseline": str(report.baseline),
        "settings": report.settings.model_dump(),
        "statement": _statement_fields(report),
        "scores": [score(outcome) for outcome in report.tested],
        "failures": [_finding_fields(failure) for failure in report.failures],
        "warnings": [_finding_fields(warning) for warning in report.warnings],
        "changed": report.changed,
        "notes": report.notes,
        "differences": report.differences,
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def score(outcome: TestedHypothesis) -> dict[str, Any]:
    """One hypothesis and its outcome, with the documents that lost most if it failed."""
    h = outcome.hypothesis
    found: dict[str, Any] = {
        "cell": h.cell.name,
        "task": h.task,
        "metric": h.metric,
        "kind": h.kind,
        "compared_with": "baseline" if h.limit is None else "unquantized",
        "verdict": outcome.verdict,
        "found_by": "scores" if outcome.verdict in ("worse", "not_excluded") else None,
        "before": h.before,
        "after": h.after,
        "loss": h.loss,
        "interval": [edge if math.isfinite(edge) else None for edge in h.interval],
        "not_worse_by_more_than": h.upper if h.is_bounded else None,
        "tolerance": h.tolerance,
        "noninferiority": h.margin,
        "alpha": h.alpha,
        "p": outcome.p,
        "adjusted_p": outcome.adjusted_p,
        "documents": h.documents.count,
        "documents_needed": h.documents_needed,
        "changed_documents": h.changed_documents,
        "calibration_draws": h.draws,
    }
    if h.parts:
        found["in_tolerances"] = dict(h.parts)
    elif outcome.verdict == "worse":
        changed = h.documents.most_changed
        found["most_changed"] = [{"doc_id": i, "before": before, "after": after} for i, before, after in changed]
    return found


def _statement_fields(report: GateReport) -> dict[str, Any] | None:
    worst = report.least_sure
    if worst is None or not worst.hypothesis.is_bounded:
        return None
    h = worst.hypothesis
    return {"level": 0.95, "times_tolerance": h.upper_in_tolerances, "cell": h.cell.name} | {
        "task": h.task,
        "metric": h.metric,
        "not_worse_by_more_than": h.upper,
        "unchanged_scores_left_out": len(report.unchanged),
    }


def _finding_fields(finding: Finding) -> dict[str, str]:
    about = {"cell": finding.cell.name, "found_by": finding.found_by, "rule": finding.rule}
    return about | {"message": finding.message}


def to_junit(report: GateReport) -> str:
    """The report for tools that show test results."""
    failed = len(report.worse) + len(report.not_excluded) + len(report.failures)
    total = len(report.tested) + len(report.failures)
    counts = {"tests": str(total), "failures": str(failed), "errors": "0", "skipped": "0"}
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(root, "testsuite", {"name": "qbench check", **counts})
    for outcome in report.tested:
        _add_score(suite, outcome, report)
    for number, failure in enumerate(report.failures):
        _add_finding(suite, failure, number, report)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def error_junit(message: str) -> str:
    """The same for a check that could not be made."""
    counts = {"tests": "1", "failures": "0", "errors": "1", "skipped": "0"}
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(root, "testsuite", {"name": "qbench check", **counts})
    ElementTree.SubElement(_case(suite, "qbench check", "not compared"), "error", {"message": _printable(message)})
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add_score(suite: ElementTree.Element, outcome: TestedHypothesis, report: GateReport) -> None:
    hypothesis = outcome.hypothesis
    case = _case(suite, hypothesis.cell.name, f"{hypothesis.task} {hypothesis.what}")
    if outcome.verdict in ("worse", "not_excluded"):
        failure = ElementTree.SubElement(case, "failure", {"type": "scores", "message": _printable(sentence(outcome))})
        title = LOST_TOGETHER if hypothesis.parts else LOST_MOST
        lines = [f"{title}: {changed(outcome)}", *_differing(report, hypothesis.cell.name)]
        failure.text = _printable("\n".join(lines))
    ElementTree.SubElement(case, "system-out").text = f"At 95% confidence: {not_worse(outcome)}."


def _add_finding(suite: ElementTree.Element, finding: Finding, number: int, report: GateReport) -> None:
    case = _case(suite, finding.cell.name, f"{finding.found_by} {number + 1}")
    message = {"type": finding.found_by, "message": _printable(finding.message)}
    failure = ElementTree.SubElement(case, "failure", message)
    failure.text = _printable("\n".join(_differing(report, finding.cell.name)))


def _differing(report: GateReport, cell: str) -> list[str]:
    return [f"differs: {line}" for line in report.differences.get(cell, ())]


def _case(suite: ElementTree.Element, cell: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", {"classname": _printable(cell), "name": _printable(name)})


def _printable(text: str) -> str:
    """The text without control characters. XML does not allow them, and a failed cell's reason may contain some."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "�" for sign in text)


# GitHub shows ten errors per step and drops the rest; the last line says how many were dropped.
MAX_ANNOTATIONS = 10


def annotations(report: GateReport) -> Iterator[str]:
    """Lines that GitHub shows as annotations, `::error title=…::…` and `::warning …`."""
    errors = [(f"{f.cell.name}: found by the {f.found_by}", f.message) for f in report.failures]
    errors += [
        (f"{o.hypothesis.name}: found by the scores", sentence(o)) for o in (*report.worse, *report.not_excluded)
    ]
    if len(errors) > MAX_ANNOTATIONS:
        rest = len(errors) - MAX_ANNOTATIONS + 1
        errors = [*errors[: MAX_ANNOTATIONS - 1], ("qbench check", f"{rest} more failures are in the report.")]
    for title, message in errors:
        yield annotation("error", title, message)
    for warning in report.warnings[:MAX_ANNOTATIONS]:
        yield annotation("warning", warning.cell.name, warning.message)
