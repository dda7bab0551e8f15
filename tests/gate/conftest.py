"""Fixtures for the tests of `qbench accept`."""

from pathlib import Path

import pytest

from .accepting import run


@pytest.fixture
def accepted_baseline(tmp_path: Path) -> Path:
    """A baseline to replace."""
    return run(tmp_path / "results" / "mini")
