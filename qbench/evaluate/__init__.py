"""Evaluation: lm-eval's tasks and metrics around a forward pass of our own."""

from importlib import import_module
from typing import Any

# Resolved on first use: reports read samples, and must not wait for lm-eval and torch.
_EXPORTS = {
    "Evaluation": "qbench.evaluate.evaluation",
    "Metric": "qbench.evaluate.evaluation",
    "evaluate": "qbench.evaluate.evaluation",
    "load_tasks": "qbench.evaluate.tasks",
    "task_fingerprint": "qbench.evaluate.tasks",
    "TokenCache": "qbench.evaluate.tokens",
    "read_samples": "qbench.evaluate.samples",
    "write_samples": "qbench.evaluate.samples",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'qbench.evaluate' has no attribute {name!r}; it exports {', '.join(_EXPORTS)}.")


def __dir__() -> list[str]:
    return sorted(_EXPORTS)
