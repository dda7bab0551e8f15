"""A real model with massive activations: one scale for a whole tensor ruins it, and one per token does not."""

from pathlib import Path

import pytest
import torch

from qbench import load_checkpoint, quantize
from qbench.tokenizer import load_tokenizer

TEXTS = [Path(__file__).parents[2] / name for name in ("docs/statistics.md", "docs/attention.md")]


@pytest.mark.slow
def test_smollm2_needs_scales_per_token(smollm2: Path) -> None:
    tokenizer = load_tokenizer(str(smollm2))
    text, other = (tokenizer(file.read_text(), return_tensors="pt", verbose=False).input_ids for file in TEXTS)
    settings = {
        "full": None,
        "token": {"bits": 8},
        "tensor": {"bits": 8, "per_tensor": True},
    }
    loss = {}
    for name, own in settings.items():
        axes = {"activations": own} if own else {}
        model, _ = quantize(load_checkpoint(smollm2), "none", 16, calibration=[other[:, :1024]], **axes)
        with torch.no_grad():
            loss[name] = float(model(input_ids=text[:, :768], labels=text[:, :768], use_cache=False).loss)
    assert loss["token"] - loss["full"] < 0.1
    assert loss["tensor"] - loss["full"] > 5 * (loss["token"] - loss["full"])
    assert loss["tensor"] - loss["full"] > 0.3
