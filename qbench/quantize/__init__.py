"""Quantizers that prove they quantized: `quantize` gives a model and its audit, or an error."""

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


def __getattr__(name: str) -> object:
    # Plans and tables read labels and audits from here; only who quantizes pays for torch.
    if name == "quantize":
        from qbench.quantize.model import quantize

        return quantize
    if name == "save_quantized":
        from qbench.quantize.saving import save_quantized

        return save_quantized
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
