"""How the gate's findings read, for every format: one place that formats a number."""

from collections.abc import Iterator
from dataclasses import dataclass

from qbench.errors import some
from qbench.gate.hypotheses import UNITS
from qbench.gate.settings import Kind
from qbench.gate.verdict import Outcome, Report

DIFFERENCES, UNCLEAR = 20, 5  # shown to people; JSON has all
HEADER = ("cell", "task", "metric", "before", "after", "loss", "95% interval", "tolerance", "p", "adjusted p")


@dataclass(frozen=True)
class Section:
    """A part of a report for people: a title, then a table or lines."""

    title: str
    rows: tuple[tuple[str, ...], ...] = ()  # under HEADER
    lines: tuple[str, ...] = ()


def headline(report: Report) -> str:
    """The verdict in one line."""
    found = []
    if report.worse:
        found.append(f"{len(report.worse)} of {len(report.outcomes)} scores got worse")
    audits = sum(failure.found_by == "audit" for failure in report.failures)
    if audits:
        found.append(f"{_count(audits, 'audit finding')}")
    if others := len(report.failures) - audits:
        found.append(f"{_count(others, 'finding')} on records")
    what = ", ".join(found) or f"none of {len(report.outcomes)} scores got worse"
    alone = " by scores alone (another checkpoint than the baseline's)" if report.by_scores_alone else ""
    return f"{'PASS' if report.passed else 'FAIL'}{alone}: {what}. {report.run} against {report.baseline}"


def explanation(report: Report) -> str:
    """What the verdict means."""
    alphas = {outcome.hypothesis.alpha for outcome in report.outcomes} or {report.settings.alpha}
    return (
        f"A score fails if its loss is above its tolerance and beyond chance: where nothing got worse, at most "
        f"{100 * max(alphas):g}% of whole tables fail (paired sign flips, Holm over {len(report.outcomes)} hypotheses)."
    )


def sections(report: Report) -> Iterator[Section]:
    """The report's parts, the worst first; empty ones are left out."""
    if report.changed:
        yield Section("Before you read the scores", lines=report.changed)
    for by in ("audit", "records"):
        lines = tuple(f"{f.cell.name}: {f.message}" for f in report.failures if f.found_by == by)
        if lines:
            yield Section(f"Failures found by the {'audit' if by == 'audit' else 'records themselves'}", lines=lines)
    if report.worse:
        yield Section("Failures found by the scores", rows=tuple(map(row, report.worse)))
        lines = tuple(f"{outcome.hypothesis.name}: {changed_documents(outcome)}" for outcome in report.worse)
        yield Section("Documents that lost most (id: before → after)", lines=lines)
    for cells, differing in _by_differences(report):
        yield Section(f"What else differs from the baseline in {cells}", lines=differing)
    if report.better:
        yield Section("Improvements beyond the tolerance", rows=tuple(map(row, report.better)))
    if report.unclear:
        shown = sorted(report.unclear, key=lambda outcome: outcome.p)[:UNCLEAR]
        title = f"Losses above the tolerance that chance explains ({len(shown)} of {len(report.unclear)})"
        yield Section(title, rows=tuple(map(row, shown)))
    if report.warnings:
        yield Section("Warnings", lines=tuple(f"{f.cell.name}: {f.message}" for f in report.warnings))
    if report.notes:
        yield Section("Notes", lines=report.notes)


def row(outcome: Outcome) -> tuple[str, ...]:
    """An outcome under HEADER."""
    h = outcome.hypothesis
    low, high = h.interval
    unit = UNITS[h.kind]
    return (
        h.cell.name,
        h.task,
        h.metric,
        value(h.kind, h.before),
        value(h.kind, h.after),
        f"{h.loss:+.3g}{unit}",
        f"{low:+.3g} to {high:+.3g}",
        f"{h.tolerance:g}{unit}",
        f"{outcome.p:.2g}",
        f"{outcome.adjusted_p:.2g}",
    )


def sentence(outcome: Outcome) -> str:
    """An outcome in one line."""
    h = outcome.hypothesis
    low, high = h.interval
    return (
        f"{h.metric} of {h.task} went from {value(h.kind, h.before)} to {value(h.kind, h.after)}: a loss of "
        f"{h.loss:.3g}{UNITS[h.kind]} (95% interval {low:.3g} to {high:.3g}, tolerance {h.tolerance:g}), "
        f"adjusted p {outcome.adjusted_p:.2g}."
    )


def value(kind: Kind, number: float) -> str:
    """A metric as people read it: accuracies in percent."""
    return f"{100 * number:.2f}%" if kind == "accuracy" else f"{number:.5g}"


def changed_documents(outcome: Outcome) -> str:
    """The ten documents that lost most, in one line."""
    changed = outcome.hypothesis.documents.most_changed()
    return ", ".join(f"{document}: {before:.4g} → {after:.4g}" for document, before, after in changed)


def _by_differences(report: Report) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Cells with the same differences together; there is mostly one set of them."""
    cells: dict[tuple[str, ...], list[str]] = {}
    for cell, differing in report.differences.items():
        cells.setdefault(differing, []).append(cell)
    for differing, names in cells.items():
        shown = differing[:DIFFERENCES]
        if len(differing) > len(shown):
            shown += (f"and {len(differing) - len(shown)} more",)
        yield some(names), shown or ("nothing that is recorded",)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
