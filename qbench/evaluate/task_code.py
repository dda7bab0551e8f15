"""Task files are code: lm-eval imports the modules that `!function` names, and its templates are programs.

Templates run in jinja2's sandbox, always. Functions outside lm-eval's own package run only if the user trusts them.
Importing this module changes lm-eval for the whole process.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import lm_eval.api.task
import lm_eval.tasks
import lm_eval.utils
from jinja2 import BaseLoader, StrictUndefined
from jinja2.sandbox import SandboxedEnvironment
from lm_eval.api.registry import metric_registry
from lm_eval.tasks import _yaml_loader

from qbench.evaluate.local_data import TaskError
from qbench.identity import source_hash

LM_EVAL_TASKS = Path(lm_eval.tasks.__file__).parent.resolve()
# Files by the hashes of their code, and lm-eval's module that has the same functions, which is imported instead: Python
# would run a compiled file (.pyc) next to a known file without reading the known one.
KNOWN = {
    # recipes/mini/tasks/preprocess_wikitext.py
    "011f4feda9b234271ee1c6e9634f806a190f53af575cec07cab654296c7f5555": "lm_eval.tasks.wikitext.preprocess_wikitext",
}
HOW_TO_TRUST = "If you trust it, write `trust_task_code: true` in the recipe, or pass --trust-task-code."

_import_function = _yaml_loader._import_func_in_yml
_get_metric = lm_eval.api.task.get_metric
_trusts: ContextVar[bool] = ContextVar("trusts", default=False)


class TaskCodeError(TaskError):
    """A task would run code that the user has not said to trust."""


@contextmanager
def trusting(trusted: bool) -> Iterator[None]:
    """Within this, tasks' own code runs if it is trusted, and is an error if not."""
    before = _trusts.set(trusted)
    try:
        yield
    finally:
        _trusts.reset(before)


def _import_if_trusted(name: str, folder: Path) -> Any:
    """What `!function` in a task file of this folder stands for. All of lm-eval's ways to a function lead here."""
    module, _, function = name.rpartition(".")
    file = (folder / f"{module.replace('.', '/')}.py").resolve()
    if _trusts.get() or folder.resolve().is_relative_to(LM_EVAL_TASKS):
        return _import_function(name, folder)
    if file.is_file() and (known := _same_module(file)):
        return getattr(import_module(known), function)
    runs = file if file.is_file() else f"Python's {name}"
    raise TaskCodeError(f"a task file in {folder} has `!function {name}`, which would run {runs}. {HOW_TO_TRUST}")


def _same_module(file: Path) -> str | None:
    """lm-eval's module that has the functions of a known file; None if the file is not known. It is parsed, not run."""
    try:
        return KNOWN.get(source_hash(file.read_bytes()))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # what ast.parse says of what is not Python
        return None


def _metric_if_trusted(name: str, hf_evaluate_metric: bool = False) -> Callable[..., Any] | None:
    """A metric by its name; the package evaluate would run a metric's code from a file, or from anyone on the Hub."""
    registered = name in metric_registry and not hf_evaluate_metric
    if not (registered or _trusts.get()) and ("/" in name or name.endswith(".py") or Path(name).exists()):
        raise TaskCodeError(f"a task has the metric {name!r}, which would run code from there. {HOW_TO_TRUST}")
    return _get_metric(name, hf_evaluate_metric)


def _sandbox() -> SandboxedEnvironment:
    """lm-eval's environment for templates, but without access to Python's internals."""
    env = SandboxedEnvironment(loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True)
    env.filters["regex_replace"] = lm_eval.utils.regex_replace
    # lm-eval recompiles a task's template for every document, which takes a hundred times as long as rendering it.
    env.from_string = lru_cache(maxsize=4096)(env.from_string)  # type: ignore[assignment, method-assign]
    return env


lm_eval.utils.env = _sandbox()
_yaml_loader._import_func_in_yml = _import_if_trusted
lm_eval.api.task.get_metric = _metric_if_trusted
