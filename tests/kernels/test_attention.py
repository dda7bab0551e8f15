"""The public function: each wrong call is an error that names the argument and what would be right."""

import os
import subprocess
import sys

import pytest
import torch
from softpick import softpick_attention
from softpick.attention import choose_backend


def tensors(q=(2, 4, 5, 32), k=(2, 2, 8, 32), v=None, dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype) for shape in (q, k, v or k)]


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (tensors(q=(2, 4, 32)), {}, ["q ", "[2, 4, 32]", "[batch, heads, length, dim]"]),
        (tensors(v=(2, 2, 7, 32)), {}, ["k ", "[2, 2, 8, 32]", "v", "[2, 2, 7, 32]"]),
        (tensors(q=(3, 4, 5, 32)), {}, ["batch 3", "k 2"]),
        (tensors(q=(2, 4, 5, 64)), {}, ["head dim 64", "k 32"]),
        (tensors(q=(2, 3, 5, 32)), {}, ["3 heads", "2", "divide"]),
        (tensors(q=(2, 0, 5, 32)), {}, ["0 heads", "above 0"]),
        (tensors(q=(2, 4, 9, 32)), {}, ["q_len", "9", "k_len", "8", "at most"]),
        (tensors(dtype=torch.int32), {}, ["q is torch.int32", "float32"]),
        ([tensors()[0].half(), *tensors()[1:]], {}, ["k is torch.float32", "q is torch.float16"]),
        (tensors(), {"key_mask": torch.ones(2, 5, dtype=torch.bool)}, ["key_mask", "[2, 5]", "[2, 8]"]),
        (tensors(), {"key_mask": torch.ones(2, 8)}, ["key_mask", "float32", "bool"]),
        (tensors(), {"scale": -1}, ["scale is -1", "positive"]),
        (tensors(), {"scale": float("nan")}, ["scale is nan", "finite"]),
        (tensors(), {"eps": 0}, ["eps is 0", "1e-6"]),
        (tensors(), {"backend": "cuda"}, ["backend is 'cuda'", "triton, cpu, reference"]),
        (tensors(dtype=torch.float64), {"backend": "triton"}, ["float64", "backend='reference'"]),
        (tensors(q=(1, 1, 1, 512), k=(1, 1, 1, 512)), {"backend": "triton"}, ["256", "512"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and isinstance(value[0], str) else "",
)
def test_a_wrong_call_is_explained(arguments, options, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are what is tested)
        softpick_attention(*arguments, **options)
    for word in words:
        assert word in str(error.value)


def test_the_triton_backend_without_a_gpu_or_the_interpreter_says_what_to_do():
    code = """
import torch
from softpick import softpick_attention
q = torch.zeros(1, 1, 1, 32)
try:
    softpick_attention(q, q, q, backend="triton")
except ValueError as error:
    print(error)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "cpu" in run.stdout, run.stderr
    assert "backend='cpu'" in run.stdout
    assert "TRITON_INTERPRET=1" in run.stdout


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
def test_defaults_and_options_reach_the_backend(backend):
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 20, 32, generator=generator).to(device) for _ in range(3))
    key_mask = torch.ones(20, 2, dtype=torch.bool, device=device)
    key_mask[:4, 0] = False
    key_mask = key_mask.T  # [batch, k_len], with a stride along the keys
    seen = torch.ones(20, 20, device=device).tril().bool() & key_mask[:, None, None, :]
    x = torch.where(seen, q.double() @ k.double().mT / 32**0.5, 0)  # the default scale is 1/sqrt(dim)
    for eps in (1e-6, 0.1):
        m = x.amax(-1, keepdim=True).clamp_min(0)
        y = torch.where(seen, torch.exp(x - m) - torch.exp(-m), 0)
        wanted = y.relu() / (y.abs().sum(-1, keepdim=True) + eps) @ v.double()
        actual = softpick_attention(q, k, v, key_mask=key_mask, eps=eps, backend=backend)
        assert (actual - wanted).abs().max() <= 5e-6


def test_the_backend_follows_the_device():
    assert choose_backend(torch.zeros(1)) == "cpu"
    assert choose_backend(torch.zeros(1, device="meta")) == "reference"
    with pytest.raises(ValueError, match=r"'cpu'.*meta"):
        choose_backend(torch.zeros(1, device="meta"), "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_cuda_the_backend_is_triton():
    assert choose_backend(torch.zeros(1, device="cuda")) == "triton"
    assert choose_backend(torch.zeros(1, device="cuda", dtype=torch.float64)) == "reference"
    assert choose_backend(torch.zeros(512, device="cuda")) == "reference"
