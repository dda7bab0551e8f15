"""What types cannot check in a recipe: files that must exist, options that must fit, labels that must differ."""

import os
import re
import unicodedata
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from qbench.attention.kinds import attentions
from qbench.checkpoint.layout import CONFIG, config_sizes, read_json
from qbench.errors import did_you_mean, some
from qbench.evaluate.facts import is_task_path
from qbench.files import file_name, shown_path
from qbench.gate.settings import EVERY
from qbench.quantizers.axes import parts_of
from qbench.quantizers.calibration import NAMED, Calibration
from qbench.quantizers.declaration import QuantizeError
from qbench.quantizers.options import NotOffered, Quantization, offers, quantization, quantizer
from qbench.recipe.schema import PASSKEY_FIELDS, QuantizationEntry, Recipe
from qbench.recipe.variants import NAME, NAME_RULE, misspelled_kind, required_attention
from qbench.recipe.yaml import Field as Where
from qbench.recipe.yaml import RecipeFile
from qbench.records.metrics import PASSKEY

HUB_ID = re.compile(r"(?!.*(--|\.\.|\.git$))\w([\w.-]*\w)?/\w([\w.-]{,94}\w)?")  # as huggingface_hub accepts them


def check_recipe(recipe: Recipe, file: RecipeFile) -> None:
    """Raise an error with the file, the line and the field of the first problem."""
    for check in (
        _check_families,
        _check_variants,
        _check_checkpoints,
        _check_reference,
        _check_replicates,
        _check_quantizations,
        _check_windows,
        _check_calibration,
        _check_analysis,
        _check_tasks,
    ):
        check(recipe, file)


def _check_families(recipe: Recipe, file: RecipeFile) -> None:
    """Families are parts of folder names, and some file systems ignore case (macOS, Windows) or Unicode form (ZFS)."""
    seen: dict[str, str] = {}
    for family in recipe.checkpoints:
        first = seen.setdefault(_folded(file_name(family)), family)
        if first != family:
            raise file.error(
                ("checkpoints", family),
                f"{family!r} and {first!r} would share folders on a file system that ignores case or Unicode form; "
                "rename one.",
            )


def _check_variants(recipe: Recipe, file: RecipeFile) -> None:
    """Check variant names: a kind's or not close to one, safe in file names and CSV, and unique with the family's."""
    seen: dict[str, tuple[str, str]] = {}
    for family, variants in recipe.checkpoints.items():
        for variant in variants:
            where: Where = ("checkpoints", family, variant)
            _check_variant(where, variant, file)
            first = seen.setdefault(_folded(file_name(f"{family}-{variant}")), (family, variant))
            if first != (family, variant):
                raise file.error(
                    where,
                    f"{variant!r} of {family} and {first[1]!r} of {first[0]} would share folders, as names of folders "
                    "are family-variant-quantization and some file systems ignore case; rename one.",
                )


def _check_variant(where: Where, variant: str, file: RecipeFile) -> None:
    if required_attention(variant):
        return
    if kind := misspelled_kind(variant):
        raise file.error(
            where,
            f"{variant!r} is too close to the name of an attention kind. A variant named as one must be trained with "
            f"it; these are {', '.join(attentions())}. Other variants need names that are less like one, such as "
            f"{kind}-v2. Did you mean {kind}?",
        )
    if not NAME.fullmatch(variant):
        raise file.error(where, f"{variant!r} cannot be a variant's name; it must consist of {NAME_RULE}.")


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def _check_checkpoints(recipe: Recipe, file: RecipeFile) -> None:
    for family, variants in recipe.checkpoints.items():
        where: Where = ("checkpoints", family)
        if not variants:
            kinds = ", ".join(attentions())
            raise file.error(where, f"is empty; it must have at least one of {kinds}, or a variant with another name.")
        for variant, source in variants.items():
            _check_source((*where, variant), source.path, recipe)
            if source.tokenizer:
                _check_source((*where, variant, "tokenizer"), source.tokenizer, recipe)
            for step, own in source.steps.items():
                _check_source((*where, variant, "steps", step), own.path, recipe)
    if recipe.tokenizer:
        _check_source(("tokenizer",), recipe.tokenizer, recipe)


def _check_reference(recipe: Recipe, file: RecipeFile) -> None:
    """Every family with several models must have the reference; so must any family, if the recipe names it."""
    reference, families = recipe.reference, recipe.checkpoints
    named = "reference" in recipe.model_fields_set
    if named and not any(reference in variants for variants in families.values()):
        have = "; ".join(f"{family} has {', '.join(variants)}" for family, variants in families.items())
        near = did_you_mean(reference, dict.fromkeys(chain.from_iterable(families.values())))
        raise file.error(("reference",), f"is {reference!r}, but no family has such a variant: {have}.{near}")
    for family, variants in families.items():
        if len(variants) > 1 and reference not in variants:
            raise file.error(
                ("reference",) if named else ("checkpoints", family),
                f"the reference is {reference}, but {family} has only {', '.join(variants)}. Add the "
                f"checkpoint, or name another reference: `reference: {next(iter(variants))}`.",
            )


def _check_replicates(recipe: Recipe, file: RecipeFile) -> None:
    """Replicates are two or more families with the same variants."""
    named, families = recipe.replicates, recipe.checkpoints
    if not named:
        return
    where: Where = ("replicates",)
    for family in named:
        if family not in families:
            raise file.error(
                where,
                f"{family!r} is not a family; the families are {', '.join(families)}.{did_you_mean(family, families)}",
            )
    if len(set(named)) < max(2, len(named)):
        raise file.error(where, "must name two or more families, each once.")
    for family in named:
        if len(families[family]) == 1:
            raise file.error(
                where, f"{family} has only one model; replicates must be pairs, such as softmax and softpick."
            )
        if families[family].keys() != families[named[0]].keys():
            raise file.error(
                where,
                f"{family} has {', '.join(families[family])}, and {named[0]} has {', '.join(families[named[0]])}; "
                "replicates must have the same variants.",
            )


def _check_source(where: Where, text: str, recipe: Recipe) -> None:
    """If there is no such folder, it must be a valid Hub id."""
    path = recipe.file.parent / text
    if path.is_dir():
        return
    near, place = did_you_mean_folder(text, recipe), shown_path(path)
    if Path(text).is_dir():  # it would load from this working folder, but not from another one
        raise recipe._file.error(where, f"{place} is not a folder; paths are relative to the recipe's folder.{near}")
    if HUB_ID.fullmatch(text) and not path.exists():
        return
    raise recipe._file.error(where, f"{place} is not a folder, and {text!r} is not a Hub id (owner/name).{near}")


def did_you_mean_folder(text: str, recipe: Recipe) -> str:
    """' Did you mean ../mini/softmax?' if the path leads to a folder from somewhere other than the recipe's folder."""
    here = recipe.file.parent.resolve()
    places = [] if (here / text).is_dir() else [Path.cwd(), here.parent, *sorted(here.glob("*/"))]
    meant = next((place / text for place in places if (place / text).is_dir()), None)
    if not meant:
        return ""
    near = here.parent == meant or here.parent in meant.resolve().parents
    return f" Did you mean {os.path.relpath(meant, here) if near else meant.resolve()}?"


def _check_quantizations(recipe: Recipe, file: RecipeFile) -> None:
    labels = _check_entries(("quantizations",), recipe.quantizations, file)
    for label in recipe.gate.max_damage:
        if label not in (*labels, EVERY):
            hint = did_you_mean(label, labels)
            raise file.error(
                ("gate", "max_damage", label), f"no such quantization; the recipe has {', '.join(labels)}.{hint}"
            )


def _check_entries(field: Where, entries: Sequence[QuantizationEntry], file: RecipeFile) -> list[str]:
    """Raise an error if a quantization is not possible or listed twice; gives their labels."""
    labels: list[str] = []
    for index, shared in enumerate(entries):
        where: Where = (*field, index)
        for entry in shared.by_method:
            _check_widths(where, entry, file, may_lack_some=bool(shared.methods))
            for bits in entry.widths:
                found = _check_options(where, entry, bits, file)
                if found.label in labels:
                    raise file.error(where, f"{found.label} is listed twice; list it once.")
                labels.append(found.label)
    return labels


def _check_widths(where: Where, entry: QuantizationEntry, file: RecipeFile, may_lack_some: bool) -> None:
    try:
        widths = quantizer(entry.method).widths
    except QuantizeError as error:
        field = "methods" if may_lack_some else "method"
        raise file.error((*where, field), str(error).removeprefix("method ")) from None
    if not entry.widths:
        raise file.error(where, f"bits are missing; give {entry.method} a list such as `bits: [4, 8]`.")
    lacking = [bits for bits in entry.widths if bits not in widths]
    if lacking and not (may_lack_some and len(lacking) < len(entry.widths)):
        raise file.error(
            (*where, "bits"),
            f"{entry.method} does not offer {some([str(bits) for bits in lacking])} bits; it offers "
            f"{', '.join(map(str, sorted(widths)))}.",
        )
    if strangers := [bits for bits in entry.options_by_bits if bits not in entry.widths]:
        raise file.error(
            (*where, "options_by_bits", strangers[0]),
            f"must be one of the entry's bits, which are {', '.join(map(str, entry.widths))}.",
        )


def _check_options(where: Where, entry: QuantizationEntry, bits: int, file: RecipeFile) -> Quantization | NotOffered:
    """The quantization of one width; each option is tried alone, so an error names its line."""
    if not offers(entry.method, bits):
        return NotOffered(entry.method, bits, parts_of(entry.axes))
    by_bits = {("options_by_bits", bits, name): value for name, value in entry.options_by_bits.get(bits, {}).items()}
    shared = {("options", name): value for name, value in entry.options.items()}
    axes = {(name,): value for name, value in entry.axes.items()}
    for option, value in (by_bits | shared | axes).items():
        try:
            quantization(entry.method, bits, **{str(option[-1]): value})
        except QuantizeError as error:
            hint = " Give it under options_by_bits." if option in shared and "not at" in str(error) else ""
            message = str(error).removeprefix(f"{entry.method}'s {option[-1]} ").removeprefix(f"{option[-1]}: ")
            raise file.error((*where, *option), f"{message}{hint}") from None
    return quantization(entry.method, bits, **entry.arguments(bits))


def _check_windows(recipe: Recipe, file: RecipeFile) -> None:
    """Keys in groups of tokens that no text can fill would never be quantized."""
    for index, entry in enumerate(recipe.quantizations):
        for part in parts_of(entry.axes):
            window = part.options.window
            if window and recipe.max_length and window >= recipe.max_length:
                raise file.error(
                    ("quantizations", index, part.axis),
                    f"{part.options.why_exact} leaves the first {window} tokens of a text exact, but texts are cut to "
                    f"{recipe.max_length:,} tokens (max_length), so no key would be quantized; choose a smaller value.",
                )


def _check_calibration(recipe: Recipe, file: RecipeFile) -> None:
    source = recipe.calibration
    seeds: Where = ("calibration", "seeds")
    calibrated = any(map(_is_calibrated, recipe.quantizations))
    if source.seeds > 1 and not calibrated and file.lines[seeds][0] == file.file:  # an extended recipe may have others
        raise file.error(
            seeds,
            f"is {source.seeds}, but no method in the recipe uses calibration; remove it, or add a method such as "
            "gptq.",
        )
    _check_file(("calibration", "source"), source, recipe)


def _check_file(where: Where, source: Calibration, recipe: Recipe) -> None:
    if source.is_file and not Path(recipe.locate(source.source)).is_file():
        raise recipe._file.error(
            where,
            f"{shown_path(recipe.file.parent / source.source)} is not a file; source must be a file, "
            f"{', '.join(NAMED)}, or a dataset on the Hub with its revision.",
        )


def _is_calibrated(entry: QuantizationEntry) -> bool:
    """Whether a method or an axis of an entry needs calibration text."""
    methods = [quantizer(own.method).calibrated for own in entry.by_method]
    return any(methods + [part.options.calibrated for part in parts_of(entry.axes)])


def _check_analysis(recipe: Recipe, file: RecipeFile) -> None:
    settings = recipe.analysis
    if settings.source:
        _check_file(("analysis", "source"), settings.texts(recipe.calibration), recipe)
    _check_entries(("analysis", "sensitivity"), settings.sensitivity, file)
    for index, entry in enumerate(settings.sensitivity):
        where: Where = ("analysis", "sensitivity", index)
        if "none" in (entry.method, *entry.methods):
            raise file.error(where, "none quantizes nothing; name a method and its bits, such as hqq-3.")
    _check_heads(recipe, file)


def _check_heads(recipe: Recipe, file: RecipeFile) -> None:
    """The requested heads must exist in every model whose config is on this machine."""
    if not recipe.analysis.maps:
        return
    models = ((family, *own) for family, variants in recipe.checkpoints.items() for own in variants.items())
    for family, variant, source in models:
        config = Path(recipe.locate(source.path), CONFIG)
        if not config.is_file():
            continue  # the worker will report it
        sizes = config_sizes(read_json(config), config)
        there = {"layer": sizes.num_hidden_layers, "head": sizes.num_attention_heads}
        for index, place in enumerate(recipe.analysis.maps):
            for name, count in there.items():
                if (number := getattr(place, name)) >= count:
                    raise file.error(
                        ("analysis", "maps", index, name),
                        f"is {number}; {family}-{variant} has {name}s 0 to {count - 1}.",
                    )


def _check_tasks(recipe: Recipe, file: RecipeFile) -> None:
    here = file.file.parent
    for index, folder in enumerate(recipe.task_folders):
        if not (here / folder).is_dir():
            raise file.error(("task_folders", index), f"{shown_path(here / folder)} is not a folder.")
    for name in filter(is_task_path, recipe.tasks):
        if not (here / name).exists():
            raise file.error(
                ("tasks", name), f"{shown_path(here / name)} does not exist; it must be a task file or folder."
            )
        if recipe.tasks[name].model_fields_set:
            raise file.error(
                ("tasks", name),
                "a path cannot have settings; add its folder to task_folders and use the task's name here.",
            )
    for name, task in recipe.tasks.items():
        if name != PASSKEY and (alien := [field for field in PASSKEY_FIELDS if getattr(task, field) is not None]):
            raise file.error(("tasks", name, alien[0]), f"is a setting of the task {PASSKEY} only.")
    for name in recipe.data:
        if name not in recipe.tasks and not any(map(is_task_path, recipe.tasks)):
            raise file.error(("data", name), f"is not one of the tasks.{did_you_mean(name, recipe.tasks)}")
    given: dict[Where, Any] = {("data", name): files for name, files in recipe.data.items()}
    given |= {("tasks", name, "data"): task.data for name, task in recipe.tasks.items() if task.data}
    for where, files in given.items():
        by_split = {(*where, split): f for split, f in files.items()} if isinstance(files, dict) else {where: files}
        for field, path in by_split.items():
            if not (here / path).is_file():
                raise file.error(field, f"{shown_path(here / path)} is not a file.")
