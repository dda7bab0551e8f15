"""Passkey and masked heads through a real run: records, samples, tables, and nothing computed twice."""

from collections.abc import Callable
from pathlib import Path

from qbench.records.store import read_results
from qbench.report.render import table

from ..example_records import stored_samples
from .driver import run_here


def test_a_run_with_passkey_and_masked_heads(change: Callable[..., Path], tmp_path: Path) -> None:
    recipe = change(
        quantizations=[
            {"method": "none"},
            {"method": "none", "mask_heads": {"epsilon": 1e9}},  # all heads are dead below that
            {"method": "hqq", "bits": 4, "options": {"group_size": 32}, "mask_heads": {"epsilon": 1e-9}},
        ],
        tasks={"arc_easy": {}, "passkey": {"lengths": [160, 200], "trials": 5}},
        data={"arc_easy": "arc_easy.jsonl"},
    )
    out = tmp_path / "out"
    code, _ = run_here(recipe, out)
    assert code == 0
    found = {stored.record.cell.name: stored for stored in read_results(out).current}
    assert len(found) == 6
    for stored in found.values():
        by_task = stored_samples(stored).groupby("task")
        assert {task: len(rows) for task, rows in by_task} == {"arc_easy": 6, "passkey_160": 5, "passkey_200": 5}
        passkey = by_task.get_group("passkey_200")
        assert passkey["response"].notna().all()
        assert passkey["target"].str.isdecimal().all()
        metrics = {(m.task, m.metric): m for m in stored.record.metrics}
        assert metrics["passkey_200", "acc"].value == passkey["acc"].mean()
        assert stored.record.cost is not None
        assert (stored.record.cost.tokens or 0) > 5 * (160 + 200) - 30
    masked, quantized = (found[f"tiny-softmax-{label}"].record for label in LABELS)
    assert masked.audit is not None
    assert quantized.audit is not None
    assert masked.audit.parts[0].details[1:] == ("layer 0: heads 0, 1, 2, 3", "layer 1: heads 0, 1, 2, 3")
    assert (masked.audit.kl or 0) > 0
    assert quantized.audit.parts[0].details[1:] == ()
    assert masked.quantizer is not None
    assert masked.quantizer.calibrated

    csv = table(out, "csv", "damage")
    assert all(f",{label}," in csv for label in LABELS)
    assert "passkey_200" in csv
    assert "Tokens 160" in table(out, "md", "passkey")
    before = {file: file.stat().st_mtime_ns for file in out.glob("*/record.json")}
    assert run_here(recipe, out)[0] == 0
    assert {file: file.stat().st_mtime_ns for file in out.glob("*/record.json")} == before


LABELS = ("none-16-mask1000000000.0", "hqq-4-g32-mask1e-09")
