"""What people call, line by line: commands, options, recipe fields, methods, Python names, exit codes and more.

`python tests/surface.py` adds what is new to surface.txt. It never removes a line: REMOVED in test_surface.py says why
one is gone. Signatures are read from the source, because importing torch takes seconds.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel

import qbench
from qbench.attention import kinds
from qbench.cli import _parser
from qbench.commands import common
from qbench.quantizers import calibration, options
from qbench.quantizers.axes import AXES
from qbench.recipe.schema import QuantizationEntry, Recipe
from qbench.records.lm_eval_import.cells import NamedCell

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("surface.txt")
PACKAGES = {"qbench": ROOT, "softpick": ROOT / "kernels"}
EXIT_CODES = ("DONE", "FAILED", "WRONG", "CRASHED", "INTERRUPTED")
# What examples in docs import besides the exports; the parameters of CheckpointScorer are lm-eval's --model_args.
DOCUMENTED = """qbench.attention.kinds.Attention qbench.evaluate.evaluation.evaluate qbench.evaluate.tasks.load_tasks
qbench.lm_eval.CheckpointScorer qbench.quantizers.declaration.LinearOptions qbench.quantizers.declaration.Quantizer
qbench.quantizers.packed.PackedLinear qbench.tokenizer.load_tokenizer softpick.reference.visible_keys"""


@cache
def surface() -> tuple[str, ...]:
    """All lines, sorted."""
    found = {f"exit code {getattr(common, name)} {name.lower()}" for name in EXIT_CODES}
    found |= {f"attention {name}" for name in kinds.ATTENTIONS}
    found |= {f"calibration source {name}" for name in calibration.NAMED}
    found |= {f"entry point group {group}" for group in (kinds.ENTRY_POINTS, options.ENTRY_POINTS)}
    for method, own in options.quantizers().items():
        for bits, width in own.widths.items() if type(own).__module__.startswith("qbench.") else ():
            found |= {f"method {method}-{bits}", *model_fields(width, f"method {method}-{bits} option ")}
    found |= {*model_fields(Recipe, "recipe "), *model_fields(NamedCell, "qbench import --cell ")}
    found |= {*commands(_parser(), "qbench"), *environment_variables(), *make_and_action()}
    imports = (node for node in _source("softpick").body if isinstance(node, ast.ImportFrom))
    exported = [f"qbench.{name}" for name in qbench.__all__]
    exported += [f"softpick.{alias.name}" for node in imports for alias in node.names]
    for path in (*exported, *DOCUMENTED.split()):
        module, _, name = path.rpartition(".")
        found |= {f"python {path}", *signature(module, name, f"python {path}")}
    return tuple(sorted(found))


def commands(parser: argparse.ArgumentParser, name: str) -> Iterator[str]:
    """A command's arguments and options with their choices, then its subcommands. All of them have --help."""
    yield name
    arguments = [action for action in parser._actions if not action.option_strings]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner, own in action.choices.items():
                yield from commands(own, f"{name} {inner}")
        elif action.dest != "help":
            repeated = " repeated" if isinstance(action, argparse._AppendAction) else ""
            default = f" default {action.default}" if action.default not in (None, []) else ""
            required = " required" if action.required else ""
            takes = f" VALUE{action.nargs or ''}{repeated}{required}{default}" if action.nargs != 0 else ""
            for option in action.option_strings or [f"argument {arguments.index(action) + 1}"]:
                yield f"{name} {option}{takes}"
                yield from (f"{name} {option} choice {choice}" for choice in action.choices or ())


def model_fields(model: type[BaseModel], prefix: str, values: Any = None, above: tuple[Any, ...] = ()) -> Iterator[str]:
    """A pydantic model's fields, dotted (* is a name that people choose, [] is an entry of a list), with their defaults
    and choices. values: the model as it is by default; above: the models that it is a part of."""
    for name, field in model.model_fields.items():
        if model is QuantizationEntry and name == "axes":  # written under their own names
            yield from (line for axis in AXES.values() for line in model_fields(axis.options, f"{prefix}{axis.name}."))
            continue
        follows = field.default_factory_takes_validated_data  # from other fields
        default = getattr(values, name) if values else field.get_default(call_default_factory=not follows)
        is_model = isinstance(default, BaseModel)
        required = field.is_required() and not values
        shown = "from other fields" if follows else repr(default)
        yield f"{prefix}{name}" + (" required" if required else "" if is_model else f" = {shown}")
        for path, inner in _inside(field.annotation, f"{prefix}{name}"):
            if not isinstance(inner, type):
                yield f"{path} choice {inner}"
            elif inner not in (*above, model):
                yield from model_fields(inner, f"{path}.", default if is_model else None, (*above, model))


def _inside(annotation: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The models and choices in an annotation."""
    if get_origin(annotation) is Literal or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        yield from ((path, part) for part in get_args(annotation) or (annotation,))
    else:
        path += {dict: ".*", tuple: "[]"}.get(get_origin(annotation), "")
        yield from (found for part in get_args(annotation) for found in _inside(part, path))


@cache
def _source(module: str) -> ast.Module:
    path = PACKAGES[module.partition(".")[0]] / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8"))


def _definition(module: str, name: str) -> tuple[str, Any]:
    """The module and the statement that define a name, through imports; None if that is not ours."""
    for node in ast.walk(_source(module)):
        if isinstance(node, ast.ImportFrom) and name in (alias.name for alias in node.names):
            ours = node.module and node.module.partition(".")[0] in PACKAGES
            return _definition(str(node.module), name) if ours else (module, None)
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return module, node
    return module, None


def signature(module: str, name: str, shown: str) -> Iterator[str]:
    """The parameters of a function or a class, and the members of what a function returns."""
    module, node = _definition(module, name)
    assert node, f"{shown} is not defined."
    inits = (item for item in getattr(node, "body", ()) if getattr(item, "name", "") == "__init__")
    for function in [node] if isinstance(node, ast.FunctionDef) else inits:
        yield from _parameters(module, function, shown)
    for part in ast.walk(getattr(node, "returns", None) or ast.Constant(None)):
        if isinstance(part, ast.Name):
            yield from _members(module, part.id, f"{shown}() returns ")


def _members(module: str, name: str, shown: str) -> Iterator[str]:
    module, node = _definition(module, name)
    for base in getattr(node, "bases", ()):
        yield from _members(module, ast.unparse(base), shown)
    for item in node.body if isinstance(node, ast.ClassDef) else ():
        member = ast.unparse(item.target) if isinstance(item, ast.AnnAssign) else getattr(item, "name", "_")
        if not member.startswith("_"):
            yield f"{shown}.{member}"
            yield from _parameters(module, item, f"{shown}.{member}") if isinstance(item, ast.FunctionDef) else ()


def _parameters(module: str, function: ast.FunctionDef, shown: str) -> Iterator[str]:
    """One line per parameter: its place, and its default."""
    own = function.args
    defaults = [*[None] * (len(own.args) - len(own.defaults)), *own.defaults, *own.kw_defaults]
    places = [*map(str, range(len(own.args))), *["keyword"] * len(own.kwonlyargs)]
    for place, argument, default in zip(places, [*own.args, *own.kwonlyargs], defaults, strict=True):
        constant = _definition(module, default.id)[1] if isinstance(default, ast.Name) else None
        value = constant.value if isinstance(constant, ast.Assign) else default
        if argument.arg not in ("self", "cls"):
            yield f"{shown}({place}: {argument.arg}" + (f" = {ast.unparse(value)})" if value else ")")
    yield from (f"{shown}(any: {rest.arg})" for rest in (own.vararg, own.kwarg) if rest)


def environment_variables() -> Iterator[str]:
    """The variables that the code reads by name, except those that pass between its own processes."""
    for file in (file for name, root in PACKAGES.items() for file in (root / name).rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        names = dict(re.findall(r'^([A-Z_]+) = "(\w+)"', text, re.M))
        for key in re.findall(r'os\.(?:getenv\(|environ(?:\.get\(|\.setdefault\(|\[))("\w+"|[A-Z_]+)(?!\] =)', text):
            name = names.get(key, key).strip('"')
            if name != key and not (name.startswith("QBENCH_") and f"os.environ[{key}] =" in text):
                yield f"environment {name}"


def make_and_action() -> Iterator[str]:
    """The Makefile's targets and variables, and the inputs of the GitHub Action."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    yield from (f"make {target}" for target in re.findall(r"^([a-z-]+):.*##", text, re.M))
    fixed = re.findall(r"^([A-Z_]+) :?=", text, re.M)
    yield from (f"make variable {name}" for name in re.findall(r"\$\(([A-Z]+)\)", text) if name not in fixed)
    for name, own in yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["inputs"].items():
        yield f"action input {name}{' required' if own.get('required') else ''}"


if __name__ == "__main__":
    known = LIST.read_text(encoding="utf-8").splitlines() if LIST.exists() else []
    LIST.write_text("\n".join(sorted({*known, *surface()})) + "\n", encoding="utf-8")
