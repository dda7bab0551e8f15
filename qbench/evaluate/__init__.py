"""Evaluation: lm-eval's tasks and metrics around our own forward pass."""
