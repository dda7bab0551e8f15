"""`qbench fetch`: download a recipe's checkpoints and datasets into the Hugging Face cache."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from qbench.checkpoint.fingerprint import NotFetchedError, checkpoint_files, tokenizer_files
from qbench.checkpoint.layout import HUB_FILES
from qbench.errors import why_not_downloaded
from qbench.numbers import byte_size, counted
from qbench.quantizers.calibration import Calibration
from qbench.recipe.cells import Recipe, analysis_cells, cells, recipe_texts

NOT_DOWNLOADED = (
    "not a local folder (paths are relative to the recipe's folder), and could not be downloaded from the Hub"
)


def fetch(recipe: Recipe, *, to_analyze: bool = False) -> Iterator[tuple[bool, str]]:
    """Fetch the sources one by one. Yields for each whether it is available, and a line with details or the reason.

    to_analyze: only what an analysis needs, without the tasks.
    """
    wanted = analysis_cells(recipe) if to_analyze else cells(recipe)
    for location, revision in {(cell.location, cell.source.revision): None for cell in wanted}:
        yield _fetch_checkpoint(location, revision)
    for tokenizer, revision in {(cell.tokenizer, cell.tokenizer_revision): None for cell in wanted}:
        yield _fetch_tokenizer(tokenizer, revision)
    data = recipe.task_data()
    for name in [] if to_analyze else recipe.task_names():
        yield _fetch_task(name, {name: data[name]} if name in data else {}, recipe)
    for use, text in recipe_texts(recipe, wanted).items():
        yield _fetch_text(text, use)


def _fetch_checkpoint(name: str, revision: str | None) -> tuple[bool, str]:
    local = Path(name).is_dir()
    try:
        files = checkpoint_files(Path(name) if local else _download(name, revision))
    except NotFetchedError as error:  # offline, the Hub's library treats an interrupted download as complete
        return False, f"checkpoint {name}: {error}"
    except (HFValidationError, OSError) as error:
        return False, f"checkpoint {name}: {NOT_DOWNLOADED} ({why_not_downloaded(error)})"
    size = byte_size(sum(file.stat().st_size for file in files))
    return True, f"checkpoint {name}: {size} {'in a local folder' if local else 'in the cache'}"


def _download(name: str, revision: str | None) -> Path:
    wanted: dict[str, Any] = {
        "repo_id": name,
        "revision": revision,
        "allow_patterns": HUB_FILES,
        "ignore_patterns": ["*/*"],
    }
    with suppress(OSError):  # offline, the size is unknown
        files = snapshot_download(**wanted, dry_run=True)
        missing = [file for file in files if file.will_download]
        size = byte_size(sum(file.file_size for file in missing))
        print(f"checkpoint {name}: fetching {len(missing)} of {counted(len(files), 'file')}, {size}", flush=True)
    return Path(snapshot_download(**wanted))


def _fetch_tokenizer(name: str, revision: str | None) -> tuple[bool, str]:
    if Path(name).is_dir():
        try:
            tokenizer_files(Path(name))
        except NotFetchedError as error:
            return False, f"tokenizer {name}: {error}"
        return True, f"tokenizer {name}: in a local folder"
    from qbench.tokenizer import load_tokenizer

    try:
        load_tokenizer(name, revision)
    except Exception as error:  # the Hub and transformers raise a dozen kinds
        return False, f"tokenizer {name}: {NOT_DOWNLOADED} ({why_not_downloaded(error)})"
    return True, f"tokenizer {name}: in the cache"


def _fetch_task(name: str, data: dict[str, Any], recipe: Recipe) -> tuple[bool, str]:
    from qbench.evaluate.tasks import MissingDatasetError, load_tasks

    print(f"task {name}: {'local data' if data else 'its dataset'}", flush=True)
    try:
        folders = [recipe.locate(folder) for folder in recipe.task_folders]
        tasks = load_tasks([name], data, folders, trust_code=recipe.trust_task_code)
    except MissingDatasetError as error:
        return False, f"task {name}: {error}"
    return True, f"task {name}: {counted(sum(len(task.eval_docs) for task in tasks.values()), 'document')}"


def _fetch_text(source: Calibration, use: str) -> tuple[bool, str]:
    from datasets import load_dataset

    if source.is_file:
        return Path(source.source).is_file(), f"{use} {source.source}: a local file"
    print(f"{use} {source.source}: its dataset", flush=True)
    try:
        load_dataset(**source.dataset(), split=source.split)
    except Exception as error:  # offline, not cached, no such dataset: datasets and the Hub raise a dozen kinds
        why = f"not in the cache, and could not be downloaded ({why_not_downloaded(error)})"
        return False, f"{use} {source.source}: {why}; name a local file instead: `{use}: {{source: FILE}}`"
    return True, f"{use} {source.source}: in the cache"
