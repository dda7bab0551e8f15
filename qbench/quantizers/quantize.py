"""quantize(): a model in, the same model quantized and audited out."""

import copy as copying
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from qbench.errors import is_out_of_memory
from qbench.quantizers.measure import (
    compare_logits,
    default_probe,
    hashes,
    int8_outputs,
    logits_on,
    measure_layer,
    relative_gap,
)
from qbench.quantizers.options import LinearOptions, Options, Quantization, QuantizeError, quantization
from qbench.quantizers.packed import PackedLinear
from qbench.records.audit import Audit, AuditError, failures

_ATTRIBUTE = "qbench_quantized"


@dataclass(frozen=True)
class Quantized:
    """A model's packed form: the modules that it runs, or those that its dense weights came from, then on the CPU."""

    quantization: Quantization
    layers: dict[str, PackedLinear]


def quantized(model: nn.Module) -> Quantized | None:
    """The packed form of a quantized model; None for one that is not."""
    return getattr(model, _ATTRIBUTE, None)


def mark_quantized(model: nn.Module, form: Quantized) -> None:
    """Attach the packed form to its model beside its modules, so that it stays out of parameters and state_dict."""
    object.__setattr__(model, _ATTRIBUTE, form)


def quantize(
    model: LlamaForCausalLM,
    method: str,
    bits: int,
    calibration: Any = None,
    probe: Tensor | None = None,
    execution: str = "dense",
    copy: bool = False,
    progress: bool = False,
    device: torch.device | str | None = None,
    **options: Any,
) -> tuple[LlamaForCausalLM, Audit]:
    """Quantize a Llama-style model, in place or on a copy, and prove it; the model comes back in eval mode.

    calibration is read by gptq alone. probe: token ids [batch, length] for the audit's logits, by default a fixed
    pseudo-random batch. device: where each layer is quantized, by default where it is.
    Memory beyond the model's own: the packed form, which is kept; the source weights on the CPU until each layer is
    audited (of a model on the CPU, the very tensors that were there); with copy=True, the copy.
    """
    wanted = quantization(method, bits, **options)
    if execution not in ("dense", "packed"):
        raise QuantizeError(f"execution is {execution!r}; it must be 'dense' or 'packed'.")
    _check_model(model)
    _check_device(device)
    probe = _checked_probe(model, probe)
    untouched = "The model passed in is as it was."
    with _out_of_memory_as_sentence(wanted.label, untouched):
        model = copying.deepcopy(model) if copy else model
        reference = logits_on(model.eval(), probe)
    if not reference.isfinite().all():
        raise QuantizeError("The model's logits on the probe are NaN or infinite before it is quantized.")
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    audit = _blank_audit(model, wanted, linears, probe)
    if method == "none":
        return model, audit.model_copy(update={"kl": 0.0, "top1_agreement": 1.0})

    targets = _targets(model, linears, wanted)
    what_now = untouched if copy else "Load the model again."
    with _out_of_memory_as_sentence(wanted.label, what_now):
        sources = {name: linears[name].weight.detach().cpu() for name in targets}
        audit = audit.model_copy(update={"target_weights": sum(w.numel() for w in sources.values())})
        rest = {name: h for name, h in hashes(model).items() if name.removesuffix(".weight") not in targets}
        linears.clear()  # so that a GPU's memory is given back layer by layer
        with _midway_as_sentence(model, targets, wanted.label, what_now):
            import_module(f"qbench.quantizers.{method}").quantize_model(
                model,
                bits,
                wanted.options,
                targets=targets,
                calibration=calibration,
                progress=progress,
                device=device,
            )
        audit = _pass(_with_weights(audit, model, sources, rest, wanted.options), what_now)
        layers = {name: m for name, m in model.named_modules() if isinstance(m, PackedLinear)}
        mark_quantized(model, Quantized(wanted, layers))
        audit = _pass(_with_logits(audit, model, probe, reference, dense=execution == "dense"), what_now)
    return model, audit


def make_dense(model: nn.Module) -> None:
    """Dequantize each packed layer once into a plain nn.Linear; the packed form moves to the CPU, for saving."""
    form = quantized(model)
    if form is None:
        raise QuantizeError("The model is not quantized, so there is nothing to dequantize.")
    for name, layer in form.layers.items():
        if layer.ACTIVATION_BITS:
            raise QuantizeError(
                f"{form.quantization.label} quantizes activations too: dense it would be another model."
            )
        weight = layer.dequantize()
        linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if layer.bias is not None:
            linear.bias = nn.Parameter(layer.bias.clone(), requires_grad=False)
        model.set_submodule(name, linear.eval())
        layer.cpu()


def _with_weights(
    audit: Audit, model: nn.Module, sources: dict[str, Tensor], rest: dict[str, str], options: Options
) -> Audit:
    """The audit with all that can be said without a forward pass; each source weight is let go when it is measured.

    rest: the hashes before quantization of all that is to stay as it was.
    """
    packed = {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    unasked = sorted(packed - sources.keys())
    now = hashes(model)
    changed = [
        n for n, h in rest.items() if now.get(n, h if n.rpartition(".")[0] in unasked else "") not in (h, "meta")
    ]
    # state_dict has what packed layers keep outside of buffers, named_buffers what is not saved.
    tensors = {**model.state_dict(), **dict(model.named_buffers())}
    on_meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    layers, untouched, in_train_mode, activation_bits = [], [], [], None
    for name in list(sources):
        source, layer = sources.pop(name), model.get_submodule(name)
        if not isinstance(layer, PackedLinear):
            untouched.append(name)
        elif not any(tensor.is_meta for tensor in layer.state_dict().values()):
            other = _other_options(layer, options)
            layers.append(measure_layer(name, source, layer).model_copy(update={"other_options": other}))
            activation_bits = layer.ACTIVATION_BITS
            if layer.training and layer.ACTIVATION_BITS:
                in_train_mode.append(name)
    return audit.model_copy(
        update={
            "layers": tuple(layers),
            "untouched": tuple(untouched),
            "unasked": tuple(unasked),
            "changed": tuple(changed),
            "on_meta": tuple(on_meta),
            "in_train_mode": tuple(in_train_mode),
            "not_finite": tuple(n for n, t in tensors.items() if not t.is_meta and not t.isfinite().all()),
            "activation_bits": activation_bits,
            **{
                name: sum(getattr(layer, name) for layer in layers)
                for name in ("weights", "code_bytes", "metadata_bytes", "source_energy", "error_energy")
            },
        }
    )


def _other_options(layer: PackedLinear, options: Options) -> tuple[str, ...]:
    """What of the options asked for the layer's tensors contradict."""
    other = []
    for name, value in layer.settings().items():
        wanted = getattr(options, name, getattr(layer, name, value))
        wanted = layer.in_features if (name, wanted) == ("group_size", -1) else wanted
        if value != wanted:
            other.append(f"{name} {value}, not {wanted}")
    return tuple(other)


def _with_logits(audit: Audit, model: nn.Module, probe: Tensor, reference: Tensor, dense: bool) -> Audit:
    """The audit with the logits of the packed model; if it is to run dense, it does so from here on."""
    modules = {name: m for name, m in model.named_modules() if isinstance(m, PackedLinear)}
    with int8_outputs(modules) as gaps:
        logits, gap, execution = logits_on(model, probe), None, "packed"
    layers = tuple(
        layer.model_copy(update=dict(zip(("int8_gap", "int8_spared"), gaps.get(layer.name, ()), strict=False)))
        for layer in audit.layers
    )
    if dense and audit.activation_bits is None:
        make_dense(model)
        packed, logits, execution = logits, logits_on(model, probe), "dense"
        gap = relative_gap(packed, logits)
    kl, top1 = compare_logits(reference, logits)
    logits_update = {"kl": kl, "top1_agreement": top1, "packed_dense_gap": gap, "execution": execution}
    return audit.model_copy(update={"layers": layers, **logits_update})


def _blank_audit(model: nn.Module, wanted: Quantization, linears: dict[str, nn.Linear], probe: Tensor) -> Audit:
    return Audit(
        label=wanted.label,
        method=wanted.method,
        bits=wanted.bits,
        activation_bits=None,
        execution="none",
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        linear_weights=sum(linear.weight.numel() for linear in linears.values()),
        target_weights=0,
        probe_tokens=probe.numel(),
        weights=0,
        code_bytes=0,
        metadata_bytes=0,
        source_energy=0.0,
        error_energy=0.0,
    )


def _pass(audit: Audit, what_now: str) -> Audit:
    if reasons := failures(audit):
        raise AuditError(audit.label, reasons, what_now)
    return audit


def _targets(model: Any, linears: dict[str, nn.Linear], wanted: Quantization) -> list[str]:
    assert isinstance(wanted.options, LinearOptions)
    if wanted.options.include_lm_head and getattr(model.config, "tie_word_embeddings", False):
        raise QuantizeError("include_lm_head: lm_head shares its weight with the embeddings, which stay as they are.")
    names = [name for name in linears if wanted.options.include_lm_head or name.split(".")[-1] != "lm_head"]
    if not names:
        raise QuantizeError("The model has no linear layers to quantize.")
    return names


def _check_model(model: Any) -> None:
    if not isinstance(model, LlamaForCausalLM):
        raise QuantizeError(
            f"model is a {type(model).__name__}; it must be a LlamaForCausalLM, as load_checkpoint gives."
        )
    if form := quantized(model):
        raise QuantizeError(f"The model is already quantized, as {form.quantization.label}; load the unquantized one.")
    foreign = any(isinstance(m, nn.Linear) and not m.weight.is_floating_point() for m in model.modules())
    if foreign or getattr(model.config, "quantization_config", None):
        raise QuantizeError("The model is already quantized, by something else; load the unquantized one.")


def _check_device(device: Any) -> None:
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:  # no such kind, or none here
        first = str(error).split("\n")[0]
        raise QuantizeError(f"device is {device!r}, which this machine or torch does not have: {first}") from None
    if torch.device(device).type == "meta":
        raise QuantizeError("device is 'meta', which holds no weights; it must be one that computes.")


def _checked_probe(model: Any, probe: Tensor | None) -> Tensor:
    vocabulary = model.config.vocab_size
    if probe is None:
        return default_probe(vocabulary)
    if not isinstance(probe, Tensor):
        raise QuantizeError(f"probe is a {type(probe).__name__}; it must be a tensor of token ids [batch, length].")
    if probe.ndim != 2 or probe.numel() == 0 or probe.dtype not in (torch.int32, torch.int64):
        raise QuantizeError(
            f"probe is {probe.dtype} of shape {list(probe.shape)}; it must be token ids [batch, length]."
        )
    if probe.min() < 0 or probe.max() >= vocabulary:
        raise QuantizeError(
            f"probe has token ids from {probe.min()} to {probe.max()}; the vocabulary has {vocabulary}."
        )
    return probe


@contextmanager
def _out_of_memory_as_sentence(label: str, what_now: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise QuantizeError(f"No memory left to quantize as {label}. {what_now} ({error})") from error


@contextmanager
def _midway_as_sentence(model: nn.Module, targets: list[str], label: str, what_now: str) -> Iterator[None]:
    """An error that comes when weights are replaced already says what the model is good for."""
    before = {name: weakref.ref(model.get_parameter(f"{name}.weight")) for name in targets}
    try:
        yield
    except Exception as error:
        now = ((name, getattr(model.get_submodule(name), "weight", error)) for name in targets)
        if is_out_of_memory(error) or all(before[name]() is weight for name, weight in now):
            raise
        raise RuntimeError(f"{label} stopped midway. {what_now} {error}") from error
