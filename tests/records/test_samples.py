"""Samples: the same frame back from disk, the same bytes for the same samples, and never half a file."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from qbench.records.samples import to_frame, write_samples

from ..example_records import aggregate

ROWS = [
    {"task": "arc", "doc_id": 0, "gold": [1], "loglikelihoods": [-3.25, -1.0], "is_greedy": [False, True], "acc": 1.0},
    {"task": "arc", "doc_id": 1, "gold": [0], "loglikelihoods": [-2.0, -1.5], "is_greedy": [False, False], "acc": 0.0},
    {"task": "wiki", "doc_id": 0, "loglikelihoods": [-90.0], "word_perplexity": -90.0, "word_perplexity.weight": 30.0},
    {"task": "wiki", "doc_id": 1, "loglikelihoods": [-20.0], "word_perplexity": -20.0, "word_perplexity.weight": 25.0},
]


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    frame = to_frame(ROWS)
    write_samples(frame, tmp_path / "samples.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "samples.parquet"), frame)
    assert list(frame["task"]) == ["arc", "arc", "wiki", "wiki"]


def test_the_same_samples_are_the_same_bytes(tmp_path: Path) -> None:
    one, two = tmp_path / "one.parquet", tmp_path / "two.parquet"
    write_samples(to_frame(ROWS), one)
    write_samples(pd.read_parquet(one), two)
    assert one.read_bytes() == two.read_bytes()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "samples.parquet"
    write_samples(to_frame(ROWS[:1]), file)
    old = file.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match="No space"):
        write_samples(to_frame(ROWS), file)
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_bytes() == old


def test_metrics_follow_from_the_rows_of_their_task() -> None:
    frame = to_frame(ROWS)
    arc, wiki = frame[frame["task"] == "arc"], frame[frame["task"] == "wiki"]
    assert aggregate(arc, "acc", "mean") == 0.5
    assert aggregate(wiki, "word_perplexity", "weighted_perplexity") == pytest.approx(7.389056)  # exp(110 / 55)


def test_reports_that_read_samples_wait_for_neither_torch_nor_lm_eval() -> None:
    code = "import sys, qbench.records.samples; assert not {'torch', 'lm_eval', 'datasets'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
