"""The gate's report as JSON, all of it."""

import json
import math
from typing import Any

from qbench.gate.verdict import Finding, Outcome, Report


def to_json(report: Report) -> str:
    """The report for programs."""
    content = {
        "passed": report.passed,
        "run": str(report.run),
        "baseline": str(report.baseline),
        "settings": report.settings.model_dump(),
        "scores": [score(outcome) for outcome in report.outcomes],
        "failures": [_finding(failure) for failure in report.failures],
        "warnings": [_finding(warning) for warning in report.warnings],
        "changed": report.changed,
        "notes": report.notes,
        "differences": report.differences,
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def score(outcome: Outcome) -> dict[str, Any]:
    """One hypothesis and what became of it; the documents that lost most where it failed."""
    h = outcome.hypothesis
    found: dict[str, Any] = {
        "cell": h.cell.name,
        "task": h.task,
        "metric": h.metric,
        "kind": h.kind,
        "verdict": outcome.verdict,
        "found_by": "scores" if outcome.verdict == "worse" else None,
        "before": h.before,
        "after": h.after,
        "loss": h.loss,
        "interval": [edge if math.isfinite(edge) else None for edge in h.interval],
        "tolerance": h.tolerance,
        "alpha": h.alpha,
        "p": outcome.p,
        "adjusted_p": outcome.adjusted_p,
        "documents": len(h.documents.ids),
    }
    if outcome.verdict == "worse":
        changed = h.documents.most_changed()
        found["most_changed"] = [{"doc_id": i, "before": before, "after": after} for i, before, after in changed]
    return found


def _finding(finding: Finding) -> dict[str, str]:
    return {"cell": finding.cell.name, "found_by": finding.found_by, "message": finding.message}
