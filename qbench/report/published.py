"""Published numbers: CSV files with one row per number pair, such as `qbench table --format csv` writes."""

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from qbench.records.metrics import Better, is_perplexity
from qbench.records.schema import CellRef
from qbench.report.attentions import TWINS
from qbench.report.metrics import Measure, in_order, measure
from qbench.report.results import NOTHING, CellResult, Gap, ReportError, ResultSet, Score, one_direction_each

ROUNDING = 0.005  # what the two decimals of published numbers hide
REQUIRED = ("family", "method", "bits", "task", "metric")
# Columns of a row about any two kinds; softmax and softpick may have one column each instead.
LONG = ("attention", "value", "reference")


def read_published(files: Sequence[Path], source: Path) -> ResultSet:
    """Read CSV files; `size` is read as `family`, and rows without a label are labelled by method and bits."""
    cells: dict[CellRef, dict[tuple[str, str], Score]] = {}
    gaps: dict[CellRef, Gap] = {}
    measures: dict[Measure, None] = {}
    deltas: dict[tuple[str, str, str, str, str], float] = {}
    seen: dict[tuple[str, str, str, str, str], str] = {}
    references: dict[str, str] = {}
    for where, row in _rows(files):
        of = measure(row["task"], row["metric"], _better(row, where))
        label = row.get("label") or f"{row['method']}-{row['bits']}"
        columns = _columns(row, where)
        reference, other = columns
        references.setdefault(reference, where)
        key = (row["family"], label, of.task, of.metric, other)
        if key in seen:
            raise ReportError(f"{where} repeats {', '.join(key)} of {seen[key]}; remove one of them.")
        seen[key] = where
        measures[of] = None
        for attention, column in columns.items():
            cell = _cell(row, attention, label, where)
            scores = cells.setdefault(cell, {})
            value = number(row, column, where)
            if value is None:
                gaps.setdefault(cell, Gap(NOTHING, row.get("note") or f"{cell.name} is not in {source}."))
                continue
            if value <= 0 and is_perplexity(of.metric):
                raise ReportError(f"{where}: {column} is {value:g}; a {of.metric} is at least 1.")
            known = scores.setdefault((of.task, of.metric), Score(value, documents=_documents(row, where)))
            if known.value != value:
                raise ReportError(f"{where}: {column} is {value:g}, but {known.value:g} in another row.")
        delta = number(row, "delta", where)
        if delta is not None:
            deltas[key] = delta
    if not cells:
        raise ReportError(f"{source} has no rows of numbers.")
    if len(references) > 1:
        of_each = " and ".join(f"{reference} ({where})" for reference, where in references.items())
        raise ReportError(f"{source} has differences from {of_each}; all must use the same reference.")
    results = (CellResult(cell, scores, None if scores else gaps[cell]) for cell, scores in cells.items())
    ordered = tuple(one_direction_each(in_order(measures)))
    return ResultSet(source, tuple(results), ordered, deltas, said_reference=next(iter(references)))


def _rows(files: Sequence[Path]) -> Iterator[tuple[str, Mapping[str, str]]]:
    def required(names: Sequence[str]) -> Sequence[str]:
        return (*REQUIRED, *(LONG if LONG[0] in names else TWINS))

    either = f"{', '.join(REQUIRED)}, and either ({', '.join(TWINS)}) or ({', '.join(LONG)})"
    return csv_rows(files, required, f"published numbers need the columns {either}")


def csv_rows(
    files: Iterable[Path], required: Callable[[Sequence[str]], Sequence[str]], rule: str
) -> Iterator[tuple[str, Mapping[str, str]]]:
    """The rows of CSV files, each with its file and line; `size` is read as `family`.

    required: which columns are needed, given those in the file. rule: the same in words, for errors.
    """
    for file in files:
        try:
            with file.open(encoding="utf-8-sig", newline="") as lines:
                reader = csv.DictReader(lines)
                names = ["family" if name == "size" else name for name in reader.fieldnames or ()]
                reader.fieldnames = names
                if missing := [name for name in required(names) if name not in names]:
                    raise ReportError(f"{file} is missing columns: {', '.join(missing)}; {rule}.")
                for row in reader:
                    where = f"{file}, line {reader.line_num}"
                    if None in row or None in row.values():
                        raise ReportError(f"{where} does not have as many fields as the header ({len(names)}).")
                    yield where, {name: value.strip() for name, value in row.items()}
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ReportError(f"{file} cannot be read as a CSV file in UTF-8 ({error}).") from None


def is_analysis_file(file: Path) -> bool:
    """Whether a CSV file holds figures of analyses, by its header."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            header = next(csv.reader(lines), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return False  # reading it will report what is wrong
    return "setting" in header


def _columns(row: Mapping[str, str], where: str) -> dict[str, str]:
    """The columns of the two kinds of attention that a row is about, the reference first."""
    if LONG[0] not in row:
        return {attention: attention for attention in TWINS}
    attention, reference = row["attention"], row.get("reference_attention") or TWINS[0]
    if attention in ("", reference):
        said = "" if row.get("reference_attention") else ", the reference unless a column reference_attention names one"
        raise ReportError(f"{where}: attention is {attention!r}; it must be a kind other than {reference}{said}.")
    return {reference: "reference", attention: "value"}


def _cell(row: Mapping[str, str], attention: str, label: str, where: str) -> CellRef:
    bits = row["bits"]
    if not bits.isdecimal() or not int(bits):
        raise ReportError(f"{where}: bits is {bits!r}; it must be a whole number, 16 if nothing is quantized.")
    method = row["method"]
    return CellRef(family=row["family"], attention=attention, checkpoint="", method=method, bits=int(bits), label=label)


def number(row: Mapping[str, str], column: str, where: str) -> float | None:
    """A number of a row; None if it is empty."""
    text = row.get(column, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ReportError(f"{where}: {column} is {text!r}; it must be a number, or empty if there is none.")
    return value


def _documents(row: Mapping[str, str], where: str) -> int | None:
    count = number(row, "documents", where)
    return None if count is None else int(count)


def _better(row: Mapping[str, str], where: str) -> Better | None:
    match row.get("better"):
        case None | "":
            return None
        case "higher" | "lower" as better:
            return better
        case other:
            raise ReportError(f"{where}: better is {other!r}; it must be higher, lower, or empty.")
