"""Imported by the fork server, and by nothing else: importing it is the work."""

from qbench.runner.child import preload

preload()
