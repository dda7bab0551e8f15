"""Quantized models on disk: safetensors, with the quantization_config that the method's other readers expect."""

import json
import os
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from qbench.quantizers.options import (
    Bnb4Options,
    Bnb8Options,
    GptqOptions,
    HqqOptions,
    Quantization,
    QuantizeError,
    quantization,
)
from qbench.quantizers.packed import PackedLinear
from qbench.quantizers.quantize import Quantized, mark_quantized, quantized

# Says the method where transformers cannot load what we write. Without "quant_method" it raises an error; by the name
# of a method that it does not know, or as "hqq", it would only warn and draw the weights at random.
OUR_METHOD = "qbench_quant_method"


def save_quantized(
    model: LlamaForCausalLM, folder: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Write the packed form of a quantized model, however it is executed; `load_checkpoint` reads it back.

    transformers reads softmax models of bnb, and of GPTQ if optimum is installed; it refuses all others.
    """
    from qbench.checkpoint.save import write_checkpoint

    form = quantized(model)
    if form is None:
        raise QuantizeError("The model is not quantized: quantize it, or write it with save_checkpoint.")
    dense = {
        name: t for name, t in model.state_dict().items() if not name.startswith(tuple(f"{n}." for n in form.layers))
    }
    packed = {f"{name}.{key}": t for name, layer in form.layers.items() for key, t in layer.state_dict().items()}
    config = quantization_config(form.quantization, model.dtype)
    write_checkpoint(model, folder, dense | packed, tokenizer, quantization_config=config)
    if form.quantization.method == "gptq":  # auto-gptq's own file, which older readers want beside config.json
        (Path(folder) / "quantize_config.json").write_text(json.dumps(config, indent=2) + "\n")


def quantization_config(wanted: Quantization, dtype: torch.dtype) -> dict[str, Any]:
    """What config.json says of a quantization, in the words of the library that reads it."""
    options = wanted.options
    if isinstance(options, GptqOptions):
        settings = {
            "quant_method": "gptq",
            "checkpoint_format": "gptq",  # v1: zeros stored minus one
            "bits": wanted.bits,
            "group_size": options.group_size,
            "sym": options.sym,
            "desc_act": options.act_order,
            "damp_percent": options.damp,
            "static_groups": False,
            "true_sequential": True,
            "lm_head": options.include_lm_head,
        }
        # For optimum, which otherwise leaves lm_head out: it reads the layers whose names start like this.
        return settings | ({"block_name_to_quantize": ""} if options.include_lm_head else {})
    if isinstance(options, HqqOptions):
        from hqq.core.quantize import BaseQuantizeConfig

        settings = BaseQuantizeConfig(nbits=wanted.bits, group_size=options.group_size, axis=options.axis)
        return {OUR_METHOD: "hqq", "quant_config": settings, "skip_modules": _skipped(options.include_lm_head)}
    if isinstance(options, Bnb8Options):
        settings = {"load_in_8bit": True, "load_in_4bit": False, "llm_int8_threshold": options.threshold}
    else:
        assert isinstance(options, Bnb4Options)
        settings = {
            "load_in_8bit": False,
            "load_in_4bit": True,
            "bnb_4bit_quant_type": options.quant_type,
            "bnb_4bit_use_double_quant": options.double_quant,
            "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
            "bnb_4bit_quant_storage": "uint8",
        }
    return {
        "quant_method": "bitsandbytes",
        **settings,
        "llm_int8_skip_modules": _skipped(options.include_lm_head),
    }


def quantization_of(settings: dict[str, Any]) -> Quantization:
    """The quantization that a config.json's quantization_config means; the inverse of `quantization_config`."""
    method = settings.get(OUR_METHOD, settings.get("quant_method"))
    try:
        if method == "gptq":
            if settings.get("checkpoint_format", "gptq") != "gptq":
                raise QuantizeError(f"checkpoint_format is {settings['checkpoint_format']!r}; it must be 'gptq' (v1).")
            return quantization(
                "gptq",
                settings["bits"],
                group_size=settings["group_size"],
                sym=settings["sym"],
                act_order=settings["desc_act"],
                damp=settings.get("damp_percent", GptqOptions().damp),
                include_lm_head=settings.get("lm_head", False),
            )
        if method == "hqq":
            params = settings["quant_config"]["weight_quant_params"]
            return quantization(
                "hqq",
                params["nbits"],
                group_size=params["group_size"],
                axis=params["axis"],
                include_lm_head=_head_included(settings["skip_modules"]),
            )
        if method == "bitsandbytes":
            head = {"include_lm_head": _head_included(settings.get("llm_int8_skip_modules"))}
            if settings.get("load_in_8bit"):
                return quantization("bnb", 8, threshold=settings["llm_int8_threshold"], **head)
            return quantization(
                "bnb",
                4,
                quant_type=settings["bnb_4bit_quant_type"],
                double_quant=settings["bnb_4bit_use_double_quant"],
                **head,
            )
    except KeyError as error:
        raise QuantizeError(f"{error} is missing in the quantization_config of {method}.") from None
    raise QuantizeError(
        f"quant_method is {method!r}, not gptq, hqq or bitsandbytes, in the quantization_config; "
        "give the unquantized one."
    )


def place_packed(
    model: LlamaForCausalLM,
    settings: dict[str, Any],
    stored: Iterable[str],
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
) -> set[str]:
    """Put the packed layers of a checkpoint into an empty model; gives the names of the tensors that they took."""
    wanted = quantization_of(settings)
    kind, marker = _layer_class(wanted)
    layers: dict[str, PackedLinear] = {}
    taken: set[str] = set()
    for name, linear in list(model.named_modules()):
        own = {key.removeprefix(f"{name}."): key for key in stored if key.startswith(f"{name}.")}
        if isinstance(linear, nn.Linear) and marker in own:
            layers[name] = _read_layer(
                kind, name, linear, {key: read(full) for key, full in own.items()}, wanted, dtype
            )
            taken |= set(own.values())
    if not layers:
        raise QuantizeError(f"the config says {wanted.label}, but no linear layer has a tensor {marker}.")
    for name, layer in layers.items():
        model.set_submodule(name, layer.eval())
    mark_quantized(model, Quantized(wanted, layers))
    return taken


def _read_layer(
    kind: type[PackedLinear],
    name: str,
    linear: nn.Linear,
    tensors: dict[str, Tensor],
    wanted: Quantization,
    dtype: torch.dtype,
) -> PackedLinear:
    shape = (linear.out_features, linear.in_features)
    if "bias" in tensors:
        tensors["bias"] = tensors["bias"].to(dtype)
    try:
        layer = kind.from_tensors(tensors, wanted.options, bits=wanted.bits, shape=shape, dtype=dtype)
        found = layer.dequantize().shape
    except KeyError as error:
        raise QuantizeError(f"{name} lacks the tensor {error} that {wanted.label} needs.") from None
    except (TypeError, ValueError, RuntimeError, IndexError, AssertionError) as error:
        raise QuantizeError(f"{name} cannot be read as {wanted.label}: {type(error).__name__}: {error}.") from error
    if tuple(found) != shape:
        raise QuantizeError(f"{name} holds a weight of {list(found)}; by the config it must be {list(shape)}.")
    return layer


def _layer_class(wanted: Quantization) -> tuple[type[PackedLinear], str]:
    """The class of a quantization's layers, and the tensor by which a stored layer shows that it is one."""
    name, marker = {
        "gptq": ("GPTQLinear", "qweight"),
        "hqq": ("HqqLinear", "W_q"),
        "bnb": ("Bnb8Linear", "SCB") if wanted.bits == 8 else ("Bnb4Linear", "weight.absmax"),
    }[wanted.method]
    return getattr(import_module(f"qbench.quantizers.{wanted.method}"), name), marker


def _skipped(include_lm_head: bool) -> list[str]:
    return [] if include_lm_head else ["lm_head"]


def _head_included(skipped: list[str] | None) -> bool:
    return skipped is not None and "lm_head" not in skipped
