"""The audit of results: it finds what cannot be right, and nothing else."""

import json
from pathlib import Path

import pytest

from qbench.report.delta import Report, read_report
from qbench.report.suspicious import suspicious
from qbench.store import RECORD

from ..records import make_samples
from .examples import PAPER, cell, samples_of, write_cell, write_mini

HQQ = {f"1.8B-{attention}-hqq-{bits}" for attention in ("softmax", "softpick") for bits in (2, 3)}
HEADER = "family,method,bits,task,metric,softmax,softpick,delta,documents\n"


def findings(folder: Path) -> list[str]:
    return [str(finding) for finding in suspicious(read_report(folder))]


def published(folder: Path, rows: str) -> list[str]:
    (folder / "rows.csv").write_text(HEADER + rows)
    return findings(folder)


def test_in_the_paper_it_finds_the_unquantized_hqq_and_nothing_else(paper: Report) -> None:
    found = suspicious(paper)
    assert {name for finding in found for name in finding.where.split(" and ")} == HQQ
    assert [f.where for f in found if "the same scores in all 9 metrics" in f.why] == [
        "1.8B-softmax-hqq-2 and 1.8B-softmax-hqq-3",
        "1.8B-softpick-hqq-2 and 1.8B-softpick-hqq-3",
    ]
    assert {f.where for f in found if "scores as the unquantized model does" in f.why} == HQQ


def test_without_those_rows_the_paper_is_clean(tmp_path: Path) -> None:
    for file in PAPER.glob("*.csv"):
        kept = [line for line in file.read_text().splitlines() if not line.startswith("1.8B,hqq")]
        (tmp_path / file.name).write_text("\n".join(kept))
    assert findings(tmp_path) == []


def test_a_sound_run_is_clean(mini: Path) -> None:
    assert findings(mini) == []


def test_twins_that_are_one_model_are_found(tmp_path: Path) -> None:
    for attention in ("softmax", "softpick"):
        write_cell(tmp_path, cell(attention, "none-16"), samples_of("softmax", "none-16"))
    (found,) = findings(tmp_path)
    assert found.startswith("mini-softmax-none-16 and mini-softpick-none-16: the same scores in all 9 metrics")


def test_8_bits_equal_to_the_last_digit_are_found(tmp_path: Path) -> None:
    samples = make_samples(40)
    for label in ("none-16", "hqq-8-g64"):
        write_cell(tmp_path, cell("softmax", label), samples)
    assert any("mini-softmax-hqq-8-g64" in found and "the same scores" in found for found in findings(tmp_path))


def test_8_bits_near_the_baseline_are_not_suspicious(tmp_path: Path) -> None:
    write_cell(tmp_path, cell("softmax", "none-16"), make_samples(40))
    write_cell(tmp_path, cell("softmax", "hqq-8-g64"), make_samples(40, loss=1e-6))
    assert findings(tmp_path) == []


def test_few_equal_accuracies_are_no_proof(tmp_path: Path) -> None:
    for label, seed in (("hqq-3-g64", 0), ("hqq-4-g64", 1)):
        samples = make_samples(20, tasks=["arc_easy", "piqa"], seed=seed)
        samples["acc"] = samples["acc_norm"] = [1.0, 1.0, 1.0, 0.0] * 10
        write_cell(tmp_path, cell("softmax", label), samples)
    assert findings(tmp_path) == []


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("S,hqq,3,sciq,acc,50.1,50.25,0.15,\n", "50.25 is no share of 1000 documents; the nearest one is 50.2000."),
        ("S,hqq,3,odd,acc,33.33,50.00,16.67,6\n", ""),
        ("S,hqq,3,odd,acc,33.33,51.00,17.67,6\n", "51 is no share of 6 documents"),
        ("S,hqq,3,odd,acc,101,50,-51,\n", "101.00 is no percentage."),
        ("S,hqq,3,wikitext,word_perplexity,0.90,2,1.10,\n", "0.90 is below 1"),
        ("S,hqq,3,odd,acc,40,50,11,\n", "Δ is +11.00, but softpick − softmax is +10.00."),
        ("S,hqq,3,odd,acc,40,50,10.01,\n", ""),
        ("S,hqq,3,l,acc,20,20,0,\nS,hqq,3,l,perplexity,1.5,9,7.5,\n", "1.50 is too low for acc 20.00: at least 1.74."),
        ("S,hqq,3,w,byte_perplexity,2,2,0,\nS,hqq,3,w,bits_per_byte,1,1.5,0.5,\n", "1.5000 is not log2 of byte_perp"),
        ("S,hqq,3,w,byte_perplexity,2,2,0,\nS,hqq,3,w,word_perplexity,1.9,30,28.1,\n", "1.90 is below byte_perplexity"),
    ],
)
def test_impossible_numbers_are_found_and_possible_ones_are_not(row: str, why: str, tmp_path: Path) -> None:
    found = published(tmp_path, row)
    if why:
        assert len(found) == 1
        assert why in found[0]
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
    assert any("arc_easy acc: 90 in the record, but its documents amount to" in f for f in found)
    assert any("wikitext word_perplexity: 12 in the record" in f for f in found)
    assert len(found) == 2


def test_scores_without_a_passed_audit_are_found(tmp_path: Path, troubled: Path) -> None:
    assert findings(troubled) == [
        "mini-softpick-hqq-2-g64: it has scores, but did not pass its audit: "
        "model.layers.0.mlp.up_proj was not quantized."
    ]
    write_cell(tmp_path, cell("softmax", "hqq-3-g64"), make_samples(10), audit=None)
    (found,) = findings(tmp_path)
    assert found == "mini-softmax-hqq-3-g64: it has no audit: that it was quantized is not proved."
