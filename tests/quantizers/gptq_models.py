"""The trained tiny model after our GPTQ pass, and what its layers see."""

import functools

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import qbench.quantizers.gptq.layer as gptq
from qbench.quantizers.gptq import GptqOptions
from qbench.quantizers.gptq.layer import quantize_linears

from . import tiny

LINEARS = [name for stage in gptq.STAGES for name in stage]
TARGETS = [f"model.layers.{i}.{name}" for i in range(4) for name in LINEARS]
G64 = GptqOptions(group_size=64)


def quantized(
    bits: int, options: GptqOptions = G64, targets: list[str] = TARGETS, **kwargs: object
) -> LlamaForCausalLM:
    """The trained model after GPTQ."""
    model = tiny.trained_model()
    quantize_linears(model, bits, options, targets=targets, calibration=tiny.calibration_ids(), **kwargs)
    return model


@functools.cache
def quantized_once(bits: int) -> LlamaForCausalLM:
    """The same, made once: for reading only."""
    return quantized(bits)


def inputs_of(model: LlamaForCausalLM, names: list[str], ids: Tensor) -> dict[str, Tensor]:
    """What enters each of these modules, [tokens, in]."""
    seen: dict[str, Tensor] = {}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: seen.__setitem__(name, args[0].detach().flatten(0, 1))
        )
        for name in names
    ]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen
