"""The layout, read without torch, matches transformers' model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from qbench.attention.kinds import ATTENTIONS
from qbench.checkpoint.layout import LLAMA_SIZES, config_sizes, parameter_count, tensor_shapes
from qbench.checkpoint.load import empty_model, llama_config

from .small_checkpoints import FLA, LLAMA

CONFIG = Path("config.json")


def test_a_size_that_a_config_leaves_out_is_transformers_own() -> None:
    assert {name: getattr(LlamaConfig, name) for name in LLAMA_SIZES} == LLAMA_SIZES


@pytest.mark.parametrize(
    "fields",
    [
        FLA,
        LLAMA,
        LLAMA | {"tie_word_embeddings": True, "head_dim": 32},
        LLAMA | {"attention_bias": True, "mlp_bias": True},
        {"model_type": "transformer"},
        {"model_type": "llama"},
    ],
    ids=str,
)
def test_tensors_and_shapes_are_those_of_the_model(fields: dict) -> None:
    model = empty_model(llama_config(fields, CONFIG))
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert tensor_shapes(config_sizes(fields, CONFIG), ATTENTIONS["softmax"]) == expected


@pytest.mark.parametrize(
    ("hidden", "layers", "heads", "parameters"), [(1024, 24, 16, 373_867_520), (2048, 32, 32, 1_775_372_288)]
)
def test_the_published_sizes_have_the_published_counts(
    hidden: int, layers: int, heads: int, parameters: int, tmp_path: Path
) -> None:
    fields = {"model_type": "transformer", "hidden_size": hidden, "num_hidden_layers": layers, "num_heads": heads}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert parameter_count(tmp_path / "config.json") == parameters


def test_it_imports_no_torch() -> None:
    code = "import qbench.checkpoint.layout, sys; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
