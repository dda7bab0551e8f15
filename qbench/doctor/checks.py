"""Small real cases for `qbench doctor`: each attention kernel against the definition, each quantizer with its audit.

python -m qbench.doctor.checks GROUP DEVICE FILE    runs a group and appends a JSON line to the file as each case begins
and as it ends, so that a case that kills the process is known by its name.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from qbench.attention.kinds import ATTENTIONS, Attention
from qbench.errors import one_line
from qbench.quantizers.options import quantizer

# A name, and a function that raises if the case fails and otherwise says what was measured.
Case = tuple[str, Callable[[], str]]

# [batch, heads, kv_heads, q_len, k_len, dim], and whether the first sequence is padded on its left.
SHAPES = (((1, 4, 2, 130, 130, 64), False), ((2, 2, 1, 40, 70, 32), True))
VOCABULARY = 256
# Rounding stays far below these shares of a tensor's norm, a wrong kernel far above.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class CheckFailedError(Exception):
    """A kernel whose numbers are wrong."""


def attention_cases(device: str) -> Iterator[Case]:
    """Each kind with a function: forward and backward by each backend that models on the device use, and a model."""
    for kind in ATTENTIONS.values():
        if kind.function:
            for backend, dtype, note in _backends(device):
                name = f"{kind.name} {backend} {_name(dtype)}{note}"
                yield name, partial(check_attention, kind, backend, device, dtype)
            yield f"{kind.name} model {_name(_dtype(device))}", partial(check_model, kind, device)


def _backends(device: str) -> Iterator[tuple[str, torch.dtype, str]]:
    from softpick.attention import HAS_TRITON
    from softpick.tiles import has_tiles

    if device == "cpu":
        yield "cpu", torch.float32, ""
        if HAS_TRITON:  # float32 alone: the interpreter multiplies bfloat16 wrongly
            yield "triton", torch.float32, " (interpreter)"
    else:
        backend = "triton" if HAS_TRITON and has_tiles(torch.device(device)) else "reference"
        for dtype in TOLERANCE:
            yield backend, dtype, ""


def check_attention(kind: Attention, backend: str, device: str, dtype: torch.dtype) -> str:
    """Output and gradients beside those of the definition in float64."""
    worst = 0.0
    for shape, padded in SHAPES:
        found = _attention(kind, shape, padded, dtype, backend, device)
        wanted = _attention(kind, shape, padded, dtype, "reference", "cpu")
        for name, ours, answer in zip(("output", "dq", "dk", "dv"), found, wanted, strict=True):
            error = ((ours.cpu().double() - answer).norm() / answer.norm()).item()
            _hold(f"{name} of {list(shape)}", error, TOLERANCE[dtype])
            worst = max(worst, error)
    return f"within {worst:.0e} of the definition, gradients too"


def check_model(kind: Attention, device: str) -> str:
    """The logits of a tiny model on the device beside those on the CPU in float64."""
    ids = torch.randint(0, VOCABULARY, (2, 100), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted = _tiny_model(kind).double()(ids).logits
        found = _tiny_model(kind).to(device, _dtype(device))(ids.to(device)).logits
    error = ((found.cpu().double() - wanted).norm() / wanted.norm()).item()
    _hold("its logits", error, TOLERANCE[_dtype(device)])
    return f"logits within {error:.0e} of float64's"


def _hold(what: str, error: float, allowed: float) -> None:
    if not error <= allowed:  # NaN fails
        raise CheckFailedError(f"{what}: off by {error:.1e} of the norm; rounding explains at most {allowed:.0e}.")


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _attention(
    kind: Attention, shape: tuple[int, ...], padded: bool, dtype: torch.dtype, backend: str, device: str
) -> list[Tensor]:
    """[output, dq, dk, dv]; the reference takes the same numbers in float64."""
    from qbench.attention.register import attention_function

    batch, heads, kv_heads, q_len, k_len, dim = shape
    draw = torch.Generator().manual_seed(0)
    computed = torch.float64 if backend == "reference" else dtype

    def normal(heads: int, length: int) -> Tensor:
        drawn = torch.randn(batch, heads, length, dim, generator=draw).to(dtype)
        return drawn.to(device, computed).requires_grad_()

    q, k, v, grad = normal(heads, q_len), normal(kv_heads, k_len), normal(kv_heads, k_len), normal(heads, q_len)
    mask = None
    if padded:
        mask = torch.ones(batch, k_len, dtype=torch.bool, device=device)
        mask[0, :9] = False
    extra = {
        name: torch.randn(size, generator=draw).to(dtype).to(device, computed)
        for name, size in kind.extra_shapes(SimpleNamespace(num_attention_heads=heads, head_dim=dim)).items()
    }
    out = attention_function(kind)(q, k, v, key_mask=mask, backend=backend, **extra)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.detach())]


def quantizer_cases(method: str, device: str) -> Iterator[Case]:
    """A tiny model quantized to each width that the method has."""
    for bits in quantizer(method).widths:
        yield f"{method} {bits} bits", partial(check_quantizer, method, bits, device)


def check_quantizer(method: str, bits: int, device: str) -> str:
    """Quantize a tiny model, packed and dense: its audit raises if that did not happen."""
    from qbench.quantizers.quantize import quantize

    model = _tiny_model(ATTENTIONS["softmax"]).to(device, _dtype(device))
    calibration = torch.randint(0, VOCABULARY, (16, 64), generator=torch.Generator().manual_seed(1))
    _, audit = quantize(model, method, bits, calibration=list(calibration.split(1)))
    return f"{audit.code_bytes * 8 / audit.weights:.2f} bits per weight, KL {audit.kl:.1e}"


def _tiny_model(kind: Attention) -> Any:
    from transformers import LlamaConfig

    from qbench.attention.register import build_model, set_attention

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    set_attention(config, kind)
    torch.manual_seed(0)
    return build_model(config).eval()


def cases(group: str, device: str) -> Iterator[Case]:
    """The cases of a group: attention, or a method."""
    return attention_cases(device) if group == "attention" else quantizer_cases(group, device)


def main(group: str, device: str, file: str) -> None:
    """Run a group; what is wrong is in the file, not in the exit code."""
    with Path(file).open("a") as out:
        for name, check in cases(group, device):
            _write(out, name=name)
            start = time.perf_counter()
            try:
                detail, ok = check(), True
            except Exception as error:  # whatever kernels and libraries raise is what was asked for
                detail, ok = one_line(error), False
            _write(out, name=name, ok=ok, detail=detail, seconds=time.perf_counter() - start)


def _write(out: Any, **line: Any) -> None:
    out.write(json.dumps(line) + "\n")
    out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
