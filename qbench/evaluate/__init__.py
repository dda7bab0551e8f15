"""Evaluation: lm-eval's tasks and metrics around a forward pass of our own."""
