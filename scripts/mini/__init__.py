"""The mini benchmark: an invented world, text and test items about it, and twin models trained on the text."""
