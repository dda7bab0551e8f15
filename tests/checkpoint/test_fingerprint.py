"""Fingerprints of checkpoints and tokenizers: content hashes, and commits in the Hugging Face cache."""

import json
from pathlib import Path

import pytest

from qbench.checkpoint.fingerprint import NotFetchedError, checkpoint_fingerprint, commit_of, tokenizer_fingerprint

COMMIT, OLDER = "a" * 40, "b" * 40
INDEX = json.dumps({"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}})


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache for each test."""
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def cached(hub: Path, repo: str, commit: str, files: dict[str, str], ref: str = "main") -> None:
    """A repository as huggingface_hub stores it."""
    folder = hub / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / ref).write_text(commit)
    for name, text in files.items():
        (folder / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
        (folder / "snapshots" / commit / name).write_text(text)


def local(folder: Path, **files: str) -> str:
    """A checkpoint on disk; names with __ for dots."""
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return str(folder)


def test_a_hub_checkpoint_is_its_commit_in_the_cache(hub: Path) -> None:
    cached(hub, "owner/tiny", COMMIT, {"config.json": "{}", "model.safetensors": "w"})
    cached(hub, "owner/tiny", OLDER, {"config.json": "{}", "model.safetensors": "w"}, ref="v1")
    assert checkpoint_fingerprint("owner/tiny") == f"owner/tiny@{COMMIT}"
    assert checkpoint_fingerprint("owner/tiny", "v1") == f"owner/tiny@{OLDER}"
    assert checkpoint_fingerprint("owner/tiny", OLDER) == f"owner/tiny@{OLDER}"
    cached(hub, "owner/tiny", OLDER, {})  # the branch moved
    assert checkpoint_fingerprint("owner/tiny") == f"owner/tiny@{OLDER}"


def test_what_is_not_in_the_cache_is_not_fetched(hub: Path) -> None:
    with pytest.raises(NotFetchedError, match=r"owner/tiny .*`qbench fetch`"):
        checkpoint_fingerprint("owner/tiny")
    cached(hub, "owner/tiny", COMMIT, {"config.json": "{}"})
    with pytest.raises(NotFetchedError, match=r"safetensors.*model\.safetensors"):
        checkpoint_fingerprint("owner/tiny")
    with pytest.raises(NotFetchedError):
        checkpoint_fingerprint("owner/tiny", "v2")


def test_an_interrupted_download_is_not_fetched(hub: Path) -> None:
    half = {"config.json": "{}", "model.safetensors.index.json": INDEX, "model-1.safetensors": "w"}
    cached(hub, "owner/tiny", COMMIT, half)
    with pytest.raises(NotFetchedError, match=r"model-2\.safetensors"):
        checkpoint_fingerprint("owner/tiny")
    cached(hub, "owner/tiny", COMMIT, {"model-2.safetensors": "w"})
    assert checkpoint_fingerprint("owner/tiny") == f"owner/tiny@{COMMIT}"


def test_a_folder_is_its_content(tmp_path: Path) -> None:
    one = local(tmp_path / "one", config__json="{}", model__safetensors="w")
    two = local(tmp_path / "two", config__json="{}", model__safetensors="w", README__md="words")
    assert checkpoint_fingerprint(one) == checkpoint_fingerprint(two)
    local(tmp_path / "two", model__safetensors="v")
    assert checkpoint_fingerprint(one) != checkpoint_fingerprint(two)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_each_config_counts(name: str, tmp_path: Path) -> None:
    folder = local(tmp_path, config__json="{}", model__safetensors="w")
    before = checkpoint_fingerprint(folder)
    (tmp_path / name).write_text('{"eos_token_id": 2}')
    assert checkpoint_fingerprint(folder) != before


def test_each_shard_counts(tmp_path: Path) -> None:
    folder = local(tmp_path / "one", config__json="{}")
    for name, text in (("model.safetensors.index.json", INDEX), ("model-1.safetensors", "w")):
        (tmp_path / "one" / name).write_text(text)
    with pytest.raises(NotFetchedError, match=r"model-2\.safetensors"):
        checkpoint_fingerprint(folder)
    (tmp_path / "one" / "model-2.safetensors").write_text("w")
    before = checkpoint_fingerprint(folder)
    (tmp_path / "one" / "model-2.safetensors").write_text("v")
    assert checkpoint_fingerprint(folder) != before


@pytest.mark.parametrize("index", ["no JSON", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none(index: str, tmp_path: Path) -> None:
    folder = local(tmp_path / "one", config__json="{}")
    (tmp_path / "one" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(NotFetchedError, match=r"model\.safetensors\.index\.json"):
        checkpoint_fingerprint(folder)


def test_a_tokenizer_is_its_files(tmp_path: Path, hub: Path) -> None:
    one = local(tmp_path / "one", tokenizer__json="{}", model__safetensors="w")
    two = local(tmp_path / "two", tokenizer__json="{}")
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(two)
    local(tmp_path / "two", special_tokens_map__json="{}")
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(two)
    with pytest.raises(NotFetchedError, match=r"three.*tokenizer\.json"):
        tokenizer_fingerprint(local(tmp_path / "three", config__json="{}"))
    cached(hub, "owner/words", COMMIT, {"tokenizer.model": "w"})
    assert tokenizer_fingerprint("owner/words") == f"owner/words@{COMMIT}"


def test_only_what_is_on_the_hub_has_a_commit(tmp_path: Path, hub: Path) -> None:
    cached(hub, "owner/words", COMMIT, {"tokenizer.model": "w"})
    assert commit_of(tokenizer_fingerprint("owner/words")) == COMMIT
    assert commit_of(tokenizer_fingerprint(local(tmp_path / "one", tokenizer__json="{}"))) is None
