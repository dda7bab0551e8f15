"""A baseline to renew."""

from pathlib import Path

import pytest

from .accepting import run


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    return run(tmp_path / "results" / "mini")
