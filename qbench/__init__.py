"""qbench measures what quantization costs a model, and proves that it was quantized."""

import logging
from importlib import import_module, metadata
from typing import Any

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
