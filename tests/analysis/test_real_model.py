"""SmolLM2-135M, a real softmax model with sinks and massive activations, compared with `output_attentions=True`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_smollm2_compared_with_output_attentions(smollm2: Path, tmp_path: Path) -> None:
    # The texts are our documentation: sinks and massive activations need real English.
    texts = [file.read_text() for file in sorted((ROOT / "docs").glob("*.md"))]
    pages = [page for text in texts for page in (text[:3000], text[3000:6000]) if len(page) > 1500]
    (tmp_path / "pages.jsonl").write_text("".join(json.dumps({"page": page}) + "\n" for page in pages))
    options = ["--texts", tmp_path / "pages.jsonl", "--samples", str(min(len(pages), 20)), "--length", "256"]
    command = [sys.executable, ROOT / "benchmarks/analysis.py", "--model", smollm2, *options, "--way"]
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
