"""A first recipe in any folder: mini with its two models and its tasks, and a short recipe to start from."""

import shutil
from pathlib import Path

from qbench.recipe.messages import RecipeError

# In the repository, its parts are links to recipes/; a wheel has copies.
STARTER = Path(__file__).with_name("starter")


def write_starter(folder: Path) -> list[Path]:
    """Write the recipes and what they need into a folder; returns the recipes. Replaces nothing."""
    if folder.exists() and not folder.is_dir():
        raise RecipeError(f"{folder} is a file; give a folder: qbench init FOLDER.")
    parts = sorted(STARTER.iterdir())
    if there := [folder / part.name for part in parts if (folder / part.name).exists()]:
        raise RecipeError(f"{there[0]} already exists; choose another folder: qbench init FOLDER.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for part in parts:
            if part.is_dir():
                shutil.copytree(part, folder / part.name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(part, folder / part.name)
    except OSError as error:
        raise RecipeError(f"{folder} cannot be written ({error.strerror or error}).") from None
    return [folder / part.name for part in parts if part.suffix == ".yaml"]
