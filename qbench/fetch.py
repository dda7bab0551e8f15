"""`qbench fetch`: a recipe's checkpoints and datasets into the Hugging Face cache, for nodes without network."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from qbench.errors import InputError, did_you_mean


class RecipeError(InputError):
    """A recipe that cannot be read as it is, in a sentence."""


@dataclass(frozen=True)
class Sources:
    """What a recipe reads from elsewhere; paths in a recipe are relative to its folder."""

    checkpoints: list[str]
    tasks: list[str]
    data: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] | None = None


def fetch(recipe: Path) -> Iterator[tuple[bool, str]]:
    """Fetch one source after another; a line for each: whether it is there now, and what it is or why it is not."""
    sources = read_sources(recipe)
    for checkpoint in sources.checkpoints:
        yield _fetch_checkpoint(checkpoint)
    for task in sources.tasks:
        yield _fetch_task(task, sources.data)
    if sources.calibration:
        yield _fetch_calibration(sources.calibration)


def read_sources(recipe: Path) -> Sources:
    """The part of a recipe that fetch needs; the whole of it is checked by the command that runs it."""
    try:
        content = yaml.safe_load(recipe.read_text())
    except OSError as error:
        raise RecipeError(f"{recipe}: the recipe cannot be read ({error.strerror}).") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{recipe}: not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise RecipeError(f"{recipe}: a recipe must have fields such as 'checkpoints:' and 'tasks:'.")
    for name in ("checkpoints", "tasks"):
        if not content.get(name):
            raise RecipeError(f"{recipe}: the field {name!r} is missing or empty." + did_you_mean(name, content))
    data, calibration = content.get("data") or {}, content.get("calibration")
    for name, value in (("data", data), ("calibration", calibration)):
        if value is not None and not isinstance(value, dict):
            raise RecipeError(f"{recipe}: {name} is {value!r}; it must have fields of its own.")
    if calibration and "source" in calibration:
        calibration = calibration | {"source": _located(recipe, calibration["source"])}
    return Sources(
        [_located(recipe, name) for name in _names(recipe, "checkpoints", content["checkpoints"])],
        _task_names(recipe, content["tasks"]),
        {task: _files(recipe, task, files) for task, files in data.items()},
        calibration,
    )


def _names(recipe: Path, name: str, value: Any) -> list[str]:
    """The texts in a list or in nested fields, such as {340M: {softmax: …, softpick: …}}."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict | list) and value:
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        return [text for key, child in inner for text in _names(recipe, f"{name}.{key}", child)]
    raise RecipeError(f"{recipe}: {name} is {value!r}; it must be a text.")


def _task_names(recipe: Path, tasks: Any) -> list[str]:
    names = _names(recipe, "tasks", list(tasks) if isinstance(tasks, dict) else tasks)
    # A bare word is a task's name, whatever lies beside the recipe.
    return [_located(recipe, name) if "/" in name or name.endswith(".yaml") else name for name in names]


def _files(recipe: Path, task: str, files: Any) -> Any:
    if isinstance(files, Mapping):
        return {split: _files(recipe, f"{task}.{split}", file) for split, file in files.items()}
    if not isinstance(files, str):
        raise RecipeError(f"{recipe}: data.{task} is {files!r}; it must be a file, or a file for each split.")
    return str(recipe.parent / files)


def _located(recipe: Path, name: str) -> str:
    """A path beside the recipe where there is one, else the name as it is: a task's, or an id on the hub."""
    path = recipe.parent / name
    return str(path) if path.exists() else name


def _fetch_checkpoint(name: str) -> tuple[bool, str]:
    if Path(name).is_dir():
        return True, f"checkpoint {name}: a local folder"
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    from qbench.checkpoint import HUB_FILES, INDEX, WEIGHTS

    wanted: dict[str, Any] = {"repo_id": name, "allow_patterns": HUB_FILES, "ignore_patterns": ["*/*"]}
    try:
        with suppress(OSError):  # offline there is no telling
            files = snapshot_download(**wanted, dry_run=True)
            missing = [file for file in files if file.will_download]
            size = sum(file.file_size for file in missing) / 1e9
            print(f"checkpoint {name}: {len(missing)} of {len(files)} files to fetch, {size:.2f} GB", flush=True)
        folder = Path(snapshot_download(**wanted))
    except (HFValidationError, OSError) as error:
        return False, f"checkpoint {name}: neither a folder nor to be had from the hub ({_reason(error)})"
    # Offline, the hub's library is content with whatever an interrupted download left.
    index = folder / INDEX
    shards = json.loads(index.read_text())["weight_map"].values() if index.is_file() else [WEIGHTS]
    if absent := sorted({shard for shard in ("config.json", *shards) if not (folder / shard).is_file()}):
        return False, f"checkpoint {name}: {absent[0]} is not among its files"
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e9
    return True, f"checkpoint {name}: {size:.2f} GB in the cache"


def _fetch_task(name: str, data: Mapping[str, Any]) -> tuple[bool, str]:
    from qbench.evaluate.tasks import MissingDatasetError, load_tasks

    own = {name: data[name]} if name in data else {}
    print(f"task {name}: {'local data' if own else 'its dataset'}", flush=True)
    try:
        tasks = load_tasks([name], own)
    except MissingDatasetError as error:
        return False, f"task {name}: {error}"
    return True, f"task {name}: {sum(len(task.eval_docs) for task in tasks.values()):,} documents"


def _fetch_calibration(fields: dict[str, Any]) -> tuple[bool, str]:
    from datasets import load_dataset
    from pydantic import ValidationError

    from qbench.quantize.calibration import Calibration

    try:
        source = Calibration(**fields)
    except ValidationError as error:
        raise RecipeError(f"calibration: {' '.join(str(error).split())}") from None
    if source.is_file:
        return Path(source.source).is_file(), f"calibration {source.source}: a local file"
    print(f"calibration {source.source}: its dataset", flush=True)
    try:
        load_dataset(**source.dataset(), split=source.split)
    except Exception as error:  # offline, not cached, no such dataset: datasets and the hub raise a dozen kinds
        return False, f"calibration {source.source}: not in the cache and not to be had ({_reason(error)})"
    return True, f"calibration {source.source}: in the cache"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
