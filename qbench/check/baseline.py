"""The folder that is named as the baseline: read, or which one beside it may have been meant."""

import difflib
from pathlib import Path

from qbench.check.join import CheckError
from qbench.store import RECORD, Results, read_results


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
