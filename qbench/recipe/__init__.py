"""Recipes: checkpoints × quantizations × tasks, and how to run them. Imports no torch."""
