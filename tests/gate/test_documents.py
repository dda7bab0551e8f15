"""Documents of two records, paired by content."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from qbench.records.paired import GOLD_LOGPROB, OtherDocuments, PairedDocuments, pair_documents
from qbench.records.samples import to_frame
from qbench.records.store import StoredRecord, read_results

from ..example_records import cell_ref, make_samples, write_run


def stored(folder: Path, samples: pd.DataFrame) -> StoredRecord:
    (record,) = read_results(write_run(folder, {cell_ref(): samples})).current
    return record


def pair(tmp_path: Path, before: pd.DataFrame, after: pd.DataFrame) -> dict[str, PairedDocuments | OtherDocuments]:
    found = pair_documents((stored(tmp_path / "before", before), stored(tmp_path / "after", after)))
    return {paired.task: paired for paired in found}


def choices(scores: list[float], gold: list[int], characters: int | None = None, name: str = "a") -> dict[str, object]:
    row = {"task": "arc_easy", "doc_id": 0, "doc_hash": name, "loglikelihoods": scores, "gold": gold}
    return row | {"characters": [3] * (characters or len(scores)), "acc": 1.0, "acc_norm": 1.0}


def logprob(tmp_path: Path, row: dict[str, object]) -> float:
    frame = to_frame([row])
    paired = pair(tmp_path, frame, frame)["arc_easy"]
    assert isinstance(paired, PairedDocuments)
    return float(paired.values[GOLD_LOGPROB][1][0])


def test_the_right_answers_logprob_is_its_log_softmax(tmp_path: Path) -> None:
    scores = np.array([-3.0, -1.0, -2.5])
    expected = scores - np.log(np.exp(scores).sum())
    assert logprob(tmp_path / "1", choices(scores.tolist(), [1])) == pytest.approx(expected[1])
    assert logprob(tmp_path / "2", choices(scores.tolist(), [0, 2])) == pytest.approx((expected[0] + expected[2]) / 2)
    mutual = [*scores.tolist(), -9.0, -9.0, -9.0]
    assert logprob(tmp_path / "3", choices(mutual, [1], characters=3)) == pytest.approx(expected[1])
    huge = choices([-4000.0, -4001.0], [1])
    assert logprob(tmp_path / "4", huge) == pytest.approx(-1 - np.log1p(np.exp(-1)))


def test_without_choices_there_is_none(tmp_path: Path) -> None:
    assert np.isnan(logprob(tmp_path / "1", choices([-3.0], [0])))
    assert np.isnan(logprob(tmp_path / "2", choices([-3.0, -4.0], [-100])))
    samples = make_samples(5)
    found = pair(tmp_path, samples, samples)
    for task, paired in found.items():
        assert isinstance(paired, PairedDocuments)
        assert np.isnan(paired.values[GOLD_LOGPROB][0]).all() == (task in ("lambada_openai", "wikitext"))


def test_documents_are_paired_whatever_their_order(tmp_path: Path) -> None:
    samples = make_samples(20)
    shuffled = samples.sample(frac=1, random_state=0).reset_index(drop=True)
    for paired in pair(tmp_path, samples, shuffled).values():
        assert isinstance(paired, PairedDocuments)
        for before, after in paired.values.values():
            np.testing.assert_array_equal(before, after)


def test_a_document_that_occurs_twice_is_one_group(tmp_path: Path) -> None:
    rows = [choices([-1.0, -2.0], [0], name=name) for name in "abcab"]
    frame = to_frame(rows)
    paired = pair(tmp_path, frame, frame)["arc_easy"]
    assert isinstance(paired, PairedDocuments)
    assert sorted(np.bincount(paired.group).tolist()) == [1, 2, 2]


def test_other_documents_are_told(tmp_path: Path) -> None:
    before, after = make_samples(10, tasks=["piqa"]), make_samples(10, tasks=["piqa"])
    after.loc[3, "doc_hash"] = "another"
    assert pair(tmp_path, before, after)["piqa"] == OtherDocuments("piqa", 10, 10, 9)


def test_a_part_of_documents_that_occur_twice_is_a_part(tmp_path: Path) -> None:
    """A --limit is noticed: the first three of a, b, a, c count as three documents."""
    rows = [choices([-1.0, -2.0], [0], name=name) for name in "abac"]
    assert pair(tmp_path, to_frame(rows), to_frame(rows[:3]))["arc_easy"] == OtherDocuments("arc_easy", 4, 3, 3)


def test_a_task_without_documents_is_not_passed_over(tmp_path: Path) -> None:
    both, one = make_samples(10, tasks=["piqa", "sciq"]), make_samples(10, tasks=["piqa"])
    assert pair(tmp_path / "1", both, one)["sciq"] == OtherDocuments("sciq", 10, 0, 0)
    assert pair(tmp_path / "2", one, both)["sciq"] == OtherDocuments("sciq", 0, 10, 0)
