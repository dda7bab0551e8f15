"""Damaged and forged records: every command says a sentence, with the right exit code."""

import hashlib
import io
import json
import random
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qbench import cli
from qbench.report.kinds import KINDS

from ..example_records import cell_ref, make_samples, write_run
from .mutate_files import failures, mutate_bytes, mutate_json, mutate_table

CELLS = {
    cell_ref(attention, method, bits, label): 0.1 * (method != "none") + 0.01 * (attention == "softmax")
    for attention in ("softmax", "softpick")
    for method, bits, label in (("none", 16, "none-16"), ("hqq", 3, "hqq-3-g64"))
}
COMMANDS = [
    *([["table", "RUN", "--kind", kind] for kind in KINDS]),
    *([["table", "RUN", "--format", format] for format in ("csv", "json", "latex")]),
    *([["check", "RUN", "--baseline", "BASE"], ["check", "BASE", "--baseline", "RUN"]] * 3),
    *([["audit", "RUN"], ["power", "RUN"], ["power", "RUN", "--against", "BASE"]] * 2),
    *([["compare", "RUN", "--with", "BASE"], ["compare", "BASE", "--with", "RUN"]]),
    ["accept", "RUN", "--baseline", "NEW", "--reason", "a test"],
    ["table", "RUN", "--format", "html", "--out", "OUT"],
]
OK = {0, 1, 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records") / "base"
    samples = {cell: make_samples(12, loss, ("arc_easy", "wikitext")) for cell, loss in CELLS.items()}
    return write_run(folder, samples)


def sealed(folder: Path, content: bytes) -> None:
    """Write the samples of a cell, with the checksum of its record made to match."""
    (folder / "samples.parquet").write_bytes(content)
    record = json.loads((folder / "record.json").read_text())
    record["samples_sha256"] = hashlib.sha256(content).hexdigest()
    (folder / "record.json").write_text(json.dumps(record))


def of_table(table: pa.Table) -> bytes:
    content = io.BytesIO()
    pq.write_table(table, content, store_schema=False)
    return content.getvalue()


def damage(draw: random.Random, run: Path) -> None:
    """Mutate one file of a run."""
    folder = draw.choice(sorted(path for path in run.iterdir() if path.is_dir()))
    samples, record = folder / "samples.parquet", folder / "record.json"
    match draw.randrange(10):
        case 0 | 1 | 2 | 3:
            sealed(folder, of_table(mutate_table(draw, pq.read_table(samples))))
        case 4:
            sealed(folder, mutate_bytes(draw, samples.read_bytes()))
        case 5:
            samples.write_bytes(mutate_bytes(draw, samples.read_bytes()))
        case 6:
            (run / "run.json").write_bytes(mutate_json(draw, (run / "run.json").read_text()))
        case _:
            record.write_bytes(mutate_json(draw, record.read_text()))


def one(base: Path, work: Path, capsys: pytest.CaptureFixture[str]):
    def run(draw: random.Random) -> str:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(base, work / "run")
        damage(draw, work / "run")
        names = {"RUN": work / "run", "BASE": base, "NEW": work / "new", "OUT": work / "page.html"}
        command = [str(names.get(part, part)) for part in draw.choice(COMMANDS)]
        code = cli.main(command)
        out, err = capsys.readouterr()
        if code in OK and "Traceback" not in out + err:
            return ""
        log = re.search(r"(/\S+qbench-crash-\S+?\.log)", err)
        last = Path(log[1]).read_text().strip().splitlines()[-4:] if log else [err[-300:]]
        return f"{' '.join(command[:1] + command[2:4])} exit {code}: {' | '.join(line.strip() for line in last)}"

    return run


def test_a_sample_of_damaged_records(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert failures(range(20), one(base, tmp_path / "work", capsys)) == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_damaged_records(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert failures(range(20, 420), one(base, tmp_path / "work", capsys)) == []
