"""Quantizers that prove they quantized: `quantize` gives a model and its audit, or an error."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from qbench.quantize.audit import Audit, AuditError, LayerAudit
from qbench.quantize.options import (
    NotOffered,
    NotOfferedError,
    Quantization,
    QuantizeError,
    offered,
    quantization,
)

__all__ = [
    "Audit",
    "AuditError",
    "LayerAudit",
    "NotOffered",
    "NotOfferedError",
    "Quantization",
    "QuantizeError",
    "offered",
    "quantization",
    "quantize",
    "save_quantized",
]


if TYPE_CHECKING:
    from qbench.quantize.model import quantize
    from qbench.quantize.saving import save_quantized

# Resolved on first use: plans and tables read labels and audits from here; only who quantizes pays for torch.
_LAZY = {"quantize": "qbench.quantize.model", "save_quantized": "qbench.quantize.saving"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _CallableModule(ModuleType):
    """`from qbench import quantize` gives this package once anything has imported it: let that be called as well."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.quantize(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
