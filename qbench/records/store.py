"""Records on disk: one folder per cell with record.json and samples.parquet. Imports no torch.

DIR/run.json                   the plan of the last run: its cells, and the key of each one's record
DIR/<cell>/record.json         what a cell produced, or why it failed; written last, so it is whole or missing
DIR/<cell>/samples.parquet     the results of every document (qbench.records.samples)
DIR/<cell>/log.txt             what the cell's process printed

An analysis has its own record, in DIR/<cell>-analysis-<key>: scores and analyses do not affect each other.
DIR/analysis.json              the plan of the last analysis
DIR/<cell>/analysis.parquet    the sums of every text (qbench.records.analysis), or maps.parquet (qbench.records.maps)
"""

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Union

from pydantic import ValidationError

from qbench.errors import InputError, shown
from qbench.files import MAX_JSON_BYTES, file_name, parse_json, read_content, write_atomically
from qbench.records.schema import SCHEMA_VERSION, CellRef, PlannedCell, Record, RunPlan
from qbench.validation import problem

if TYPE_CHECKING:
    import pandas as pd

    from qbench.records.analysis import Analysis, AttentionMap
    from qbench.records.documents import Documents

RECORD, SAMPLES, LOG, RUN = "record.json", "samples.parquet", "log.txt", "run.json"
ANALYSES = "analysis.json"
PARQUET = (SAMPLES, "analysis.parquet", "maps.parquet")
KEY_LETTERS = 10  # of a key, in the name of its folder
CELL_FOLDER = re.compile(rf"-[0-9a-f]{{{KEY_LETTERS}}}$")


Samples = Union["pd.DataFrame", bytes, None]  # per-document results, or the Parquet file of an analysis


class StoreError(InputError):
    """Why a folder of records cannot be read or written, in a sentence."""


@dataclass(frozen=True)
class StoredRecord:
    """A record and its folder."""

    record: Record
    folder: Path
    content: bytes | None = field(default=None, compare=False, repr=False)  # of the Parquet file, if there is no file
    _key: object = field(default_factory=object, init=False, compare=False, repr=False)  # of its documents in KEPT

    @property
    def has_samples(self) -> bool:
        """Whether there is a Parquet file: per-document results, or the sums of an analysis."""
        return self.record.samples_sha256 is not None

    def analysis(self) -> "Analysis":
        """The analysis with the sums of every text; the same error as for samples."""
        from qbench.records.analysis import read_analysis

        assert self.record.analysis
        return read_analysis(self.record.analysis, self.samples_content(), self.parquet)

    def maps(self) -> "list[AttentionMap]":
        """The attention maps; the same error."""
        from qbench.records.maps import read_maps

        return read_maps(self.samples_content(), self.parquet)

    @property
    def parquet(self) -> Path:
        """The Parquet file next to the record."""
        return self.folder / parquet_name(self.record)

    @property
    def documents(self) -> "Documents":
        """The results of every document by task; an error if the file does not match the record's checksum."""
        from qbench.records.documents import KEPT, Documents

        return KEPT.get(
            self._key,
            lambda: Documents(self.samples_content, self.parquet, self.record.metrics),
            lambda found: found.nbytes,
        )

    def samples_content(self) -> bytes:
        """The bytes of the Parquet file; the same error."""
        if self.content is not None:
            return self.content
        file = self.parquet
        if not file.exists():
            raise StoreError(f"{file}: the samples of {self.record.cell.name} are missing; run the cell again.")
        content = read_content(file, StoreError)
        if hashlib.sha256(content).hexdigest() != self.record.samples_sha256:
            raise StoreError(f"{file} does not match the checksum in its {RECORD}; run the cell again.")
        return content


@dataclass(frozen=True)
class Results:
    """A folder of records, read: the current record of each cell, and what else is there."""

    folder: Path
    plan: RunPlan | None
    current: tuple[StoredRecord, ...]
    superseded: tuple[StoredRecord, ...] = ()
    missing: tuple[PlannedCell, ...] = field(default=())  # planned, but there is no record
    not_offered: tuple[PlannedCell, ...] = ()


Model = TypeVar("Model", Record, RunPlan)


def read_results(folder: Path | str) -> Results:
    """Read the scores in a folder of records.

    With a run.json, its keys say which records count; without one, all of them do.
    """
    return _read_results(Path(folder), RUN)


def read_analyses(folder: Path | str) -> Results:
    """Read the analyses in a folder of records, by analysis.json in the same way."""
    return _read_results(Path(folder), ANALYSES)


def is_run(folder: Path) -> bool:
    """Whether a path is a folder of records, or of a run that has none yet."""
    return (folder / RUN).exists() or holds_records(folder)


def holds_records(folder: Path) -> bool:
    """Whether a folder has a record of a cell."""
    return any(folder.glob(f"*/{RECORD}"))


def no_records(folder: Path, what: str, others: str = "", made_by: str = "qbench run") -> str:
    """A sentence for a folder without records; what: "no records"; others: what it could have had besides."""
    from qbench.records.lm_eval_import.output import holds_lm_eval_output

    if holds_lm_eval_output(folder):
        return (
            f"{folder} is lm-eval's output. `qbench import lm-eval {shlex.quote(str(folder))} --out DIR` makes records "
            "of it, which this command can read; `qbench check RUN BASELINE` compares two such folders directly."
        )
    return f"{folder} contains {what} ({RECORD}, one folder per cell; `{made_by}` writes them){others}."


def _read_results(folder: Path, run: str) -> Results:
    made_by = "qbench run" if run == RUN else "qbench analyze"
    if not folder.is_dir():
        raise StoreError(f"{folder} is not a folder; it must be a folder of records, as `{made_by}` writes them.")
    records = [stored for stored in _read_all(folder) if bool(stored.record.cell.measured) == (run == ANALYSES)]
    plan = _read_plan(folder / run)
    if plan is None:
        if not records:
            raise StoreError(no_records(folder, "no records" if run == RUN else "no analyses", made_by=made_by))
        _check_one_each(records, folder, lambda record: record.cell.name, f", and no {run} that says which one counts")
        return Results(folder, None, tuple(records))
    _check_one_each(records, folder, lambda record: (record.cell.name, record.key), " with the same key")
    # By name as well: families with the same checkpoint have the same keys.
    found: dict[tuple[str, str | None], StoredRecord] = {(s.record.cell.name, s.record.key): s for s in records}
    planned = {(cell.cell.name, cell.key): cell for cell in plan.cells if not cell.not_offered}
    return Results(
        folder,
        plan,
        tuple(found[cell] for cell in planned if cell in found),
        tuple(stored for cell, stored in found.items() if cell not in planned),
        tuple(planned[cell] for cell in planned if cell not in found),
        tuple(cell for cell in plan.cells if cell.not_offered),
    )


def read_record(file: Path) -> Record:
    """One record.json; an error says what is wrong with it."""
    return _read_json(file, Record)


def cell_folder(folder: Path, cell: CellRef, key: str) -> Path:
    """Where a cell's record is: named for people, and by its key."""
    return folder / f"{file_name(cell.name)}-{key[:KEY_LETTERS]}"


def parquet_name(record: Record) -> str:
    """The name of the Parquet file next to a record."""
    return f"{record.cell.measured}.parquet" if record.cell.measured else SAMPLES


def write_record(folder: Path, record: Record, samples: Samples = None) -> None:
    """Write a cell's record into its folder: samples first, record.json last, each whole or not at all."""
    digest = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if samples is not None:
            file = folder / parquet_name(record)
            if isinstance(samples, bytes):
                write_atomically(file, samples)
            else:
                from qbench.records.samples import write_samples

                write_samples(samples, file)
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
        record = record.model_copy(update={"samples_sha256": digest})
        content = record.model_dump(mode="json")
        Record.model_validate(content)  # model_copy checks nothing
        write_atomically(folder / RECORD, _as_json(content))
        if samples is None:
            (folder / parquet_name(record)).unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{folder}: the record cannot be written ({error.strerror or error}).") from error


def _as_json(content: Mapping[str, Any]) -> str:
    """One line per field: with indentation, a record of many layers is twice as large, and references are committed."""
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    lines = [f"{encode(name)}: {encode(value)}" for name, value in content.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_plan(folder: Path, plan: RunPlan, name: str = RUN) -> None:
    """Write run.json, or analysis.json."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, plan.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise StoreError(f"{folder / name} cannot be written ({error.strerror or error}).") from error


def remove_unfinished(folder: Path) -> None:
    """Remove what killed writers left behind: temporary files, and cell folders without a finished record.

    Call only while holding the folder's lock.
    """
    if not folder.is_dir():  # someone removed it while a run was writing to it
        return
    cells = [found for found in folder.iterdir() if found.is_dir() and CELL_FOLDER.search(found.name)]
    for file in [path for place in (folder, *cells) for path in place.glob(".*.*")]:
        if file.name.startswith(tuple(f".{name}." for name in (RECORD, RUN, ANALYSES, *PARQUET))):
            file.unlink(missing_ok=True)
    for cell in cells:
        if not (cell / RECORD).exists():
            for name in (LOG, *PARQUET):
                (cell / name).unlink(missing_ok=True)
            if not any(cell.iterdir()):
                cell.rmdir()


def _read_all(folder: Path) -> Iterable[StoredRecord]:
    for file in sorted(folder.glob(f"*/{RECORD}")):
        yield StoredRecord(read_record(file), file.parent)


def _read_plan(file: Path) -> RunPlan | None:
    return _read_json(file, RunPlan) if file.exists() else None


def _read_json(file: Path, kind: type[Model]) -> Model:
    text = read_content(file, StoreError, MAX_JSON_BYTES)
    try:
        read = kind.model_validate_json(text)  # three times as fast as the way that reports what is wrong
        if "schema_version" in read.model_fields_set:
            return read
        wrong = ""
    except ValidationError as error:
        wrong = _first_problem(error)
    content = parse_json(text, file, StoreError)
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise StoreError(
            f"{file} has the schema version {shown(version)}; this qbench reads version {SCHEMA_VERSION}. Run the "
            f"recipe again, or read the folder with the qbench that wrote it{_commit(content)}."
        )
    raise StoreError(f"{file}: {wrong}")


def _commit(content: Any) -> str:
    """The commit of the qbench that wrote a record, if it is known."""
    provenance = content.get("provenance") if isinstance(content, dict) else None
    commit = provenance.get("git_commit") if isinstance(provenance, dict) else None
    return f" (commit {commit[:12]})" if isinstance(commit, str) else ""


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the record'} {problem(first)}"


def _check_one_each(records: list[StoredRecord], folder: Path, by: Callable[[Record], object], why: str) -> None:
    seen: dict[object, Path] = {}
    for stored in records:
        first = seen.setdefault(by(stored.record), stored.folder)
        if first != stored.folder:
            name = stored.record.cell.name
            raise StoreError(
                f"{folder} has two records of {name}, in {first.name} and {stored.folder.name}{why}; remove one."
            )
