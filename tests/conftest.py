"""What all tests share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with fixtures and data beside the project; it is no part of the repository."""
    folder = Path(__file__).resolve().parents[1].parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the ../shared folder, which is not here")
    return folder
