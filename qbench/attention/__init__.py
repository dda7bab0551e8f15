"""Kinds of attention, and how transformers runs them."""
