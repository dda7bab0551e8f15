"""What a cell's key is made of: content hashes of checkpoints, tasks and our own code, and package versions.

Imports no torch. What takes long to compute (hashing gigabytes, loading tasks through lm-eval) is remembered with the
size and time of the files it was computed from, so that a plan takes a second.
"""

import functools
import glob
import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from qbench.errors import InputError
from qbench.files import write_atomically
from qbench.recipe.yaml import is_task_path

# What computes numbers, apart from Python itself.
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "lm-eval",
    "datasets",
    "accelerate",
    "bitsandbytes",
    "hqq",
    "gptqmodel",
    "numpy",
)
PACKAGE = Path(__file__).parent
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
GENERATION = "generation_config.json"  # decides what generating tasks give
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


class NotFetchedError(InputError):
    """A checkpoint or a dataset that is not on this machine yet."""


class NotCachedError(NotFetchedError):
    """A name that is no folder and, taken as one on the hub, not in the Hugging Face cache."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is no folder here and not in the Hugging Face cache; `qbench fetch` gets it.")
        self.name = name


@functools.cache
def package_versions() -> dict[str, str]:
    """The versions of the packages that compute, as installed."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


@functools.cache
def code_hash() -> str:
    """A hash of our own code that computes: the kernels, attention, loading, quantizers, evaluation and the worker."""
    import importlib.util

    softpick = importlib.util.find_spec("softpick")
    assert softpick is not None
    assert softpick.origin is not None
    kernels = Path(softpick.origin).parent
    packages = ("attention", "checkpoint", "quantizers", "evaluate")
    files = [*kernels.rglob("*.py"), *(file for name in packages for file in (PACKAGE / name).rglob("*.py"))]
    files.append(PACKAGE / "runner" / "cell.py")  # it decides which model is evaluated
    digest = hashlib.sha256()
    for name, file in sorted((_module_path(file, kernels), file) for file in files):
        digest.update(f"{name}\n".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _module_path(file: Path, kernels: Path) -> str:
    return str(file.relative_to(kernels.parent if file.is_relative_to(kernels) else PACKAGE.parent))


def checkpoint_fingerprint(location: str, revision: str | None = None) -> str:
    """The content of a local checkpoint, or the commit of one on the hub that is in the cache."""
    if not Path(location).is_dir():
        folder = hub_folder(location, revision, [CONFIG])
        checkpoint_files(folder)
        return f"{location}@{folder.name}"
    return _files_hash(checkpoint_files(Path(location)))


def tokenizer_fingerprint(location: str, revision: str | None = None) -> str:
    """The content of a tokenizer's files, or the commit of one on the hub that is in the cache."""
    if not Path(location).is_dir():
        return f"{location}@{hub_folder(location, revision, TOKENIZER_FILES).name}"
    return _files_hash(tokenizer_files(Path(location)))


def checkpoint_files(folder: Path) -> list[Path]:
    """The files that make a checkpoint: its config and its weights; an error when one is not there."""
    index = folder / INDEX
    names = [CONFIG, WEIGHTS]
    if index.is_file() and not (folder / WEIGHTS).is_file():
        try:
            names = [CONFIG, INDEX, *sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise NotFetchedError(f"{index} is no index of weights: it must be JSON with a weight_map.") from None
    wanted = [folder / name for name in names]
    if absent := [file for file in wanted if not file.is_file()]:
        raise NotFetchedError(f"{absent[0].name} is not in {folder}, which must hold a checkpoint in safetensors.")
    return wanted + [file for file in [folder / GENERATION] if file.is_file()]


def tokenizer_files(folder: Path) -> list[Path]:
    """The files that make a tokenizer; an error when there is none."""
    found = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not found:
        raise NotFetchedError(f"{folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)}.")
    return found


def hub_folder(repo: str, revision: str | None, files: Iterable[str]) -> Path:
    """The folder of a repository in the Hugging Face cache, named by its commit, that has one of the files."""
    from huggingface_hub import try_to_load_from_cache

    for file in files:
        found = try_to_load_from_cache(repo, file, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    raise NotCachedError(repo)


def _files_hash(files: Iterable[Path]) -> str:
    return _hash([[file.name, file_hash(file)] for file in files])


def file_hash(file: Path) -> str:
    """SHA-256 of a file's content."""

    def compute() -> str:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    return remembered(f"file {file.resolve()}", [file], compute)


def task_facts(
    names: Sequence[str],
    *,
    data: Mapping[str, Any],
    folders: Sequence[str],
    num_fewshot: Mapping[str, int] | int | None,
    limits: Callable[[Iterable[str]], Mapping[str, int | None]],
    seed: int,
) -> dict[str, dict[str, Any]]:
    """Of each task: its fingerprint, and how many documents, requests and characters it has.

    limits: how many documents of each task, by the names of the tasks that were found.
    """
    settings = [list(names), data, list(folders), num_fewshot, limits(names), seed]
    asked = f"tasks {_hash([settings, package_versions(), code_hash(), os.getcwd()])}"
    given = [file for files in data.values() for file in (files.values() if isinstance(files, Mapping) else [files])]
    local = [*map(Path, given), *_task_files([*folders, *filter(is_task_path, names)])]

    def compute() -> dict[str, dict[str, Any]]:
        from qbench.evaluate.requests import build_documents
        from qbench.evaluate.tasks import MissingDatasetError, load_tasks, task_fingerprint

        try:
            tasks = load_tasks(names, data, folders, num_fewshot)
        except MissingDatasetError as error:
            raise NotFetchedError(str(error)) from None
        facts, chosen = {}, limits(tasks)
        for name, task in tasks.items():
            own = chosen[name]
            requests = [request for document in build_documents(task, own, seed) for request in document.requests]
            facts[name] = {
                "fingerprint": task_fingerprint(task, own),
                "version": str(task.VERSION),
                "num_fewshot": task.config.num_fewshot,
                "limit": own,
                "documents": len({request.doc_id for request in requests}),
                "requests": len(requests),
                "characters": sum(len(text) for request in requests for text in request.args if isinstance(text, str)),
                "files": [] if name in data else _own_data(task.config.dataset_path, task.config.dataset_kwargs or {}),
            }
        return facts

    def read(facts: dict[str, dict[str, Any]]) -> list[Path]:
        return [Path(file) for own in facts.values() for file in own["files"]]

    return remembered(asked, [*local, *_hub_datasets()], compute, read)


def _own_data(dataset: str | None, arguments: Mapping[str, Any]) -> list[str]:
    """The local files that a task's own file names as its data, in the ways of datasets.load_dataset."""
    named = arguments.get("data_files") or []
    by_split = [named] if isinstance(named, str) else named.values() if isinstance(named, Mapping) else named
    patterns = [file for files in by_split for file in ([files] if isinstance(files, str) else files)]
    within = arguments.get("data_dir") or ""
    folders = [folder for folder in (within, dataset) if folder and Path(folder).is_dir()]
    found = {file for pattern in patterns for file in glob.glob(os.path.join(within, pattern), recursive=True)}
    found |= {str(file) for folder in folders for file in Path(folder).rglob("*") if file.is_file()}
    return sorted(found)


def _task_files(names: Iterable[str]) -> list[Path]:
    """What lies in the folders among the names, and beside the files among them: task files and their code."""
    places = {Path(name) if Path(name).is_dir() else Path(name).parent for name in names}
    return sorted({file for folder in places for file in folder.rglob("*") if file.suffix in (".yaml", ".py")})


def _hub_datasets() -> list[Path]:
    """The files that say which commits of datasets are in the Hugging Face cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return sorted(Path(HF_HUB_CACHE).glob("datasets--*/refs/*"))


def cache_folder() -> Path:
    """Where qbench remembers hashes and token ids: $QBENCH_CACHE, or qbench in the user's cache folder."""
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("QBENCH_CACHE") or Path(user) / "qbench")


def remembered(
    asked: str, files: Iterable[Path], compute: Callable[[], Any], read: Callable[[Any], Iterable[Path]] = lambda _: ()
) -> Any:
    """compute(), or what it gave when these files had the same sizes and times.

    read: further files, which only the value tells.
    """
    state = _stamps(files)
    note = cache_folder() / "fingerprints" / f"{hashlib.sha256(asked.encode()).hexdigest()}.json"
    try:
        stored = json.loads(note.read_text())
        if stored["files"] == state + _stamps(read(stored["value"])):
            return stored["value"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or damaged: computed again
    value = compute()
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        state += _stamps(read(value))
        write_atomically(note, json.dumps({"asked": asked, "files": state, "value": value}))
    except OSError:
        pass  # a read-only home costs time, not the run
    return value


def _stamps(files: Iterable[Path]) -> list[list[Any]]:
    there = [(file, file.stat()) for file in files if file.is_file()]
    return [[str(file.resolve()), found.st_size, found.st_mtime_ns, found.st_ino] for file, found in there]


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
