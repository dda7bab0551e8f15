"""Damaged output of lm-eval: import and check say a sentence, with the right exit code, and write all or nothing."""

import random
import shutil
from pathlib import Path

import pytest

from qbench.records.store import read_results

from ..lm_eval_import.lm_eval_cli import OUTPUT
from .commands import complaint
from .mutate_files import failures, mutate_bytes, mutate_json

MODEL = OUTPUT / "models__softmax"
LINES = 6  # of each samples file that are mutated; the rest are as they were


def damage(draw: random.Random, folder: Path) -> None:
    """Mutate one file: a line of samples, or the results."""
    results = max(folder.glob("results_*.json"))
    if draw.random() < 0.4:
        results.write_bytes(mutate_json(draw, results.read_text()))
        return
    file = draw.choice(sorted(folder.glob("samples_*.jsonl")))
    if draw.random() < 0.1:
        file.write_bytes(mutate_bytes(draw, file.read_bytes()))
        return
    lines = file.read_text().splitlines()
    at = draw.randrange(min(LINES, len(lines)))
    mutated = mutate_json(draw, lines[at])
    file.write_bytes(
        b"\n".join([*(line.encode() for line in lines[:at]), mutated, *(o.encode() for o in lines[at + 1 :])])
    )


def one(work: Path, draw: random.Random) -> str:
    """What is wrong with how the commands ended on one damaged folder."""
    shutil.rmtree(work, ignore_errors=True)
    run = shutil.copytree(MODEL, work / "run")
    damage(draw, run)
    out = work / "records"
    if found := complaint(["import", "lm-eval", str(run), "--out", str(out)]):
        return f"import: {found}"
    if out.exists() and (
        not read_results(out).current or (found := complaint(["table", str(out), "--kind", "baseline"]))
    ):
        return f"table: {found}"
    return complaint(["check", str(run), str(MODEL)])


def test_damaged_output(tmp_path: Path) -> None:
    assert failures(range(10), lambda draw: one(tmp_path / "work", draw)) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_much_damaged_output(tmp_path: Path) -> None:
    assert failures(range(10, 1000), lambda draw: one(tmp_path / "work", draw)) == []
