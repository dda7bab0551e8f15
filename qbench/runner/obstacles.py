"""Why a cell cannot run, as far as files show before anything is loaded. Imports no torch."""

import functools
import os
import re
from pathlib import Path

from qbench.checkpoint import layout
from qbench.checkpoint.layout import CheckpointError
from qbench.quantizers.declaration import LinearOptions
from qbench.quantizers.options import Quantization
from qbench.recipe.cells import Cell


def obstacle(cell: Cell) -> str:
    """Why a cell cannot run: its checkpoint is not what the recipe says, or its options do not fit a layer's shape.

    Empty if nothing is known against it, or if the config is not on this machine.
    """
    file, quantized = cell.config, cell.quantization
    if file is None or not isinstance(quantized, Quantization):
        return ""
    return config_obstacle(file, quantized, cell.required_attention)


def config_obstacle(file: Path, quantized: Quantization, attention: str | None = None) -> str:
    """Why a checkpoint with this config.json cannot be quantized so; empty if it can, as far as the file shows.

    attention: as `load_checkpoint` takes it.
    """
    try:
        shapes = _linear_shapes(file, attention, file.stat().st_mtime_ns if file.exists() else 0)
    except (CheckpointError, OSError) as error:
        return str(error)
    if not isinstance(quantized.options, LinearOptions):
        return ""
    if not quantized.options.include_lm_head:
        shapes = {name: shape for name, shape in shapes.items() if name != "lm_head"}
    return quantized.options.first_misfit(quantized.bits, shapes)


def missing_text(cell: Cell) -> str:
    """That a text of calibration or analysis is not on this machine, and what to do; empty if all are."""
    for use, text in cell.texts.items():
        if not text.is_file and not _is_cached(text.dataset()):
            return (
                f"The {use} text {text.source} is not on this machine: `qbench fetch {cell.recipe.file}` downloads it, "
                f"or name a local file in the recipe: `{use}: {{source: FILE}}`."
            )
    return ""


def _is_cached(dataset: dict[str, str]) -> bool:
    """Whether `datasets` has this commit in its cache, which is datasets/OWNER___NAME/SUBSET/VERSION/COMMIT."""
    from huggingface_hub.constants import HF_HOME

    cache, commit = Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME, "datasets")), dataset["revision"]
    if not re.fullmatch("[0-9a-f]{40}", commit):
        return True  # the commit of a branch or tag is not known here: the worker will report it
    subset = dataset.get("name", "")
    return any(found.parents[1].name.startswith(subset) for found in cache.glob(f"*/*/*/{commit}"))


def doubt(cell: Cell) -> str:
    """Why the scores of a cell that can run may differ from those in training; empty if there is no reason to."""
    file = cell.config
    return layout.config_note(file, cell.required_attention) if file else ""


@functools.lru_cache(maxsize=32)
def _linear_shapes(config: Path, attention: str | None, changed: int) -> dict[str, tuple[int, int]]:
    """The linear layers that are quantized, each shape once: outputs and inputs by name."""
    fields = layout.read_json(config)
    sizes = layout.config_sizes(fields, config)
    found: dict[tuple[int, int], str] = {}
    for name, shape in layout.tensor_shapes(sizes, layout.config_attention(fields, config, attention)).items():
        linear = name.removesuffix(".weight")
        if linear == "lm_head" or (".layers." in name and name.endswith("_proj.weight")):
            found.setdefault((shape[0], shape[1]), linear)
    return {name: shape for shape, name in found.items()}
