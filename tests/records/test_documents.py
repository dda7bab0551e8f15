"""Documents as columns, their pairing, and the frame for users."""

import io
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

import qbench
from qbench.records.documents import Documents, Keys, pairing
from qbench.records.samples import SamplesError, to_parquet
from qbench.records.store import StoreError, read_results
from qbench.report.delta import read_report

ROOT = Path(__file__).parents[2]
MINI = ROOT / "results" / "mini"
LM_EVAL = ROOT / "tests" / "lm_eval_import" / "output" / "models__softmax"


def keys(*contents: str) -> Keys:
    return Keys(np.arange(len(contents)), np.array(contents, dtype=np.bytes_))


def brute_force(sides: list[Keys]) -> list[tuple[bytes, int]]:
    """What all sides have, as (content, repetition), in the order of the first."""
    each = []
    for side in sides:
        seen: dict[bytes, int] = {}
        each.append([])
        for own in side.contents.tolist():
            seen[own] = seen.get(own, -1) + 1
            each[-1].append((own, seen[own]))
    return [own for own in each[0] if all(own in other for other in each)]


def test_repetitions_and_distinct_documents() -> None:
    own = keys("b", "a", "b", "c", "a", "b")
    assert own.distinct.tolist() == [0, 1, 0, 2, 1, 0]
    assert own.repetition.tolist() == [0, 0, 1, 0, 1, 2]
    assert own.repeats
    assert not keys("b", "a").repeats
    assert not keys().repeats


@pytest.mark.parametrize("seed", range(20))
def test_pairing_is_that_of_a_loop(seed: int) -> None:
    draw = np.random.default_rng(seed)
    sides = [keys(*draw.choice(list("abcdef"), size=draw.integers(0, 9))) for _ in range(draw.integers(2, 5))]
    found, expected = pairing(sides), brute_force(sides)
    for side, rows in zip(sides, found.rows, strict=True):
        paired = zip(side.contents[rows].tolist(), side.repetition[rows].tolist(), strict=True)
        assert sorted(paired) == sorted(expected)
    first = zip(sides[0].contents[found.rows[0]].tolist(), sides[0].repetition[found.rows[0]].tolist(), strict=True)
    assert list(first) == expected
    for rows, side in zip(found.rows[1:], sides[1:], strict=True):
        assert (side.contents[rows] == sides[0].contents[found.rows[0]]).all()
    assert found.complete is all(len(side) == len(expected) for side in sides)


def test_only_the_order_differs() -> None:
    found = pairing([keys("a", "b", "c"), keys("c", "a", "b")])
    assert found.complete
    assert found.rows[1].tolist() == [1, 2, 0]
    assert not pairing([keys("a", "a"), keys("a")]).complete  # the same contents, but not as often


def test_equal_documents_share_their_keys() -> None:
    one, two = read_results(MINI).current[:2]
    assert one.documents["mini_piqa"].keys is two.documents["mini_piqa"].keys


def test_a_file_whose_tasks_all_generate_text_has_no_decisions() -> None:
    rows = [{"task": "gsm8k", "doc_id": i, "doc_hash": str(i), "response": "7", "exact_match": 1.0} for i in range(3)]
    own = Documents(lambda: to_parquet(rows), "samples.parquet", ())["gsm8k"]
    assert np.isnan(own.decisions.values).all()
    assert not own.has_decisions
    assert own.chance is None


def test_a_file_without_a_column_of_answers_is_a_sentence() -> None:
    table = pq.read_table(io.BytesIO(to_parquet([{"task": "arc", "doc_id": 0, "doc_hash": "a", "acc": 1.0}])))
    content = io.BytesIO()
    pq.write_table(table.drop_columns(["tokens"]), content)
    with pytest.raises(SamplesError, match=r"samples\.parquet lacks the column tokens"):
        Documents(content.getvalue, "samples.parquet", ())


def test_every_score_of_mini_follows_from_the_frame() -> None:
    frame = qbench.documents(MINI)
    for stored in read_results(MINI).current:
        own = frame[frame["cell"] == stored.record.cell.name]
        for m in stored.record.metrics:
            rows = own[(own["task"] == m.task) & (own["metric"] == m.metric)]
            ratio = rows["value"].sum() / rows["weight"].sum()
            log2 = math.log(2)
            value = {"mean": ratio, "weighted_mean": ratio, "bits_per_byte": -ratio / log2}.get(m.aggregation)
            assert (math.exp(-ratio) if value is None else value) == pytest.approx(m.value, rel=1e-12)
            assert set(rows["better"]) == {m.better}


def test_the_example_of_the_docs_gives_the_tables_numbers(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    text = Path("docs/tables.md").read_text(encoding="utf-8")
    example = re.search(r"<!-- example -->\n```python\n(.*?)```", text, re.DOTALL)
    assert example
    exec(example[1], {})
    printed = capsys.readouterr().out.split()
    assert re.findall(r"# ([+-][\d.]+)", example[1]) == printed
    damages = {
        (row.measure.task, row.measure.metric): row.damages["softmax"].score
        for row in read_report(MINI).damages
        if row.quantization.label == "hqq-3-g64"
    }
    points, percent = damages["mini_arc_easy", "acc_norm"], damages["mini_wikitext", "word_perplexity"]
    assert printed == [f"{points.value:+.2f}", f"{100 * percent.log_ratio:+.2f}"]


def test_a_frame_of_some_cells_one_record_and_lm_evals_results() -> None:
    some = qbench.documents(MINI, tasks=["mini_piqa", "mini_wikitext"], cells=["mini-softmax-none-16", "*-hqq-2-*"])
    assert set(some["cell"]) == {"mini-softmax-none-16", "mini-softmax-hqq-2-g64", "mini-softpick-hqq-2-g64"}
    assert set(some["task"]) == {"mini_piqa", "mini_wikitext"}
    folder = next(MINI.glob("mini-softpick-hqq-2-g64-*"))
    one = qbench.documents(folder, tasks=["mini_piqa"])
    same = some[(some["cell"] == "mini-softpick-hqq-2-g64") & (some["task"] == "mini_piqa")]
    pd.testing.assert_series_equal(one["value"], same["value"].reset_index(drop=True))
    imported = qbench.documents(LM_EVAL)
    assert len(imported[(imported["task"] == "mini_piqa") & (imported["metric"] == "acc")]) == 24


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"tasks": ["mini_piqua"]}, "no task mini_piqua.*mini_piqa"),
        ({"tasks": "mini_piqa"}, r"list.*\['mini_piqa'\]"),
        ({"tasks": []}, r"tasks is \[\]; it must be a list of names, such as \['mini_"),
        ({"tasks": ["mini_piqa"], "cells": "mini-relu-*"}, "no cell mini-relu-.*mini-softmax-none-16"),
        ({"cells": "mini-relu-*"}, "no cell mini-relu-.*mini-softmax-none-16"),
    ],
)
def test_what_is_not_there_is_a_sentence(arguments: dict, facts: str) -> None:
    with pytest.raises(StoreError, match=facts):
        qbench.documents(MINI, **arguments)
