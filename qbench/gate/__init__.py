"""The regression gate: did a run get worse than its baseline? Imports no torch."""
