"""GPTQ's layer, and the loop over decoder layers around gptqmodel's solver."""

import contextlib
import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from qbench.output import quiet_import
from qbench.progress import Bar
from qbench.quantizers.calibration import token_ids
from qbench.quantizers.declaration import QuantizeError
from qbench.quantizers.gptq import GptqOptions
from qbench.quantizers.packed import PackedLinear, check_shapes

# The linear layers of a decoder layer, in the order that data flows. Those of one stage read the same input.
STAGES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)

# Short samples of one length run together up to this many tokens, by the kind of device: more is not faster on a CPU
# and takes more memory; a GPU needs this many to be busy.
BATCH_TOKENS = {"cpu": 1024, "cuda": 16384}

# The solver takes the columns one by one. In a small weight that is too little work to share: two layers of hidden size
# 512 took 7 s of CPU on one thread and 28 s on two, on a busy machine with two cores.
WEIGHTS_A_THREAD = 2**22


class GPTQLinear(PackedLinear):
    """A linear layer in auto-gptq's v1 format; the buffers are the tensors of the file.

    qweight [in·bits/32, out] int32: 32 codes along the input in `bits` words; qzeros [groups, out·bits/32] int32: the
    zeros minus one, packed along the output; scales [groups, out]; g_idx [in] int32: the group of each input column.
    weight[o, i] = scales[g_idx[i], o] · (code[o, i] - zero[g_idx[i], o])
    In packed execution, our code unpacks and multiplies at each call: gptqmodel's layer takes seconds to import and
    rounds the scales to half.
    """

    CODE_TENSORS: ClassVar = frozenset({"qweight"})

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor

    def __init__(
        self,
        qweight: Tensor,
        qzeros: Tensor,
        scales: Tensor,
        g_idx: Tensor,
        bias: Tensor | None = None,
        *,
        bits: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = g_idx.numel(), scales.shape[1]
        self.bits, self.group_size = bits, g_idx.numel() // scales.shape[0]
        self.dtype = dtype  # of the weight that dequantize returns
        for name, tensor in {"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": g_idx}.items():
            self.register_buffer(name, tensor)
        self.register_buffer("bias", bias)

    @classmethod
    def from_codes(
        cls,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor,
        g_idx: Tensor,
        bias: Tensor | None = None,
        *,
        bits: int,
        dtype: torch.dtype,
    ) -> Self:
        """Pack codes [out, in] with scales and zeros [out, groups]; zeros are in 1 .. 2**bits."""
        # The format normally uses half. A float32 model keeps the solver's scales; kernels that read it cast them.
        scale_dtype = torch.float32 if dtype == torch.float32 else torch.float16
        return cls(
            qweight=pack(codes.T, bits),
            qzeros=pack(zeros - 1, bits).T.contiguous(),
            scales=scales.T.to(scale_dtype, copy=True, memory_format=torch.contiguous_format),
            g_idx=g_idx.to(torch.int32, copy=True),
            bias=None if bias is None else bias.detach(),
            bits=bits,
            dtype=dtype,
        )

    @classmethod
    def from_tensors(
        cls, tensors: dict[str, Tensor], options: GptqOptions, *, bits: int, shape: tuple[int, int], dtype: torch.dtype
    ) -> Self:
        """The layer that a saved state_dict holds; shape and groups are read from the tensors."""
        return cls(**tensors, bits=bits, dtype=dtype)

    def codes(self) -> Tensor:
        """The codes, int32 [out, in]."""
        return unpack(self.qweight, self.bits).T

    def zeros(self) -> Tensor:
        """The zero points, int32 [groups, out]."""
        return unpack(self.qzeros.T, self.bits).T + 1

    def dequantize(self) -> Tensor:
        """The weight [out, in]."""
        return self.dequantize_float32().to(self.dtype, memory_format=torch.contiguous_format)

    def dequantize_float32(self) -> Tensor:
        """Bit-identical to the solver's."""
        steps = unpack(self.qweight, self.bits) - self.zeros()[self.g_idx]  # [in, out]
        return (steps * self.scales.float()[self.g_idx]).T

    def settings(self) -> dict[str, object]:
        """The options that can be read from the tensors; with one group, the order of the columns cannot."""
        shown: dict[str, object] = {
            "group_size": self.in_features // len(self.scales),
            "sym": bool((self.zeros() == 2 ** (self.bits - 1)).all()),
        }
        return shown | ({"act_order": bool((self.g_idx.diff() < 0).any())} if len(self.scales) > 1 else {})

    def groups(self, weight: Tensor) -> Tensor:
        """[out, in] as [out · groups, group_size]; with act-order, a group's columns are not adjacent."""
        return weight[:, self.g_idx.argsort(stable=True)].reshape(-1, self.group_size)


def pack(values: Tensor, bits: int) -> Tensor:
    """[n, m] integers below 2**bits as [n·bits/32, m] int32; n is a multiple of 32.

    Every 32 rows are one little-endian stream of 32·bits bits, so value k starts at bit k·bits.
    """
    blocks = values.to(torch.int32).reshape(-1, 32, values.shape[1])  # [n/32, 32, m]
    words = blocks.new_zeros(len(blocks), bits, values.shape[1])  # [n/32, bits, m]
    for k in range(32):
        word, shift = divmod(k * bits, 32)
        words[:, word] |= blocks[:, k] << shift
        if shift + bits > 32:  # with 3 bits, values 10 and 21 span two words
            words[:, word + 1] |= blocks[:, k] >> (32 - shift)
    return words.flatten(0, 1)


def unpack(words: Tensor, bits: int) -> Tensor:
    """The inverse of pack: [n·bits/32, m] int32 as [n, m] int32."""
    words = words.reshape(-1, bits, words.shape[1])  # [n/32, bits, m]
    values = words.new_empty(len(words), 32, words.shape[2])  # [n/32, 32, m]
    for k in range(32):
        word, shift = divmod(k * bits, 32)
        value = words[:, word] >> shift  # copies the sign bit down; the mask removes it
        if shift + bits > 32:
            value = value & ((1 << (32 - shift)) - 1) | words[:, word + 1] << (32 - shift)
        values[:, k] = value & ((1 << bits) - 1)
    return values.flatten(0, 1)


@torch.no_grad()
def quantize_linears(
    model: LlamaForCausalLM,
    bits: int,
    options: GptqOptions,
    *,
    targets: Sequence[str],
    calibration: Any = None,
    progress: bool = False,
    device: torch.device | str | None = None,
) -> None:
    """Replace each target linear by a GPTQLinear, in place; calibration is what token_ids takes.

    Model and activations stay on the model's device; one layer at a time moves to `device` (by default the same) and
    back. progress: show a bar on stderr if that is a terminal.
    """
    _check_targets(model, targets, bits, options)
    home = model.model.embed_tokens.weight.device
    device = torch.device(device or home)
    model.eval()
    activations = _first_layer_inputs(model, batches(token_ids(calibration, model), home), device)
    with Bar(total=len(targets), unit="linear", shown=progress) as bar:
        for index, layer in enumerate(model.model.layers):
            prefix = f"model.layers.{index}."
            packed: dict[str, GPTQLinear] = {}
            with _visit(layer, device, home):
                for stage in STAGES:
                    linears = {name: layer.get_submodule(name) for name in stage if prefix + name in targets}
                    if not linears:
                        continue
                    bar.set_description(prefix + ", ".join(linears))
                    inputs = _inputs_of(layer, next(iter(linears.values())), activations)
                    packed |= (solved := solve(linears, inputs, bits, options, where=prefix))
                    # Later stages get its quantized output; dense, since packed execution would unpack for each batch.
                    for name, linear in solved.items():
                        layer.set_submodule(name, _linear(linear.dequantize(), linear.bias))
                    bar.update(len(linears))
                if index + 1 < len(model.model.layers) or "lm_head" in targets:
                    activations.forward(layer)
                for name, linear in packed.items():
                    layer.set_submodule(name, linear)
        if "lm_head" in targets:
            bar.set_description("lm_head")
            with _visit(model.model.norm, device, home), _visit(model.lm_head, device, home):
                inputs = (model.model.norm(x) for x, _ in activations)
                solved = solve({"lm_head": model.lm_head}, inputs, bits, options)
            model.lm_head = solved["lm_head"].to(home)
            bar.update()


def solve(
    linears: Mapping[str, nn.Linear], inputs: Iterator[Tensor], bits: int, options: GptqOptions, *, where: str = ""
) -> dict[str, GPTQLinear]:
    """GPTQ of linear layers that read the same inputs ([…, in] each), by gptqmodel's solver.

    The rows of a weight are independent given the inputs, so the layers are one problem with one Hessian.
    """
    GPTQ, QuantizeConfig = solver()
    config = QuantizeConfig(
        bits=bits,
        group_size=options.group_size,
        sym=options.sym,
        desc_act=options.act_order,
        damp_percent=options.damp,
        act_group_aware=False,  # gptqmodel's default reorders columns; plain GPTQ does not
        fallback=None,  # its default silently rounds to nearest if it considers the samples too few
        offload_to_disk=False,
    )
    joint = _linear(torch.cat([linear.weight for linear in linears.values()]).float())  # [sum of outputs, in]
    task = _shows_its_damping(GPTQ)(joint, config)
    if not options.sym:
        task.quantizer = _zeros_from_one(type(task.quantizer))(config)
    task.quantizer.configure(perchannel=True)
    _keep_on_host(task.quantizer)
    # Not add_batch, which keeps two more Hessians: one per batch, and one for the sum over devices.
    task.H, task.nsamples = hessian(inputs, joint)
    # Columns are updated one by one within a block, and by one product beyond it. The size changes only the rounding,
    # unless a block has several groups, whose scales come from the weights at its start: 128 then, as in the authors'
    # code. The fused CUDA kernel needs 128 too; on the CPU, a smaller size is faster.
    small = joint.weight.device.type == "cpu" and not 0 < options.group_size < 128
    with _threads(max(1, joint.weight.numel() // WEIGHTS_A_THREAD)):
        wq, scales, zeros, g_idx, _, _, damp, _ = task.quantize(blocksize=32 if small else 128)
    task.free()
    if damp != options.damp:
        # If the Hessian has no Cholesky factor, the solver tries more damping, then a larger diagonal, then
        # round-to-nearest.
        raise QuantizeError(
            f"GPTQ found no solution for {where}{', '.join(linears)} with damp={options.damp}: the calibration "
            "activations are not finite, or a larger damp is needed."
        )
    solved, start = {}, 0
    for name, linear in linears.items():
        rows = slice(start, start := start + linear.out_features)
        scale, zero = scales[rows], zeros[rows]
        codes = torch.round(wq[rows] / scale[:, g_idx]) + zero[:, g_idx]
        solved[name] = GPTQLinear.from_codes(
            codes, scale, zero, g_idx, linear.bias, bits=bits, dtype=linear.weight.dtype
        ).eval()
    return solved


def hessian(inputs: Iterator[Tensor], linear: nn.Linear) -> tuple[Tensor, int]:
    """2 XᵀX / n in float32, [in, in], and the number n of inputs."""
    total = linear.weight.new_zeros(linear.in_features, linear.in_features)
    tokens = 0
    for x in inputs:
        x = x.flatten(0, -2).to(total.dtype)  # [tokens, in]
        total.addmm_(x.T, x)
        tokens += len(x)
    return total.mul_(2 / tokens), tokens


@functools.cache
def solver() -> tuple[Any, Any]:
    """gptqmodel's GPTQ and QuantizeConfig; imported on first use, because that takes seconds and prints a banner."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # on 2 cores its default is 1, and its thread pool crashes
    # The import sets HF_HOME and CUDA_DEVICE_ORDER for this process and its children: other caches, other GPUs.
    environment = dict(os.environ)
    try:
        with quiet_import():
            from gptqmodel.quantization import GPTQ, QuantizeConfig
    except ImportError as error:
        raise QuantizeError(f"gptq needs the package gptqmodel, which cannot be imported: {error}.") from error
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
    return GPTQ, QuantizeConfig


def _shows_its_damping(task: Any) -> Any:
    """The solver's task; its damp is NaN if it had to raise the Hessian's diagonal beyond the damping."""

    class ShowsItsDamping(task):
        def hessian_inverse(self, H: Tensor) -> tuple[Tensor | None, float]:
            diagonal = H.diagonal().clone()
            factor, damp = super().hessian_inverse(H)
            # The solver removes the damping again; what it added because no damping helped stays.
            return factor, damp if torch.equal(H.diagonal(), diagonal) else math.nan

    return ShowsItsDamping


def _keep_on_host(quantizer: Any) -> None:
    """Keep the solver's largest code on the host, where its loop reads it twice per column.

    Not by a subclass: with a subclass, the solver does not use its fused CUDA kernel.
    """
    largest, find_params = quantizer.maxq.cpu(), quantizer.find_params

    def find_and_keep(x: Tensor, weight: bool = False) -> None:
        find_params(x, weight)  # moves it to the weights
        quantizer.maxq = largest

    quantizer.find_params = find_and_keep


def _zeros_from_one(quantizer: Any) -> Any:
    """The solver's asymmetric grid with zeros of at least 1.

    v1 stores zero - 1, and readers disagree on 0: vLLM's kernels read it as 2**bits, gptqmodel carries into the next
    zero. A group with (nearly) no negative weights, the only case, gets a scale that covers it from zero 1.
    """

    class ZerosFromOne(quantizer):
        scale: Tensor
        zero: Tensor

        def find_params(self, x: Tensor, weight: bool = False) -> None:
            super().find_params(x, weight)
            scale, zero, maxq = self.scale, self.zero, self.maxq
            self.scale = torch.where(zero == 0, scale * maxq / (maxq - 1), scale)
            self.zero = torch.where(zero == 0, 1, zero)

    return ZerosFromOne


def _check_targets(model: LlamaForCausalLM, targets: Sequence[str], bits: int, options: GptqOptions) -> None:
    """Raise an error, before anything is changed, if a target cannot be quantized or packed."""
    reached = {f"model.layers.{i}.{name}" for i in range(len(model.model.layers)) for s in STAGES for name in s}
    linears: dict[str, nn.Linear] = {}
    for target in targets:
        if target not in reached | {"lm_head"}:
            raise QuantizeError(
                f"gptq cannot calibrate {target}; it supports the linear layers of Llama's decoder, and lm_head."
            )
        linear = model.get_submodule(target)
        if not isinstance(linear, nn.Linear):
            raise QuantizeError(f"{target} is a {type(linear).__name__}, not a linear layer: is it quantized already?")
        linears[target] = linear
    check_shapes(linears, bits, options)


def batches(calibration: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Consecutive samples of one length as token ids [n, length] with at most BATCH_TOKENS tokens."""
    most = BATCH_TOKENS["cpu" if device.type == "cpu" else "cuda"]
    start = 0
    while start < len(calibration):
        length = calibration[start].shape[1]
        stop = start + 1
        while stop < len(calibration) and calibration[stop].shape[1] == length and (stop + 1 - start) * length <= most:
            stop += 1
        yield torch.cat(list(calibration[start:stop])).to(device)
        start = stop


class _Reached(Exception):  # noqa: N818 - no error: it ends a forward pass at the module whose inputs are wanted
    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.input, self.kwargs = args[0], kwargs


@contextlib.contextmanager
def _stop_at(module: nn.Module) -> Iterator[None]:
    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Reached(args, kwargs)

    handle = module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True)
class _Activations:
    """The hidden states [n, length, hidden] that enter a layer, one per batch, and the layer's other arguments."""

    hidden: list[Tensor]
    contexts: list[dict[str, Any]]  # mask and positions
    device: torch.device  # where the layer runs; the hidden states stay on the model's device

    def __iter__(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for x, context in zip(self.hidden, self.contexts, strict=True):
            yield x.to(self.device), send_to_device(context, self.device)

    def forward(self, layer: nn.Module) -> None:
        """Replace the inputs of the layer by its outputs."""
        for i, (x, context) in enumerate(self):
            self.hidden[i] = layer(x, **context).to(self.hidden[i].device)


def _first_layer_inputs(model: LlamaForCausalLM, samples: Iterator[Tensor], device: torch.device) -> _Activations:
    activations = _Activations([], [], device)
    by_shape: dict[torch.Size, dict[str, Any]] = {}  # nothing is padded: one mask for all batches of a shape
    with _stop_at(model.model.layers[0]):
        for ids in samples:
            try:
                model.model(input_ids=ids, use_cache=False)
            except _Reached as reached:
                activations.hidden.append(reached.input)
                activations.contexts.append(by_shape.setdefault(ids.shape, reached.kwargs))
    return activations


def _inputs_of(layer: nn.Module, linear: nn.Module, activations: _Activations) -> Iterator[Tensor]:
    """The inputs of a linear layer within the decoder layer, batch by batch; the rest of the layer does not run."""
    with _stop_at(linear):
        for x, context in activations:
            try:
                layer(x, **context)
            except _Reached as reached:
                x = reached.input
            yield x  # outside the handler: inside it, the exception still holds everything that the layer has computed


@contextlib.contextmanager
def _threads(at_most: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, at_most))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _visit(module: nn.Module, device: torch.device, home: torch.device) -> Iterator[None]:
    """Move the module to the device, and back afterwards."""
    try:
        module.to(device)
        yield
    finally:
        module.to(home)


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A plain linear layer with only these tensors."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear.eval()
