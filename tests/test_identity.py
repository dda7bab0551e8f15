"""What keys are made of: content hashes, commits in the Hugging Face cache, and what is remembered of them."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from qbench import identity as fingerprints
from qbench import machine
from qbench.identity import NotFetchedError, checkpoint_fingerprint, remembered, tokenizer_fingerprint

COMMIT, OLDER = "a" * 40, "b" * 40
INDEX = json.dumps({"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}})


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("QBENCH_CACHE", str(folder))
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def cached(hub: Path, repo: str, commit: str, files: dict[str, str], ref: str = "main") -> None:
    """A repository as the hub's library keeps it."""
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


class TestCheckpoints:
    def test_a_hub_checkpoint_is_its_commit_in_the_cache(self, hub: Path) -> None:
        cached(hub, "owner/tiny", COMMIT, {"config.json": "{}", "model.safetensors": "w"})
        cached(hub, "owner/tiny", OLDER, {"config.json": "{}", "model.safetensors": "w"}, ref="v1")
        assert checkpoint_fingerprint("owner/tiny") == f"owner/tiny@{COMMIT}"
        assert checkpoint_fingerprint("owner/tiny", "v1") == f"owner/tiny@{OLDER}"
        assert checkpoint_fingerprint("owner/tiny", OLDER) == f"owner/tiny@{OLDER}"
        cached(hub, "owner/tiny", OLDER, {})  # the branch moved
        assert checkpoint_fingerprint("owner/tiny") == f"owner/tiny@{OLDER}"

    def test_what_is_not_in_the_cache_is_not_fetched(self, hub: Path) -> None:
        with pytest.raises(
            NotFetchedError, match=r"owner/tiny is no folder here and not in the Hugging Face cache; `q"
        ):
            checkpoint_fingerprint("owner/tiny")
        cached(hub, "owner/tiny", COMMIT, {"config.json": "{}"})
        with pytest.raises(NotFetchedError, match=r"model\.safetensors is not in "):
            checkpoint_fingerprint("owner/tiny")
        with pytest.raises(NotFetchedError):
            checkpoint_fingerprint("owner/tiny", "v2")

    def test_an_interrupted_download_is_not_fetched(self, hub: Path) -> None:
        half = {"config.json": "{}", "model.safetensors.index.json": INDEX, "model-1.safetensors": "w"}
        cached(hub, "owner/tiny", COMMIT, half)
        with pytest.raises(NotFetchedError, match=r"model-2\.safetensors is not in "):
            checkpoint_fingerprint("owner/tiny")
        cached(hub, "owner/tiny", COMMIT, {"model-2.safetensors": "w"})
        assert checkpoint_fingerprint("owner/tiny") == f"owner/tiny@{COMMIT}"

    def test_a_folder_is_its_content(self, tmp_path: Path) -> None:
        one = local(tmp_path / "one", config__json="{}", model__safetensors="w")
        two = local(tmp_path / "two", config__json="{}", model__safetensors="w", README__md="words")
        assert checkpoint_fingerprint(one) == checkpoint_fingerprint(two)
        local(tmp_path / "two", model__safetensors="v")
        assert checkpoint_fingerprint(one) != checkpoint_fingerprint(two)

    def test_each_shard_counts(self, tmp_path: Path) -> None:
        folder = local(tmp_path / "one", config__json="{}")
        for name, text in (("model.safetensors.index.json", INDEX), ("model-1.safetensors", "w")):
            (tmp_path / "one" / name).write_text(text)
        with pytest.raises(NotFetchedError, match=r"model-2\.safetensors is not in "):
            checkpoint_fingerprint(folder)
        (tmp_path / "one" / "model-2.safetensors").write_text("w")
        before = checkpoint_fingerprint(folder)
        (tmp_path / "one" / "model-2.safetensors").write_text("v")
        assert checkpoint_fingerprint(folder) != before

    @pytest.mark.parametrize("index", ["no JSON", "[]", "{}", '{"weight_map": 3}'])
    def test_an_index_that_is_none(self, index: str, tmp_path: Path) -> None:
        folder = local(tmp_path / "one", config__json="{}")
        (tmp_path / "one" / "model.safetensors.index.json").write_text(index)
        with pytest.raises(NotFetchedError, match="is no index of weights"):
            checkpoint_fingerprint(folder)

    def test_a_tokenizer_is_its_files(self, tmp_path: Path, hub: Path) -> None:
        one = local(tmp_path / "one", tokenizer__json="{}", model__safetensors="w")
        two = local(tmp_path / "two", tokenizer__json="{}")
        assert tokenizer_fingerprint(one) == tokenizer_fingerprint(two)
        local(tmp_path / "two", special_tokens_map__json="{}")
        assert tokenizer_fingerprint(one) != tokenizer_fingerprint(two)
        with pytest.raises(NotFetchedError, match=r"has no tokenizer: none of tokenizer\.json"):
            tokenizer_fingerprint(local(tmp_path / "three", config__json="{}"))
        cached(hub, "owner/words", COMMIT, {"tokenizer.model": "w"})
        assert tokenizer_fingerprint("owner/words") == f"owner/words@{COMMIT}"


class TestRemembered:
    def test_computed_once_until_a_file_changes(self, tmp_path: Path) -> None:
        file, calls = tmp_path / "file", []

        def ask() -> str:
            return remembered("what", [file], lambda: calls.append(1) or file.read_text())

        file.write_text("one")
        assert [ask(), ask(), len(calls)] == ["one", "one", 1]
        times = file.stat()
        file.write_text("two")  # of the same size, and with the old time
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
        assert [ask(), len(calls)] == ["two", 2]
        other = tmp_path / "other"
        other.write_text("six")
        shutil.copystat(file, other)
        os.replace(other, file)  # another file under its name, as atomic writers do
        assert [ask(), len(calls)] == ["six", 3]

    def test_a_file_more_or_less_is_a_change(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        assert remembered("what", [file], lambda: 1) == 1
        file.write_text("here")
        assert remembered("what", [file], lambda: 2) == 2
        file.unlink()
        assert remembered("what", [file], lambda: 3) == 3

    @pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"files": []}', "null"])
    def test_damaged_notes_are_computed_again(self, damage: str, cache: Path) -> None:
        remembered("what", [], lambda: 1)
        (note,) = (cache / "fingerprints").iterdir()
        note.write_text(damage)
        assert remembered("what", [], lambda: 2) == 2
        assert remembered("what", [], lambda: 3) == 2

    def test_a_cache_that_cannot_be_written_costs_time_only(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("in the way")
        monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "file"))
        assert [remembered("what", [], lambda: 1), remembered("what", [], lambda: 2)] == [1, 2]

    def test_errors_are_not_remembered(self) -> None:
        def fail() -> None:
            raise NotFetchedError("not yet")

        with pytest.raises(NotFetchedError):
            remembered("what", [], fail)
        assert remembered("what", [], lambda: 1) == 1


class TestCode:
    @pytest.fixture
    def code(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A copy of our own code, which is hashed in place of it."""
        kernels = Path(fingerprints.__file__).parents[1] / "kernels" / "softpick"
        shutil.copytree(fingerprints.PACKAGE, tmp_path / "qbench")
        shutil.copytree(kernels, tmp_path / "kernels" / "softpick")
        monkeypatch.setattr(fingerprints, "PACKAGE", tmp_path / "qbench")
        monkeypatch.syspath_prepend(str(tmp_path / "kernels"))
        monkeypatch.delitem(sys.modules, "softpick", raising=False)
        return tmp_path

    def hash(self) -> str:
        return fingerprints.code_hash.__wrapped__()

    @pytest.mark.parametrize(
        "name",
        [
            "kernels/softpick/cpu.py",
            "kernels/softpick/triton_forward.py",
            "qbench/attention/register.py",
            "qbench/checkpoint/load.py",
            "qbench/quantizers/hqq/layer.py",
            "qbench/evaluate/scorer.py",
            "qbench/runner/cell.py",
        ],
    )
    def test_what_computes_changes_the_hash(self, name: str, code: Path) -> None:
        before = self.hash()
        (code / name).write_text((code / name).read_text() + "\n")
        assert self.hash() != before

    def test_a_file_more_changes_the_hash(self, code: Path) -> None:
        before = self.hash()
        (code / "qbench" / "quantizers" / "new.py").write_text("")
        assert self.hash() != before

    @pytest.mark.parametrize("name", ["qbench/cli.py", "qbench/runner/view.py", "qbench/recipe/cells.py"])
    def test_what_does_not_compute_does_not(self, name: str, code: Path) -> None:
        before = self.hash()
        (code / name).write_text("")
        assert self.hash() == before

    def test_it_is_the_same_wherever_the_code_lies(self, code: Path) -> None:
        assert self.hash() == fingerprints.code_hash()


@pytest.mark.parametrize(
    ("visible", "build", "expected"),
    [
        (None, "2.13.0", True),
        ("0", "2.13.0+cu130", True),
        ("", "2.13.0", False),
        ("-1", "2.13.0", False),
        (None, "2.13.0+cpu", False),
    ],
)
def test_cuda_is_a_gpu_that_is_visible_and_a_torch_for_it(
    visible: str | None, build: str, expected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "NVIDIA", tmp_path)
    monkeypatch.setattr(machine, "torch_build", lambda: build)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.has_cuda() is expected
    monkeypatch.setattr(machine, "NVIDIA", tmp_path / "gone")
    assert not machine.has_cuda()
