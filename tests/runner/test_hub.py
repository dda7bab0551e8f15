"""The Hub: within seconds qbench knows whether it is reachable, and a recipe that does not need it never asks."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from qbench.recipe.cells import load_recipe
from qbench.runner.fetch import fetch
from qbench.runner.hub import OFFLINE, go_offline_if_unreachable, needs_hub

from ..small_recipe import write_recipe


class Refusing(BaseHTTPRequestHandler):
    """A Hub that answers with an error."""

    def do_HEAD(self) -> None:
        self.send_error(403)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def answering() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def closed() -> str:
    """An address where nothing is listening."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OFFLINE, "")  # so monkeypatch restores it
    monkeypatch.delenv(OFFLINE)


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoints": {"tiny": {"softmax": "owner/name"}}},
        {"tokenizer": "owner/words"},
        {"calibration": {"source": "wikitext2"}},
        {"calibration": None},  # gptq then has the default text
        {"tasks": ["piqa", "mine", "sciq"]},
    ],
)
def test_what_needs_the_hub(change: dict[str, object], tmp_path: Path) -> None:
    assert needs_hub(load_recipe(write_recipe(tmp_path, **change)))


def test_the_default_text_is_needed_only_by_what_reads_it(tmp_path: Path) -> None:
    """By a calibrated method, or by an analysis that names no text."""
    plain = {"calibration": None, "quantizations": [{"method": "none"}, {"method": "hqq", "bits": 3}]}
    recipe = load_recipe(write_recipe(tmp_path, **plain))
    assert not needs_hub(recipe)
    assert needs_hub(recipe, to_analyze=True)
    assert not [line for _, line in fetch(recipe) if line.startswith("calibration")]
    named = load_recipe(write_recipe(tmp_path, **plain, analysis={"source": "corpus.txt"}))
    assert not needs_hub(named, to_analyze=True)


def test_a_recipe_of_local_files_asks_nobody(tmp_path: Path, closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", closed)
    go_offline_if_unreachable(load_recipe(write_recipe(tmp_path)))
    assert OFFLINE not in os.environ


def test_a_hub_that_answers_is_asked(tmp_path: Path, answering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", answering)
    go_offline_if_unreachable(load_recipe(write_recipe(tmp_path, tokenizer="owner/words")))
    assert OFFLINE not in os.environ


@pytest.mark.parametrize("change", [{"tokenizer": "owner/words"}, {"tasks": ["piqa", "mine", "sciq"]}])
def test_an_unreachable_hub_is_reported_and_only_the_cache_is_used(
    change: dict[str, object],
    tmp_path: Path,
    closed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", closed)
    recipe = load_recipe(write_recipe(tmp_path, **change))
    go_offline_if_unreachable(recipe)
    assert os.environ[OFFLINE] == "1"
    said = capsys.readouterr().err
    assert all(fact in said for fact in (closed, "qbench fetch", "HF_ENDPOINT"))
    go_offline_if_unreachable(recipe)
    assert capsys.readouterr().err == ""  # said once


def test_what_is_missing_offline_quotes_no_setting_that_the_user_did_not_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{library}.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    away = {"checkpoints": {"tiny": {"softmax": "owner/name"}}, "tasks": ["sciq"], "data": None}
    recipe = load_recipe(write_recipe(tmp_path, **away, calibration={"source": "wikitext2"}))
    missing = [line for here, line in fetch(recipe) if not here]
    assert [line.split()[0] for line in missing] == ["checkpoint", "tokenizer", "task", "calibration"]
    for line in missing:
        assert "(offline)" in line
        assert not re.search("HF_|environment variable|offline.mode", line, re.I), line


@pytest.mark.slow  # two processes that import everything; the test above has the probe and its message
@pytest.mark.parametrize("command", ["run", "fetch"])
def test_without_the_hub_a_command_says_what_is_missing_within_seconds(
    command: str, closed: str, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, checkpoints={"tiny": {"softmax": "owner/name"}}, tasks=["piqa", "sciq"], data=None)
    environment = {**os.environ, "HF_ENDPOINT": closed, "HF_HOME": str(tmp_path / "home")}
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "qbench.cli", command, str(recipe)],
        cwd=tmp_path.parent,  # no folder there has a package's name
        env=environment,
        capture_output=True,
        text=True,
    )
    assert time.monotonic() - begun < 90  # imports on a busy machine; the Hub's library would retry for minutes
    assert done.returncode == {"run": 2, "fetch": 1}[command]
    assert all(fact in done.stderr for fact in (closed, "qbench fetch", "HF_ENDPOINT"))
    assert "Retrying" not in done.stderr
    said = done.stdout + done.stderr
    assert "checkpoint owner/name: " in said
    assert re.search(r"task sciq.*cache", said)
    assert "OFFLINE=" not in said  # a setting that only qbench made
    assert "offline-mode" not in said


def test_a_missing_gpu_is_reported_before_anything_is_fetched(tmp_path: Path, closed: str) -> None:
    recipe = write_recipe(tmp_path, tokenizer="owner/words", device="cuda")
    environment = {**os.environ, "HF_ENDPOINT": closed, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "qbench.cli", "run", str(recipe)]
    done = subprocess.run(command, cwd=tmp_path.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--device cpu" in done.stderr
    assert "tokenizer" not in done.stderr
