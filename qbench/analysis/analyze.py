"""analyze(): takes a model and texts, and returns every measurement from one pass."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from qbench.analysis import activations, sinks, sparsity
from qbench.analysis.heads import off_tokens
from qbench.analysis.rows import RowBlocks, up_to
from qbench.analysis.texts import Batch, Text, batches, checked_lengths, checked_texts
from qbench.analysis.watch import run
from qbench.attention.register import attention_kind
from qbench.progress import Bar
from qbench.records.analysis import (
    DEAD_EPSILONS,
    GU_LENGTH,
    Analysis,
    AnalysisError,
    AnalysisFacts,
    TextSums,
)
from qbench.records.analysis_metrics import state_name

BATCH_TOKENS = 4096
# What is summed over the rows of a layer's attention, in this order and with the names of TextSums.
ROWS = ("first", "first_normalized", "row_sums", "zeros", "near_zeros", "empty_tiles")


def analyze(
    model: LlamaForCausalLM,
    texts: Sequence[Tensor],
    *,
    length: int | None = None,
    lengths: Sequence[int] | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: bool = False,
) -> Analysis:
    """Measure sinks, activations, sparsity and dead heads of a model on texts, in one pass with linear memory.

    texts: token ids [length] each; each text is measured separately from its first token and cut at `length`.
    lengths: of the sweep, by default 16, 32, …: the same figures for only the first tokens of each text; attention is
    causal, so they come from the same pass. batch_tokens: tokens that run together; does not change the results.
    """
    kind = attention_kind(model)
    kept, notes = checked_texts(model, texts, length)
    sweep, more = checked_lengths(lengths, kept, length, GU_LENGTH)
    for note in (*notes, *more):
        warnings.warn(note, stacklevel=2)
    was_training = model.training
    model.eval()
    try:
        measure = _Pass(model, sweep)
        found: dict[int, dict[str, np.ndarray]] = {}
        with Bar(total=len(kept), unit="text", shown=progress) as bar:
            for batch in batches(model, kept, batch_tokens):
                found |= measure.batch(batch)
                bar.update(len(batch.texts))
    finally:
        model.train(was_training)
    facts = AnalysisFacts(
        attention=kind,
        dtype=str(model.dtype).removeprefix("torch."),
        layers=len(model.model.layers),
        heads=model.config.num_attention_heads,
        hidden_size=model.config.hidden_size,
        length=length or max(len(text.ids) for text in kept),
        lengths=sweep,
        texts=len(kept),
        tokens=sum(len(text.ids) for text in kept),
        notes=tuple(notes + more),
        quartiles=measure.histogram.quartiles(),
    )
    return Analysis(facts, _sums(kept, found))


def _sums(kept: list[Text], found: dict[int, dict[str, np.ndarray]]) -> TextSums:
    named: dict[str, Any] = {
        "number": np.array([text.number for text in kept]),
        "hash": np.array([text.hash for text in kept], dtype=object),
        "tokens": np.array([len(text.ids) for text in kept]),
    }
    own = [found[text.number] for text in kept]
    return TextSums(**named, **{name: np.stack([sums[name] for sums in own]) for name in own[0]})


class _Pass:
    """Runs batches and collects the sums."""

    def __init__(self, model: LlamaForCausalLM, lengths: tuple[int, ...]) -> None:
        self._model, self._blocks = model, RowBlocks(model)
        self._layers, self._heads = len(model.model.layers), model.config.num_attention_heads
        self._device = model.model.embed_tokens.weight.device
        self._lengths = torch.tensor(lengths, dtype=torch.int64, device=self._device)
        self.histogram = activations.Histogram(self._layers + 2, self._device)

    def batch(self, batch: Batch) -> dict[int, dict[str, np.ndarray]]:
        """The sums of each text in a batch, by the text's number and the name in TextSums."""
        self._batch = batch
        # Where sums end: at each length of the sweep, and at the end of the text.
        self._ends = torch.minimum(self._lengths, batch.tokens[:, None])
        self._ends = torch.cat([self._ends, batch.tokens[:, None]], dim=1)  # [batch, n + 1]
        self._has = self._lengths <= batch.tokens[:, None]  # [batch, n]
        self._by_layer: list[dict[str, Tensor]] = []
        self._off: list[Tensor] = []
        self._by_state: dict[int, dict[str, Tensor]] = {}
        run(self._model, batch, on_attention=self._attention, on_heads=self._outputs, on_state=self._state)
        sums = {name: tensor.cpu().numpy() for name, tensor in self._summed().items()}
        self._check_finite(sums["power_sums"])
        return {text.number: {name: own[i] for name, own in sums.items()} for i, text in enumerate(batch.texts)}

    def _attention(self, layer: int, module: nn.Module, q: Tensor, k: Tensor, scale: float) -> None:
        counter, rows = sparsity.ZeroCounter(), []
        for start, weights in self._blocks(module, q, k, scale):
            rows.append(torch.stack([*sinks.first_and_sum(weights), *counter.count(start, weights)]))
        first, row_sums, zeros, near, empty = torch.cat(rows, dim=-1)  # [batch, heads, length] each
        values = (first, sinks.normalized(first, row_sums), row_sums, zeros, near, sparsity.tile_steps(empty))
        self._by_layer.append({name: up_to(v, self._ends) for name, v in zip(ROWS, values, strict=True)})

    def _outputs(self, layer: int, outputs: Tensor) -> None:
        self._off.append(off_tokens(outputs, self._heads, self._batch.real, DEAD_EPSILONS))

    def _state(self, state: int, x: Tensor) -> None:
        real, of_tokens = self._batch.real, activations.StateSums(x)
        self.histogram.add(state, x, real)
        median, massive = activations.massive(x, real)
        values, tokens, channels = activations.largest(x, of_tokens.largest_abs, real)
        low, high = of_tokens.extremes(self._ends)
        self._by_state[state] = {
            "power_sums": of_tokens.sums(self._ends),
            "minimum": low,
            "maximum": high,
            "median_abs": median.double(),
            "massive": massive,
            "largest": values.double(),
            "largest_token": tokens,
            "largest_channel": channels,
        }

    def _summed(self) -> dict[str, Tensor]:
        """All sums by their names in TextSums."""
        layers = {name: torch.stack([own[name] for own in self._by_layer], dim=1) for name in ROWS}
        states = [self._by_state[state] for state in range(self._layers + 2)]
        joined = {name: torch.stack([own[name] for own in states], dim=1) for name in states[0]}
        swept = {name: joined[name][:, :, :-1] for name in ("power_sums", "minimum", "maximum")}
        whole = joined | {name: joined[name][:, :, -1] for name in swept}
        counts = {name: values[..., -1] for name, values in layers.items()}
        return counts | {"off": torch.stack(self._off, dim=2)} | whole | self._swept(layers, swept)

    def _swept(self, layers: dict[str, Tensor], states: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sums over layers, heads [batch, layers, heads, n + 1] and all states but the raw one; 0 for short texts."""
        by_head = {name: values[..., :-1].flatten(1, 2) for name, values in layers.items()}
        tokens = self._ends[:, :-1]
        above = [sinks.sinks(by_head[name], tokens) for name in ("first", "first_normalized")]
        found = {"sweep_sinks": torch.stack(above, dim=2)}
        for name in ("row_sums", "zeros", "near_zeros", "empty_tiles"):
            found[f"sweep_{name}"] = by_head[name].sum(1)
        shown = {name: values[:, : self._layers + 1] for name, values in states.items()}
        found["sweep_power_sums"] = shown["power_sums"].sum((1, 3))
        found["sweep_minimum"] = shown["minimum"].amin((1, 3))
        found["sweep_maximum"] = shown["maximum"].amax((1, 3))
        for name, values in found.items():
            has = self._has.view(*self._has.shape, *[1] * (values.ndim - 2))
            found[name] = values.masked_fill(~has, torch.nan if name in ("sweep_minimum", "sweep_maximum") else 0)
        return found

    def _check_finite(self, power_sums: np.ndarray) -> None:
        """Raise if activations are NaN or infinite: figures from them would be meaningless."""
        text, state = np.nonzero(~np.isfinite(power_sums).all((2, 3)))
        if len(state):
            order = [*range(self._layers), self._layers + 1, self._layers]  # the final norm runs after the raw output
            first = min(state, key=order.index)
            number = self._batch.texts[int(text[list(state).index(first)])].number
            raise AnalysisError(
                f"The activations of text {number} are NaN or infinite, first at the {state_name(first, self._layers)} "
                f"output, in {self._model.dtype}; if that is a 16-bit dtype, a wider one may help."
            )
