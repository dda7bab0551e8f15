"""Low-bit activations and KV cache through a real run: records, audits, tables, plots, and what is refused."""

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qbench.records.store import read_results
from qbench.report.audits import audit_table
from qbench.report.delta import read_report
from qbench.report.looks import PAGE
from qbench.report.lowbit_plots import low_bit_figures
from qbench.report.plots import figures
from qbench.report.render import table
from qbench.report.results import ReportError

from .driver import run_here

KV = {"group_size": 8, "channels": 16}
CELLS: list[dict[str, Any]] = [
    {"method": "none"},
    {"method": "rtn", "bits": 8, "activations": {"bits": 8, "per_tensor": True}},
    {"method": "rtn", "bits": 8, "activations": {"bits": 8}},
    {"method": "none", "kv_cache": {"bits": 2, **KV}},
    {"method": "none", "kv_cache": {"bits": 2, **KV, "group_size": 120}},  # longer than any text
]
LABELS = ("rtn-8-a8-tensor", "rtn-8-a8", "none-16-kv2-g8-c16")


@pytest.fixture
def out(change: Callable[..., Path], tmp_path: Path) -> Path:
    recipe = change(
        quantizations=CELLS,
        tasks=["arc_easy", "lambada_openai"],
        data={"arc_easy": "arc_easy.jsonl", "lambada_openai": "lambada_openai.jsonl"},
    )
    code, _ = run_here(recipe, tmp_path / "out")
    assert code == 1  # the window that is longer than the texts
    return tmp_path / "out"


def test_a_run_with_few_bits(out: Path) -> None:
    found = {stored.record.cell.name: stored.record for stored in read_results(out).current}
    failed = {record.cell.label for record in found.values() if record.state == "failed"}
    assert failed == {"none-16-kv2-g120-c16"}
    failure = found["tiny-softmax-none-16-kv2-g120-c16"].failure
    assert failure is not None
    assert failure.kind == "audit"
    assert "longer than the texts" in failure.reason

    for label in LABELS:
        audit = found[f"tiny-softpick-{label}"].audit
        assert audit is not None
        (part,) = audit.parts
        assert label.endswith(part.label)
        assert any("simulated" in detail for detail in part.details)
    pairs = found["tiny-softmax-none-16-kv2-g8-c16"].audit.parts[0].quantized_pairs
    assert 0.3 < pairs < 0.95
    what = found["tiny-softmax-rtn-8-a8-tensor"].identity.what
    assert what.parts == {"a8-tensor": {"format": "int", "bits": 8, "per_tensor": True, "percentile": 100.0}}
    assert what.calibration is not None
    assert found["tiny-softmax-rtn-8-a8"].identity.what.calibration is None

    report = read_report(out)
    text = table(out, "md", "lowbit")
    for fact in ("W8A8 per tensor", "W8A8 per token", "KV2", "− Softmax", "simulated", f"{pairs:.1%}"):
        assert fact in text
    assert "qbench analyze" in text
    rows = list(csv.DictReader(io.StringIO(table(out, "csv", "lowbit"))))
    assert {row["label"] for row in rows} >= set(LABELS)
    wanted = {"label": LABELS[2], "attention": "softpick", "metric": "perplexity"}
    (row,) = [row for row in rows if wanted.items() <= row.items()]
    assert float(row["damage"]) != 0
    assert float(row["difference"]) != 0
    assert float(row["quantized_pairs"]) == pytest.approx(pairs)
    assert f"{pairs:.1%}" in " ".join(audit_table(report.results).footnotes.values())
    ((name, figure),) = low_bit_figures(report, PAGE)
    assert name == "tiny-lowbit"
    assert {label.get_text() for label in figure.axes[0].get_yticklabels()} >= set(LABELS)
    assert not [name for name, _ in figures(report)]  # there is no quantization of weights alone to draw


def test_without_such_quantizations_a_sentence_says_so(undisturbed: tuple[Path, Any]) -> None:
    with pytest.raises(ReportError, match=r"lowbit.*W8A8 per token.*recipes/lowbit\.yaml"):
        table(undisturbed[0], "md", "lowbit")
