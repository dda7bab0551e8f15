"""Real cells of the mini twins, broken on purpose: each is found, and the report says by whom."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RECIPE = {
    "extends": os.fspath(ROOT / "recipes" / "mini.yaml"),
    "quantizations": [{"method": "hqq", "bits": 3}],
    "tasks": ["mini_arc_easy", "mini_wikitext"],
    "data": dict.fromkeys(["mini_lambada", "mini_piqa", "mini_sciq"]),
    "limit": 60,
}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """For each sabotage, what found it (the cell's own audit, the gate's audit, the scores)."""
    folder = tmp_path_factory.mktemp("sabotage")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    command = [sys.executable, "benchmarks/sabotage.py", str(folder / "recipe.yaml"), "--only", "*softpick*"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "QBENCH_CACHE": str(folder / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in done.stdout.splitlines()]
    return {name: found for name, _, *found in rows[2:]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sabotage", "found"),
    [
        (
            "one layer left unquantized",
            ("yes: model.layers.0.self_attn.q_proj was not quantized", "it has scores, but did not pass", ""),
        ),
        ("scales of one layer off by 2%", ("no", "Weight scale changed", "no")),
        ("all scales off by 2%", ("no", "Weight scale changed", "")),
        ("two layers swapped", ("yes: model.layers.0.self_attn.q_proj", "", "yes")),
        ("two blocks swapped after the audit", ("no", "no", "yes")),
        ("softpick run as softmax", ("no", "no", "yes")),
    ],
)
def test_it_is_found(table: dict[str, list[str]], sabotage: str, found: tuple[str, ...]) -> None:
    for says, start in zip(table[sabotage], found, strict=True):
        assert says.startswith(start)
