"""Malicious records: whatever a record contains, reading it ends with a clear error."""

import hashlib
import io
import json
import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qbench import cli
from qbench.records.samples import MAX_VALUES

from ..example_records import cell_ref, make_samples, write_run

CELLS = [
    cell_ref(a, m, b, label)
    for a in ("softmax", "softpick")
    for m, b, label in (("none", 16, "none-16"), ("hqq", 3, "hqq-3-g64"))
]
COMMANDS = [
    ["table", "RUN"],
    ["table", "RUN", "--kind", "summary"],
    ["audit", "RUN"],
    ["power", "RUN"],
    ["check", "RUN", "--baseline", "BASE"],
    ["check", "BASE", "--baseline", "RUN"],
    ["compare", "RUN", "--with", "BASE"],
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    samples = {cell: make_samples(12, 0.1, ("arc_easy", "wikitext")) for cell in CELLS}
    return write_run(tmp_path_factory.mktemp("honest") / "base", samples)


@pytest.fixture
def folders(tmp_path: Path, base: Path) -> dict[str, Path]:
    return {"RUN": shutil.copytree(base, tmp_path / "run"), "BASE": base}


@pytest.fixture
def cell(folders: dict[str, Path]) -> Path:
    return next(path for path in sorted(folders["RUN"].iterdir()) if "softpick-hqq" in path.name)


def said(folders: dict[str, Path], capsys: pytest.CaptureFixture[str], command: list[str]) -> tuple[int, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        code = cli.main([str(folders.get(part, part)) for part in command])
    return code, capsys.readouterr().err


def seal(cell: Path, content: bytes) -> None:
    (cell / "samples.parquet").write_bytes(content)
    record = json.loads((cell / "record.json").read_text())
    record["samples_sha256"] = hashlib.sha256(content).hexdigest()
    (cell / "record.json").write_text(json.dumps(record))


def with_column(cell: Path, name: str, values: list) -> None:
    table = pq.read_table(cell / "samples.parquet")
    kind = table.schema.field(name)
    rest = table[name].to_pylist()[len(values) :]
    table = table.set_column(table.column_names.index(name), kind, pa.array([*values, *rest], kind.type))
    content = io.BytesIO()
    pq.write_table(table, content, store_schema=False)
    seal(cell, content.getvalue())


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_an_unreadable_file_with_a_matching_checksum(folders, cell, capsys, command) -> None:
    seal(cell, b"not parquet")
    code, message = said(folders, capsys, command)
    assert code == 2
    assert str(cell / "samples.parquet") in message


@pytest.mark.parametrize(
    ("column", "value", "facts"),
    [
        ("doc_hash", None, "null"),
        ("task", None, "null"),
        ("doc_id", None, "null"),
        ("acc", 1e308, "1e+308"),
        ("acc", -1e308, "-1e+308"),
        ("loglikelihoods", [1e308, 1e308, 1e308, 1e308], "1e+308"),
        ("word_perplexity.weight", 0.0, "0"),
    ],
)
@pytest.mark.parametrize("command", [COMMANDS[1], COMMANDS[2], COMMANDS[4]], ids=" ".join)
def test_values_that_nothing_measures(folders, cell, capsys, column, value, facts, command) -> None:
    with_column(cell, column, [value])
    code, message = said(folders, capsys, command)
    assert code == 2
    assert str(cell / "samples.parquet") in message
    assert column in message
    assert facts in message


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("metrics", 0, "value"), 1e308),
        (("metrics", 0, "value"), "half"),
        (("metrics", 0, "documents"), 10**400),
        (("metrics", 0, "documents"), -1),
        (("cell", "bits"), 10**9),
        (("audit", "bits"), 10**9),
        (("audit", "layers", 0, "bits"), 10**9),
        (("audit", "error_energy"), -1.0),
        (("audit", "weights"), 10**400),
        (("cost", "seconds", "load"), 1e308),
        (("state",), ["done"]),
        (("provenance", "resolved_recipe"), 3),
    ],
)
def test_wrong_values_in_record_json(folders, cell, capsys, place, value) -> None:
    content = record = json.loads((cell / "record.json").read_text())
    for step in place[:-1]:
        content = content[step]
    content[place[-1]] = value
    (cell / "record.json").write_text(json.dumps(record))
    code, message = said(folders, capsys, ["audit", "RUN"])
    assert code == 2
    assert str(cell / "record.json") in message
    assert ".".join(map(str, place)) in message, message
    assert len(message) < 600


@pytest.mark.parametrize("depth", [100, 190, 100_000])
@pytest.mark.parametrize("name", ["record.json", "run.json"])
def test_deep_json(folders, cell, capsys, name, depth) -> None:
    file = cell / name if name == "record.json" else folders["RUN"] / name
    text = file.read_text()
    file.write_text(
        text.replace('"resolved_recipe"', '"resolved_recipe": {"a":' + "[" * depth + "]" * depth + '}, "x"', 1)
    )
    code, message = said(folders, capsys, ["table", "RUN", "--format", "html"])
    assert code == 2
    assert str(file) in message


def test_a_small_file_of_billions_of_values(folders, cell, capsys, monkeypatch) -> None:
    monkeypatch.setattr("qbench.records.samples.MAX_VALUES", 100)
    assert MAX_VALUES > 10**6
    code, message = said(folders, capsys, ["table", "RUN"])
    assert code == 2
    assert "values" in message


def test_a_pipe_in_place_of_a_record(folders, cell, capsys) -> None:
    (cell / "samples.parquet").unlink()
    os.mkfifo(cell / "samples.parquet")
    code, message = said(folders, capsys, ["table", "RUN"])
    assert (code, "not a regular file" in message) == (2, True)


def test_two_columns_of_one_name(folders, cell, capsys) -> None:
    table = pq.read_table(cell / "samples.parquet")
    content = io.BytesIO()
    pq.write_table(table.append_column("acc", pa.array(np.zeros(len(table)))), content, store_schema=False)
    seal(cell, content.getvalue())
    code, message = said(folders, capsys, ["audit", "RUN"])
    assert code == 2
    assert "acc" in message
