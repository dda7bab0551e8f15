"""The tiny trained model, and what it becomes when it is quantized; made once, so tests must not write into it."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from qbench.quantizers.quantize import quantize
from qbench.records.audit import Audit

from . import tiny


@pytest.fixture
def model() -> LlamaForCausalLM:
    """A fresh copy of a trained tiny model."""
    return tiny.trained_model().requires_grad_(False)


@pytest.fixture
def untrained() -> LlamaForCausalLM:
    """A fresh smaller model, two layers with random weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny.config(num_hidden_layers=2)).eval().requires_grad_(False)


@pytest.fixture(scope="session")
def probe() -> Tensor:
    """Sentences that the trained model has not seen."""
    return tiny.held_out_ids(8, 48)


@pytest.fixture(scope="session")
def calibration() -> list[Tensor]:
    """Calibration samples of the same language, [1, length] each."""
    return tiny.calibration_ids(16, 48)


@pytest.fixture(scope="session")
def quantized(probe: Tensor, calibration: list[Tensor]) -> Callable[..., tuple[LlamaForCausalLM, Audit]]:
    """The trained model quantized as asked, with its audit; for reading only."""

    @functools.cache
    def make(method: str, bits: int, **options: object) -> tuple[LlamaForCausalLM, Audit]:
        model = tiny.trained_model().requires_grad_(False)
        return quantize(model, method, bits, calibration=calibration, probe=probe, **options)

    return make


@torch.no_grad()
def logits(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits
