"""Damaged files are read offline, each test with separate folders."""

from pathlib import Path

import datasets
import pytest


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # datasets reads the working folder if a task does not name files
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    for name in ("huggingface_hub.constants.HF_HUB_OFFLINE", "datasets.config.HF_HUB_OFFLINE"):
        monkeypatch.setattr(name, True)  # `plan` sets HF_HUB_OFFLINE, which is read when they are imported
    monkeypatch.setenv("HF_EVALUATE_OFFLINE", "1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # crash logs
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
