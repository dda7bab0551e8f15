"""Recipes as files: YAML with the line of every field, and `extends`, which lets one recipe override another."""

import os
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qbench.errors import InputError, closest
from qbench.evaluate.facts import is_task_path
from qbench.files import shown_path
from qbench.limited_yaml import LimitedLoader, TooLargeError, each_node

Field = tuple[Hashable, ...]  # the path to a field: ("checkpoints", "340M", "softpick")
Lines = dict[Field, tuple[Path, int]]  # where each field is written

# Fields that hold paths only, and fields that hold a path or a name.
FILES: tuple[Field, ...] = (
    ("task_folders", "*"),
    ("data", "*"),
    ("data", "*", "*"),
    ("tasks", "*", "data"),
    ("tasks", "*", "data", "*"),
    ("output",),
)
FILES_OR_NAMES: tuple[Field, ...] = (
    ("checkpoints", "*", "*"),
    ("checkpoints", "*", "*", "path"),
    ("checkpoints", "*", "*", "tokenizer"),
    ("tokenizer",),
    ("checkpoints", "*", "*", "steps", "*"),
    ("checkpoints", "*", "*", "steps", "*", "path"),
    ("calibration", "source"),
    ("analysis", "source"),
)
MAX_NAME, MAX_PATH = 200, 4000  # in characters; file systems allow 255 bytes and 4,096
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # surrogates are not text
# A task's path may be an item of a list or a key with settings; is_task_path recognizes it.
TASKS: Field = ("tasks",)


class RecipeError(InputError):
    """A problem with a recipe, as a sentence with the file, the line and the field."""


@dataclass(frozen=True)
class RecipeFile:
    """The content of a recipe and of what it extends; paths in it are relative to the folder of `file`."""

    file: Path
    content: dict[str, Any]
    lines: Lines

    def error(self, field: Field, message: str) -> RecipeError:
        """An error at a field, or at the nearest one around it that has a line."""
        around = next((field[:n] for n in range(len(field), 0, -1) if field[:n] in self.lines), None)
        where = f"{self.file}" if around is None else _place(*self.lines[around])
        joint = " " if message.startswith(("is ", "has ", "must ")) else ": "
        return RecipeError(f"{where}: {field_name(field)}{joint if field else ''}{message}")


def field_name(field: Field) -> str:
    """A field as a person writes it: quantizations[2].options.group_size."""
    plain = [isinstance(part, str) and "/" not in part and "." not in part for part in field]
    return "".join(f".{part}" if p else f"[{part}]" for part, p in zip(field, plain, strict=True)).removeprefix(".")


def read_recipe_file(file: Path, _within: tuple[Path, ...] = ()) -> RecipeFile:
    """Read a recipe and the one that it extends: its fields override the other's, and mappings are merged.

    A null removes what the other recipe has.
    """
    own = _read_one(file)
    if "extends" not in own.content:
        return own
    base = own.content.pop("extends")
    if not isinstance(base, str):
        raise own.error(("extends",), "must be the path of another recipe.")
    target, within = file.parent / base, (*_within, file.resolve())
    if target.resolve() in within:
        raise own.error(("extends",), f"{base} extends this recipe; a recipe must not extend itself.")
    if not target.is_file():
        raise own.error(("extends",), f"{shown_path(target)} is not a file.")
    below = read_recipe_file(target, within)
    return _on_top_of(move_paths(below, file.parent), own)


def move_paths(read: RecipeFile, folder: Path) -> RecipeFile:
    """The recipe with its paths relative to another folder."""
    source = read.file.parent
    if source.resolve() == folder.resolve():
        return read

    def moved(text: str, field: Field) -> str:
        here = _matches(field, FILES)
        here |= _matches(field, FILES_OR_NAMES) and (text.startswith(".") or (source / text).exists())
        here |= field[:-1] == TASKS and is_task_path(text)
        return os.path.relpath(source / text, folder) if here and not Path(text).is_absolute() else text

    def in_lines(field: Field) -> Field:
        is_task = field[:1] == TASKS and len(field) > 1 and isinstance(field[1], str)
        return (*TASKS, moved(str(field[1]), field[:2]), *field[2:]) if is_task else field

    lines = {in_lines(field): place for field, place in read.lines.items()}
    return RecipeFile(read.file, _map_texts(read.content, (), moved), lines)


def _matches(field: Field, patterns: tuple[Field, ...]) -> bool:
    return any(
        len(field) == len(pattern) and all(p in ("*", part) for part, p in zip(field, pattern, strict=True))
        for pattern in patterns
    )


def _map_texts(content: Any, field: Field, change: Callable[[str, Field], str]) -> Any:
    """The content with each string and each task's name changed."""
    if isinstance(content, dict):
        names = {key: change(key, (*field, key)) if field == TASKS and isinstance(key, str) else key for key in content}
        return {names[key]: _map_texts(value, (*field, key), change) for key, value in content.items()}
    if isinstance(content, list):
        return [_map_texts(value, (*field, index), change) for index, value in enumerate(content)]
    return change(content, field) if isinstance(content, str) else content


def _on_top_of(below: RecipeFile, own: RecipeFile) -> RecipeFile:
    kept = {field: place for field, place in below.lines.items() if not _replaced(field, below.content, own.content)}
    return RecipeFile(own.file, _merge(below.content, own.content), kept | own.lines)


def _merge(below: dict[Any, Any], above: dict[Any, Any]) -> dict[Any, Any]:
    merged = dict(below)
    for key, value in above.items():
        if value is None and key in merged:
            del merged[key]
            continue
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _replaced(field: Field, below: Any, above: Any) -> bool:
    """Whether a field of one recipe is replaced by the recipe that extends it."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return True
    return bool(field) and field[0] in above and _replaced(field[1:], below.get(field[0]), above[field[0]])


def _read_one(file: Path) -> RecipeFile:
    lines: Lines = {}
    node, content = _parse(file)
    if not isinstance(content, dict):
        raise RecipeError(f"{file}: a recipe must be a mapping with fields such as 'checkpoints:' and 'tasks:'.")
    _find_lines(node, (), file, lines)
    return RecipeFile(file, content, lines)


def _instead(missing: Path) -> str:
    """Which recipe may be meant: one of a similar name in the same folder or in `recipes`; or how to make one."""
    beside = [*missing.parent.glob("*.yaml"), *Path("recipes").glob("*.yaml")]
    if near := closest(missing.stem, {file.stem for file in beside}):
        return f" Did you mean {next(file for file in beside if file.stem == near)}?"
    return " `qbench init` writes a first recipe."


def _parse(file: Path) -> tuple[yaml.Node | None, Any]:
    try:
        with file.open("rb") as stream:
            loader = LimitedLoader(stream)
        node = loader.get_single_node()
        for own in each_node(node) if node else ():
            _check_names(own, file)
            _check_text(own, file)
        return node, loader.construct_document(node) if node else None
    except FileNotFoundError:
        raise RecipeError(f"The recipe {file} does not exist.{_instead(file)}") from None
    except OSError as error:
        raise RecipeError(f"{file}: the recipe cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{file}: the recipe is not UTF-8 text (byte {error.start}).") from None
    except RecipeError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = _place(file, mark.line + 1) if mark else str(file)
        what = "the recipe cannot be read" if isinstance(error, TooLargeError) else "not YAML"
        raise RecipeError(f"{where}: {what}: {error.problem or error.context}.") from None
    except KeyError as error:  # `!!bool x`
        raise RecipeError(f"{file}: not YAML: {error} does not fit its tag (!!).") from None
    # ValueError: a date that does not exist; TypeError: other tags on the wrong values.
    except (yaml.YAMLError, ValueError, TypeError, AttributeError) as error:
        raise RecipeError(f"{file}: not YAML: {' '.join(str(error).split())}.") from None


def _check_names(node: yaml.Node, file: Path) -> None:
    """An error if a name (a key of a mapping) has a line break or a tab: it goes into tables, file names and logs."""
    for name, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(name, yaml.ScalarNode) and (wrong := re.search(r"[\t\n\u2028\u2029]", name.value)):
            where = _place(file, name.start_mark.line + 1)
            raise RecipeError(f"{where}: the name {name.value[:60]!r} has the character {wrong[0]!r}; use one line.")


def _check_text(node: yaml.Node, file: Path) -> None:
    if not isinstance(node, yaml.ScalarNode):
        return
    text, where = node.value, _place(file, node.start_mark.line + 1)
    if wrong := UNPRINTABLE.search(text):
        raise RecipeError(f"{where}: {text[:60]!r} has the character {wrong[0]!r}; texts must be printable.")
    if " " not in text and (len(text) > MAX_PATH or max(map(len, text.split("/"))) > MAX_NAME):
        raise RecipeError(
            f"{where}: {text[:40]}… has {len(text):,} characters; names may have {MAX_NAME}, paths {MAX_PATH:,}."
        )


def _find_lines(node: yaml.Node | None, field: Field, file: Path, lines: Lines) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*field, _key(key))
            place = (file, key.start_mark.line + 1)
            if inner in lines:
                raise RecipeError(
                    f"{_place(*place)}: {field_name(inner)}: already given on line {lines[inner][1]}; "
                    "YAML would silently use the last one."
                )
            lines[inner] = place
            _find_lines(value, inner, file, lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*field, index)] = (file, value.start_mark.line + 1)
            _find_lines(value, (*field, index), file, lines)


def _key(node: yaml.Node) -> Hashable:
    return node.value if node.tag == "tag:yaml.org,2002:str" else yaml.safe_load(node.value)


def _place(file: Path, line: int) -> str:
    return f"{file}, line {line}"
