"""Recipes as files: YAML with the line of every field, and `extends`, which puts one recipe on top of another."""

import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qbench.errors import InputError

Field = tuple[Hashable, ...]  # the way to a field: ("checkpoints", "340M", "softpick")


class RecipeError(InputError):
    """A recipe that cannot be used as it is, in a sentence with the file, the line and the field."""


@dataclass(frozen=True)
class RecipeFile:
    """The content of a recipe and of what it extends; paths in it are relative to the folder of `file`."""

    file: Path
    content: dict[str, Any]
    lines: dict[Field, tuple[Path, int]]  # where each field is written

    def error(self, field: Field, message: str) -> RecipeError:
        """An error at a field, or at the nearest one around it that is written somewhere."""
        around = next((field[:n] for n in range(len(field), 0, -1) if field[:n] in self.lines), None)
        where = f"{self.file}" if around is None else "{}, line {}".format(*self.lines[around])
        name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in field).removeprefix(".")
        return RecipeError(f"{where}: {name}{': ' if name else ''}{message}")


def read_recipe_file(file: Path, _within: tuple[Path, ...] = ()) -> RecipeFile:
    """Read a recipe and what it extends: its own fields win, fields with fields of their own are merged."""
    own = _read_one(file)
    if "extends" not in own.content:
        return own
    base = own.content.pop("extends")
    if not isinstance(base, str):
        raise own.error(("extends",), f"is {base!r}; it must be the path of another recipe.")
    target, within = file.parent / base, (*_within, file.resolve())
    if target.resolve() in within:
        raise own.error(("extends",), f"{base} extends this recipe in turn; a recipe must not extend itself.")
    if not target.is_file():
        raise own.error(("extends",), f"there is no recipe {target}.")
    below = read_recipe_file(target, within)
    moved = move_paths(below.content, below.file.parent, file.parent)
    return RecipeFile(file, _merge(moved, own.content), below.lines | own.lines)


def move_paths(content: Any, source: Path, target: Path) -> Any:
    """The content with every text that names something in the source folder relative to the target folder."""
    if source.resolve() == target.resolve():
        return content
    if isinstance(content, Mapping):
        return {key: move_paths(value, source, target) for key, value in content.items()}
    if isinstance(content, list):
        return [move_paths(value, source, target) for value in content]
    if isinstance(content, str) and is_path(content) and (source / content).exists():
        return os.path.relpath((source / content).resolve(), target.resolve())
    return content


def is_path(text: str) -> bool:
    """Whether a text can name a file or a folder; a bare word is a name, whatever lies beside the recipe."""
    return "/" in text or Path(text).suffix != ""


def _merge(below: dict[Any, Any], above: dict[Any, Any]) -> dict[Any, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _read_one(file: Path) -> RecipeFile:
    try:
        text = file.read_text(encoding="utf-8")
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        lines: dict[Field, tuple[Path, int]] = {}
        _find_lines(node, (), file, lines)
        content = loader.construct_document(node) if node else None
    except OSError as error:
        raise RecipeError(f"{file}: the recipe cannot be read ({error.strerror}).") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{file}: not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise RecipeError(f"{file}: a recipe must have fields such as 'checkpoints:' and 'tasks:'.")
    return RecipeFile(file, content, lines)


def _find_lines(node: yaml.Node | None, field: Field, file: Path, lines: dict[Field, tuple[Path, int]]) -> None:
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            name = yaml.safe_load(key.value) if key.tag != "tag:yaml.org,2002:str" else key.value
            line = key.start_mark.line + 1
            if name in seen:
                raise RecipeError(f"{file}, line {line}: {name} is given twice; YAML would take the last one only.")
            seen.add(name)
            lines[(*field, name)] = (file, line)
            _find_lines(value, (*field, name), file, lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*field, index)] = (file, value.start_mark.line + 1)
            _find_lines(value, (*field, index), file, lines)
