"""The regression gate: does a run score what its baseline scored? Imports no torch."""
