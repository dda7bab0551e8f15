"""Quantized models on disk: the packed tensors, and the quantization_config that other readers expect."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from qbench.errors import one_line
from qbench.quantizers.declaration import OUR_METHOD, QuantizeError
from qbench.quantizers.options import Quantization, quantization, quantizers
from qbench.quantizers.packed import PackedForm, PackedLinear, attach_packed_form, packed_form


def packed_tensors(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """All tensors of a quantized model as saved: packed layers in packed form, however the model is executed."""
    form = packed_form(model)
    if form is None:
        raise QuantizeError("The model is not quantized; quantize it, or save it with save_checkpoint.")
    if form.quantization.parts:
        axes = " and ".join(part.axis for part in form.quantization.parts)
        raise QuantizeError(
            f"The model is quantized as {form.quantization.label}, and no checkpoint format stores {axes}. "
            f"Quantize the model without {axes} to save it."
        )
    inside = tuple(f"{name}." for name in form.layers)
    dense = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(inside)}
    packed = {f"{name}.{key}": t for name, layer in form.layers.items() for key, t in layer.state_dict().items()}
    return dense | packed


def quantization_config(wanted: Quantization, dtype: torch.dtype) -> dict[str, Any]:
    """What config.json says about a quantization, in the format of the library that reads it."""
    return wanted.quantizer.write_config(wanted.bits, wanted.options, str(dtype).removeprefix("torch."))


def quantization_of(settings: dict[str, Any]) -> Quantization:
    """The quantization that a config.json's quantization_config describes; the inverse of `quantization_config`."""
    method = settings.get(OUR_METHOD, settings.get("quant_method"))
    known = {found.config_name: found for found in quantizers().values() if found.name != "none"}
    if not isinstance(method, str) or method not in known:
        raise QuantizeError(
            f"quant_method is {method!r} in the quantization_config; it must be one of {', '.join(known)}. Otherwise, "
            "use the unquantized checkpoint."
        )
    try:
        bits, options = known[method].read_config(settings)
    except KeyError as error:
        raise QuantizeError(f"{error} is missing from the quantization_config of {method}.") from None
    return quantization(known[method].name, bits, **options)


def config_files() -> list[str]:
    """The files that methods write next to config.json; those of a previously saved model must be removed."""
    return [found.config_file for found in quantizers().values() if found.config_file]


def place_packed(
    model: LlamaForCausalLM,
    settings: dict[str, Any],
    stored: Iterable[str],
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
) -> set[str]:
    """Put the packed layers of a checkpoint into an empty model; return the names of the tensors that they use."""
    wanted = quantization_of(settings)
    kind = wanted.quantizer.layer_class(wanted.bits)
    marker = kind.marker()
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
        raise QuantizeError(f"the config says {wanted.label}, but none of the linear layers has a tensor {marker}.")
    for name, layer in layers.items():
        model.set_submodule(name, layer.eval())
    attach_packed_form(model, PackedForm(wanted, layers))
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
        raise QuantizeError(f"{name} has no tensor {error}, which {wanted.label} needs.") from None
    except (TypeError, ValueError, RuntimeError, IndexError, AssertionError) as error:
        raise QuantizeError(f"{name} cannot be read as {wanted.label}: {one_line(error)}.") from error
    if tuple(found) != shape:
        raise QuantizeError(
            f"{name} has a weight of shape {list(found)}; according to the config it must be {list(shape)}."
        )
    return layer
