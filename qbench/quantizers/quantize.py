"""quantize(): a model in, the same model quantized and audited out."""

import copy as copying
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from qbench.errors import is_out_of_memory, one_line
from qbench.quantizers.axes import AppliedAxis
from qbench.quantizers.axis_options import Spans
from qbench.quantizers.declaration import LinearOptions, Options, QuantizeError
from qbench.quantizers.measure import (
    compare_logits,
    default_probe,
    hashes,
    int8_outputs,
    logits_on,
    measure_layer,
    relative_gap,
)
from qbench.quantizers.options import Quantization, quantization
from qbench.quantizers.packed import PackedForm, PackedLinear, attach_packed_form, packed_form
from qbench.records.audit import Audit, AuditError, LayerAudit, PartAudit, failures


@dataclass(frozen=True)
class _Evidence:
    """What is known about a quantized model without a forward pass, by the names of the audit's fields."""

    layers: tuple[LayerAudit, ...] = ()
    untouched: tuple[str, ...] = ()
    unasked: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    on_meta: tuple[str, ...] = ()
    in_train_mode: tuple[str, ...] = ()
    not_finite: tuple[str, ...] = ()
    activation_bits: int | None = None


@dataclass(frozen=True)
class _LogitsEvidence:
    """What the logits on the probe show, by the names of the audit's fields; and LLM.int8 layers' outputs, by name."""

    execution: str = "none"
    kl: float | None = None
    top1_agreement: float | None = None
    packed_dense_gap: float | None = None
    int8_outputs: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Subject:
    """What an audit is about, recorded before quantization."""

    quantization: Quantization
    targets: tuple[str, ...]  # the linear layers to quantize
    dtype: str
    linear_weights: int
    target_weights: int
    probe_tokens: int

    def audit(self, weights: _Evidence, logits: _LogitsEvidence, parts: tuple[PartAudit, ...] = ()) -> Audit:
        """The audit, validated; this is the only place that creates one."""
        return Audit(
            label=self.quantization.label,
            method=self.quantization.method,
            bits=self.quantization.bits,
            activation_bits=weights.activation_bits,
            execution=logits.execution,
            dtype=self.dtype,
            linear_weights=self.linear_weights,
            target_weights=self.target_weights,
            probe_tokens=self.probe_tokens,
            layers=tuple(_with_int8(layer, logits.int8_outputs.get(layer.name)) for layer in weights.layers),
            untouched=weights.untouched,
            unasked=weights.unasked,
            changed=weights.changed,
            on_meta=weights.on_meta,
            in_train_mode=weights.in_train_mode,
            not_finite=weights.not_finite,
            kl=logits.kl,
            top1_agreement=logits.top1_agreement,
            packed_dense_gap=logits.packed_dense_gap,
            parts=parts,
            weights=sum(layer.weights for layer in weights.layers),
            code_bytes=sum(layer.code_bytes for layer in weights.layers),
            metadata_bytes=sum(layer.metadata_bytes for layer in weights.layers),
            source_energy=sum(layer.source_energy for layer in weights.layers),
            error_energy=sum(layer.error_energy for layer in weights.layers),
        )


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
    """Quantize a Llama-style model, in place or on a copy, and prove it; the returned model is in eval mode.

        model, audit = quantize(load_checkpoint(folder), method="hqq", bits=4, group_size=128)

    options: those of the method, and axes: activations={"bits": 8}, kv_cache={"bits": 4}.
    calibration: used by the methods and axes that need it (gptq, static scales of activations).
    probe: token ids [batch, length] for the audit's logits, by default a fixed pseudo-random batch.
    device: where each layer is quantized, by default where it is.
    Memory besides the model: the packed form, which is kept; the source weights on the CPU until each layer is audited
    (for a model on the CPU, the original tensors); with copy=True, the copy.
    """
    wanted = quantization(method, bits, **options)
    _check_call(model, wanted, execution, device)
    probe = _checked_probe(model, probe)
    as_it_was = "The model passed in is unchanged."
    with _out_of_memory_as_sentence(wanted.label, as_it_was):
        model = copying.deepcopy(model) if copy else model
        reference = logits_on(model.eval(), probe)
    if not reference.isfinite().all():
        raise QuantizeError("The model's logits on the probe are NaN or infinite before it is quantized.")
    subject = _subject(model, wanted, probe)
    if wanted.is_unquantized:
        return model, subject.audit(_Evidence(), _LogitsEvidence(execution="none", kl=0.0, top1_agreement=1.0))

    what_now = as_it_was if copy else "Load the model again."
    with _out_of_memory_as_sentence(wanted.label, what_now):
        linears = _targets(model, wanted.options)
        axes = [part.declaration.load()(model, part.options, calibration, linears) for part in wanted.parts]
        weights, layers = _Evidence(), {}
        if not wanted.for_weights.is_unquantized:
            weights = _quantize_weights(
                model, subject, what_now, calibration=calibration, progress=progress, device=device
            )
            _check_audit(
                subject.audit(weights, _LogitsEvidence()), what_now
            )  # it may not be able to run a forward pass
            layers = {name: m for name, m in model.named_modules() if isinstance(m, PackedLinear)}
            attach_packed_form(model, PackedForm(wanted.for_weights, layers))
        runs_dense = bool(layers) and execution == "dense" and weights.activation_bits is None
        logits, parts = _logits_evidence(model, probe, reference, runs_dense, axes)
        attach_packed_form(model, PackedForm(wanted, layers))
        audit = subject.audit(weights, logits, parts)
        _check_audit(audit, what_now)
    return model, audit


def audit_after_scoring(audit: Audit, wanted: Quantization, read: Spans) -> Audit:
    """The audit with what is known after texts were scored; AuditError if they show that a part had no effect."""
    pairs = [part.options.quantized_pairs(read) for part in wanted.parts]
    parts = [part.model_copy(update={"quantized_pairs": own}) for part, own in zip(audit.parts, pairs, strict=True)]
    audit = audit.model_copy(update={"parts": tuple(parts)})
    _check_audit(audit, "Give smaller groups, or longer texts.")
    return audit


def make_dense(model: nn.Module) -> None:
    """Dequantize each packed layer once into a plain nn.Linear; the packed form moves to the CPU for saving."""
    form = packed_form(model)
    if form is None:
        raise QuantizeError("The model is not quantized, so there is nothing to dequantize.")
    if form.quantization.parts:
        raise QuantizeError(f"Making {form.quantization.label} dense would lose what it changes besides the weights.")
    for name, layer in form.layers.items():
        if layer.ACTIVATION_BITS:
            raise QuantizeError(
                f"{form.quantization.label} also quantizes activations, so a dense version would be a different model."
            )
        weight = layer.dequantize()
        linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if layer.bias is not None:
            linear.bias = nn.Parameter(layer.bias.clone(), requires_grad=False)
        model.set_submodule(name, linear.eval())
        layer.cpu()


def _subject(model: nn.Module, wanted: Quantization, probe: Tensor) -> _Subject:
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    targets = () if wanted.for_weights.is_unquantized else _targets(model, wanted.options)
    return _Subject(
        quantization=wanted,
        targets=targets,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        linear_weights=sum(linear.weight.numel() for linear in linears.values()),
        target_weights=sum(linears[name].weight.numel() for name in targets),
        probe_tokens=probe.numel(),
    )


def _quantize_weights(model: nn.Module, subject: _Subject, what_now: str, **settings: Any) -> _Evidence:
    """Quantize the targets in place, and compare them with the original weights."""
    wanted, targets = subject.quantization, list(subject.targets)
    sources = {name: model.get_parameter(f"{name}.weight").detach().cpu() for name in targets}
    rest = {name: h for name, h in hashes(model).items() if name.removesuffix(".weight") not in targets}
    with _midway_as_sentence(model, targets, wanted.label, what_now):
        wanted.quantizer.quantize_linears(model, wanted.bits, wanted.options, targets=targets, **settings)
    return _weights_evidence(model, sources, rest, wanted.options)


def _weights_evidence(
    model: nn.Module, sources: dict[str, Tensor], rest: dict[str, str], options: Options
) -> _Evidence:
    """Everything that is known without a forward pass; each source weight is released once it is measured.

    rest: the hashes before quantization of everything that must not change.
    """
    packed = {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    unasked = sorted(packed - sources.keys())
    now = hashes(model)
    changed = [
        n for n, h in rest.items() if now.get(n, h if n.rpartition(".")[0] in unasked else "") not in (h, "meta")
    ]
    # state_dict has what packed layers keep outside buffers; named_buffers has what is not saved.
    tensors = {**model.state_dict(), **dict(model.named_buffers())}
    layers, untouched, in_train_mode, activation_bits = [], [], [], None
    for name in list(sources):
        source, layer = sources.pop(name), model.get_submodule(name)
        if not isinstance(layer, PackedLinear):
            untouched.append(name)
        elif not any(tensor.is_meta for tensor in layer.state_dict().values()):
            layers.append(measure_layer(name, source, layer, _other_options(layer, options)))
            activation_bits = layer.ACTIVATION_BITS
            if layer.training and layer.ACTIVATION_BITS:
                in_train_mode.append(name)
    return _Evidence(
        layers=tuple(layers),
        untouched=tuple(untouched),
        unasked=tuple(unasked),
        changed=tuple(changed),
        on_meta=tuple(name for name, tensor in tensors.items() if tensor.is_meta),
        in_train_mode=tuple(in_train_mode),
        not_finite=tuple(n for n, t in tensors.items() if not t.is_meta and not t.isfinite().all()),
        activation_bits=activation_bits,
    )


def _other_options(layer: PackedLinear, options: Options) -> tuple[str, ...]:
    """The requested options that the layer's tensors contradict."""
    other = []
    for name, value in layer.settings().items():
        wanted = getattr(options, name, getattr(layer, name, value))
        wanted = layer.in_features if (name, wanted) == ("group_size", -1) else wanted
        if value != wanted:
            other.append(f"{name} {value}, not {wanted}")
    return tuple(other)


def _logits_evidence(
    model: LlamaForCausalLM, probe: Tensor, reference: Tensor, dense: bool, axes: Sequence[AppliedAxis]
) -> tuple[_LogitsEvidence, tuple[PartAudit, ...]]:
    """What the logits of the packed model show; then, if requested, the model is made dense, and axes are applied.

    Each axis is audited before the next one changes what it would see.
    """
    modules = {name: m for name, m in model.named_modules() if isinstance(m, PackedLinear)}
    with int8_outputs(modules) as outputs:
        logits, gap = logits_on(model, probe), None
    if dense:
        make_dense(model)
        packed, logits = logits, logits_on(model, probe)
        gap = relative_gap(packed, logits)
    parts = []
    for axis in axes:
        axis.apply(model)
        parts.append(axis.audit(model, probe))
    kl, top1 = compare_logits(reference, logits_on(model, probe) if axes else logits)
    execution = "none" if not modules else "dense" if dense else "packed"
    return _LogitsEvidence(execution, kl, top1, gap, outputs), tuple(parts)


def _with_int8(layer: LayerAudit, outputs: tuple[float, float] | None) -> LayerAudit:
    """The layer's audit with its output on the probe compared with LLM.int8's, if it is an LLM.int8 layer."""
    if outputs is None:
        return layer
    gap, spared = outputs
    return LayerAudit.model_validate(layer.model_dump() | {"int8_gap": gap, "int8_spared": spared})


def _check_audit(audit: Audit, what_now: str) -> None:
    if reasons := failures(audit):
        raise AuditError(audit.label, reasons, what_now)


def _targets(model: Any, options: Options) -> tuple[str, ...]:
    """The linear layers to quantize; for the unquantized baseline, those that methods quantize by default."""
    include_lm_head = isinstance(options, LinearOptions) and options.include_lm_head
    if include_lm_head and getattr(model.config, "tie_word_embeddings", False):
        raise QuantizeError(
            "include_lm_head: lm_head shares its weight with the embeddings, which are not quantized; leave it out."
        )
    linears = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    names = tuple(name for name in linears if include_lm_head or name.split(".")[-1] != "lm_head")
    if not names:
        raise QuantizeError("The model has no linear layers to quantize.")
    return names


def _check_call(model: Any, wanted: Quantization, execution: str, device: Any) -> None:
    library = wanted.quantizer.library
    if not wanted.quantizer.is_installed:
        raise QuantizeError(
            f"{wanted.method} needs the package {library}, which is not installed: pip install {library}."
        )
    if execution not in ("dense", "packed"):
        raise QuantizeError(f"execution is {execution!r}; it must be 'dense' or 'packed'.")
    _check_model(model)
    _check_device(device)


def _check_model(model: Any) -> None:
    if not isinstance(model, LlamaForCausalLM):
        raise QuantizeError(
            f"model is a {type(model).__name__}; it must be a LlamaForCausalLM, as returned by load_checkpoint."
        )
    if form := packed_form(model):
        raise QuantizeError(f"The model is already quantized as {form.quantization.label}; load the unquantized one.")
    foreign = any(isinstance(m, nn.Linear) and not m.weight.is_floating_point() for m in model.modules())
    if foreign or getattr(model.config, "quantization_config", None):
        raise QuantizeError("The model is already quantized by another library; load the unquantized one.")


def _check_device(device: Any) -> None:
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (
        RuntimeError,
        AssertionError,
        TypeError,
        NotImplementedError,
    ) as error:  # unknown to torch, or not on this machine
        raise QuantizeError(
            f"device is {device!r}, which torch cannot use on this machine: {one_line(error)}"
        ) from None
    if torch.device(device).type == "meta":
        raise QuantizeError("device is 'meta', which cannot hold weights; use 'cpu' or 'cuda'.")


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
            f"probe has token ids from {probe.min()} to {probe.max()}; the vocabulary is 0 to {vocabulary - 1}."
        )
    return probe


@contextmanager
def _out_of_memory_as_sentence(label: str, what_now: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise QuantizeError(f"Out of memory while quantizing as {label}. {what_now} ({error})") from error


@contextmanager
def _midway_as_sentence(model: nn.Module, targets: list[str], label: str, what_now: str) -> Iterator[None]:
    """If an error comes after some weights were replaced, say what state the model is in."""
    before = {name: weakref.ref(model.get_parameter(f"{name}.weight")) for name in targets}
    try:
        yield
    except Exception as error:
        now = ((name, getattr(model.get_submodule(name), "weight", error)) for name in targets)
        if is_out_of_memory(error) or all(before[name]() is weight for name, weight in now):
            raise
        raise RuntimeError(f"Quantizing as {label} failed midway. {what_now} {error}") from error
