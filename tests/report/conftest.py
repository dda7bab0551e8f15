"""Results that many tests read; made once, so tests must not write into them."""

from pathlib import Path

import pytest

from qbench.report.delta import ReportData, read_report
from qbench.report.html import page

from .examples import PAPER, write_mini, write_troubled


@pytest.fixture(scope="session")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which everything worked."""
    return write_mini(tmp_path_factory.mktemp("runs") / "mini")


@pytest.fixture(scope="session")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything that can go wrong."""
    return write_troubled(tmp_path_factory.mktemp("runs") / "troubled")


@pytest.fixture(scope="session")
def mini_report(mini: Path) -> ReportData:
    """The same, as a report."""
    return read_report(mini)


@pytest.fixture(scope="session")
def mini_page(mini_report: ReportData) -> str:
    """Its HTML report."""
    return page(mini_report)


@pytest.fixture(scope="session")
def troubled_report(troubled: Path) -> ReportData:
    """The same, as a report."""
    return read_report(troubled)


@pytest.fixture(scope="session")
def paper() -> ReportData:
    """The published numbers."""
    return read_report(PAPER)


@pytest.fixture(scope="session")
def paper_page(paper: ReportData) -> str:
    """Their HTML report."""
    return page(paper)
