"""A ternary quantizer, written as docs/quantizers.md says, passes the audit at 2 bits; fewer bits than asked do not."""

from collections.abc import Callable
from typing import ClassVar, Literal

import pytest
import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from qbench.quantizers.declaration import LinearOptions, Quantizer
from qbench.quantizers.options import quantizers
from qbench.quantizers.packed import PackedLinear
from qbench.quantizers.quantize import quantize
from qbench.records.audit import AuditError

from ..messages import states

Rounded = tuple[Tensor, Tensor, Tensor]  # codes [groups, group_size]; scale and low [groups, 1]


class TernaryOptions(LinearOptions):
    group_size: int = Field(default=64, ge=8, multiple_of=8)
    scale: Literal["absmax", "absmean"] = "absmax"
    label_always: ClassVar = {"group_size": "g{}", "scale": "{}"}


def ternary(groups: Tensor, options: TernaryOptions) -> Rounded:
    """-1, 0 or 1 times the largest or, as in BitNet, the mean weight of a group."""
    size = groups.abs()
    scale = size.amax(1, keepdim=True) if options.scale == "absmax" else size.mean(1, keepdim=True)
    return (groups / scale).round().clamp(-1, 1) + 1, scale, -scale


def levels(count: int, *offsets: int) -> Callable[[Tensor, TernaryOptions], Rounded]:
    """So many equal steps between the extremes of a group; the codes of its groups begin at the offsets in turn."""

    def rounded(groups: Tensor, _: TernaryOptions) -> Rounded:
        low, high = groups.aminmax(dim=1, keepdim=True)
        scale = (high - low) / (count - 1)
        start = torch.tensor(offsets).repeat(len(groups))[: len(groups), None]
        return ((groups - low) / scale).round() + start, scale, low - start * scale

    return rounded


class TernaryLinear(PackedLinear):
    CODE_TENSORS: ClassVar = frozenset({"packed"})
    NEAREST: ClassVar = True
    ROUND: ClassVar = staticmethod(ternary)

    def __init__(self, tensors, options, *, bits, shape, dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.bits, self.group_size, self.dtype = bits, options.group_size, dtype
        for name in ("packed", "scale", "low"):
            self.register_buffer(name, tensors[name])
        self.bias = None

    @classmethod
    def from_linear(cls, linear: nn.Linear, bits: int, options: TernaryOptions) -> "TernaryLinear":
        weight = linear.weight.detach()
        codes, scale, low = cls.ROUND(weight.reshape(-1, options.group_size), options)
        places = torch.arange(0, 8, bits)  # in a byte
        packed = (codes.long().view(-1, len(places)) << places).sum(1).to(torch.uint8)
        tensors = {"packed": packed, "scale": scale, "low": low}
        return cls(tensors, options, bits=bits, shape=weight.shape, dtype=weight.dtype)

    def codes(self) -> Tensor:
        codes = self.packed[:, None] >> torch.arange(0, 8, self.bits) & 2**self.bits - 1
        return codes.view(self.out_features, self.in_features)

    def dequantize(self) -> Tensor:
        weight = self.groups(self.codes()) * self.scale + self.low
        return weight.view(self.out_features, self.in_features).to(self.dtype)


class Ternary(Quantizer):
    name, title = "ternary", "Ternary"
    widths: ClassVar = {2: TernaryOptions, 4: TernaryOptions}

    def layer_class(self, bits: int) -> type[PackedLinear]:
        return TernaryLinear


@pytest.fixture(autouse=True)
def _declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quantizers(), "ternary", Ternary())


@pytest.mark.parametrize("group_size", [8, 16, 32, 128])
@pytest.mark.parametrize("scale", ["absmax", "absmean"])
def test_three_levels_are_two_bits_in_groups_of_any_size(model: LlamaForCausalLM, group_size: int, scale: str) -> None:
    _, audit = quantize(model, "ternary", 2, group_size=group_size, scale=scale)
    assert audit.label == f"ternary-2-g{group_size}-{scale}"
    assert {(layer.codes_used, layer.levels) for layer in audit.layers} == {(3, 3)}


@pytest.mark.parametrize("group_size", [16, 64])
@pytest.mark.parametrize(
    ("bits", "rounding", "facts"),
    [
        (2, levels(2, 0), "only 2 codes"),
        (2, levels(2, 0, 1), ""),
        (2, levels(2, 0, 1, 2), ""),
        (4, levels(8, 0), "only 8 codes"),
        (4, levels(8, 0, 1), ""),
        (4, levels(8, 0, 8), ""),
    ],
)
def test_fewer_bits_than_the_label_says_wherever_their_codes_begin(
    untrained: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, bits: int, rounding, facts: str, group_size: int
) -> None:
    monkeypatch.setattr(TernaryLinear, "ROUND", staticmethod(rounding))
    with pytest.raises(AuditError) as caught:
        quantize(untrained, "ternary", bits, group_size=group_size)
    reasons = [reason for reason in caught.value.reasons if states(reason, f"{facts}…{bits - 1} bits")]
    assert len(reasons) == 14, caught.value.reasons


@pytest.mark.parametrize(("wide", "every"), [(9, 1000), (15, 1000), (16, 1000), (13, 2), (15, 2), (16, 2)])
def test_wide_groups_do_not_excuse_the_others(
    untrained: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, wide: int, every: int
) -> None:
    def rounded(groups: Tensor, _: TernaryOptions) -> Rounded:
        low, high = groups.aminmax(dim=1, keepdim=True)
        is_wide = torch.arange(len(groups))[:, None] % every == 0
        scale = (high - low) / torch.where(is_wide, wide - 1, 7)
        return ((groups - low) / scale).round(), scale, low

    monkeypatch.setattr(TernaryLinear, "ROUND", staticmethod(rounded))
    with pytest.raises(AuditError) as caught:
        quantize(untrained, "ternary", 4, group_size=16)
    assert any(states(reason, "groups…3 bits") for reason in caught.value.reasons), caught.value.reasons


@pytest.mark.parametrize(("scale", "factor"), [("absmax", 1.5), ("absmean", 0.4), ("absmean", -1.0)])
def test_a_wrong_scale_of_three_levels(
    untrained: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, scale: str, factor: float
) -> None:
    def wrong(groups: Tensor, options: TernaryOptions) -> Rounded:
        codes, right, low = ternary(groups, options)
        return codes, factor * right, factor * low

    monkeypatch.setattr(TernaryLinear, "ROUND", staticmethod(wrong))
    with pytest.raises(AuditError, match="slope"):
        quantize(untrained, "ternary", 2, scale=scale)
