"""The Hugging Face hub: whether it can be reached, told in seconds. Its own library tries again for minutes."""

import http.client
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

from qbench.recipe.cells import Recipe, cells

SECONDS = 5  # to wait for an answer
OFFLINE = "HF_HUB_OFFLINE"  # read when the hub's library is imported


def go_offline_if_unreachable(recipe: Recipe) -> None:
    """Where a recipe needs the hub and it does not answer, leave it at what is in the cache, and say so."""
    if os.environ.get(OFFLINE, "0") not in ("", "0") or not needs_hub(recipe):
        return
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=SECONDS):
            return
    except urllib.error.HTTPError:
        return  # an answer all the same
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        print(
            f"qbench: {endpoint} cannot be reached ({reason}): what is not in the cache will be missing. "
            "Run `qbench fetch` where there is network, or set HF_ENDPOINT to a mirror.",
            file=sys.stderr,
        )
        os.environ[OFFLINE] = "1"


def needs_hub(recipe: Recipe) -> bool:
    """Whether a checkpoint, a tokenizer, a task's documents or the calibration text may come from the hub."""
    places = [place for cell in cells(recipe) for place in (cell.location, cell.tokenizer)]
    source = recipe.calibration_source()
    return (
        not all(Path(place).is_dir() for place in places)
        or not recipe.tasks.keys() <= recipe.task_data().keys()
        or (source is not None and not source.is_file)
    )
