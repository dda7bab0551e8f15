"""Checks within seconds whether the Hugging Face Hub is reachable; its library would keep retrying for minutes."""

import http.client
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

from qbench.recipe.cells import Recipe, analysis_cells, cells, recipe_texts

TIMEOUT = 5  # seconds to wait for an answer
OFFLINE = "HF_HUB_OFFLINE"  # read when the Hub's library is imported
OFFLINE_VARIABLES = (OFFLINE, "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE", "TRANSFORMERS_OFFLINE")


def go_offline_if_unreachable(recipe: Recipe, *, to_analyze: bool = False) -> None:
    """If a recipe needs the Hub and it does not answer, print that and use only the cache."""
    if needs_hub(recipe, to_analyze=to_analyze):
        use_cache_if_unreachable()


def use_cache_if_unreachable() -> None:
    """If the Hub does not answer, print that and use only the cache."""
    if os.environ.get(OFFLINE, "0") not in ("", "0"):
        return
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=TIMEOUT):
            return
    except urllib.error.HTTPError:
        return  # an HTTP error is an answer too
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        print(
            f"qbench: {endpoint} cannot be reached ({reason}); only what is in the cache is available. "
            "Run `qbench fetch` on a machine with network access, or set HF_ENDPOINT to a mirror.",
            file=sys.stderr,
        )
        os.environ[OFFLINE] = "1"


def needs_hub(recipe: Recipe, *, to_analyze: bool = False) -> bool:
    """Whether a checkpoint, a tokenizer, a task's documents or a text may come from the Hub."""
    wanted = analysis_cells(recipe) if to_analyze else cells(recipe)
    places = [place for cell in wanted for place in (cell.location, cell.tokenizer)]
    return (
        not all(Path(place).is_dir() for place in places)
        or not all(text.is_file for text in recipe_texts(recipe, wanted).values())
        or not (to_analyze or set(recipe.task_names()) <= recipe.task_data().keys())
    )
