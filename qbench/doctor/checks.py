"""Small real cases for `qbench doctor`: compares attention kernels with the reference code, and audits quantizers.

python -m qbench.doctor.checks GROUP DEVICE FILE [DTYPE]    runs a group, and appends a JSON line to the file when a
case starts and when it ends: if a case kills the process, its name is in the file. A group is `attention`, a method or
`timings`; `attention:softpick` and `hqq:3,4` are parts of groups. Without a dtype, those in DTYPES are tried.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qbench.attention.kinds import Attention, Sizes, attentions
from qbench.doctor.timings import timing_cases
from qbench.errors import one_line
from qbench.quantizers.options import quantizer

# A name, and a function that returns what was measured, or raises if the case fails.
Case = tuple[str, Callable[[], str]]

# [batch, heads, kv_heads, q_len, k_len, dim], and whether the first sequence is padded on the left.
SHAPES = (((1, 4, 2, 130, 130, 64), False), ((2, 2, 1, 40, 70, 32), True))
VOCABULARY = 256
# As a share of a tensor's norm: rounding errors are far below, a wrong kernel is far above.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# The dtypes of models on each device, the usual one last. Triton's interpreter multiplies bfloat16 incorrectly.
DTYPES = {"cpu": (torch.float32,), "cuda": (torch.float32, torch.float16, torch.bfloat16)}
Dtypes = Sequence[torch.dtype]


class CheckFailedError(Exception):
    """A kernel computes wrong numbers."""


def attention_cases(device: str, chosen: Sequence[str] = (), dtypes: Dtypes = ()) -> Iterator[Case]:
    """For each kind except softmax: a model, and forward and backward on each backend that models on the device use."""
    dtypes = dtypes or DTYPES[device]
    for kind in attentions().values():
        if not kind.is_softmax and kind.name in (chosen or attentions()):
            for backend, dtype, note in _backends(kind, device, dtypes):
                name = f"{kind.name} {backend} {_name(dtype)}{note}"
                yield name, partial(check_attention, kind, backend, device, dtype)
            yield f"{kind.name} model {_name(dtypes[-1])}", partial(check_model, kind, device, dtypes[-1])


def _backends(kind: Attention, device: str, dtypes: Dtypes) -> Iterator[tuple[str, torch.dtype, str]]:
    if kind.normalizer is None:
        yield "function", dtypes[-1], ""
        return
    from softpick.attention import HAS_TRITON, choose_backend

    for dtype in dtypes:
        q = torch.empty(1, 1, 1, 64, device=device, dtype=dtype)
        yield choose_backend(q, None, kind.normalizer), dtype, ""
    if device == "cpu" and HAS_TRITON and not (kind.scaled or kind.gated):  # these use another kind's kernel
        try:
            yield choose_backend(q, "triton", kind.normalizer), dtype, " (interpreter)"
        except ValueError:
            return  # this kind has no kernel, or this process has no interpreter


def check_attention(kind: Attention, backend: str, device: str, dtype: torch.dtype) -> str:
    """Compare output and gradients with the reference code's in float64."""
    worst = 0.0
    for shape, padded in SHAPES:
        found = _attention(kind, shape, padded, dtype, dtype, backend, device)
        wanted = _attention(kind, shape, padded, dtype, torch.float64, "reference", "cpu")
        for name, answer in wanted.items():
            error = ((found[name].cpu().double() - answer).norm() / answer.norm()).item()
            _check_error(f"{name} of {list(shape)}", error, TOLERANCE[dtype])
            worst = max(worst, error)
    measured = f"within {worst:.0e} of the float64 reference, including gradients"
    return f"{measured}; it has no kernel and is slow" if kind.function else measured


def check_model(kind: Attention, device: str, dtype: torch.dtype) -> str:
    """Compare the logits of a tiny model on the device with those on the CPU in float64."""
    ids = torch.randint(0, VOCABULARY, (2, 100), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted = _tiny_model(kind).double()(ids).logits
        found = _tiny_model(kind).to(device, dtype)(ids.to(device)).logits
    error = ((found.cpu().double() - wanted).norm() / wanted.norm()).item()
    _check_error("logits", error, TOLERANCE[dtype])
    return f"logits within {error:.0e} of float64"


def _check_error(what: str, error: float, allowed: float) -> None:
    if not error <= allowed:  # NaN fails
        raise CheckFailedError(f"{what}: off by {error:.1e} of the norm; rounding explains at most {allowed:.0e}.")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _attention(
    kind: Attention,
    shape: tuple[int, ...],
    padded: bool,
    drawn: torch.dtype,
    computed: torch.dtype,
    backend: str,
    device: str,
) -> dict[str, Tensor]:
    """The output, and the gradients of all inputs including extra tensors."""
    from qbench.attention.register import attention_function

    batch, heads, kv_heads, q_len, k_len, dim = shape
    draw = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=draw).to(drawn).to(device, computed).requires_grad_()

    q, k, v = (normal(batch, n, length, dim) for n, length in ((heads, q_len), (kv_heads, k_len), (kv_heads, k_len)))
    grad = normal(batch, heads, q_len, dim).detach()
    mask = None
    if padded:
        mask = torch.ones(batch, k_len, dtype=torch.bool, device=device)
        mask[0, :9] = False
    extra = {name: normal(*size) for name, size in kind.extra_shapes(_sizes(heads, kv_heads, dim, k_len)).items()}
    options = {} if kind.function else {"backend": backend}
    out = attention_function(kind)(q, k, v, scale=dim**-0.5, causal=True, key_mask=mask, **options, **extra)
    inputs = {"q": q, "k": k, "v": v} | extra
    gradients = torch.autograd.grad(out, list(inputs.values()), grad)
    return {"output": out.detach()} | {f"d{name}": found for name, found in zip(inputs, gradients, strict=True)}


def _sizes(heads: int, kv_heads: int, dim: int, length: int) -> Sizes:
    """The sizes of a model with this attention."""
    return Sizes(
        vocab_size=VOCABULARY,
        hidden_size=heads * dim,
        intermediate_size=2 * heads * dim,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        max_position_embeddings=length,
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
    )


def quantizer_cases(method: str, device: str, chosen: Sequence[str] = (), dtypes: Dtypes = ()) -> Iterator[Case]:
    """A tiny model quantized to each of the method's widths."""
    dtypes = dtypes or DTYPES[device]
    for bits in map(int, chosen or quantizer(method).widths):
        yield f"{method} {bits} bits", partial(check_quantizer, method, bits, device, dtypes[-1])


def check_quantizer(method: str, bits: int, device: str, dtype: torch.dtype) -> str:
    """Quantize a tiny model, packed and dense; the audit raises if it was not quantized."""
    from qbench.quantizers.quantize import quantize

    model = _tiny_model(attentions()["softmax"]).to(device, dtype)
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
        initializer_range=0.1,  # scores of order 1: closer to 0, rectified attention loses its digits in bfloat16
    )
    set_attention(config, kind)
    torch.manual_seed(0)
    return build_model(config).eval()


def cases(group: str, device: str, dtypes: Dtypes = ()) -> Iterator[Case]:
    """The cases of a group: attention, a method, or timings."""
    name, _, part = group.partition(":")
    chosen = part.split(",") if part else ()
    if name == "timings":
        return timing_cases(device)
    if name == "attention":
        return attention_cases(device, chosen, dtypes)
    return quantizer_cases(name, device, chosen, dtypes)


def main(group: str, device: str, file: str, dtype: str = "") -> None:
    """Run a group; failures are in the file, not in the exit code."""
    with Path(file).open("a") as out:
        for name, check in cases(group, device, [getattr(torch, dtype)] if dtype else ()):
            _write(out, name=name)
            start, trace = time.perf_counter(), ""
            try:
                detail, ok = check(), True
            except Exception as error:  # whatever kernels and libraries raise is a result
                detail, ok, trace = one_line(error), False, traceback.format_exc()
            _write(out, name=name, ok=ok, detail=detail, traceback=trace, seconds=time.perf_counter() - start)


def _write(out: Any, **line: Any) -> None:
    out.write(json.dumps(line) + "\n")
    out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
