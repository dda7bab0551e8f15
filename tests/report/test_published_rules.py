"""`qbench audit` finds results that cannot be right, and nothing else."""

import json
from pathlib import Path

import numpy as np
import pytest

from qbench.records.store import RECORD
from qbench.report.delta import ReportData, read_report

from ..example_records import make_samples
from .examples import PAPER, cell, samples_of, write_cell, write_mini

HQQ = {f"1.8B-{attention}-hqq-{bits}" for attention in ("softmax", "softpick") for bits in (2, 3)}
HEADER = "family,method,bits,task,metric,softmax,softpick,delta,documents\n"


def findings(folder: Path) -> list[str]:
    return list(map(str, read_report(folder).findings))


def published(folder: Path, rows: str) -> list[str]:
    (folder / "rows.csv").write_text(HEADER + rows)
    return findings(folder)


def test_in_the_paper_it_finds_the_1_8b_rows_of_hqq_and_nothing_else(paper: ReportData) -> None:
    found = paper.findings
    assert {name for finding in found for name in finding.names} == HQQ
    assert [f.where for f in found if "the same scores in all 9 metrics" in f.message] == [
        "1.8B-softmax-hqq-2 and 1.8B-softmax-hqq-3",
        "1.8B-softpick-hqq-2 and 1.8B-softpick-hqq-3",
    ]
    # This shows only that they are not of 2 or 3 bits; an 8-bit model would score the same.
    assert {f.cell.name for f in found if "unquantized or nearly lossless" in f.message} == HQQ


def test_without_those_rows_the_paper_is_clean(tmp_path: Path) -> None:
    for file in PAPER.glob("*.csv"):
        kept = [line for line in file.read_text().splitlines() if not line.startswith("1.8B,hqq")]
        (tmp_path / file.name).write_text("\n".join(kept))
    assert findings(tmp_path) == []


def test_a_sound_run_is_clean(mini: Path) -> None:
    assert findings(mini) == []


def test_records_are_judged_by_their_documents(tmp_path: Path) -> None:
    for attention in ("softmax", "softpick"):
        write_cell(tmp_path, cell(attention, "none-16"), samples_of("softmax", "none-16"))
    (found,) = findings(tmp_path)
    assert found.startswith("mini-softmax-none-16: ")
    assert "equal to the last bit to those of mini-softpick-none-16" in found


def test_equal_accuracies_of_records_are_no_proof(tmp_path: Path) -> None:
    for label, loss in (("hqq-3-g64", 0.1), ("hqq-4-g64", 0.05)):
        samples = make_samples(200, loss, tasks=["arc_easy", "piqa", "sciq"])
        samples["acc"] = samples["acc_norm"] = [1.0, 1.0, 1.0, 0.0] * 150
        write_cell(tmp_path, cell("softmax", label), samples)
    assert findings(tmp_path) == []


FULL_TASKS = {"arc_easy": 2376, "lambada_openai": 5153, "piqa": 1838, "sciq": 1000}


def table_of(scores: dict[str, dict[str, float]], documents: dict[str, int]) -> str:
    """Published rows of one model: by label and task, accuracies in percent, or word perplexities of wikitext."""
    rows = []
    for label, tasks in scores.items():
        for task, score in tasks.items():
            metric = "word_perplexity" if task == "wikitext" else "acc"
            method, bits = label.split("-")
            rows.append(f"S,{method},{bits},{task},{metric},{score:.2f},,,{documents.get(task, '')}\n")
    return "".join(rows)


@pytest.mark.parametrize(
    ("labels", "guilty"),
    [
        (("none-16", "hqq-2"), {"S-softmax-hqq-2", "S-softmax-none-16"}),
        (("none-16", "bnb-4"), {"S-softmax-bnb-4", "S-softmax-none-16"}),
        (("hqq-2", "gptq-4"), {"S-softmax-hqq-2", "S-softmax-gptq-4"}),
        (("none-16", "hqq-8"), set()),  # wide cells may agree to the second decimal
        (("hqq-8", "gptq-8"), set()),
    ],
)
def test_equal_published_scores_of_full_tasks(labels: tuple[str, ...], guilty: set[str], tmp_path: Path) -> None:
    scores = {"arc_easy": 60.35, "lambada_openai": 36.25, "piqa": 66.97, "sciq": 80.5, "wikitext": 23.85}
    found = published(tmp_path, table_of(dict.fromkeys(labels, scores), {}))
    named = {name for line in found if "is impossible with" not in line for name in line.split(":")[0].split(" and ")}
    assert named == guilty


@pytest.mark.parametrize("tasks", [{"sciq": 200, "piqa": 200}, {"sciq": 100, "piqa": 100, "a": 100, "b": 100}])
def test_equal_published_scores_of_few_documents_are_no_proof(tasks: dict[str, int], tmp_path: Path) -> None:
    scores = dict.fromkeys(tasks, 62.0)
    assert published(tmp_path, table_of(dict.fromkeys(("none-16", "hqq-4", "gptq-4", "bnb-8"), scores), tasks)) == []


def test_equal_scores_of_two_models_are_found(tmp_path: Path) -> None:
    rows = [
        f"S,none,16,{task},acc,{s},{s},0,\n" for task, s in zip(FULL_TASKS, (60.35, 36.25, 66.97, 80.5), strict=True)
    ]
    found = published(tmp_path, "".join([*rows, "S,none,16,wikitext,word_perplexity,23.85,23.85,0,\n"]))
    assert any(line.startswith("S-softmax-none-16 and S-softpick-none-16: the same scores") for line in found)


def honest_table(seed: int) -> str:
    """Published scores of two to five tasks: answers flip at random, 0.5% to 2% of them at 8 bits, 3% to 6% at 4."""
    draw = np.random.default_rng(seed)
    tasks = {f"task{i}": int(draw.integers(200, 600)) for i in range(draw.integers(2, 6))}
    answers = {task: draw.random(count) < draw.uniform(0.3, 0.9) for task, count in tasks.items()}
    scores: dict[str, dict[str, float]] = {"none-16": {task: 100 * right.mean() for task, right in answers.items()}}
    for label in ("bnb-8", "gptq-8", "hqq-8", "bnb-4", "gptq-4", "hqq-4"):
        low, high = (0.005, 0.02) if label.endswith("8") else (0.03, 0.06)
        flips = {task: draw.random(len(right)) < draw.uniform(low, high) for task, right in answers.items()}
        scores[label] = {task: 100 * (right ^ flips[task]).mean() for task, right in answers.items()}
    return table_of(scores, tasks)


def test_of_200_honest_published_tables_at_most_one_is_accused(tmp_path: Path) -> None:
    accused = [seed for seed in range(200) if published(tmp_path, honest_table(seed))]
    assert len(accused) <= 1


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("S,hqq,3,sciq,acc,50.1,50.25,0.15,\n", "50.25…1000 documents…50.2000"),
        ("S,hqq,3,odd,acc,33.33,50.00,16.67,6\n", ""),
        ("S,hqq,3,odd,acc,33.33,51.00,17.67,6\n", "51 …6 documents"),
        ("S,hqq,3,odd,acc,101,50,-51,\n", "101.00 is not a percentage."),
        ("S,hqq,3,wikitext,word_perplexity,0.90,2,1.10,\n", "0.90 is below 1"),
        ("S,hqq,3,odd,acc,40,50,11,\n", "Δ is +11.00, but softpick − softmax is +10.00."),
        ("S,hqq,3,odd,acc,40,50,10.01,\n", ""),
        ("S,hqq,3,l,acc,20,20,0,\nS,hqq,3,l,perplexity,1.5,9,7.5,\n", "1.50…acc 20.00…at least 1.74"),
        ("S,hqq,3,w,byte_perplexity,2,2,0,\nS,hqq,3,w,bits_per_byte,1,1.5,0.5,\n", "1.5000 is not log2 of byte_perp"),
        ("S,hqq,3,w,byte_perplexity,2,2,0,\nS,hqq,3,w,word_perplexity,1.9,30,28.1,\n", "1.90 is below byte_perplexity"),
    ],
)
def test_impossible_numbers_are_found_and_possible_ones_are_not(row: str, why: str, tmp_path: Path) -> None:
    found = published(tmp_path, row)
    if why:
        assert len(found) == 1
        assert all(fact in found[0] for fact in why.split("…"))
    else:
        assert found == []


def change(folder: Path, name: str, edit: dict[str, float]) -> None:
    """Change values of a record by hand."""
    (file,) = folder.glob(f"{name}-*/{RECORD}")
    record = json.loads(file.read_text())
    for metric in record["metrics"]:
        metric["value"] = edit.get(f"{metric['task']} {metric['metric']}", metric["value"])
    file.write_text(json.dumps(record))


def test_a_record_that_was_edited_is_found(tmp_path: Path) -> None:
    write_mini(tmp_path, documents=40, labels=("none-16",))
    change(tmp_path, "mini-softmax-none-16", {"arc_easy acc": 0.9, "wikitext word_perplexity": 12.0})
    found = findings(tmp_path)
    assert any("arc_easy acc is 0.9 in record.json; its samples" in f for f in found)
    assert any("wikitext word_perplexity is 12 in record.json" in f for f in found)
    assert len(found) == 2


def test_scores_without_a_passed_audit_are_found(tmp_path: Path, troubled: Path) -> None:
    found, *others = findings(troubled)
    assert all("mini-softpick-bnb-4-nf4: " in own and "the documents differ" in own for own in others)
    assert found.startswith("mini-softpick-hqq-2-g64: ")
    assert "model.layers.0.mlp.up_proj was not quantized" in found
    write_cell(tmp_path, cell("softmax", "hqq-3-g64"), make_samples(10), audit=None)
    (found,) = findings(tmp_path)
    assert found.startswith("mini-softmax-hqq-3-g64: ")
    assert "no audit" in found
