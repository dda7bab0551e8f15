"""SmolLM2-135M, a real softmax model with sinks and massive activations, beside `output_attentions=True`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_smollm2_beside_output_attentions(shared: Path, tmp_path: Path) -> None:
    tool = shared / "tools/smollm2.py"
    if not tool.exists():
        pytest.skip("needs ../shared/tools/smollm2.py, which is not here")
    subprocess.run([sys.executable, tool, tmp_path / "smollm2"], check=True)
    pages = ["--texts", shared / "data/wikitext_valid.jsonl", "--samples", "20", "--length", "256"]
    command = [sys.executable, ROOT / "benchmarks/analysis.py", "--model", tmp_path / "smollm2", *pages, "--way"]
    ours, plain = (
        json.loads(subprocess.run([*command, way], check=True, capture_output=True, text=True).stdout)
        for way in ("ours", "plain")
    )
    found, wanted = ours["figures"], plain["figures"]
    for name, value in wanted.items():
        share = name.startswith(("sink", "sparsity", "dead"))
        assert found[name] == pytest.approx(value, **({"abs": 1e-4} if share else {"rel": 1e-5})), name
    assert found["sink_rate 0.3"] > 50
    assert found["massive sun"] > 1
