"""The table of attentions is consistent, and matches the documentation."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import softpick

from qbench.attention.kinds import ATTENTIONS, NORMALIZERS, SIZE_NAMES, Attention, AttentionError
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
        (row,) = [
            line for line in page.splitlines() if line.startswith(f"| `{kind.name}` | ") and "transformer" in line
        ]
        assert all(f"`{value}`" in row for value in (*kind.attn_impl, kind.model_type, *kind.extra_tensors))
        assert all(f"`{value}`" in page for value in kind.attn_implementation)


def test_the_documentation_has_the_sizes_that_shapes_may_name() -> None:
    page = (ROOT / "docs" / "attention.md").read_text()
    (item,) = [part for part in page.split("\n- ") if part.startswith("`extra_tensors`")]
    assert all(f"`{name}`" in item for name in SIZE_NAMES)


def test_the_normalizers_are_those_of_the_kernels() -> None:
    assert set(NORMALIZERS) == set(softpick.NORMALIZERS)


@pytest.mark.parametrize(
    ("declared", "facts"),
    [
        ({"normalizer": "softpik"}, ["normalizer is 'softpik'", "sink_softmax", "Did you mean softpick?"]),
        ({"normalizer": "softmax", "scaled": True}, ["scaled", "'s'", "num_attention_heads"]),
        ({"function": "m:f", "scaled": True}, ["scaled", "'s'"]),
        ({"normalizer": "softmax", "extra_tensors": {"sinks": ("num_attention_heads",)}}, ["sinks", "sink_softmax"]),
        ({"normalizer": "softmax", "extra_tensors": {"s": ("num_attention_heads", 1)}}, ["'s'", "scaled=True"]),
        (
            {"normalizer": "softmax", "scaled": True, "extra_tensors": {"s": ("num_attention_heads",)}},
            ["extra_tensors['s'] is ('num_attention_heads',)", "('num_attention_heads', 1)"],
        ),
        ({"function": "m:f", "extra_tensors": {"a": ("num_heads",)}}, ["'num_heads'", "num_attention_heads"]),
        ({"function": "m:f", "extra_tensors": {"a": ("num_attention_head",)}}, ["Did you mean num_attention_heads?"]),
        ({"function": "m:f", "extra_tensors": {"a": ("attention_bias",)}}, ["'attention_bias'", "head_dim"]),
        ({"function": "m:f", "extra_tensors": {"a": "head_dim"}}, ["extra_tensors['a'] is 'head_dim'", "tuple"]),
        ({"function": "m:f", "extra_tensors": {"a": (0,)}}, ["(0,)", "positive integer"]),
        (
            {"function": "m:f", "extra_tensors": {"leak": ("head_dim",)}, "initial": {"leek": 1.0}},
            ["initial", "'leek'", "Did you mean leak?"],
        ),
    ],
)
def test_a_wrong_declaration_is_a_sentence(declared: dict, facts: list[str]) -> None:
    with pytest.raises(AttentionError) as caught:
        Attention(name="mine", title="Mine", **declared)
    assert all(fact in str(caught.value) for fact in ["'mine'", *facts]), caught.value


def test_it_imports_no_torch() -> None:
    code = "import qbench.attention.kinds, sys; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
