"""Sensitivity: what it costs to quantize each linear layer alone, measured on texts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from qbench.analysis.texts import Text, checked_texts
from qbench.progress import Bar
from qbench.quantizers.options import Quantization
from qbench.quantizers.packed import PackedLinear, packed_form
from qbench.records.analysis import AnalysisError, LinearDamage

LOGITS_ROWS = 64  # positions whose logits are computed in float64 at a time


@torch.no_grad()
def sensitivity(
    model: LlamaForCausalLM,
    texts: Sequence[Tensor],
    quantization: Quantization,
    *,
    calibration: Any = None,
    length: int | None = None,
    progress: bool = False,
) -> tuple[LinearDamage, ...]:
    """For each layer and kind of linear: the log-likelihood lost and the KL if only this linear is quantized.

    Weight-only methods run dense, as in cells. Afterwards the model is bit-for-bit unchanged, even after an error.
    Each linear takes one forward pass over the texts; calibrated methods take another over the calibration text.
    """
    if packed_form(model):
        raise AnalysisError("The model is already quantized; sensitivity needs the unquantized model.")
    if quantization.is_unquantized:
        raise AnalysisError(f"{quantization.label} quantizes nothing; give a method and bits, such as hqq-3.")
    kept, _ = checked_texts(model, texts, length)
    model.eval()
    reference = [_log_probabilities(model, text) for text in kept]
    found = []
    for layer, linear in Bar(list(_linears(model)), unit="linear", shown=progress):
        with _quantized_alone(model, f"model.layers.{layer}.{linear}", quantization, calibration):
            lost, kl, tokens = _damage(model, kept, reference)
        found.append(
            LinearDamage(
                label=quantization.label,
                layer=layer,
                linear=linear.split(".")[-1],
                nats_per_token=lost / tokens,
                kl=kl / tokens,
                tokens=tokens,
            )
        )
    return tuple(found)


def _linears(model: LlamaForCausalLM) -> Iterator[tuple[int, str]]:
    for number, layer in enumerate(model.model.layers):
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                yield number, name


@contextmanager
def _quantized_alone(
    model: LlamaForCausalLM, name: str, quantization: Quantization, calibration: Any
) -> Iterator[None]:
    linear = model.get_submodule(name)
    weight = linear.weight  # a method may remove it from its module, but never writes to it
    try:
        quantization.quantizer.quantize_linears(
            model, quantization.bits, quantization.options, targets=[name], calibration=calibration
        )
        packed = model.get_submodule(name)
        if not isinstance(packed, PackedLinear):
            raise AnalysisError(f"{quantization.label} did not quantize {name}, so there is nothing to measure.")
        if not packed.ACTIVATION_BITS:
            weight_now = nn.Parameter(packed.dequantize(), requires_grad=False)
            model.set_submodule(name, linear)
            linear.weight = weight_now
        yield
    finally:
        linear.weight = weight
        model.set_submodule(name, linear)


def _log_probabilities(model: LlamaForCausalLM, text: Text) -> Tensor:
    """log p of every token at every position except the last, [tokens - 1, vocabulary], in float32 on the CPU."""
    hidden = model.model(text.ids[None].to(model.device), use_cache=False).last_hidden_state[0, :-1]
    rows = [model.lm_head(part).double().log_softmax(-1).float().cpu() for part in hidden.split(LOGITS_ROWS)]
    return torch.cat(rows)


def _damage(model: LlamaForCausalLM, texts: list[Text], reference: list[Tensor]) -> tuple[float, float, int]:
    """Log-likelihood lost and KL(reference ‖ model), summed over the predicted tokens, and their number."""
    lost, kl, tokens = 0.0, 0.0, 0
    for text, before in zip(texts, reference, strict=True):
        now, targets = _log_probabilities(model, text), text.ids[1:, None]
        lost += float((before.gather(1, targets) - now.gather(1, targets)).double().sum())
        for p, q in zip(before.split(LOGITS_ROWS), now.split(LOGITS_ROWS), strict=True):
            kl += float((p.double().exp() * (p.double() - q.double())).sum())
        tokens += len(targets)
    return lost, kl, tokens
