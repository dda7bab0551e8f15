"""Which files make up a checkpoint and a tokenizer, and their fingerprints. Imports no torch."""

from collections.abc import Callable, Iterable
from pathlib import Path

from qbench.checkpoint.layout import CONFIG, GENERATION_CONFIG, INDEX, WEIGHTS, CheckpointError, weight_files
from qbench.errors import InputError
from qbench.identity import file_hash, json_hash

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)


class NotFetchedError(InputError):
    """A checkpoint or dataset that is not on this machine yet."""


class IncompleteError(NotFetchedError):
    """A local folder without all files of a checkpoint or tokenizer: nothing can be fetched into it."""


class NotCachedError(NotFetchedError):
    """A name that is neither a local folder nor a Hub id in the Hugging Face cache."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} is neither a local folder nor in the Hugging Face cache. "
            "If it is a Hub id, `qbench fetch` downloads it."
        )
        self.name = name


def checkpoint_fingerprint(location: str, revision: str | None = None) -> str:
    """The content of a local checkpoint, or the commit of one on the Hub that is in the cache."""
    if not Path(location).is_dir():
        folder = hub_folder(location, revision, [CONFIG])
        checkpoint_files(folder)
        return f"{location}@{folder.name}"
    return _local_hash(checkpoint_files, location)


def tokenizer_fingerprint(location: str, revision: str | None = None) -> str:
    """The content of a tokenizer's files, or the commit of one on the Hub that is in the cache."""
    if not Path(location).is_dir():
        return f"{location}@{hub_folder(location, revision, TOKENIZER_FILES).name}"
    return _local_hash(tokenizer_files, location)


def _local_hash(files: Callable[[Path], list[Path]], location: str) -> str:
    try:
        return _files_hash(files(Path(location)))
    except NotFetchedError as error:
        raise IncompleteError(str(error)) from None


def commit_of(fingerprint: str) -> str | None:
    """The commit in the fingerprint of something on the Hub; None for a local folder's."""
    return fingerprint.partition("@")[2] or None


def checkpoint_files(folder: Path) -> list[Path]:
    """The files that make up a checkpoint, its config and weights; an error if one is missing."""
    if not (folder / CONFIG).is_file():
        raise NotFetchedError(f"{folder} has no {CONFIG}; it must contain a checkpoint in safetensors format.")
    try:
        weights = weight_files(folder)
    except CheckpointError as error:
        raise NotFetchedError(str(error)) from None
    if weights != [folder / WEIGHTS]:
        weights.insert(0, folder / INDEX)
    generation = folder / GENERATION_CONFIG  # affects tasks that generate text
    return [folder / CONFIG, *weights, *([generation] if generation.is_file() else [])]


def tokenizer_files(folder: Path) -> list[Path]:
    """The files that make up a tokenizer; an error if there are none."""
    found = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not found:
        raise NotFetchedError(f"{folder} has no tokenizer; it must contain one of {', '.join(TOKENIZER_FILES)}.")
    return found


def local_file(location: str, name: str, revision: str | None = None) -> Path | None:
    """A file of a folder or of a repository in the Hugging Face cache; None if it is not on this machine."""
    from huggingface_hub.errors import HFValidationError

    local = Path(location, name)
    if local.is_file():
        return local
    try:
        return hub_folder(location, revision, [name]) / name
    except (NotCachedError, HFValidationError):
        return None


def hub_folder(repo: str, revision: str | None, files: Iterable[str]) -> Path:
    """The folder in the Hugging Face cache, named after the commit, of a repository that has one of the files."""
    from huggingface_hub import try_to_load_from_cache

    for file in files:
        found = try_to_load_from_cache(repo, file, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    raise NotCachedError(repo)


def _files_hash(files: Iterable[Path]) -> str:
    return json_hash([[file.name, file_hash(file)] for file in files])
