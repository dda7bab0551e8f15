"""The folder that is named as the baseline: what is in it, whether it may be replaced, and which one was meant."""

import difflib
from pathlib import Path

from qbench.errors import InputError
from qbench.gate.join import CheckError
from qbench.records.store import CELL_FOLDER, LOG, RECORD, SAMPLES, Results, read_record, read_results

CHANGES = "CHANGES.jsonl"


def read_baseline(folder: Path, run: Path) -> Results:
    """The baseline's records; where there is no such folder, the error has the name of one that is like it."""
    if not folder.exists() and (meant := similar_folder(folder, run)):
        raise CheckError(f"There is no folder {folder}. Did you mean {meant}?")
    return read_results(folder)


def similar_folder(folder: Path, run: Path) -> Path | None:
    """The folder of records beside this one whose name is nearest to its name; not the run itself."""
    if not folder.parent.is_dir():
        return None
    shown = [found for found in sorted(folder.parent.iterdir()) if not found.name.startswith(".")]
    beside = [found for found in shown if holds_records(found) and found.resolve() != run.resolve()]
    near = difflib.get_close_matches(folder.name, [found.name for found in beside], n=1)
    return folder.with_name(near[0]) if near else None


def holds_records(folder: Path) -> bool:
    """Whether there is a record of a cell."""
    return any(folder.glob(f"*/{RECORD}"))


def check_replaceable(folder: Path, run: Path) -> None:
    """An error unless the folder is new, or holds a baseline and nothing that would be lost with it."""
    if folder.resolve() == run.resolve():
        raise CheckError(f"{run} is the baseline itself; there is nothing to accept.")
    if problem := _why_not_replaceable(folder, run):
        raise CheckError(f"{problem}. {_what_is_right(folder, run)}")


def _why_not_replaceable(folder: Path, run: Path) -> str | None:
    if run.resolve().is_relative_to(folder.resolve()):
        return f"{folder} cannot be the baseline, because it contains the run {run}"
    if folder.resolve().is_relative_to(run.resolve()):
        return f"{folder} cannot be the baseline, because it is inside the run {run}"
    foreign = _first_foreign(folder) if folder.exists() else None
    return f"{folder} cannot be replaced, because {foreign} is not part of a baseline" if foreign else None


def _what_is_right(folder: Path, run: Path) -> str:
    meant = folder / run.name
    if holds_records(meant) and meant.resolve() != run.resolve():
        return f"Did you mean {meant}?"
    return "Name a folder that holds a baseline, or one that does not exist yet."


def _first_foreign(folder: Path) -> Path | None:
    """The first path that is neither a cell nor a file beside cells; the first file if there is no baseline at all."""
    entries = sorted(folder.iterdir())
    files = [entry for entry in entries if _is_plain_file(entry)]
    for entry in entries:
        if entry not in files and (foreign := _foreign_in_cell(entry)):
            return foreign
    is_baseline = len(files) < len(entries) or (folder / CHANGES) in files or _is_readable(folder)
    return files[0] if files and not is_baseline else None


def _foreign_in_cell(cell: Path) -> Path | None:
    """The first file in a cell's folder that qbench did not write; the folder itself if it is not a cell's."""
    if cell.is_symlink() or not cell.is_dir():
        return cell
    if not CELL_FOLDER.search(cell.name) and not _has_record(cell):
        return cell
    known = (RECORD, SAMPLES, LOG)
    return next((file for file in sorted(cell.iterdir()) if file.name not in known or not _is_plain_file(file)), None)


def _is_plain_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _has_record(cell: Path) -> bool:
    try:
        read_record(cell / RECORD)
    except InputError:
        return False
    return True


def _is_readable(folder: Path) -> bool:
    try:
        read_results(folder)
    except InputError:
        return False
    return True
