"""`qbench fetch`: a recipe's checkpoints and datasets into the Hugging Face cache, for nodes without network."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from qbench.quantize.calibration import Calibration
from qbench.recipe import Recipe, cells


def fetch(recipe: Recipe) -> Iterator[tuple[bool, str]]:
    """Fetch one source after another; a line for each: whether it is there now, and what it is or why it is not."""
    for location, revision in {(cell.location, cell.source.revision): None for cell in cells(recipe)}:
        yield _fetch_checkpoint(location, revision)
    for tokenizer in {cell.tokenizer: None for cell in cells(recipe) if cell.tokenizer != cell.location}:
        yield _fetch_tokenizer(tokenizer)
    data = recipe.task_data()
    for name, task in zip(recipe.tasks, recipe.task_names(), strict=True):
        yield _fetch_task(task, {name: data[name]} if name in data else {}, recipe)
    if source := recipe.calibration_source():
        yield _fetch_calibration(source)


def _fetch_checkpoint(name: str, revision: str | None) -> tuple[bool, str]:
    if Path(name).is_dir():
        return True, f"checkpoint {name}: a local folder"
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    from qbench.checkpoint import HUB_FILES, INDEX, WEIGHTS

    wanted: dict[str, Any] = {
        "repo_id": name,
        "revision": revision,
        "allow_patterns": HUB_FILES,
        "ignore_patterns": ["*/*"],
    }
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


def _fetch_tokenizer(name: str) -> tuple[bool, str]:
    if Path(name).is_dir():
        return True, f"tokenizer {name}: a local folder"
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(name)
    except Exception as error:  # the hub, its files and transformers raise a dozen kinds
        return False, f"tokenizer {name}: neither a folder nor to be had from the hub ({_reason(error)})"
    return True, f"tokenizer {name}: in the cache"


def _fetch_task(name: str, data: dict[str, Any], recipe: Recipe) -> tuple[bool, str]:
    from qbench.evaluate.tasks import MissingDatasetError, load_tasks

    print(f"task {name}: {'local data' if data else 'its dataset'}", flush=True)
    try:
        tasks = load_tasks([name], data, [recipe.locate(folder) for folder in recipe.task_folders])
    except MissingDatasetError as error:
        return False, f"task {name}: {error}"
    return True, f"task {name}: {sum(len(task.eval_docs) for task in tasks.values()):,} documents"


def _fetch_calibration(source: Calibration) -> tuple[bool, str]:
    from datasets import load_dataset

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
