"""Rules on one record: it does not follow from its identity or its samples, or no model can have its scores."""

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np

from qbench.attention.kinds import ATTENTIONS
from qbench.records.audit import UNQUANTIZED, failures, names_weights
from qbench.records.documents import Values
from qbench.records.findings.arithmetic import ClaimedScore, impossible_scores
from qbench.records.findings.finding import Finding, FoundBy
from qbench.records.metrics import facts_of
from qbench.records.samples import AGGREGATIONS, GROUP
from qbench.records.schema import MetricValue, Record
from qbench.records.store import RECORD, StoredRecord

ROUNDING = 1e-9  # sums of the same float64 values in another order

Problem = tuple[str, str]  # a rule, and a sentence


def altered(stored: StoredRecord) -> list[Finding]:
    """What a record says that does not follow from its samples and its identity: no verdict and no table uses it."""
    record = stored.record
    problems = [*_other_identity(record)]
    if record.cell.measured:
        problems += _other_analysis(stored)
    else:
        problems += _other_scores(stored)
    return [_finding(record, *problem) for problem in problems]


def audit_failures(record: Record) -> list[Finding]:
    """Why the audit does not prove what the cell's name says; nothing without an audit."""
    return [_finding(record, "audit_failed", why, "audit") for why in _why_not_proved(record)]


def unproved(record: Record) -> list[Finding]:
    """The same for the scores of a quantized cell, which also need an audit. Tables say it of imported records."""
    if record.cell.label == UNQUANTIZED:
        return []
    if record.audit is None and not record.imported:
        return [_finding(record, "no_audit", "it has no audit, so nothing proves that it was quantized.", "audit")]
    reasons = [f"it has scores, but did not pass its audit: {why}" for why in _why_not_proved(record)]
    return [_finding(record, "audit_failed", reasons[0], "audit")] if reasons else []


def impossible(stored: StoredRecord) -> list[Finding]:
    """Scores that no model can have, whatever its weights."""
    others = _not_right_or_wrong(stored) if stored.has_samples else set()
    claims = []
    for m in stored.record.metrics:
        documents = None if (m.task, m.metric) in others or m.aggregation not in AGGREGATIONS else m.documents
        claims.append(ClaimedScore(m.task, m.metric, m.value, m.better, documents))
    return [
        _finding(stored.record, found.rule, f"{found.score.task} {found.score.metric}: {found.why}")
        for found in impossible_scores(claims)
    ]


def _finding(record: Record, rule: str, message: str, found_by: FoundBy = "records") -> Finding:
    return Finding(rule, (record.cell,), message, found_by)


def _why_not_proved(record: Record) -> list[str]:
    """Sentences; the audit may belong to another cell."""
    audit, cell = record.audit, record.cell
    if audit is None:
        return []
    if audit.label != cell.label:
        return [f"it is an audit of {audit.label}."]
    if (audit.method, audit.bits) != (cell.method, cell.bits):
        return [f"it is an audit of {audit.method} at {audit.bits} bits; the cell is {cell.method} at {cell.bits}."]
    if (wanted := sorted(record.identity.what.parts or {})) != (audited := sorted(part.label for part in audit.parts)):
        return [f"it has {wanted} besides its weights, but the audit covers {audited}."]
    return failures(audit)


def _not_right_or_wrong(stored: StoredRecord) -> set[tuple[str, str]]:
    """The tasks and metrics with values other than 0 and 1."""
    return {
        (task, name)
        for task, documents in stored.documents.items()
        for name, own in documents.metrics.items()
        if not (np.isnan(own.values) | (own.values == 0) | (own.values == 1)).all()
    }


def why_other_key(record: Record) -> str:
    """Why the key is not the record's; empty if it is."""
    return "" if record.key == record.identity.key else "the key is not the hash of its identity."


def _other_identity(record: Record) -> Iterator[Problem]:
    cell, what = record.cell, record.identity.what
    if why := why_other_key(record):
        yield "altered_key", f"{RECORD}: {why}"
    # A variant named as one of our kinds has it; other names (base, qat, another package's kind) say nothing about it.
    for field in ("attention", "method", "bits") if cell.attention in ATTENTIONS else ("method", "bits"):
        own, hashed = getattr(cell, field), getattr(what, field)
        if own != hashed:
            yield "altered_identity", f"{RECORD}: the cell's {field} is {own}, but its identity says {hashed}."
    label = f"{RECORD}: the label"
    if not names_weights(cell.label, cell.method, cell.bits):
        yield "altered_label", f"{label} {cell.label} is not one of {cell.method} at {cell.bits} bits."
    if not cell.label.endswith(ending := "".join(f"-{part}" for part in what.parts or {})):
        yield "altered_label", f"{label} is {cell.label}, but by its identity it must end in {ending}."


def _other_analysis(stored: StoredRecord) -> Iterator[Problem]:
    """Why an analysis does not match its identity or its Parquet file."""
    record, measured, rule = stored.record, stored.record.cell.measured, "altered_analysis"
    said = (record.identity.what.analysis or {}).get("measured")
    if said != measured:
        yield rule, f"{RECORD} is about {measured}, but its identity says {said}."
    if record.state == "done" and getattr(record, str(measured)) is None:
        yield rule, f"{RECORD} has no {measured}."
    elif record.state == "done" and measured != "sensitivity" and not stored.has_samples:
        yield rule, f"{RECORD} has no {stored.parquet.name} next to it to prove it."
    elif record.analysis and stored.has_samples and int(stored.analysis().sums.tokens.sum()) != record.analysis.tokens:
        yield rule, f"{RECORD} has {record.analysis.tokens} tokens, but {stored.parquet.name} does not."


def _other_scores(stored: StoredRecord) -> Iterator[Problem]:
    """Scores whose value, standard error or number of documents does not follow from the documents."""
    record, imported = stored.record, stored.record.imported is not None
    if record.state == "done" and not stored.has_samples:
        yield "no_samples", f"{RECORD} has scores, but no samples.parquet to prove them."
    for (task, metric), count in Counter((m.task, m.metric) for m in record.metrics).items():
        if count > 1:
            yield "repeated_metric", f"{task} {metric} is in {RECORD} more than once."
    for score in record.metrics if stored.has_samples else ():
        documents = stored.documents.get(score.task)
        if imported and score.aggregation == GROUP and documents is None:
            continue
        values = documents.metrics.get(score.metric) if documents else None
        where = RECORD if stored.content is None else "lm-eval's results"  # which are in memory
        if found := _differs(score, values, where, any_aggregation=imported):
            rule, why = found
            yield rule, f"{score.task} {score.metric} {why}"


def _differs(score: MetricValue, own: Values | None, where: str, any_aggregation: bool) -> Problem | None:
    """Why a score does not follow from its documents; None if it does, or if only lm-eval can compute it.

    where: the score is. any_aggregation: the task's file may have chosen another one than lm-eval's for a metric.
    """
    facts = facts_of(score.metric)
    if facts and not any_aggregation and score.aggregation != facts.aggregation:
        return "other_aggregation", f"has the aggregation {score.aggregation}; lm-eval uses {facts.aggregation}."
    if score.aggregation not in AGGREGATIONS:
        return None
    if own is None:
        return "no_values", f"is {score.value:.6g} in {where}; the samples have no value for it."
    there = ~np.isnan(own.values)
    values, weights, count = own.values[there], own.weights[there], int(there.sum())
    if score.documents != count:
        return "other_count", f"has {score.documents} documents in {where}; the samples have {count}."
    again = AGGREGATIONS[score.aggregation].value(values, weights)
    if not math.isclose(again, score.value, rel_tol=ROUNDING, abs_tol=ROUNDING):
        return "altered_value", f"is {score.value:.6g} in {where}; its samples give {again:.6g}."
    if score.aggregation == "mean" and score.stderr is not None and count > 1:
        error = float(values.std(ddof=1)) / math.sqrt(count)
        if not math.isclose(error, score.stderr, rel_tol=1e-6, abs_tol=ROUNDING):
            said = f"has a standard error of {score.stderr:.6g} in {where}"
            return "altered_stderr", f"{said}; its samples give {error:.6g}."
    return None
