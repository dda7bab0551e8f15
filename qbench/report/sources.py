"""Reads results: from a folder of records, or from CSV files of published numbers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from qbench.errors import some
from qbench.files import as_path
from qbench.records.audit import UNQUANTIZED
from qbench.records.metrics import is_share
from qbench.records.schema import MetricValue, PlannedCell, Record
from qbench.records.store import (
    ANALYSES,
    RUN,
    Results,
    StoredRecord,
    is_run,
    no_records,
    read_analyses,
    read_results,
)
from qbench.report.attentions import learn_titles
from qbench.report.draws import with_draws_joined
from qbench.report.metrics import in_order, measure
from qbench.report.published import is_analysis_file, read_published
from qbench.report.results import (
    NOT_OFFERED,
    CellResult,
    Gap,
    ReportError,
    ResultSet,
    Score,
    one_direction_each,
)

if TYPE_CHECKING:
    from qbench.records.findings.finding import Finding
    from qbench.records.findings.folder import Review

MAX_REASON_LENGTH = 400  # has room for a path, what is wrong, and what to do about it


def read_result_set(source: Path | str) -> ResultSet:
    """Read a folder of records, or a CSV file of published numbers or a folder of such."""
    source = as_path(source, "a folder of records or CSV files of published numbers", ReportError)
    if not source.exists():
        raise ReportError(f"{source} does not exist; it must be a folder of records or CSV files of published numbers.")
    if source.is_file():
        return _from_files([source], source)
    if (source / ANALYSES).exists() and not (source / RUN).exists():
        plan = read_analyses(source).plan
        return ResultSet(source, (), (), said_reference=plan.resolved_recipe.get("reference") if plan else None)
    if is_run(source):
        return from_records(read_results(source))
    if files := sorted(source.glob("*.csv")):
        return _from_files(files, source)
    found = no_records(source, "neither records", " nor CSV files of published numbers")
    runs = sorted(str(file.parent) for depth in ("*", "*/*") for file in source.glob(f"{depth}/{RUN}"))
    raise ReportError(f"{found} Folders of records below it: {some(runs)}." if runs else found)


def _from_files(files: Sequence[Path], source: Path) -> ResultSet:
    """Published scores, and which of the files are about analyses."""
    analyses = tuple(file for file in files if is_analysis_file(file))
    scores = [file for file in files if file not in analyses]
    found = read_published(scores, source) if scores else ResultSet(source, (), ())
    return replace(found, analysis_files=analyses)


def from_records(records: Results) -> ResultSet:
    """The results of records that were read, in the order of the plan if there is one."""
    learn_titles(stored.record for stored in records.current)
    from qbench.records.findings.folder import Review  # published numbers need neither numpy nor pyarrow

    review = Review(records.current)
    cells = [_of_record(stored, review) for stored in records.current]
    cells += [CellResult(planned.cell, gap=_missing(planned)) for planned in records.missing]
    cells += [CellResult(planned.cell, gap=_not_offered(planned)) for planned in records.not_offered]
    if records.plan:
        order = [planned.cell.name for planned in records.plan.cells]
        cells.sort(key=lambda result: order.index(result.cell.name))
    cells = with_draws_joined(cells)
    if not cells:
        raise ReportError(f"{records.folder / RUN} plans no cells, so there is nothing to show.")
    metrics = (metric for stored in records.current for metric in stored.record.metrics)
    measures = in_order(measure(m.task, m.metric, m.better) for m in metrics)
    return ResultSet(
        source=records.folder,
        cells=tuple(cells),
        measures=tuple(one_direction_each(measures)),
        records=records,
        review=review,
        said_reference=records.plan.resolved_recipe.get("reference") if records.plan else None,
    )


def _of_record(stored: StoredRecord, review: "Review") -> CellResult:
    """A cell's scores, or why it has none. All that needs its documents is computed while they are in memory."""
    record, altered = stored.record, review.read(stored)
    if gap := _failed(record) or _not_measured(record, altered) or _not_proved(record):
        return CellResult(record.cell, gap=gap, stored=stored)
    documents = stored.documents if stored.has_samples else None
    for own in (documents or {}).values():
        _ = own.chance, own.decisions
    scores = {(m.task, m.metric): _score(m) for m in record.metrics}
    caveat = ""
    if record.audit is None and record.cell.label != UNQUANTIZED and not record.imported:  # of these, remarks tell
        caveat = f"{record.cell.name} has no audit, so nothing proves that it was quantized."
    return CellResult(record.cell, scores, caveat=caveat, stored=stored, documents=documents)


def _failed(record: Record) -> Gap | None:
    if record.state != "failed":
        return None
    name, failure = record.cell.name, record.failure
    if failure is None:
        return Gap("failed", f"{name} failed.")
    phase = f" in {failure.phase}" if failure.phase else ""
    text = "audit failed" if failure.kind == "audit" else "failed"
    return Gap(text, f"{name} failed{phase} ({failure.kind}): {_first_line(failure.reason)}")


def _not_measured(record: Record, altered: Sequence["Finding"]) -> Gap | None:
    if not altered:
        return None
    reason = f"{record.cell.name} does not match what was measured: {altered[0].message} Run the cell again."
    return Gap("altered", reason)


def _not_proved(record: Record) -> Gap | None:
    from qbench.records.findings.record import audit_failures  # published numbers need neither numpy nor pyarrow

    reasons = audit_failures(record)
    if not reasons:
        return None
    return Gap("audit failed", f"{record.cell.name} did not pass its audit: {_first_line(reasons[0].message)}")


def _score(metric: MetricValue) -> Score:
    factor = 100 if is_share(metric.metric) else 1
    stderr = None if metric.stderr is None else factor * metric.stderr
    return Score(factor * metric.value, stderr, metric.documents)


def _missing(planned: PlannedCell) -> Gap:
    # The same words for all cells, so they share one footnote. A damage has the footnote of its baseline.
    what = "The unquantized model is planned" if planned.cell.label == UNQUANTIZED else "Planned"
    return Gap("missing", f"{what} but not run yet; `qbench run` will run it.")


def _not_offered(planned: PlannedCell) -> Gap:
    return Gap(NOT_OFFERED, f"{planned.cell.method} does not offer {planned.cell.bits} bits.")


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= MAX_REASON_LENGTH else line[: MAX_REASON_LENGTH - 1] + "…"
