"""Doctor's checks as they run on a GPU, except gradients, for which autograd needs a device with streams."""

import pytest
import torch

from qbench.attention.kinds import attentions
from qbench.doctor.checks import cases
from qbench.quantizers.options import quantizers

from .device import PretendedCuda

FEW = {"bnb": 2, "gptq": 0, "hqq": 2, "rtn": 2}  # widths that take seconds


def widths() -> list:
    """Each quantizer's widths; those beyond the first few are slow."""
    found = []
    for method, few in FEW.items():
        for n, bits in enumerate(quantizers()[method].widths):
            found.append(pytest.param(method, n, id=f"{method}-{bits}", marks=pytest.mark.slow if n >= few else ()))
    return found


@pytest.mark.parametrize(("method", "number"), widths())
def test_quantizers(cuda: PretendedCuda, method: str, number: int) -> None:
    _, check = list(cases(method, "cuda"))[number]
    assert "bits per weight" in check()


def test_every_kind_has_a_kernel_in_each_dtype_and_a_model(cuda: PretendedCuda) -> None:
    found = dict(cases("attention", "cuda"))
    for kind in attentions().values():
        if kind.is_softmax:
            continue
        backend = "sdpa" if kind.normalizer == "softmax" else "triton"
        assert {f"{kind.name} {backend} {dtype}" for dtype in ("float32", "float16", "bfloat16")} <= found.keys()
        assert "logits within" in found[f"{kind.name} model bfloat16"]()


def test_only_the_dtype_of_a_recipe_is_tried(cuda: PretendedCuda) -> None:
    found = dict(cases("attention:softpick", "cuda", [torch.float16]))
    assert found.keys() == {"softpick triton float16", "softpick model float16"}
    assert "logits within" in found["softpick model float16"]()


def test_every_method_is_checked() -> None:
    assert FEW.keys() == quantizers().keys() - {"none"}
