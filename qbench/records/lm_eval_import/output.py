"""lm-eval's output folders: which files belong to which model, and which of several results of a task counts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qbench.errors import some
from qbench.records.lm_eval_import.fields import LmEvalError
from qbench.records.lm_eval_import.results_file import LmEvalTask, ResultsFile, is_results_file, read_results_file

MAX_FILES = 10_000  # of a folder, in which results are looked for


@dataclass(frozen=True)
class ModelOutput:
    """What lm-eval measured of one model: the newest results of each task."""

    model: str
    folder: Path
    tasks: dict[str, tuple[ResultsFile, LmEvalTask]]
    notes: tuple[str, ...]  # what a reader must know

    @property
    def files(self) -> list[ResultsFile]:
        """The results files that count, the newest first."""
        by_path = {file.path: file for file, _ in self.tasks.values()}
        return sorted(by_path.values(), key=_age, reverse=True)


def holds_lm_eval_output(path: Path) -> bool:
    """Whether lm-eval wrote results here."""
    return any(True for _ in _candidates(path))


def read_outputs(paths: Sequence[Path]) -> list[ModelOutput]:
    """The models in lm-eval's output folders; a path may also be one results file."""
    found: dict[tuple[Path, str], list[ResultsFile]] = {}
    for path in paths:
        files = [file for candidate in _candidates(path) if (file := _read(candidate))]
        if not files:
            what = "contains no results" if path.is_dir() else "is not a results file"
            why = f"{what} of lm-eval (results_<date>.json)" if path.exists() else "does not exist"
            raise LmEvalError(
                f"{path} {why}; give the folder that lm-eval wrote (its --output_path, with --log_samples)."
            )
        for file in files:
            own = found.setdefault((file.path.parent, file.model), [])
            if file.path not in [other.path for other in own]:
                own.append(file)
    return [_newest(model, folder, files) for (folder, model), files in found.items()]


def _candidates(path: Path) -> Iterable[Path]:
    """Files that are results by their names. With --output_path NAME.json they are NAME_<date>.json."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        named = sorted(path.parent.glob(f"{path.stem}_*.json")) if path.suffix == ".json" else []
        return [file for file in named if is_results_file(file)]
    return sorted(file for file in _below(path) if is_results_file(file))


def _below(folder: Path) -> Iterable[Path]:
    for count, file in enumerate(folder.rglob("*.json")):
        if count > MAX_FILES:
            raise LmEvalError(
                f"{folder} has more than {MAX_FILES:,} JSON files; name the folder that lm-eval wrote to."
            )
        yield file


def _read(path: Path) -> ResultsFile | None:
    """A results file; None for other JSON files that have a date in their name."""
    try:
        return read_results_file(path)
    except LmEvalError:
        if path.stem.startswith("results"):
            raise
        return None


def _newest(model: str, folder: Path, files: Sequence[ResultsFile]) -> ModelOutput:
    tasks: dict[str, tuple[ResultsFile, LmEvalTask]] = {}
    again: dict[str, list[ResultsFile]] = {}
    for file in sorted(files, key=_age, reverse=True):
        for task in file.tasks:
            tasks.setdefault(task.name, (file, task))
            again.setdefault(task.name, []).append(file)
    notes = []
    if twice := [name for name, own in again.items() if len(own) > 1]:
        newest = some(list(dict.fromkeys(tasks[name][0].path.name for name in twice)))
        notes.append(f"{folder} has several results of {some(twice)}; the newest are used ({newest}).")
    output = ModelOutput(model, folder, tasks, tuple(notes))
    _check_one_model(output)
    _check_samples(output)
    return output


def _check_one_model(output: ModelOutput) -> None:
    first, *others = output.files
    for other in others:
        if other.model_args != first.model_args:
            raise LmEvalError(
                f"{first.path} and {other.path} are results of {output.model} with different model_args "
                f"({first.model_args} and {other.model_args}), so they may be two models: put them in two folders."
            )


def _check_samples(output: ModelOutput) -> None:
    for name, (file, task) in output.tasks.items():
        if not task.is_group and not file.samples(name).is_file():
            raise LmEvalError(
                f"{file.path} has scores of {name}, but there is no {file.samples(name).name} next to it: per-document "
                "results are needed. Run lm-eval with --log_samples."
            )


def _age(file: ResultsFile) -> tuple[str, str]:
    return file.date, file.path.name
