"""Imported only by the fork server: the import does the work."""

from qbench.runner.child import preload

preload()
