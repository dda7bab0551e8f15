"""Our bitsandbytes layers compared with the library's."""

import copy

import bitsandbytes as bnb
import pytest
import torch
from torch import nn

from qbench.quantizers.bnb import KERNELS, QUANTIZER, Bnb4Options, Bnb8Options
from qbench.quantizers.bnb.layers import Bnb4Linear, Bnb8Linear
from qbench.quantizers.declaration import QuantizeError
from qbench.quantizers.quantize import quantize

FOUR_BITS = [(kind, double) for kind in ("nf4", "fp4") for double in (False, True)]


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(128, 96).requires_grad_(False)


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(1)
    x = torch.randn(2, 20, 128)
    x[0, 3, 7] = 9.0  # an outlier, above LLM.int8's threshold
    return x


def library_4bit(linear: nn.Linear, kind: str, double: bool) -> bnb.nn.Linear4bit:
    layer = bnb.nn.Linear4bit(128, 96, compute_dtype=torch.float32, compress_statistics=double, quant_type=kind)
    layer.load_state_dict(linear.state_dict())
    return layer.to("cpu").eval()


def library_8bit(linear: nn.Linear, threshold: float) -> bnb.nn.Linear8bitLt:
    layer = bnb.nn.Linear8bitLt(128, 96, has_fp16_weights=False, threshold=threshold)
    layer.load_state_dict(linear.state_dict())
    return layer.to("cpu").eval()


@pytest.mark.parametrize(("kind", "double"), FOUR_BITS)
def test_four_bits_are_the_librarys(linear, x, kind, double):
    ours = Bnb4Linear.from_linear(linear, 4, Bnb4Options(quant_type=kind, double_quant=double))
    theirs = library_4bit(linear, kind, double)
    weight = bnb.functional.dequantize_4bit(theirs.weight.data, theirs.weight.quant_state)
    assert torch.equal(ours.dequantize(), weight)
    theirs.train()  # otherwise it multiplies in bfloat16 on CPUs that support it
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    assert ours.state_dict().keys() == theirs.state_dict().keys()


@pytest.mark.parametrize("shape", [(48, 32), (5, 36), (33, 96), (7, 10)])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_block_that_runs_over_the_end_of_a_row_keeps_its_scale(shape, kind):
    """The library's call gets this wrong on CPUs with AVX-512."""
    torch.manual_seed(0)
    rows, columns = shape
    linear = nn.Linear(columns, rows).requires_grad_(False)
    layer = Bnb4Linear.from_linear(linear, 4, Bnb4Options(quant_type=kind))
    packed = layer.weight.flatten().long()
    levels = layer.quant_state.code[torch.stack([packed >> 4, packed & 15], 1).flatten()[: rows * columns]]
    scales = layer.quant_state.absmax.repeat_interleave(64)[: rows * columns]
    expected = (levels * scales).view(rows, columns)
    assert torch.equal(layer.dequantize(), expected)
    x = torch.randn(3, columns)
    torch.testing.assert_close(layer(x), x @ expected.T + linear.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kind", "double"), FOUR_BITS)
def test_the_librarys_four_bit_kernel_leaves_the_packed_weight_alone(linear, x, kind, double, dtype, monkeypatch):
    layer = Bnb4Linear.from_linear(linear.to(dtype), 4, Bnb4Options(quant_type=kind, double_quant=double))
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    monkeypatch.setattr(layer, "dequantize", None)  # the kernel does not use it
    out = layer(x.to(dtype))
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
    weight = bnb.functional.dequantize_4bit(layer.weight, layer.quant_state)
    torch.testing.assert_close(out, nn.functional.linear(x.to(dtype), weight, layer.bias))


@pytest.mark.parametrize("threshold", [6.0, 0.0, 2.0])
def test_eight_bits_are_the_librarys(linear, x, threshold):
    ours = Bnb8Linear.from_linear(linear, 8, Bnb8Options(threshold=threshold))
    theirs = library_8bit(linear, threshold)
    assert torch.equal(ours(x), theirs(x))
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def test_outliers_are_kept_out_of_int8(linear, x):
    exact = linear(x)
    with_threshold, without = (Bnb8Linear.from_linear(linear, 8, Bnb8Options(threshold=t))(x) for t in (6.0, 0.0))
    assert (with_threshold - exact)[0, 3].norm() < (without - exact)[0, 3].norm() / 2


def test_eight_bits_quantize_activations_too(linear, x):
    layer = Bnb8Linear.from_linear(linear, 8, Bnb8Options())
    weight_only = nn.functional.linear(x, layer.dequantize(), layer.bias)
    assert not torch.allclose(layer(x), weight_only, atol=1e-4)


def test_train_mode_is_refused_where_the_library_silently_changes_its_numbers(linear, x):
    theirs = library_8bit(linear, 6.0)
    in_eval_mode = theirs(x)
    assert not torch.equal(theirs.train()(x), in_eval_mode)
    with pytest.raises(RuntimeError, match=r"call model.eval\(\) first"):
        Bnb8Linear.from_linear(linear, 8, Bnb8Options()).train()(x)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_codes_rise_with_their_levels(linear, kind):
    layer = Bnb4Linear.from_linear(linear, 4, Bnb4Options(quant_type=kind))
    for codes, values in zip(layer.groups(layer.codes()), layer.groups(layer.dequantize()), strict=True):
        assert torch.equal(values[codes.argsort()], values.sort().values)


def test_blocks_run_on_over_the_ends_of_rows():
    linear = nn.Linear(40, 24, bias=False)
    layer = Bnb4Linear.from_linear(linear, 4, Bnb4Options())
    assert layer.groups(layer.dequantize()).shape == (15, 64)
    assert (layer.groups(linear.weight - layer.dequantize()).abs() < 0.2 * linear.weight.abs().max()).all()


@pytest.mark.parametrize(("bits", "options"), [(4, {"double_quant": True}), (8, {})])
def test_copies_stand_on_their_own(untrained, probe, bits, options):
    model, _ = quantize(untrained, "bnb", bits, execution="packed", **options)
    with torch.no_grad():
        other = copy.deepcopy(model)
        expected = model(input_ids=probe).logits
        model.model.layers[0].mlp.up_proj.weight.zero_()
        assert torch.equal(other(input_ids=probe).logits, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("kind", "double"), FOUR_BITS)
def test_layers_move_between_devices(linear, x, kind, double):
    layer = Bnb4Linear.from_linear(linear, 4, Bnb4Options(quant_type=kind, double_quant=double))
    here = layer(x)
    torch.testing.assert_close(layer.cuda()(x.cuda()).cpu(), here, rtol=1e-3, atol=1e-3)
    assert torch.equal(layer.cpu()(x), here)


def test_a_cell_on_cuda_needs_the_librarys_cuda_kernels() -> None:
    """Imported without a GPU it has none, and would run its fallbacks."""
    QUANTIZER.check_kernels("cpu")
    if torch.cuda.is_available():
        QUANTIZER.check_kernels("cuda")
        return
    with pytest.raises(QuantizeError) as refused:
        QUANTIZER.check_kernels("cuda")
    assert all(name in str(refused.value) for name in KERNELS)
    with torch.library._scoped_library("bitsandbytes", "IMPL") as library:
        for name in KERNELS[:-1]:
            library.impl(name.split("::")[1], lambda *_: None, "CUDA")
        with pytest.raises(QuantizeError, match=KERNELS[-1]) as refused:
            QUANTIZER.check_kernels("cuda")
        assert KERNELS[0] not in str(refused.value)
        library.impl(KERNELS[-1].split("::")[1], lambda *_: None, "CUDA")
        QUANTIZER.check_kernels("cuda")
