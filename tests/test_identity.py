"""What keys depend on: a typed identity, hashes of our code by its meaning, and remembered hashes of files."""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from pydantic import ValidationError

from qbench import identity
from qbench.errors import InputError
from qbench.identity import Identity, What, code_hash, remembered, source_hash
from qbench.records.store import RECORD, StoreError, read_record

from .example_records import cell_ref, identity_of

NUMBERS = ("bits", "max_length", "seed", "batch_tokens")
MINI = Path(__file__).parents[1] / "results" / "mini"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for each test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("QBENCH_CACHE", str(folder))
    return folder


class TestIdentity:
    @pytest.mark.parametrize("file", sorted(MINI.glob("*/record.json")), ids=lambda file: file.parent.name)
    def test_a_committed_record_has_the_key_of_its_identity(self, file: Path) -> None:
        record = read_record(file)
        stored = json.loads(file.read_text())["identity"]
        assert record.identity.key == record.key
        assert record.identity.model_dump(mode="json") == stored
        (task, (fingerprint, shots)), *_ = stored["what"]["tasks"].items()
        assert record.identity.what.tasks[task].fingerprint == fingerprint
        assert record.identity.what.tasks[task].num_fewshot == shots

    @pytest.mark.parametrize("field", [name for name, field in What.model_fields.items() if field.is_required()])
    def test_a_record_whose_identity_lacks_a_field_is_refused(self, field: str, tmp_path: Path) -> None:
        content = json.loads(next(MINI.glob("*/record.json")).read_text())
        del content["identity"]["what"][field]
        (tmp_path / RECORD).write_text(json.dumps(content))
        with pytest.raises(StoreError, match=rf"record\.json.*identity\.what\.{field}"):
            read_record(tmp_path / RECORD)

    def test_an_unknown_field_is_refused(self) -> None:
        content = identity_of(cell_ref()).model_dump()
        content["what"]["colour"] = "red"
        with pytest.raises(ValidationError, match="colour"):
            Identity(**content)

    @pytest.mark.parametrize("field", What.model_fields)
    def test_each_field_is_in_the_key(self, field: str) -> None:
        made_up = identity_of(cell_ref())
        other = {
            "options": {"label": "other"},
            "tasks": {},
            "parts": {"kv4": {}},
            "analysis": {"lengths": [8]},
        } | dict.fromkeys(NUMBERS, 7)
        what = What(**made_up.what.model_dump() | {field: other.get(field, "other")})
        changed = made_up.model_copy(update={"what": what})
        assert changed.key != made_up.key
        assert changed.what_key != made_up.what_key

    def test_an_axis_that_is_not_used_leaves_keys_as_they_are(self) -> None:
        class Later(What):
            kv_cache: str | None = None

        class LaterIdentity(Identity):
            what: Later

        made_up = identity_of(cell_ref())
        later = LaterIdentity(**made_up.model_dump())
        assert (later.key, later.what_key) == (made_up.key, made_up.what_key)
        assert json.loads(later.model_dump_json()) == json.loads(made_up.model_dump_json())
        used = later.model_copy(update={"what": Later(**made_up.what.model_dump() | {"kv_cache": "int4"})})
        assert used.key != made_up.key
        assert LaterIdentity(**json.loads(used.model_dump_json())) == used


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
        os.replace(other, file)  # replaced by another file, as atomic writers do
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

    def test_a_user_without_a_home_has_a_temporary_cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("QBENCH_CACHE", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a user id without a name
        assert identity.cache_folder().parent == Path(tempfile.gettempdir())
        assert remembered("what", [], lambda: 1) == 1

    def test_errors_are_not_remembered(self) -> None:
        def fail() -> None:
            raise InputError("not yet")

        with pytest.raises(InputError):
            remembered("what", [], fail)
        assert remembered("what", [], lambda: 1) == 1


# Code, and the same with another meaning.
CODE = "import os\n\nSIZE = 64\n\n\n@cache\ndef scale(x, factor=2.0):\n    return x * factor\n"
OTHER_MEANING = {
    "constant": ("64", "65"),
    "type of a constant": ("64", "64.0"),
    "truth": ("64", "True"),
    "none": ("64", "None"),
    "text": ("64", "'64'"),
    "operator": ("x * factor", "x + factor"),
    "default": ("factor=2.0", "factor=2.5"),
    "no default": ("factor=2.0", "factor"),
    "keyword-only": ("(x, ", "(x, *, "),
    "decorator": ("@cache", "@lru_cache"),
    "no decorator": ("@cache\n", ""),
    "annotation": ("(x,", "(x: tl.constexpr,"),
    "import": ("import os", "import sys"),
    "no result": ("return x * factor", "x * factor"),
    "name": ("SIZE", "LENGTH"),
}
SAME_MEANING = {
    "comment": ("SIZE = 64", "# why\nSIZE = 64  # tokens"),
    "docstring": ("    return", '    """The product."""\n    return'),
    "docstring of the module": ("import os", '"""Words."""\n\nimport os'),
    "formatting": (
        "(x, factor=2.0):\n    return x * factor",
        "(\n  x,\n  factor = 2.0):\n  return (x\n *factor)",
    ),
    "empty lines": ("\n\n\n", "\n\n\n\n\n"),
    "another spelling of a constant": ("64", "0x40"),
}

COMPUTE = [
    "kernels/softpick/cpu.py",
    "kernels/softpick/triton_forward.py",
    "qbench/attention/register.py",
    "qbench/checkpoint/load.py",
    "qbench/quantizers/hqq/layer.py",
    "qbench/evaluate/scorer.py",
    "qbench/runner/cell.py",
]
QUICK = ("kernels/softpick/cpu.py", "qbench/quantizers/hqq/layer.py")  # parsing all code takes half a second


class TestCode:
    @pytest.mark.parametrize("change", OTHER_MEANING)
    def test_another_meaning_is_another_hash(self, change: str) -> None:
        old, new = OTHER_MEANING[change]
        assert old in CODE
        assert source_hash(CODE.replace(old, new)) != source_hash(CODE)

    @pytest.mark.parametrize("change", SAME_MEANING)
    def test_comments_docstrings_and_formatting_do_not_count(self, change: str) -> None:
        old, new = SAME_MEANING[change]
        assert old in CODE
        assert source_hash(CODE.replace(old, new)) == source_hash(CODE)

    @pytest.fixture
    def code(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A copy of our code, which is hashed instead of it."""
        shutil.copytree(identity.PACKAGE, tmp_path / "qbench")
        shutil.copytree(identity.PACKAGE.parent / "kernels" / "softpick", tmp_path / "kernels" / "softpick")
        monkeypatch.setattr(identity, "PACKAGE", tmp_path / "qbench")
        monkeypatch.syspath_prepend(str(tmp_path / "kernels"))
        monkeypatch.delitem(sys.modules, "softpick", raising=False)
        return tmp_path

    def hash(self) -> str:
        return code_hash.__wrapped__()

    @pytest.mark.parametrize(
        "name",
        [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in COMPUTE],
    )
    def test_what_computes_changes_the_hash_and_a_comment_in_it_does_not(self, name: str, code: Path) -> None:
        before, source = code_hash(), (code / name).read_text()  # the same wherever the code lies, as tested below
        (code / name).write_text(source + "# a comment\n")
        assert self.hash() == before
        (code / name).write_text(source + "SIZE = 1\n")
        assert self.hash() != before

    def test_every_file_that_computes_counts(self, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            identity, "source_hash", lambda source: hashlib.sha256(source).hexdigest()
        )  # parses nothing
        hashes = [self.hash()]
        for name in COMPUTE:
            with (code / name).open("a") as file:
                file.write("SIZE = 1\n")
            hashes.append(self.hash())
        assert len(set(hashes)) == 1 + len(COMPUTE)

    @pytest.mark.parametrize("folder", ["qbench/quantizers", "kernels/softpick"])
    def test_a_new_file_changes_the_hash(self, folder: str, code: Path) -> None:
        before = code_hash()
        (code / folder / "new.py").write_text("")
        assert self.hash() != before

    @pytest.mark.parametrize(
        "name", ["qbench/cli.py", "qbench/checkpoint/save.py", "qbench/runner/view.py", "qbench/recipe/cells.py"]
    )
    def test_what_does_not_compute_does_not_count(self, name: str, code: Path) -> None:
        before = code_hash()
        (code / name).write_text("")
        assert self.hash() == before

    def test_it_is_the_same_wherever_the_code_lies(self, code: Path) -> None:
        assert self.hash() == code_hash()

    def test_a_folder_that_is_taken_for_the_kernels_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "softpick").mkdir()
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        monkeypatch.delitem(sys.modules, "softpick", raising=False)
        with pytest.raises(InputError, match="softpick"):
            self.hash()
