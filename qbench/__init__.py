"""qbench measures what quantization costs a model, and proves that it was quantized.

    model, audit = qbench.quantize(qbench.load_checkpoint(folder), method="hqq", bits=4)
    done = qbench.run("recipes/mini.yaml", only="*hqq*")
    done.table(kind="damage")

A wrong argument, recipe or file raises a ValueError whose message is a sentence. A quantized model that is not what was
asked for raises AuditError.
"""

import logging
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see of _EXPORTS
    from qbench.analysis.analyze import analyze as analyze
    from qbench.checkpoint.load import load_checkpoint as load_checkpoint
    from qbench.checkpoint.save import save_checkpoint as save_checkpoint
    from qbench.checkpoint.save import save_quantized as save_quantized
    from qbench.evaluate.scorer import Scorer as Scorer
    from qbench.gate.verdict import check as check
    from qbench.quantizers.quantize import quantize as quantize
    from qbench.records.audit import AuditError as AuditError
    from qbench.records.frame import documents as documents
    from qbench.report.render import table as table
    from qbench.runner.matrix import run as run

    __version__: str

DISTRIBUTION = "qbench-harness"  # the name qbench on PyPI belongs to another project

# Resolved on first use: reports and checks import qbench and must not wait for torch.
_EXPORTS = {
    "load_checkpoint": "qbench.checkpoint.load",
    "save_checkpoint": "qbench.checkpoint.save",
    "quantize": "qbench.quantizers.quantize",
    "save_quantized": "qbench.checkpoint.save",
    "Scorer": "qbench.evaluate.scorer",
    "analyze": "qbench.analysis.analyze",
    "run": "qbench.runner.matrix",
    "table": "qbench.report.render",
    "check": "qbench.gate.verdict",
    "documents": "qbench.records.frame",
    "AuditError": "qbench.records.audit",
}

__all__ = list(_EXPORTS)

# transformers imports torchao, which warns about CUDA kernels and enums that nothing here uses; lm-eval logs every
# default that it uses.
for _noisy in ("torchao", "torch.utils._pytree", "lm_eval"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    if name == "__version__":
        try:
            return metadata.version(DISTRIBUTION)
        except metadata.PackageNotFoundError:
            return "of a folder that is not installed"
    raise AttributeError(f"module 'qbench' has no attribute {name!r}; it exports {', '.join(_EXPORTS)}.")


def __dir__() -> list[str]:
    return sorted(_EXPORTS)
