"""The regression gate: does a run score what its baseline scored? Imports no torch."""

from qbench.check.settings import GateSettings, Override, Tolerances

__all__ = ["GateSettings", "Override", "Tolerances"]
