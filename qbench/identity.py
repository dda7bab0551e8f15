"""What a cell's key is made of: Identity, typed; and the hashes of files, packages and our own code that go into it.

Imports no torch. What takes long to compute (hashing gigabytes, loading tasks through lm-eval) is remembered with the
size and time of the files it was computed from, so a plan takes a second.
"""

import ast
import functools
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, JsonValue, SerializerFunctionWrapHandler, model_serializer

from qbench.errors import InputError
from qbench.files import write_atomically

# What computes numbers in every cell, apart from Python itself; a quantizer adds its library.
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "lm-eval",
    "datasets",
    "accelerate",
    "numpy",
)
PACKAGE = Path(__file__).parent
# Our own code that computes numbers, within qbench; the kernels come first. runner/cell.py decides which model is
# evaluated. Not records/audit.py and records/findings: their rules are applied again whenever a record is read.
COMPUTES = ("attention", "checkpoint", "quantizers", "evaluate", "tokenizer.py", "runner/cell.py")
# The same for an analysis, its maps and sensitivities (CellRef.measured), which are not scores.
ANALYZES = (
    "attention",
    "checkpoint",
    "quantizers",
    "analysis",
    "tokenizer.py",
    "records/analysis.py",
    "records/maps.py",
    "runner/cell.py",
    "runner/analyzing.py",
)
WRITES = ("checkpoint/save.py",)  # never called by a cell


class TaskIdentity(NamedTuple):
    """What decides a task's numbers; a list of two in JSON."""

    fingerprint: str  # of its config, its code and its documents
    num_fewshot: int


class WithoutUnused(BaseModel):
    """A model whose optional fields are left out of the JSON while they are None.

    Adding a field to such a model, with None as its default, does not change what is stored and hashed.
    """

    @model_serializer(mode="wrap")
    def _without_unused(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        return {name: value for name, value in dump(self).items() if value is not None or fields[name].is_required()}


class What(WithoutUnused):
    """What a cell computes, regardless of the code and packages that compute it.

    A new field here needs None as its default, so cells that do not use it keep their keys.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    checkpoint: str  # a hash of its files, or owner/name@commit on the Hub
    tokenizer: str  # the same of the tokenizer
    attention: str
    method: str
    bits: int
    options: dict[str, JsonValue]  # of the method, all of them
    calibration: str | None  # a hash of its settings and its text; None if the method is not calibrated
    tasks: dict[str, TaskIdentity]
    dtype: str
    execution: str
    device: str
    max_length: int | None  # None: what the checkpoint's config says
    seed: int
    batch_tokens: int | None  # None if scores do not depend on what else is in a batch: on a CPU, except with LLM.int8
    parts: dict[str, dict[str, JsonValue]] | None = None  # options of what else is quantized, by the part's label
    analysis: dict[str, JsonValue] | None = None  # what is measured instead of scores: its settings and texts


class Identity(BaseModel):
    """Everything that can change a cell's numbers. A record whose `code` or `packages` alone differ is stale."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    what: What
    code: str  # a hash of our own code that computes
    packages: dict[str, str]  # versions of the packages that compute

    @property
    def key(self) -> str:
        """A hash of everything."""
        return json_hash(self.model_dump())

    @property
    def what_key(self) -> str:
        """A hash of what is computed, regardless of the code and packages that compute it."""
        return json_hash(self.what.model_dump())


def json_hash(value: Any) -> str:
    """SHA-256 of a value as JSON; the order of its fields does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@functools.cache
def package_versions() -> dict[str, str]:
    """The versions of the packages that compute, as installed."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


@functools.cache
def code_hash(*, analyzes: bool = False) -> str:
    """A hash of our own code that computes scores, or analyses, by what it means.

    Comments, docstrings and formatting do not count.
    """
    files = _code_files(ANALYZES if analyzes else COMPUTES)

    def compute() -> str:
        return json_hash([[name, source_hash(file.read_bytes())] for name, file in files.items()])

    # Parsing takes 0.2 s. This file is included because it decides how code is hashed.
    asked = f"code{' of analyses' if analyzes else ''} in {PACKAGE}"
    return str(remembered(asked, [*files.values(), Path(__file__)], compute))


def _code_files(places: tuple[str, ...]) -> dict[str, Path]:
    """The files that compute, by names that do not depend on where they are installed."""
    kernels = _kernels_folder()
    files = {file.relative_to(kernels.parent).as_posix(): file for file in kernels.rglob("*.py")}
    for place in (PACKAGE / name for name in places):
        found = place.rglob("*.py") if place.is_dir() else [place]
        own = [file for file in found if file.relative_to(PACKAGE).as_posix() not in WRITES]
        files |= {file.relative_to(PACKAGE.parent).as_posix(): file for file in own}
    return dict(sorted(files.items()))


def _kernels_folder() -> Path:
    found = find_spec("softpick")
    if found is None or found.origin is None:
        raise InputError(
            "The package softpick cannot be found; a folder of that name in the working directory may hide it. "
            "Run `qbench` instead of `python -m qbench.cli`, or run it from another folder."
        )
    return Path(found.origin).parent


@functools.cache
def package_code_hash(module: str) -> str:
    """A hash of the code of the package (not ours) that a module is in, by what it means."""
    package = module.split(".")[0]
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise InputError(f"The package {package} cannot be found; install it, or put its folder on PYTHONPATH.")
    origin = Path(spec.origin)
    files = sorted(origin.parent.rglob("*.py")) if spec.submodule_search_locations else [origin]
    by_name = {file.relative_to(origin.parent).as_posix(): source_hash(file.read_bytes()) for file in files}
    return json_hash(by_name)[:12]


def source_hash(source: str | bytes) -> str:
    """A hash of Python code without its comments, docstrings and formatting."""
    return hashlib.sha256(repr(_meaning(ast.parse(source))).encode()).hexdigest()


def _meaning(node: Any) -> Any:
    """A syntax tree as nested tuples; without empty fields, since newer versions of Python have more of them."""
    if isinstance(node, ast.AST):
        fields = ((name, getattr(node, name, None)) for name in node._fields)
        return (type(node).__name__, *((name, _meaning(value)) for name, value in fields if value not in (None, [])))
    if isinstance(node, list):
        return [_meaning(item) for item in node if not _is_docstring(item)]
    return node


def _is_docstring(node: Any) -> bool:
    """Whether a statement is only a string, which does nothing."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def file_hash(file: Path) -> str:
    """SHA-256 of a file's content."""

    def compute() -> str:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    return remembered(f"file {file.resolve()}", [file], compute)


def cache_folder() -> Path:
    """Where qbench remembers hashes and token ids: $QBENCH_CACHE, or qbench in the user's cache folder."""
    if given := os.environ.get("QBENCH_CACHE"):
        return Path(given)
    if user := os.environ.get("XDG_CACHE_HOME"):
        return Path(user) / "qbench"
    try:
        return Path.home() / ".cache" / "qbench"
    except RuntimeError:  # no HOME, and a user without a name, as in some containers
        return Path(tempfile.gettempdir()) / f"qbench-{os.getuid()}"


def remembered(
    asked: str, files: Iterable[Path], compute: Callable[[], Any], read: Callable[[Any], Iterable[Path]] = lambda _: ()
) -> Any:
    """compute(), or what it returned when these files had the same sizes and times.

    read: further files, which the value names.
    """
    state = _stamps(files)
    note = cache_folder() / "fingerprints" / f"{hashlib.sha256(asked.encode()).hexdigest()}.json"
    try:
        stored = json.loads(note.read_text())
        if stored["files"] == state + _stamps(read(stored["value"])):
            return stored["value"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # missing or damaged: computed again
    value = compute()
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        state += _stamps(read(value))
        write_atomically(note, json.dumps({"asked": asked, "files": state, "value": value}))
    except OSError:
        pass  # a read-only home costs time, not the run
    return value


def _stamps(files: Iterable[Path]) -> list[list[Any]]:
    there = [(file, file.stat()) for file in files if file.is_file()]
    return [[str(file.resolve()), found.st_size, found.st_mtime_ns, found.st_ino] for file, found in there]
