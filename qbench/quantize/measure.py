"""Measurements for the audit: of a layer's codes and weights against its source, and of logits on a probe."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from qbench.quantize.audit import LayerAudit
from qbench.quantize.packed import PackedLinear

PROBE_SHAPE = (2, 64)
_CHUNK = 2**22  # entries of a table of levels that are held at once


def default_probe(vocab_size: int) -> Tensor:
    """A fixed pseudo-random batch of token ids, the same on every machine."""
    return torch.randint(vocab_size, PROBE_SHAPE, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits_on(model: nn.Module, probe: Tensor) -> Tensor:
    """The logits on the probe, [tokens, vocabulary], in float32 on the CPU."""
    device = next(model.parameters()).device
    return model(input_ids=probe.to(device), use_cache=False).logits.float().cpu().flatten(0, 1)


def compare_logits(reference: Tensor, logits: Tensor) -> tuple[float, float]:
    """Mean KL(reference ‖ logits) in nats, and the share of positions whose likeliest token is the same."""
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


@torch.no_grad()
def measure_layer(name: str, source: Tensor, layer: PackedLinear) -> LayerAudit:
    """All that the audit wants to know of one packed layer, given the weight that it was made from."""
    codes, weight = layer.codes(), layer.dequantize().float()
    source = source.to(weight.device, torch.float32)
    error = (weight - source).double()
    finite = bool(weight.isfinite().all())
    storage = layer.storage()
    grid = _Grid(layer, codes, weight, source) if finite else None
    return LayerAudit(
        name=name,
        bits=layer.bits,
        group_size=layer.group_size,
        weights=weight.numel(),
        code_bytes=storage.code_bytes,
        metadata_bytes=storage.metadata_bytes,
        source_energy=float(source.double().square().sum()),
        error_energy=float(error.square().sum()),
        codes_used=len(codes.unique()),
        max_code=int(codes.max()),
        nearest=layer.NEAREST,
        finite=finite,
        levels=grid.levels if grid else 0,
        one_value_a_code=bool(grid and grid.one_value_a_code),
        median_steps=grid.median_steps if grid else math.nan,
        median_bias=grid.median_bias if grid else math.nan,
        misplaced=grid.misplaced if grid else math.nan,
    )


class _Grid:
    """Where the weights of a layer lie on the levels of their groups."""

    def __init__(self, layer: PackedLinear, codes: Tensor, weight: Tensor, source: Tensor) -> None:
        self.levels, self.one_value_a_code, misplaced = 0, True, 0
        steps_off = []
        width = int(codes.max()) + 1
        for c, w, s in _chunks(width, *(layer.groups(t) for t in (codes.long(), weight, source))):
            # [groups, 1 + width + 1]: the value of each code in each group, NaN where it is not in use
            table = w.new_full((len(c), width + 2), math.nan).scatter_(1, c + 1, w)
            self.one_value_a_code &= bool((table.gather(1, c + 1) == w).all())
            self.levels = max(self.levels, int((~table.isnan()).sum(1).max()))
            low, high = c.amin(1, keepdim=True), c.amax(1, keepdim=True)
            # A group's mean step; NaN, and so out of all that follows, in a group of one level.
            step = (table.gather(1, high + 1) - table.gather(1, low + 1)).abs() / (high - low)
            steps_off.append(((w - s) / step).flatten())
            neighbour = torch.fmin((table.gather(1, c) - s).abs(), (table.gather(1, c + 2) - s).abs())
            misplaced += int(((w - s).abs() - neighbour > step / 2).sum())
        off = torch.cat(steps_off)
        self.median_steps, self.median_bias = float(off.abs().nanmedian()), float(off.nanmedian())
        self.misplaced = misplaced / len(off)


def _chunks(width: int, *grouped: Tensor) -> Iterator[tuple[Tensor, ...]]:
    rows = max(1, _CHUNK // max(width + 2, grouped[0].shape[1]))
    return zip(*(tensor.split(rows) for tensor in grouped), strict=True)
