"""lm-eval's output in the gate: two of its folders as run and baseline, and whether both asked the same questions."""

from pathlib import Path

import numpy as np

from qbench.errors import some
from qbench.gate.pairing import CheckError, read_baseline
from qbench.records.lm_eval_import.cells import cells_of
from qbench.records.lm_eval_import.output import ModelOutput, holds_lm_eval_output, read_outputs
from qbench.records.lm_eval_import.store import as_results
from qbench.records.schema import CellRef, ImportedTask
from qbench.records.store import Results, StoredRecord, is_run, read_results

# By field of ImportedTask: what differs, in words.
ASKED = {
    "num_fewshot": "few-shot examples",
    "version": "task versions",
    "documents": "documents",
    "prompts": "prompts (few-shot examples, chat template or task file)",
    "targets": "targets",
    "generation": "settings for generated text",
}


def read_both(run: Path, baseline: Path) -> tuple[Results, Results, list[str]]:
    """A run and its baseline, each a folder of records or lm-eval's output; and what a reader must know.

    If each has one model, those are compared, whatever their names.
    """
    if not any(is_lm_eval_output(path) for path in (run, baseline)):
        if run.is_dir() and not is_run(run):
            raise CheckError(
                f"{run} contains no records, as `qbench run` writes them, and no results of lm-eval "
                "(results_<date>.json, which it writes with --output_path)."
            )
        now = read_results(run)
        return now, read_baseline(baseline, now.folder), []
    outputs = [None if is_run(path) else read_outputs([path]) for path in (run, baseline)]
    there = [None if own else read_results(path) for path, own in zip((run, baseline), outputs, strict=True)]
    common = _common_cell(outputs, there)
    if common is None and outputs[0] and outputs[1]:
        _check_same_models(outputs[0], outputs[1], run, baseline)
    now, then = (
        records or as_results(path, own or [], [common] if common else cells_of(own or []))
        for path, own, records in zip((run, baseline), outputs, there, strict=True)
    )
    return now, then, [note for own in outputs for output in own or () for note in output.notes]


def _check_same_models(run: list[ModelOutput], baseline: list[ModelOutput], here: Path, there: Path) -> None:
    now, then = ([output.model for output in outputs] for outputs in (run, baseline))
    if sorted(now) != sorted(then):
        raise CheckError(
            f"{here} has results of {some(now)}, and {there} of {some(then)}: the model names do not match. Give "
            "folders with one model each, such as the subfolders that lm-eval wrote."
        )


def is_lm_eval_output(path: Path) -> bool:
    """Whether a path is lm-eval's output, and not a folder of records."""
    return not is_run(path) and holds_lm_eval_output(path)


def _common_cell(outputs: list[list[ModelOutput] | None], there: list[Results | None]) -> CellRef | None:
    """The one cell that both sides have; None if a side has several, which are then joined by name."""
    recorded = [records.current[0].record.cell for records in there if records and len(records.current) == 1]
    alone = [own for own in outputs if own and len(own) == 1]
    if len(recorded) + len(alone) < 2:
        return None
    return recorded[0] if recorded else cells_of(alone[0])[0]


def check_asked(before: StoredRecord, after: StoredRecord) -> None:
    """Raise an error if imported records did not ask the same questions: their scores cannot be compared."""
    then, now = before.record.imported, after.record.imported
    if not then and not now:
        return
    if not then or not now:
        imported, measured = (before, after) if then else (after, before)
        raise CheckError(
            f"{imported.folder} is from lm-eval and {measured.folder} from qbench: their documents cannot be matched. "
            "Compare two results of lm-eval."
        )
    for task in [task for task in now.tasks if task in then.tasks]:
        _check_task(task, (before, then.tasks[task]), (after, now.tasks[task]))


def _check_task(task: str, before: tuple[StoredRecord, ImportedTask], after: tuple[StoredRecord, ImportedTask]) -> None:
    (_, then), (_, now) = before, after
    other = next((name for name in ASKED if getattr(then, name) != getattr(now, name)), None)
    if other is None:
        return
    if other in ("num_fewshot", "version"):
        here, there = (str(getattr(own, other)) or "missing" for own in (now, then))
        values = f"{here} in the run and {there} in the baseline"
        raise CheckError(
            f"{task}: the {ASKED[other]} differ ({values}): {now.file} and {then.file} cannot be compared."
        )
    sizes = [len(own.documents.keys_of(task)) for own, _ in (after, before)]
    limit = f" ({sizes[0]} documents and {sizes[1]}: was one run with --limit?)" if sizes[0] != sizes[1] else ""
    raise CheckError(
        f"{_first_other(task, before, after)}: the {ASKED[other]} of {task} differ from those in {then.file}{limit}; "
        "only results of the same questions can be compared."
    )


def _first_other(task: str, before: tuple[StoredRecord, ImportedTask], after: tuple[StoredRecord, ImportedTask]) -> str:
    """The file and line of the first document that only one side has."""
    for (one, about), (other, _) in ((after, before), (before, after)):
        keys, known = one.documents.keys_of(task), other.documents.keys_of(task)
        for line in np.flatnonzero(~np.isin(keys.contents, known.contents)):
            return f"{about.file}, line {1 + line}"
    return after[1].file
