"""The regression gate: does a run score what its baseline scored? Imports no torch."""

from importlib import import_module
from typing import Any

# Resolved on first use: the command line imports this package for every command.
_EXPORTS = {
    "GateSettings": "qbench.check.settings",
    "Report": "qbench.check.gate",
    "check": "qbench.check.gate",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'qbench.check' has no attribute {name!r}; it exports {', '.join(_EXPORTS)}.")


def __dir__() -> list[str]:
    return sorted(_EXPORTS)
