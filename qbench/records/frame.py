"""The documents of a folder as one pandas frame, for users; what computes tables reads qbench.records.documents."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qbench.errors import did_you_mean, some
from qbench.files import as_path
from qbench.records.lm_eval_import.cells import cells_of
from qbench.records.lm_eval_import.output import holds_lm_eval_output, read_outputs
from qbench.records.lm_eval_import.store import as_results
from qbench.records.store import RECORD, StoredRecord, StoreError, is_run, read_record, read_results

if TYPE_CHECKING:
    import pandas as pd

    from qbench.records.documents import TaskDocuments, Values


def documents(
    folder: Path | str, tasks: Sequence[str] | None = None, cells: str | Sequence[str] | None = None
) -> "pd.DataFrame":
    """What every cell scored on every document: one row per cell, document and metric.

    folder: of records, of lm-eval's output, or of one record. tasks: only these; cells: only those with these names,
    which may be patterns, such as "mini-softmax-*". docs/tables.md explains the columns: cell, family, variant
    (`attention` in CSV files), label, draw (of calibration, or <NA>), task, id, key (of the document's content),
    repetition, metric, value, weight, better, aggregation. Texts are categoricals: use groupby(…, observed=True).

    A score follows from r = sum(value) / sum(weight) by its aggregation: r for mean and weighted_mean, exp(-r) for
    perplexity and weighted_perplexity, -r / ln 2 for bits_per_byte. Two cells are paired by task, key and repetition.
    """
    import pandas as pd

    found = [stored for stored in _records(as_path(folder, "a folder of records", StoreError)) if stored.has_samples]
    patterns = [cells] if isinstance(cells, str) else cells
    chosen = [s for s in found if patterns is None or any(fnmatchcase(s.record.cell.name, own) for own in patterns)]
    if not chosen:
        names = [stored.record.cell.name for stored in found]
        near = did_you_mean(patterns[0], names) if patterns else ""
        raise StoreError(
            f"{folder} has no cell {some(list(patterns or []))} with documents; it has {some(names)}.{near}"
        )
    _check(tasks, dict.fromkeys(task for stored in chosen for task in stored.documents), f"{folder} has no task")
    frames = [
        _frame(stored, own, metric, values)
        for stored in chosen
        for task, own in stored.documents.items()
        if tasks is None or task in tasks
        for metric, values in own.metrics.items()
    ]
    frame = pd.concat(frames, ignore_index=True)
    texts = ["cell", "family", "variant", "label", "task", "key", "metric", "better", "aggregation"]
    return frame.astype(dict.fromkeys(texts, "category") | {"draw": "Int64"})


def _records(folder: Path) -> list[StoredRecord]:
    folder = folder.parent if folder.name == RECORD else folder
    if (folder / RECORD).exists():
        return [StoredRecord(read_record(folder / RECORD), folder)]
    if not is_run(folder) and holds_lm_eval_output(folder):
        outputs = read_outputs([folder])
        return list(as_results(folder, outputs, cells_of(outputs)).current)
    done = [stored for stored in read_results(folder).current if stored.record.state == "done"]
    if not done:
        raise StoreError(f"{folder} has no finished cell, so it has no documents.")
    return done


def _check(wanted: Sequence[str] | None, known: dict[str, None], what: str) -> None:
    if isinstance(wanted, str) or (wanted is not None and not len(wanted)):
        example = wanted if isinstance(wanted, str) else next(iter(known), "piqa")
        raise StoreError(f"tasks is {wanted!r}; it must be a list of names, such as [{example!r}].")
    for name in wanted or ():
        if name not in known:
            raise StoreError(f"{what} {name}; it has {', '.join(known)}.{did_you_mean(name, known)}")


def _frame(stored: StoredRecord, own: "TaskDocuments", metric: str, values: "Values") -> "pd.DataFrame":
    import pandas as pd

    cell, there = stored.record.cell, ~np.isnan(values.values)
    return pd.DataFrame(
        {
            "cell": cell.name,
            "family": cell.family,
            "variant": cell.attention,
            "label": cell.label,
            "draw": cell.draw,
            "task": own.task,
            "id": own.keys.ids[there],
            "key": own.keys.contents[there].astype(np.str_),
            "repetition": own.keys.repetition[there],
            "metric": metric,
            "value": values.values[there],
            "weight": values.weights[there],
            "better": values.better,
            "aggregation": values.aggregation,
        }
    )
