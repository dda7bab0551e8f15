"""What tests of renewing a baseline share."""

from pathlib import Path

import pytest

from .accepting import run


@pytest.fixture
def accepted_baseline(tmp_path: Path) -> Path:
    """A baseline to renew."""
    return run(tmp_path / "results" / "mini")
