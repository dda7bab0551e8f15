"""Lengths of the passkey tasks: by default, the paper's lengths that the recipe's models can read. Imports no torch."""

import logging
from contextlib import suppress

from qbench.checkpoint.fingerprint import local_file
from qbench.checkpoint.layout import CheckpointError, config_sizes, read_json
from qbench.evaluate.passkey import NEW_TOKENS
from qbench.recipe.schema import PASSKEY_FIELDS, Recipe
from qbench.recipe.yaml import Field as Where
from qbench.records.metrics import PASSKEY

WHAT_THE_PAPER_DID = (
    "The paper also ran lengths of 4,167 and 4,986 on models trained with 4,096 tokens: its softmax model got 70.5% "
    "and 0% right there."
)

log = logging.getLogger(__name__)


def with_passkey_lengths(recipe: Recipe) -> Recipe:
    """The recipe with the lengths that its passkey tasks will have; an error if a model cannot read one of them.

    All models get the same lengths, since every cell of a recipe is measured on the same tasks.
    """
    settings = recipe.passkey
    if settings is None:
        return recipe
    _check_fields(recipe)
    positions = _positions(recipe)
    if not positions and not recipe.max_length:
        return recipe  # no model is fetched yet, so no cell can run
    name = min(positions, key=lambda name: positions[name], default="")
    most = (recipe.max_length or positions[name]) - NEW_TOKENS
    limit = f"max_length {recipe.max_length:,}" if recipe.max_length else f"the {positions[name]:,} positions of {name}"
    lengths, left_out = _split(settings.lengths, most)
    if left_out:
        _say_left_out(recipe, lengths, left_out, most, limit)
    elif untrained := _split(lengths, positions.get(name, most))[1]:
        beyond = f"lengths of {_listed(untrained)} tokens exceed the {positions[name]:,} positions of {name}"
        log.warning("%s: %s; max_length allows them. %s", PASSKEY, beyond, WHAT_THE_PAPER_DID)
    task = recipe.tasks[PASSKEY].model_copy(update={"lengths": lengths})
    return recipe.model_copy(update={"tasks": {**recipe.tasks, PASSKEY: task}})


def _say_left_out(recipe: Recipe, lengths: tuple[int, ...], left_out: tuple[int, ...], most: int, limit: str) -> None:
    """Raise an error if the recipe asks for lengths that do not fit, or if none fits; otherwise warn."""
    given = recipe.tasks[PASSKEY].lengths
    beyond = f"lengths of {_listed(left_out)} tokens, plus {NEW_TOKENS} for the answer, exceed {limit}."
    allow = f"`max_length: {max(left_out) + NEW_TOKENS}` runs them anyway. {WHAT_THE_PAPER_DID}"
    if lengths and not given:
        log.warning("%s: %s They are left out; %s", PASSKEY, beyond, allow)
        return
    where: Where = ("tasks", PASSKEY, "lengths") if given else ("tasks", PASSKEY)
    fitting = f"At most {most:,} fit: `tasks: {{{PASSKEY}: {{lengths: [{most}]}}}}`."
    raise recipe._file.error(where, f"{beyond} {fitting} {allow}")


def _check_fields(recipe: Recipe) -> None:
    own, error = recipe.tasks[PASSKEY], recipe._file.error
    for field in ("num_fewshot", "limit", "data"):
        if getattr(own, field) is not None:
            instead = "; trials says how many documents each length has." if field == "limit" else "."
            raise error(
                ("tasks", PASSKEY, field),
                f"is not a setting of {PASSKEY}, whose documents are generated; it has {', '.join(PASSKEY_FIELDS)}"
                + instead,
            )
    if PASSKEY in recipe.data:
        raise error(("data", PASSKEY), f"{PASSKEY} does not take data: its documents are generated.")
    if own.lengths and len(set(own.lengths)) < len(own.lengths):
        raise error(("tasks", PASSKEY, "lengths"), "lists a length twice; list each once.")


def _positions(recipe: Recipe) -> dict[str, int]:
    """How many tokens each model that is on this machine was made for."""
    found = {}
    for family, variants in recipe.checkpoints.items():
        for variant, source in variants.items():
            file = local_file(recipe.locate(source.path), "config.json", source.revision)
            with suppress(CheckpointError):  # loading it reports what is wrong with it
                if file:
                    found[f"{family}-{variant}"] = config_sizes(read_json(file), file).max_position_embeddings
    return found


def _split(lengths: tuple[int, ...], most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(n for n in lengths if n <= most), tuple(n for n in lengths if n > most)


def _listed(lengths: tuple[int, ...]) -> str:
    *head, last = (f"{length:,}" for length in lengths)
    return f"{', '.join(head)} and {last}" if head else last
