"""Cells on the simulated device: every value of each axis and every method × dtype; slow tests: all combinations."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from qbench import Scorer, load_checkpoint, quantize, save_quantized
from qbench.attention.kinds import attentions
from qbench.quantizers.hqq import HqqOptions
from qbench.quantizers.hqq.layer import HqqLinear
from qbench.quantizers.options import quantizers
from qbench.quantizers.packed import packed_form
from qbench.tokenizer import load_tokenizer

from .cells import PAIRS, calibration, instances, run
from .device import CUDA, PretendedCuda, pretend

DTYPES = (torch.bfloat16, torch.float16)
EXECUTIONS = ("dense", "packed")
WIDTHS = [(name, bits) for name, method in quantizers().items() for bits in method.widths]
Case = tuple[str, tuple[str, int], torch.dtype, str]
ALL: list[Case] = list(product(attentions(), WIDTHS, DTYPES, EXECUTIONS))


def chosen() -> list[Case]:
    """Every width, attention and execution, and every method in each dtype, in as few cells as possible."""
    kinds, cases = list(attentions()), []
    for n, (method, bits) in enumerate(WIDTHS):  # attentions alternate, and so do executions within a method
        place = list(quantizers()[method].widths).index(bits)
        cases.append((kinds[n % len(kinds)], (method, bits), DTYPES[0], EXECUTIONS[place % 2]))
    for n, (method, declared) in enumerate(quantizers().items()):
        cases.append((("softpick", "softmax")[n % 2], (method, max(declared.widths)), DTYPES[1], EXECUTIONS[1]))
    return cases


def marked() -> list:
    """All cases; those not chosen are marked slow."""
    few = chosen()
    return [pytest.param(*case, id=_name(case), marks=() if case in few else pytest.mark.slow) for case in ALL]


def _name(case: Case) -> str:
    kind, (method, bits), dtype, execution = case
    return f"{kind}-{method}-{bits}-{str(dtype).removeprefix('torch.')}-{execution}"


def test_the_chosen_cases_have_every_value_of_each_axis() -> None:
    cases = chosen()
    for axis in range(4):
        assert {case[axis] for case in cases} == {case[axis] for case in ALL}
    assert {(method, dtype) for _, (method, _), dtype, _ in cases} == set(product(quantizers(), DTYPES))
    assert {(method, execution) for _, (method, _), _, execution in cases} == set(product(quantizers(), EXECUTIONS))


@pytest.mark.parametrize(("kind", "width", "dtype", "execution"), marked())
def test_a_cell_runs_and_is_saved_where_it_should_in_the_dtype_it_should(
    cuda: PretendedCuda,
    folders: Callable[[str, int], Path],
    kind: str,
    width: tuple[str, int],
    dtype: torch.dtype,
    execution: str,
    tmp_path: Path,
) -> None:
    method, bits = width
    cell = run(cuda, folders(kind, 1), method, bits, dtype, execution)
    tensors = {**cell.model.state_dict(), **dict(cell.model.named_buffers())}
    away = {name for name, tensor in tensors.items() if tensor.device != CUDA}
    assert {name for name in away if "quant_state" not in name and "weight_format" not in name} <= metadata(cell.model)
    assert {p.dtype for p in cell.model.parameters()} == {dtype}
    assert cell.audit.dtype == str(dtype).removeprefix("torch.")
    assert cell.audit.execution == {"none": "none"}.get(method, "packed" if (method, bits) == ("bnb", 8) else execution)
    scores = torch.tensor([s if isinstance(s, float) else s[0] for s in cell.scores])
    assert (scores.isfinite() & (scores < 0)).all()
    if method != "none":
        save_quantized(cell.model, tmp_path, cell.lm.tokenizer)
        again = load_checkpoint(tmp_path, device="cuda", dtype=dtype)
        assert packed_form(again).quantization == packed_form(cell.model).quantization
        ids = torch.arange(1, 20, device="cuda")[None]
        logits = cell.model(ids).logits.float()
        assert float((again(ids).logits - logits).norm() / logits.norm()) < 0.03


def metadata(model: torch.nn.Module) -> set[str]:
    """What packed layers save besides their tensors: settings that are encoded on the CPU on demand."""
    form = packed_form(model)
    layers = form.layers if form else {}
    return {
        f"{name}.{key}" for name, layer in layers.items() for key in layer.state_dict() if key not in layer._buffers
    }


@pytest.mark.parametrize(
    ("kind", "method", "bits"), [("softmax", "none", 16), ("softpick", "hqq", 4), ("gated", "bnb", 8)]
)
def test_scores_are_those_of_the_cpu_in_the_same_dtype(
    ready: None, folders: Callable[[str, int], Path], kind: str, method: str, bits: int
) -> None:
    with torch.no_grad():
        wanted = run(None, folders(kind, 1), method, bits)
    with pretend() as device:
        found = run(device, folders(kind, 1), method, bits)
    values = [torch.tensor([s if isinstance(s, float) else s[0] for s in cell.scores]) for cell in (found, wanted)]
    torch.testing.assert_close(*values, rtol=2e-2, atol=2e-2)  # the CPU's bfloat16 kernels sum in another order
    assert found.audit.kl == pytest.approx(wanted.audit.kl, rel=0.05, abs=1e-6)


@pytest.mark.parametrize("bits", [8, 3])
def test_hqqs_solver_finds_the_same_on_both_devices(ready: None, bits: int) -> None:
    """The library's solver uses float16 on CUDA, which changes 6% of mini's 8-bit codes."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()

    def solved(device: str) -> dict[str, torch.Tensor]:
        linear = torch.nn.Linear(128, 64, bias=False)
        linear.weight = torch.nn.Parameter(weight.to(device), requires_grad=False)
        return {name: t.cpu() for name, t in HqqLinear.from_linear(linear, bits, HqqOptions()).named_buffers()}

    here = solved("cpu")
    with pretend():
        there = solved("cuda")
    for name, tensor in here.items():
        assert torch.equal(tensor, there[name]), name


def test_heads_are_masked_on_the_device(cuda: PretendedCuda, folders: Callable[[str, int], Path]) -> None:
    model = load_checkpoint(folders("softpick", 1), device="cuda", dtype=torch.bfloat16)
    samples = calibration(model.config.vocab_size)
    model, audit = quantize(model, "hqq", 4, calibration=samples, group_size=32, mask_heads={"epsilon": 100.0})
    (part,) = audit.parts
    assert "4 of 4 heads are dead" in part.details[0]
    assert model(torch.arange(1, 20, device="cuda")[None]).logits.device == CUDA


@pytest.mark.parametrize("kind", ["softmax", "softpick"])
def test_few_bits_are_rounded_on_the_device(
    cuda: PretendedCuda, folders: Callable[[str, int], Path], kind: str
) -> None:
    model = load_checkpoint(folders(kind, 1), device="cuda", dtype=torch.bfloat16)
    samples = calibration(model.config.vocab_size)
    few = {"activations": {"per_tensor": True, "percentile": 99.9}, "kv_cache": {"group_size": 8, "channels": 8}}
    model, audit = quantize(model, "rtn", 4, format="nvfp4", calibration=samples, **few)
    assert audit.label == "rtn-4-nvfp4-a8-tensor-p99.9-kv4-g8-c8"
    lm = Scorer(model, load_tokenizer(folders(kind, 1)), batch_tokens=512)
    assert all(score[0] < 0 for score in lm.loglikelihood(instances(PAIRS)))  # some contexts are padded


def test_a_calibrated_model_of_two_layers_and_its_head(
    cuda: PretendedCuda, folders: Callable[[str, int], Path]
) -> None:
    model = load_checkpoint(folders("softpick", 2), device="cuda", dtype=torch.bfloat16)
    samples = calibration(model.config.vocab_size)
    options = {"group_size": 64, "act_order": True, "sym": False, "include_lm_head": True}
    model, audit = quantize(model, "gptq", 4, calibration=samples, **options)
    assert len(audit.layers) == 2 * 7 + 1
    assert {p.device for p in model.parameters()} == {CUDA}


@pytest.mark.parametrize("kind", ["softmax", "softpick"])
def test_generation(cuda: PretendedCuda, folders: Callable[[str, int], Path], kind: str) -> None:
    cell = run(cuda, folders(kind, 1))
    settings = {"until": [], "max_gen_toks": 4, "do_sample": False}
    texts = ["The river ran", "Question: which animal eats only plants?"]
    cuda.syncs.clear()
    answers = cell.lm.generate_until(instances([(text, settings) for text in texts], "generate_until"))
    assert all(isinstance(answer, str) and answer for answer in answers)
    # HF's loop checks after each token whether all rows are done: waits grow with tokens, not with rows.
    assert cuda.syncs.total() <= 12 * 4 + 20, cuda.syncs
