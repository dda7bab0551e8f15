"""Damaged and forged checkpoints: loading gives a model or a sentence, and so does a plan."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from qbench import load_checkpoint
from qbench.checkpoint.fingerprint import checkpoint_files
from qbench.checkpoint.layout import config_note, parameter_count
from qbench.errors import InputError

from ..checkpoint.small_checkpoints import fla, llama
from .mutate_files import failures, mutate_bytes, mutate_json


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    made = [
        llama(folder / "llama", "softpick"),
        fla(folder / "fla", "gated"),
        llama(folder / "shards", shards=2),
        fla(folder / "scaled", "scaled_softpick"),
    ]
    for own in made:
        (own / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "max_length": 20}))
    return made


def one(whole: list[Path], work: Path) -> Callable[[random.Random], str]:
    def run(draw: random.Random) -> str:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(draw.choice(whole), work)
        files = sorted(work.iterdir())
        texts = [file for file in files if file.suffix == ".json"]
        if draw.random() < 0.7:
            file = draw.choice([*texts, work / "config.json", work / "config.json"])
            file.write_bytes(mutate_json(draw, file.read_text()))
        else:
            file = draw.choice([file for file in files if file not in texts])
            file.write_bytes(mutate_header(draw, file.read_bytes()))
        for use in (load_checkpoint, _note, checkpoint_files, _count):
            try:
                use(work)
            except InputError as error:
                if "\n" in str(error):
                    return f"several lines: {error}"
            except Exception as error:
                return f"{file.name}: {type(error).__name__}: {str(error)[:200]}"
        return ""

    return run


def _note(folder: Path) -> str:
    return config_note(folder / "config.json", "softpick")


def _count(folder: Path) -> int:
    return parameter_count(folder / "config.json")


def mutate_header(draw: random.Random, content: bytes) -> bytes:
    """A safetensors file with another header, or with damaged bytes."""
    if draw.random() < 0.4:
        return mutate_bytes(draw, content)
    size = int.from_bytes(content[:8], "little")
    header = mutate_json(draw, content[8 : 8 + size].decode())
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


@pytest.mark.filterwarnings("ignore")
def test_a_sample_of_damaged_checkpoints(whole: list[Path], tmp_path: Path) -> None:
    assert failures(range(25), one(whole, tmp_path / "work")) == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.filterwarnings("ignore")
def test_damaged_checkpoints(whole: list[Path], tmp_path: Path) -> None:
    assert failures(range(25, 225), one(whole, tmp_path / "work")) == []
