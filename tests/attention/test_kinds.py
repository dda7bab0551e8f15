"""The table of attentions is consistent, and the documentation shows it as it is."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from qbench.attention.kinds import ATTENTIONS
from qbench.attention.register import attention_function

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("field", ["attn_impl", "attn_implementation"])
def test_a_config_value_means_one_kind(field: str) -> None:
    values = Counter(value for kind in ATTENTIONS.values() for value in getattr(kind, field))
    assert [value for value, count in values.items() if count > 1] == []


def test_only_softmax_runs_as_transformers_own() -> None:
    assert next(iter(ATTENTIONS)) == "softmax"
    for name, kind in ATTENTIONS.items():
        assert kind.name == name
        if name == "softmax":
            assert (kind.runs_as, kind.architecture) == ("sdpa", "LlamaForCausalLM")
        else:
            assert kind.runs_as == name
            assert kind.architecture != "LlamaForCausalLM"
            assert callable(attention_function(kind))


def test_the_documentation_has_every_kind_with_its_values() -> None:
    page = (ROOT / "docs" / "attention.md").read_text()
    for kind in ATTENTIONS.values():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{kind.name}` |")]
        assert all(f"`{value}`" in row for value in (*kind.attn_impl, kind.model_type, *kind.extra_tensors))
        assert all(f"`{value}`" in page for value in kind.attn_implementation)


def test_it_imports_no_torch() -> None:
    code = "import qbench.attention.kinds, sys; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
