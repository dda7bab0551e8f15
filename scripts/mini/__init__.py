"""The mini benchmark: an invented world, text and test items about it, and twin models trained on the text."""

import qbench  # noqa: F401 (must come before transformers, which is noisy without it)
