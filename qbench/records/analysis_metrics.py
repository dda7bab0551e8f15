"""The pooled figures of an analysis, each with its interval over texts. Imports no torch.

A figure is a function of sums over texts, so it can be computed for all resamples at once. Analyses of the same texts
are resampled with the same draws: the draws of a difference are the difference of the draws.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from qbench.records.analysis import (
    DEAD,
    DEAD_EPSILONS,
    MASSIVE,
    MOSTLY_DEAD,
    NEAR_ZERO,
    PARTS,
    SINK_EPSILONS,
    TILE,
    WEIGHT_KINDS,
    Analysis,
    AnalysisError,
)
from qbench.records.resampling import resampled_sums, tail_share

if TYPE_CHECKING:
    import pandas as pd

SINK_METRICS = dict(zip(WEIGHT_KINDS, ("sink_rate", "sink_rate_normalized"), strict=True))


@dataclass(frozen=True)
class Figure:
    """One number of an analysis. Its name is (metric, setting, part, length)."""

    metric: str
    setting: str  # epsilon, or what counts as massive; empty if there is none
    part: str  # of the tokens: all, first or others
    length: int
    value: float
    texts: int
    tokens: int
    draws: np.ndarray | None = None  # the value in every resample of the texts; None for extremes and a single text

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval over texts."""
        return None if self.draws is None else _interval(self.draws, self.texts)


def figures(analysis: Analysis) -> list[Figure]:
    """Every pooled figure: at the length of the analysis and for all tokens first, then by part, then by length."""
    found = [*_attention(analysis), *_activations(analysis), *_sweep(analysis)]
    if analysis.facts.texts < 2:
        return [pooled.figure for pooled in found]
    drawn = resampled_sums(np.concatenate([pooled.columns for pooled in found], axis=1))
    ends = np.cumsum([pooled.columns.shape[1] for pooled in found])
    parts = np.split(drawn, ends[:-1], axis=1)
    return [
        pooled.figure if pooled.value is None else replace(pooled.figure, draws=pooled.value(sums))
        for pooled, sums in zip(found, parts, strict=True)
    ]


def difference(one: Figure, other: Figure) -> tuple[float, tuple[float, float] | None]:
    """one - other and its paired interval, if both are of the same texts."""
    value = one.value - other.value
    if one.draws is None or other.draws is None:
        return value, None
    if one.draws.shape != other.draws.shape or one.texts != other.texts:
        raise AnalysisError(f"{one.metric} cannot be paired: one has {one.texts} texts, the other {other.texts}.")
    return value, _interval(one.draws - other.draws, one.texts)


def same_texts(one: Analysis, other: Analysis) -> bool:
    """Whether two analyses used the same token ids: then their differences are paired."""
    return bool(np.array_equal(one.sums.hash, other.sums.hash))


def kurtosis(counted: np.ndarray) -> np.ndarray:
    """μ₄ / μ₂², population, of counted [..., (n, Σx, Σx², Σx³, Σx⁴)]."""
    n = counted[..., 0]
    with np.errstate(invalid="ignore", divide="ignore"):  # no values, or all the same
        m1, m2, m3, m4 = (counted[..., power] / n for power in (1, 2, 3, 4))
        variance = m2 - m1**2
        return (m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4) / variance**2


def triangle(tokens: np.ndarray) -> np.ndarray:
    """The number of weights in the causal triangle, the diagonal included."""
    return tokens * (tokens + 1) // 2


def tiles(tokens: np.ndarray) -> np.ndarray:
    """The number of tiles that have a part in the causal triangle."""
    rows, columns = TILE
    full, rest = tokens // rows, tokens % rows
    each = rows // columns  # Σ over full blocks of rows of their tiles, 1·each + 2·each + …, and the last block
    return each * full * (full + 1) // 2 + np.where(rest > 0, -(-tokens // columns), 0)


def _interval(draws: np.ndarray, texts: int) -> tuple[float, float] | None:
    if texts < 2 or not np.isfinite(draws).all():
        return None
    tail = tail_share(texts)
    low, high = np.quantile(draws, (tail, 1 - tail))
    return float(low), float(high)


def _ratio(factor: float, sums: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):  # a resample may contain no text that is long enough
        return factor * sums[..., 0] / sums[..., 1]


def _dead(share: float, sums: np.ndarray) -> np.ndarray:
    """Percent of the heads that are off for more than a share of the tokens: sums [..., (tokens, off of each head)]."""
    return 100 * (sums[..., 1:] / sums[..., :1] > share).mean(-1)


PERCENT, PLAIN = partial(_ratio, 100.0), partial(_ratio, 1.0)


@dataclass(frozen=True)
class _Pooled:
    """A figure without its draws, and what they are made of."""

    figure: Figure
    columns: np.ndarray  # [texts, n], to be summed over texts; none for an extreme
    value: Callable[[np.ndarray], np.ndarray] | None = None  # of the sums


@dataclass(frozen=True)
class _Maker:
    """Makes the figures of one length."""

    length: int
    texts: int
    tokens: int

    def pooled(
        self, metric: str, setting: str, columns: list[np.ndarray], value: Callable, part: str = "all"
    ) -> _Pooled:
        """A function of the sums of columns [texts] or [texts, …] over texts."""
        wide = np.concatenate([c.reshape(len(c), -1).astype(np.float64) for c in columns], axis=1)
        return _Pooled(self._figure(metric, setting, part, value(wide.sum(0))), wide, value)

    def extremes(self, low: np.ndarray, high: np.ndarray, part: str = "all") -> Iterator[_Pooled]:
        """The least and the greatest value; NaN in arrays is ignored."""
        for metric, value in (("min", np.nanmin(low)), ("max", np.nanmax(high))):
            yield _Pooled(self._figure(metric, "", part, value), np.empty((len(low), 0)))

    def _figure(self, metric: str, setting: str, part: str, value: np.ndarray) -> Figure:
        return Figure(metric, setting, part, self.length, float(value), self.texts, self.tokens)


def _maker(analysis: Analysis) -> _Maker:
    facts = analysis.facts
    return _Maker(facts.length, facts.texts, facts.tokens)


def _attention(analysis: Analysis) -> Iterator[_Pooled]:
    make, sums, facts = _maker(analysis), analysis.sums, analysis.facts
    tokens, heads = sums.tokens, np.full(facts.texts, facts.layers * facts.heads)
    for metric, alpha in zip(SINK_METRICS.values(), mean_first_weights(analysis), strict=True):
        for epsilon in SINK_EPSILONS:
            yield make.pooled(metric, f"{epsilon:g}", [(alpha > epsilon).sum((1, 2)), heads], PERCENT)
    yield make.pooled("row_sum", "", [sums.row_sums.sum((1, 2)), tokens * heads], PLAIN)
    pairs = triangle(tokens) * heads
    yield make.pooled("sparsity", "", [sums.zeros.sum((1, 2)), pairs], PERCENT)
    yield make.pooled("sparsity", f"{NEAR_ZERO:g}", [sums.near_zeros.sum((1, 2)), pairs], PERCENT)
    yield make.pooled("empty_tiles", "", [sums.empty_tiles.sum((1, 2)), tiles(tokens) * heads], PERCENT)
    for metric, share in (("dead_heads", DEAD), ("mostly_dead_heads", MOSTLY_DEAD)):
        for epsilon, off in zip(DEAD_EPSILONS, sums.off.swapaxes(0, 1), strict=True):
            yield make.pooled(metric, f"{epsilon:g}", [tokens, off], partial(_dead, share))


def _activations(analysis: Analysis) -> Iterator[_Pooled]:
    make, sums, facts = _maker(analysis), analysis.sums, analysis.facts
    shown = slice(facts.layers + 1)  # all states but the raw one
    counted = _counted(analysis)[:, shown]  # [texts, states, parts, 1 + powers]
    every = {"all": slice(None)} | {part: slice(n, n + 1) for n, part in enumerate(PARTS)}
    for part, chosen in every.items():
        yield make.pooled("kurtosis", "", [counted[:, :, chosen].sum((1, 2))], kurtosis, part)
        yield from make.extremes(sums.minimum[:, shown, chosen], sums.maximum[:, shown, chosen], part)
        if part == "all":
            for n, setting in enumerate(MASSIVE):
                number = sums.massive[:, shown, n].sum(1)
                yield make.pooled("massive", setting, [number, np.ones(facts.texts)], PLAIN)


def _sweep(analysis: Analysis) -> Iterator[_Pooled]:
    sums, facts = analysis.sums, analysis.facts
    for n, length in enumerate(facts.lengths):
        counts = sums.tokens >= length  # [texts]
        if not counts.any():
            continue
        make = _Maker(length, int(counts.sum()), length * int(counts.sum()))
        heads = counts * facts.layers * facts.heads
        for kind, metric in enumerate(SINK_METRICS.values()):
            for i, epsilon in enumerate(SINK_EPSILONS):
                yield make.pooled(metric, f"{epsilon:g}", [sums.sweep_sinks[:, n, kind, i], heads], PERCENT)
        yield make.pooled("row_sum", "", [sums.sweep_row_sums[:, n], heads * length], PLAIN)
        pairs = heads * triangle(np.array(length))
        yield make.pooled("sparsity", "", [sums.sweep_zeros[:, n], pairs], PERCENT)
        yield make.pooled("sparsity", f"{NEAR_ZERO:g}", [sums.sweep_near_zeros[:, n], pairs], PERCENT)
        empty = [sums.sweep_empty_tiles[:, n], heads * tiles(np.array(length))]
        yield make.pooled("empty_tiles", "", empty, PERCENT)
        values = counts * length * facts.hidden_size * (facts.layers + 1)
        yield make.pooled("kurtosis", "", [values, sums.sweep_power_sums[:, n]], kurtosis)
        yield from make.extremes(sums.sweep_minimum[:, n], sums.sweep_maximum[:, n])


def mean_first_weights(analysis: Analysis) -> tuple[np.ndarray, np.ndarray]:
    """The mean weight on the first token of each text, layer and head, raw and normalized: a sink is above epsilon."""
    tokens = analysis.sums.tokens[:, None, None]
    return analysis.sums.first / tokens, analysis.sums.first_normalized / tokens


def differing_heads(one: Analysis, other: Analysis, count: int = 4) -> list[tuple[int, int]]:
    """The heads (layer, head) whose mean weight on the first token differs most between two models, most first."""
    if one.sums.first.shape[1:] != other.sums.first.shape[1:]:
        shapes = " and ".join(f"{a.facts.layers} layers of {a.facts.heads} heads" for a in (one, other))
        raise AnalysisError(f"The models have {shapes}; heads can be compared only if these are equal.")
    gap = np.abs(mean_first_weights(one)[0].mean(0) - mean_first_weights(other)[0].mean(0))  # [layers, heads]
    order = np.argsort(-gap, axis=None, kind="stable")[:count]
    return [(int(n) // gap.shape[1], int(n) % gap.shape[1]) for n in order]


def largest_sinks(analysis: Analysis, count: int = 4) -> list[tuple[int, int]]:
    """The heads (layer, head) with the largest mean weight on the first token, largest first."""
    alpha = mean_first_weights(analysis)[0].mean(0)  # [layers, heads]
    order = np.argsort(-alpha, axis=None, kind="stable")[:count]
    return [(int(n) // alpha.shape[1], int(n) % alpha.shape[1]) for n in order]


def _counted(analysis: Analysis) -> np.ndarray:
    """[texts, states, parts, (n, Σx, Σx², Σx³, Σx⁴)]."""
    facts, power_sums = analysis.facts, analysis.sums.power_sums
    ones = np.ones_like(analysis.sums.tokens)
    by_part = np.stack([ones, analysis.sums.tokens - 1], axis=1) * facts.hidden_size  # [texts, parts]
    n = np.broadcast_to(by_part[:, None, :, None], (*power_sums.shape[:3], 1))
    return np.concatenate([n, power_sums], axis=-1)


def figures_frame(analysis: Analysis) -> "pd.DataFrame":
    """`Analysis.to_frame`."""
    import pandas as pd

    rows = []
    for figure in figures(analysis):
        low, high = figure.interval or (np.nan, np.nan)
        rows.append(
            {
                "attention": analysis.facts.attention,
                "metric": figure.metric,
                "setting": figure.setting,
                "value": figure.value,
                "low": low,
                "high": high,
                "length": figure.length,
                "tokens": figure.tokens,
                "dtype": analysis.facts.dtype,
                "part": figure.part,
                "texts": figure.texts,
            }
        )
    return pd.DataFrame(rows)


def layers_frame(analysis: Analysis) -> "pd.DataFrame":
    """`Analysis.layers_frame`: the largest |x| with its text, token and channel, and massive values, of all tokens."""
    import pandas as pd

    facts, sums = analysis.facts, analysis.sums
    counted = _counted(analysis).sum(0)  # [states, parts, 1 + powers]
    quartiles = {(q.state, q.part): q for q in facts.quartiles}
    rows = []
    for state in range(facts.states):
        for part, chosen in {"all": [0, 1], "first": [0], "others": [1]}.items():
            row = {
                "state": state,
                "where": state_name(state, facts.layers),
                "part": part,
                "kurtosis": float(kurtosis(counted[state, chosen].sum(0))),
                "min": float(np.nanmin(sums.minimum[:, state, chosen])),
                "max": float(np.nanmax(sums.maximum[:, state, chosen])),
            }
            if (state, part) in quartiles:
                row |= quartiles[state, part].model_dump(exclude={"state", "part"})
            if part == "all":
                row |= {f"massive_{name}": int(sums.massive[:, state, n].sum()) for n, name in enumerate(MASSIVE)}
                text = int(np.abs(sums.largest[:, state, 0]).argmax())
                row |= {
                    "largest": float(sums.largest[text, state, 0]),
                    "largest_text": int(sums.number[text]),
                    "largest_token": int(sums.largest_token[text, state, 0]),
                    "largest_channel": int(sums.largest_channel[text, state, 0]),
                }
            rows.append(row)
    return pd.DataFrame(rows)


def state_name(state: int, layers: int) -> str:
    """A state in words."""
    if state == 0:
        return "embedding"
    if state == layers:
        return "final norm"
    return f"layer {min(state, layers)}" + (" (raw)" if state > layers else "")


def heads_frame(analysis: Analysis) -> "pd.DataFrame":
    """`Analysis.heads_frame`: rates and shares are in percent, and pooled over texts."""
    import pandas as pd

    facts, sums = analysis.facts, analysis.sums
    raw, normalized = mean_first_weights(analysis)
    tokens, pairs, all_tiles = (float(c.sum()) for c in (sums.tokens, triangle(sums.tokens), tiles(sums.tokens)))
    columns = {"first_weight": raw.mean(0), "row_sum": sums.row_sums.sum(0) / tokens}
    for metric, alpha in zip(SINK_METRICS.values(), (raw, normalized), strict=True):
        columns |= {f"{metric}_{epsilon:g}": 100 * (alpha > epsilon).mean(0) for epsilon in SINK_EPSILONS}
    columns |= {
        "sparsity": 100 * sums.zeros.sum(0) / pairs,
        f"sparsity_{NEAR_ZERO:g}": 100 * sums.near_zeros.sum(0) / pairs,
        "empty_tiles": 100 * sums.empty_tiles.sum(0) / all_tiles,
    }
    for epsilon, off in zip(DEAD_EPSILONS, sums.off.sum(0), strict=True):
        columns[f"off_{epsilon:g}"] = 100 * off / tokens
        columns[f"dead_{epsilon:g}"] = off / tokens > DEAD
        columns[f"mostly_dead_{epsilon:g}"] = off / tokens > MOSTLY_DEAD
    layer, head = np.indices((facts.layers, facts.heads))
    flat = {name: values.ravel() for name, values in ({"layer": layer, "head": head} | columns).items()}
    return pd.DataFrame(flat)


def massive_places(analysis: Analysis, setting: str = "sun") -> "pd.DataFrame":
    """Tokens and channels of massive values by state: how many texts have one there.

    Only the LISTED largest values of a text and state are known.
    """
    import pandas as pd

    sums, which = analysis.sums, MASSIVE.index(setting)
    rank = np.arange(sums.largest.shape[2])
    text, state, place = np.nonzero(rank < sums.massive[:, :, which, None])  # the listed values that are massive
    found = pd.DataFrame(
        {
            "state": state,
            "token": sums.largest_token[text, state, place],
            "channel": sums.largest_channel[text, state, place],
            "size": np.abs(sums.largest[text, state, place]),
        }
    )
    grouped = found.groupby(["state", "token", "channel"])["size"].agg(texts="count", largest="max")
    return grouped.reset_index().sort_values(["state", "texts"], ascending=[True, False], ignore_index=True)
