"""What a cell's key is made of: content hashes of checkpoints, tasks and our own code, and package versions.

Imports no torch. What takes long to compute (hashing gigabytes, loading tasks through lm-eval) is remembered with the
size and time of the files it was computed from, so that a plan takes a second.
"""

import functools
import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from qbench.errors import InputError
from qbench.store import write_atomically

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
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")
WEIGHT_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json")


class NotFetchedError(InputError):
    """A checkpoint or a dataset that is not on this machine yet."""


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
    """A hash of our own code that computes: the kernels, attention, loading, quantizers and evaluation."""
    import importlib.util

    softpick = importlib.util.find_spec("softpick")
    assert softpick is not None
    assert softpick.origin is not None
    kernels = Path(softpick.origin).parent
    files = [*kernels.rglob("*.py"), PACKAGE / "attention.py", PACKAGE / "checkpoint.py"]
    files += [*(PACKAGE / "quantize").rglob("*.py"), *(PACKAGE / "evaluate").rglob("*.py")]
    digest = hashlib.sha256()
    for name, file in sorted((_module_path(file, kernels), file) for file in files):
        digest.update(f"{name}\n".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _module_path(file: Path, kernels: Path) -> str:
    return str(file.relative_to(kernels.parent if file.is_relative_to(kernels) else PACKAGE.parent))


def checkpoint_fingerprint(location: str, revision: str | None = None) -> str:
    """The content of a local checkpoint, or the commit of one on the hub that is in the cache."""
    if Path(location).is_dir():
        return _files_hash(Path(location), WEIGHT_FILES)
    return f"{location}@{hub_commit(location, revision)}"


def tokenizer_fingerprint(location: str, revision: str | None = None) -> str:
    """The content of a tokenizer's files, or the commit of one on the hub that is in the cache."""
    if Path(location).is_dir():
        return _files_hash(Path(location), TOKENIZER_FILES)
    return f"{location}@{hub_commit(location, revision, TOKENIZER_FILES)}"


def hub_commit(repo: str, revision: str | None = None, files: Sequence[str] = ("config.json",)) -> str:
    """The commit of a repository in the Hugging Face cache; an error when it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for file in files:
        try:
            found = try_to_load_from_cache(repo, file, revision=revision)
        except HFValidationError:
            raise NotFetchedError(f"{repo} is no folder here, and no name that the hub could have.") from None
        if isinstance(found, str):
            return Path(found).relative_to(Path(found).parents[len(Path(file).parts)]).parts[0]
    raise NotFetchedError(f"{repo} is no folder here and not in the Hugging Face cache; `qbench fetch` gets it.")


def _files_hash(folder: Path, patterns: Iterable[str]) -> str:
    files = sorted(file for pattern in patterns for file in folder.glob(pattern))
    if not files:
        raise NotFetchedError(f"{folder} has none of {', '.join(patterns)}.")
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
    limit: Mapping[str, int | None],
    seed: int,
) -> dict[str, dict[str, Any]]:
    """Of each task: its fingerprint, and how many documents, requests and characters it has."""
    settings = [list(names), data, list(folders), num_fewshot, limit, seed]
    asked = f"tasks {_hash([settings, package_versions()['lm-eval'], os.getcwd()])}"
    given = [file for files in data.values() for file in (files.values() if isinstance(files, Mapping) else [files])]
    local = [*map(Path, given), *_task_files([*folders, *names])]

    def compute() -> dict[str, dict[str, Any]]:
        from qbench.evaluate.documents import build_documents
        from qbench.evaluate.tasks import MissingDatasetError, load_tasks, task_fingerprint

        try:
            tasks = load_tasks(names, data, folders, num_fewshot)
        except MissingDatasetError as error:
            raise NotFetchedError(str(error)) from None
        facts = {}
        for name, task in tasks.items():
            own = limit.get(name)
            requests = [request for document in build_documents(task, own, seed) for request in document.requests]
            facts[name] = {
                "fingerprint": task_fingerprint(task, own),
                "version": str(task.VERSION),
                "num_fewshot": task.config.num_fewshot,
                "limit": own,
                "documents": len({request.doc_id for request in requests}),
                "requests": len(requests),
                "characters": sum(len(text) for request in requests for text in request.args if isinstance(text, str)),
            }
        return facts

    return remembered(asked, [*local, *_hub_datasets()], compute)


def _task_files(names: Sequence[str]) -> list[Path]:
    """What lies in the task folders, and beside the task files, among the names."""
    places = [Path(name) if Path(name).is_dir() else Path(name).parent for name in names if Path(name).exists()]
    return sorted({file for folder in places for file in folder.rglob("*") if "__pycache__" not in file.parts})


def _hub_datasets() -> list[Path]:
    """The files that say which commits of datasets are in the Hugging Face cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return sorted(Path(HF_HUB_CACHE).glob("datasets--*/refs/*"))


def cache_folder() -> Path:
    """Where qbench remembers hashes and token ids: $QBENCH_CACHE, or qbench in the user's cache folder."""
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("QBENCH_CACHE") or Path(user) / "qbench")


def remembered(asked: str, files: Iterable[Path], compute: Callable[[], Any]) -> Any:
    """compute(), or what it gave when these files had the same sizes and times."""
    state = [[str(file.resolve()), *_stamp(file)] for file in files if file.is_file()]
    note = cache_folder() / "fingerprints" / f"{hashlib.sha256(asked.encode()).hexdigest()}.json"
    try:
        stored = json.loads(note.read_text())
        if stored["files"] == state:
            return stored["value"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or damaged: computed again
    value = compute()
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(note, json.dumps({"asked": asked, "files": state, "value": value}))
    except OSError:
        pass  # a read-only home costs time, not the run
    return value


def _stamp(file: Path) -> list[int]:
    found = file.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
