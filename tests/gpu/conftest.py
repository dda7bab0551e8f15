"""The simulated device, and tiny checkpoints of every kind of attention for it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import softpick.cpu
import softpick.triton_op  # noqa: F401 (registers the op)
import torch
from transformers import LlamaConfig, PreTrainedTokenizerFast

from qbench import save_checkpoint
from qbench.attention.kinds import attentions
from qbench.attention.register import build_model, set_attention
from qbench.quantizers.options import quantizers

from ..evaluate.conftest import texts, tokenizer
from . import device
from .device import PretendedCuda, pretend

__all__ = ["texts", "tokenizer"]


@pytest.fixture(scope="session")
def ready(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Preparation before the device is simulated: libraries choose kernels for the device at import."""
    os.environ["GPTQMODEL_DISABLE_GPTQ_CUDA"] = "1"  # its CUDA extension cannot be simulated
    for method in quantizers().values():
        method.preload()
    shared = tmp_path_factory.getbasetemp()
    device.register_guard(shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared)
    device.REPLACED[torch.ops.softpick.triton_attention.default] = torch.ops.softpick.cpu_attention.default


@pytest.fixture
def cuda(ready: None) -> Iterator[PretendedCuda]:
    """A simulated GPU with 80 GiB."""
    with pretend() as pretended:
        yield pretended


@pytest.fixture(scope="session")
def folders(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Returns a folder with a tiny checkpoint of this kind and number of layers, and the tokenizer."""
    made: dict[tuple[str, int], Path] = {}

    def folder(kind: str, layers: int = 1) -> Path:
        if (kind, layers) not in made:
            made[kind, layers] = tmp_path_factory.mktemp(kind)
            _write(made[kind, layers], kind, layers, tokenizer)
        return made[kind, layers]

    return folder


def _write(folder: Path, kind: str, layers: int, tokenizer: PreTrainedTokenizerFast) -> None:
    config = LlamaConfig(
        vocab_size=2048,  # a multiple of 32, for GPTQ of lm_head
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    set_attention(config, attentions()[kind])
    torch.manual_seed(0)
    model = build_model(config)
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and "self_attn.s" not in name:
            torch.nn.init.normal_(weight, std=0.15)
    save_checkpoint(model, folder, tokenizer)
