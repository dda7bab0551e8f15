"""What a plan needs to know about tasks: fingerprints and sizes. Imports torch and lm-eval only to compute them."""

import glob
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.checkpoint.fingerprint import NotFetchedError
from qbench.errors import InputError
from qbench.identity import TaskIdentity, code_hash, json_hash, package_versions, remembered

if TYPE_CHECKING:
    from lm_eval.api.task import Task

SAMPLE = 4000  # characters of a task's text
KL_TOKENS = 8000  # per task that KL is measured on, or all if there are fewer
PAGES = "loglikelihood_rolling"  # lm-eval's type of tasks that score whole pages
MAX_FILES = 50_000  # of a folder with task files or data; lm-eval's has 17,000


@dataclass(frozen=True)
class TaskSummary:
    """One task's identity and size."""

    fingerprint: str
    num_fewshot: int
    documents: int
    requests: int
    read: int  # characters that the model reads; a context that several continuations share is read once
    scored: int  # characters that are scored
    attended: int  # the sum, over the characters that are read, of the number before each
    pages: bool  # whether whole pages are scored, so that KL is measured
    sample: str  # some of its text, to estimate the length of a token
    files: tuple[str, ...]  # local files that the task's file names as its data

    @property
    def identity(self) -> TaskIdentity:
        """What decides the task's numbers."""
        return TaskIdentity(self.fingerprint, self.num_fewshot)


def is_task_path(name: str) -> bool:
    """Whether a task is named by its file or folder; a bare word is a name, even if there is a folder called that."""
    return "/" in name or name.endswith(".yaml")


def task_facts(
    names: Sequence[str],
    *,
    data: Mapping[str, Any],
    folders: Sequence[str],
    num_fewshot: Mapping[str, int] | int | None,
    limits: Callable[[Iterable[str]], Mapping[str, int | None]],
    seed: int,
    trust_code: bool,
) -> dict[str, TaskSummary]:
    """The facts of each task; NotFetchedError if a dataset is not on this machine.

    limits: how many documents of each task, by the names of the tasks that were found.
    """
    settings = [list(names), data, list(folders), num_fewshot, limits(names), seed, trust_code]
    asked = f"tasks {json_hash([settings, package_versions(), code_hash(), os.getcwd()])}"
    given = [file for files in data.values() for file in (files.values() if isinstance(files, Mapping) else [files])]
    local = [*map(Path, given), *_task_files([*folders, *filter(is_task_path, names)])]

    def compute() -> dict[str, dict[str, Any]]:
        from qbench.evaluate.tasks import MissingDatasetError, load_tasks

        try:
            tasks = load_tasks(names, data, folders, num_fewshot, trust_code)
        except MissingDatasetError as error:
            raise NotFetchedError(str(error)) from None
        chosen = limits(tasks)
        return {name: asdict(_facts(task, chosen[name], seed, name in data)) for name, task in tasks.items()}

    def read(facts: dict[str, dict[str, Any]]) -> list[Path]:
        return [Path(file) for own in facts.values() for file in own["files"]]

    found = remembered(asked, [*local, *_hub_datasets()], compute, read)
    return {name: TaskSummary(**own | {"files": tuple(own["files"])}) for name, own in found.items()}


def _facts(task: "Task", limit: int | None, seed: int, has_given_data: bool) -> TaskSummary:
    from qbench.evaluate.requests import build_documents
    from qbench.evaluate.tasks import task_fingerprint

    documents = build_documents(task, limit, seed)
    requests = [request.args for document in documents for request in document.requests]
    texts = [text for arguments in requests for text in arguments if isinstance(text, str)]
    return TaskSummary(
        fingerprint=task_fingerprint(task, limit),
        num_fewshot=task.config.num_fewshot,
        documents=len(documents),
        requests=len(requests),
        **characters(requests),
        pages=task.OUTPUT_TYPE == PAGES,
        sample="\n".join(itertools.islice(texts, SAMPLE))[:SAMPLE],
        files=() if has_given_data else _own_data(task.config.dataset_path, task.config.dataset_kwargs or {}),
    )


def characters(requests: Iterable[tuple[Any, ...]]) -> dict[str, int]:
    """How many characters a model reads, scores and attends to, given that the scorer runs each context once.

    A request is (context, continuation), (text,), all of which is scored, or (context, settings) to generate from.
    """
    contexts: dict[str, list[int]] = {}  # the lengths of what follows each
    scored = 0
    for first, *rest in requests:
        generates = bool(rest) and not isinstance(rest[0], str)
        context, length = (first, len(rest[0])) if rest and not generates else ("", len(first))
        contexts.setdefault(context, []).append(length)
        scored += 0 if generates else length
    lengths = {context: (len(context), following) for context, following in contexts.items()}.values()
    return {
        "read": sum(before + sum(following) for before, following in lengths),
        "scored": scored,
        "attended": sum(
            before**2 // 2 + sum(n * (before + n // 2) for n in following) for before, following in lengths
        ),
    }


def _own_data(dataset: str | None, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The local files that a task's file names as its data, in any form that datasets.load_dataset accepts."""
    named = arguments.get("data_files") or []
    by_split = [named] if isinstance(named, str) else named.values() if isinstance(named, Mapping) else named
    patterns = [file for files in by_split for file in ([files] if isinstance(files, str) else files)]
    within = arguments.get("data_dir") or ""
    folders = [Path(folder) for folder in (within, dataset) if folder and os.path.isdir(folder)]
    found = {file for pattern in patterns for file in glob.glob(os.path.join(within, pattern), recursive=True)}
    found |= {str(file) for folder in folders for file in files_below(folder) if file.is_file()}
    return tuple(sorted(found))


def _task_files(names: Iterable[str]) -> list[Path]:
    """The files in folders among the names, and next to files among them: task files and their code."""
    places = {Path(name) if Path(name).is_dir() else Path(name).parent for name in names}
    return sorted({file for folder in places for file in files_below(folder) if file.suffix in (".yaml", ".py")})


def files_below(folder: Path) -> list[Path]:
    """The files in a folder and in its folders; an error if there are too many, as in /."""
    found: list[Path] = []
    for place, _, names in os.walk(folder):
        found += [Path(place, name) for name in names]
        if len(found) > MAX_FILES:
            raise InputError(
                f"{folder} has more than {MAX_FILES:,} files; put task files and data in a smaller folder."
            )
    return found


def _hub_datasets() -> list[Path]:
    """The files that record which commits of datasets are in the Hugging Face cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return sorted(Path(HF_HUB_CACHE).glob("datasets--*/refs/*"))
