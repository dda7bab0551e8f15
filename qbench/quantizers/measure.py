"""Measurements for the audit: a layer's codes and weights compared with its source, and logits on a probe."""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qbench.quantizers.packed import PackedLinear
from qbench.records.audit import MAX_NARROW, LayerAudit

PROBE_SHAPE = (2, 64)
_CHUNK = 2**22  # entries of a table of levels in memory at once


def default_probe(vocab_size: int) -> Tensor:
    """A fixed pseudo-random batch of token ids, the same on every machine."""
    return torch.randint(vocab_size, PROBE_SHAPE, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits_on(model: nn.Module, probe: Tensor) -> Tensor:
    """The logits on the probe, [tokens, vocabulary], in float32 on the CPU."""
    device = next(model.parameters()).device
    return model(input_ids=probe.to(device), use_cache=False).logits.float().cpu().flatten(0, 1)


def compare_logits(reference: Tensor, logits: Tensor) -> tuple[float, float]:
    """Mean KL(reference ‖ logits) in nats, and the share of positions with the same most likely token."""
    if not logits.isfinite().all():
        return math.nan, math.nan
    kl = 0.0
    for p, q in zip(reference.split(64), logits.split(64), strict=True):  # float64 of 64 rows at a time
        log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        kl += float((log_p.exp() * (log_p - log_q)).sum())
    return kl / len(logits), float((reference.argmax(-1) == logits.argmax(-1)).double().mean())


def relative_gap(logits: Tensor, reference: Tensor) -> float:
    """‖logits - reference‖ / ‖reference‖."""
    return float((logits - reference).double().norm() / reference.double().norm())


def hashes(model: nn.Module) -> dict[str, str]:
    """A hash of each parameter and buffer, saved or not; "meta" if it has no values."""
    tensors = {**model.state_dict(), **dict(model.named_buffers())}
    return {name: "meta" if tensor.is_meta else _hash(tensor) for name, tensor in tensors.items()}


def _hash(tensor: Tensor) -> str:
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.blake2b(content.data, digest_size=16).hexdigest()}"


@contextmanager
def int8_outputs(layers: dict[str, PackedLinear]) -> Iterator[dict[str, tuple[float, float]]]:
    """While the model runs, compare the outputs of LLM.int8 layers with a simulation of them in float64.

    Yields, by layer name, ‖output - simulated‖ / ‖simulated‖, and where the output lies between the simulated one and
    the one with unquantized activations: 0 for LLM.int8, 1 if only the weights are int8, regardless of rounding.
    """
    gaps: dict[str, tuple[float, float]] = {}

    def compare(name: str, layer: Any, x: Tensor, output: Tensor) -> None:
        x, weight = x.flatten(0, -2), (layer.codes().double() - 128) * layer.SCB.double().view(-1, 1) / 127
        bias = None if layer.bias is None else layer.bias.double()
        simulated = F.linear(_int8_rows(x, layer.threshold), weight, bias)
        off, spared = output.flatten(0, -2).double() - simulated, F.linear(x.double(), weight, bias) - simulated
        tell = spared.norm() > 1e-4 * simulated.norm()  # unless all columns are outliers
        gaps[name] = (
            float(off.norm() / simulated.norm()),
            float((off * spared).sum() / spared.square().sum()) if tell else 0.0,
        )

    hooks = [
        layer.register_forward_hook(lambda module, args, output, name=name: compare(name, module, args[0], output))
        for name, layer in layers.items()
        if layer.ACTIVATION_BITS
    ]
    try:
        yield gaps
    finally:
        for hook in hooks:
            hook.remove()


def _int8_rows(x: Tensor, threshold: float) -> Tensor:
    """x [tokens, in] as LLM.int8 sees it: int8 with a scale per row, except columns with any |x| ≥ threshold > 0."""
    half = x.half().double()  # which bitsandbytes quantizes
    outliers = half.abs() >= threshold if threshold else torch.zeros_like(x, dtype=torch.bool)
    scale = half.masked_fill(outliers, 0).abs().amax(1, keepdim=True) / 127
    return torch.where(outliers.any(0), x.double(), (half / scale).round().nan_to_num() * scale)


@torch.no_grad()
def measure_layer(name: str, source: Tensor, layer: PackedLinear, other_options: tuple[str, ...] = ()) -> LayerAudit:
    """Everything the audit needs to know about one packed layer, given the weight that it was made from."""
    codes, weight = layer.codes(), layer.dequantize()
    exact = weight if weight.dtype == torch.float32 else layer.dequantize_float32()
    weight, source = weight.float(), source.to(weight.device, torch.float32)
    error = (weight - source).double()
    norms, product = source.double().norm() * weight.double().norm(), (source.double() * weight.double()).sum()
    finite = bool(weight.isfinite().all())
    storage = layer.storage()
    grid = _Grid(layer, codes, weight, exact, source) if finite else None
    return LayerAudit(
        name=name,
        bits=layer.bits,
        group_size=layer.group_size,
        weights=weight.numel(),
        code_bytes=storage.code_bytes,
        metadata_bytes=storage.metadata_bytes,
        source_energy=float(source.double().square().sum()),
        error_energy=float(error.square().sum()),
        cosine=float(product / norms),
        slope=float(product / source.double().square().sum()),
        codes_used=len(codes.unique()),
        max_code=int(codes.max()),
        nearest=layer.NEAREST,
        finite=finite,
        levels=grid.levels if grid else 0,
        one_value_a_code=bool(grid and grid.one_value_a_code),
        median_steps=grid.median_steps if grid else math.nan,
        median_bias=grid.median_bias if grid else math.nan,
        misplaced=grid.misplaced if grid else math.nan,
        narrow=grid.narrow if grid else math.nan,
        codes_possible=grid.codes_possible if grid else 0,
        packed_bytes=layer.packed_bytes(),
        other_options=other_options,
    )


class _Grid:
    """Where the weights of a layer lie on the levels of their groups; exact: the weights before rounding."""

    def __init__(self, layer: PackedLinear, codes: Tensor, weight: Tensor, exact: Tensor, source: Tensor) -> None:
        self.levels, self.one_value_a_code, self.codes_possible, misplaced = 0, True, 0, 0
        steps_off, spans = [], []
        width, levels = max(int(codes.max()) + 1, 2**layer.bits), layer.grid()
        every = torch.arange(width, device=codes.device)
        lowest, highest = int(codes.min()), int(codes.max())
        # A ternary quantizer has no fourth level that would be nearer to the weights that it clips.
        missing = (every < lowest) | (every > highest) if highest - lowest == 2 else every < 0
        for c, w, e, s in _chunks(width, *(layer.groups(t) for t in (codes.long(), weight, exact, source))):
            # [groups, 1 + width + 1]: the value of each code in each group, NaN if it is not in use
            table = e.new_full((len(c), width + 2), math.nan).scatter_(1, c + 1, e)
            self.one_value_a_code &= _is_one_value_a_code(c, w)
            self.levels = max(self.levels, int((~table.isnan()).sum(1).max()))
            low, high = c.amin(1, keepdim=True), c.amax(1, keepdim=True)
            # A group's mean step; NaN in a group with one level, which excludes it from what follows.
            step = _signed(table, low, high).abs()
            steps_off.append(((w - s) / step).flatten())
            # The levels that are not in use, to detect a group that has fewer levels than it could have.
            if levels is None:
                unused = table.gather(1, low + 1) + (every - low) * _signed(table, low, high)
            else:
                largest = e.abs().argmax(1, keepdim=True)
                unused = e.gather(1, largest) / levels[c.gather(1, largest)] * levels
            unused = unused.masked_fill(missing, math.nan)
            table[:, 1:-1] = table[:, 1:-1].where(~table[:, 1:-1].isnan(), unused)
            span = s.amax(1) - s.amin(1)
            possible = (span / layer.MIN_STEP).clamp(max=2**layer.bits - 1) + 1 if layer.MIN_STEP else 2**layer.bits
            possible = torch.where(span > 0, possible, 1)
            self.codes_possible = max(self.codes_possible, int(possible.max()))
            wide = possible == 2**layer.bits
            spans.append((high - low).flatten()[wide] + 1)
            neighbour = torch.fmin((table.gather(1, c) - s).abs(), (table.gather(1, c + 2) - s).abs())
            misplaced += int(((e - s).abs() - neighbour > step / 2).sum())
        off = torch.cat(steps_off)
        self.median_steps, self.median_bias = float(off.abs().nanmedian()), float(off.nanmedian())
        self.misplaced, self.narrow = misplaced / len(off), _narrow(torch.cat(spans), 2**layer.bits)


def _narrow(spans: Tensor, levels: int) -> float:
    """The share of groups that use at most half of the levels that the matrix has; spans: of the codes of each group.

    A small group may miss levels by chance: two of three in a ternary matrix. So a matrix that needs its bits, but uses
    at most three quarters of their levels, is judged by the levels that it uses; a few wide groups do not decide that.
    """
    if not len(spans):
        return 0.0
    used = int(spans.sort().values[math.ceil(len(spans) * (1 - MAX_NARROW)) - 1])  # by more than MAX_NARROW of groups
    return float((spans <= (used if levels / 2 < used <= levels * 3 / 4 else levels) / 2).double().mean())


def _is_one_value_a_code(codes: Tensor, weight: Tensor) -> bool:
    """Whether equal codes in a group [groups, group_size] mean equal weights."""
    by_code = weight.new_empty(len(codes), int(codes.max()) + 1).scatter_(1, codes, weight)
    return bool((by_code.gather(1, codes) == weight).all())


def _signed(table: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The mean step of each group, from one code to the next."""
    return (table.gather(1, high + 1) - table.gather(1, low + 1)) / (high - low)


def _chunks(width: int, *grouped: Tensor) -> Iterator[tuple[Tensor, ...]]:
    rows = max(1, _CHUNK // max(width + 2, grouped[0].shape[1]))
    return zip(*(tensor.split(rows) for tensor in grouped), strict=True)
