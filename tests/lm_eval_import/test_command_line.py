"""Output that lm-eval's command line writes now, by this release and the one before, with HFLM on the mini models."""

import subprocess
import sys
from pathlib import Path

import pytest

from .lm_eval_cli import write_output
from .test_import import (
    assert_damages_are_those_of_our_own_records,
    assert_scores_are_those_of_lm_eval,
    assert_the_verdict_is_that_of_our_own_records,
    imported_by_the_command,
)

RELEASE_BEFORE = "0.4.12"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("release", [None, RELEASE_BEFORE], ids=["this release", "the one before"])
def test_output_of_today(release: str | None, tmp_path: Path) -> None:
    packages = None
    if release:
        packages = tmp_path / "packages"
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages]
        subprocess.run([*install, f"lm-eval=={release}"], check=True, timeout=200)
    documents = 100
    output = write_output(tmp_path, packages=packages, documents=documents)
    imported = imported_by_the_command(output, tmp_path / "records")
    assert f'"lm_eval_version": "{release or ""}' in next(output.rglob("results_*.json")).read_text()
    assert_scores_are_those_of_lm_eval(imported, output)
    assert_damages_are_those_of_our_own_records(imported, tmp_path, documents)
    assert_the_verdict_is_that_of_our_own_records(output, tmp_path, documents)
