"""The forward pass of a group of batches: hidden states first, logits only at positions that are scored."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from transformers import Cache, LlamaForCausalLM

from qbench.evaluate.batches import Batch, Group

Place = tuple[str, int, int]  # a window of a page: its task, its document, and its number in the document

LOGITS_BYTES = 2**26  # of float32 logits in memory at a time


@torch.no_grad()
def run(model: LlamaForCausalLM, group: Group) -> Iterator[tuple[Batch, Tensor]]:
    """Each batch with its final hidden states at the positions that are scored, [positions, dim]."""
    cache = ContextCache(group, model.device) if group.continuations else None
    for batch in group.first + group.continuations:
        placed = {} if cache is None else cache.place(batch)
        ids = to_device(_padded(batch), model.device)
        output = model.model(input_ids=ids, past_key_values=cache, use_cache=cache is not None, **placed)
        yield batch, _at_positions(output.last_hidden_state, batch)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device, from pinned memory: otherwise the host would wait until the device is idle."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class ContextCache(Cache):
    """Keys and values of a group's contexts, without padding, reused by the continuations that follow them."""

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(layers=[])
        self._device = device
        self._lengths = [len(row.tokens) for batch in group.first for row in batch]
        *self._starts, self._total = accumulate(self._lengths, initial=0)
        # After the contexts there is room for the tokens of one batch of continuations.
        self._size = self._total + max(len(batch) * len(batch[0].tokens) for batch in group.continuations)
        self._pools: list[tuple[Tensor, Tensor]] = []  # a layer's keys and values, [size, kv_heads, dim] each
        self._kept = 0  # tokens of contexts so far
        self._keep = self._read = torch.empty(0)
        self._before = 0  # keys before the batch's own

    def place(self, batch: Batch) -> dict[str, Tensor | None]:
        """Set the next batch; return the model's arguments for it besides its tokens."""
        return self._place_contexts(batch) if batch[0].context < 0 else self._place_continuations(batch)

    def _place_contexts(self, batch: Batch) -> dict[str, Tensor | None]:
        width = len(batch[0].tokens)
        real = [n * width + t for n, row in enumerate(batch) for t in range(len(row.tokens))]
        self._keep = to_device(torch.tensor(real), self._device)  # of the padded batch
        self._kept += len(real)
        return {}

    def _place_continuations(self, batch: Batch) -> dict[str, Tensor | None]:
        each = [self._lengths[row.context] for row in batch]
        starts = [self._starts[row.context] for row in batch]
        lengths, width, before = torch.tensor(each)[:, None], len(batch[0].tokens), max(each)
        # Contexts end where continuations begin, so padding is on the left: [rows, before], negative for padding.
        context = torch.arange(before) - (before - lengths)
        own = self._total + torch.arange(len(batch) * width).view(len(batch), width)
        read = torch.cat([torch.tensor(starts)[:, None] + context.clamp_min(0), own], dim=1)
        self._before, self._read = before, to_device(read, self._device)  # [rows, before + width]
        mask = torch.cat([context >= 0, torch.ones_like(own, dtype=torch.bool)], dim=1)
        return {
            "position_ids": to_device(lengths + torch.arange(width), self._device),
            "attention_mask": None if min(each) == before else to_device(mask, self._device),
        }

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Keep contexts' keys and values [batch, kv_heads, length, dim], or prepend them to the continuations'."""
        if layer_idx == len(self._pools):
            shape = (self._size, key_states.shape[1], key_states.shape[3])
            self._pools.append((key_states.new_empty(shape), value_states.new_empty(shape)))
        keys, values = self._pools[layer_idx]
        return self._exchange(keys, key_states), self._exchange(values, value_states)

    def _exchange(self, pool: Tensor, states: Tensor) -> Tensor:
        by_token = states.transpose(1, 2).flatten(0, 1)  # [batch * length, kv_heads, dim]
        if not self._before:
            pool[self._kept - len(self._keep) : self._kept] = by_token[self._keep]
            return states
        pool[self._total : self._total + len(by_token)] = by_token
        return pool.index_select(0, self._read.flatten()).unflatten(0, self._read.shape).transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many keys there are before those of the batch."""
        return self._before

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The number of keys, and the first one's offset."""
        return self._before + query_length, 0


def _padded(batch: Batch) -> Tensor:
    """Token ids [rows, longest], padded on the right: causal attention never looks there, so no mask is needed."""
    width = len(batch[0].tokens)
    return torch.tensor([[*row.tokens, *[0] * (width - len(row.tokens))] for row in batch])


def _at_positions(hidden: Tensor, batch: Batch) -> Tensor:
    """Hidden states [rows, length, dim] at the positions that are scored, [positions, dim]."""
    width = hidden.shape[1]
    positions = [n * width + position for n, row in enumerate(batch) for position in row.positions]
    return hidden.flatten(0, 1)[to_device(torch.tensor(positions), hidden.device)]


def targets_of(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """The targets of a batch: the index into its scored positions, the token, and the request."""
    before = 0
    for row in batch:
        yield from ((before + slot, token, request) for slot, token, request in row.targets)
        before += len(row.positions)


@torch.no_grad()
def score_targets(model: LlamaForCausalLM, hidden: Tensor, batch: Batch, greedy: bool) -> list[list[float]]:
    """Two numbers per target: its log-probability, and (if requested) 1 if no token is more likely.

    The log-probability is NaN if any logit at its position is NaN or infinite. hidden: as from `run`.
    """
    slots, tokens, _ = zip(*targets_of(batch), strict=True)
    target = to_device(torch.tensor([slots, tokens]), hidden.device)
    scores = []
    step = max(1, LOGITS_BYTES // (4 * model.config.vocab_size))
    for start in range(0, len(hidden), step):
        part = slice(bisect_left(slots, start), bisect_left(slots, start + step))
        logits = model.lm_head(hidden[start : start + step]).float()  # [positions of the chunk, vocabulary]
        scores.append(_log_softmax(logits, target[0, part] - start, target[1, part], greedy))
    return torch.cat(scores, dim=1).tolist()


@dataclass(frozen=True)
class States:
    """A model's final hidden states at the positions where the tokens of a request are scored."""

    hidden: Tensor  # [tokens, dim]
    tokens: list[int]


class StateKeeper:
    """Keeps the states of the first tokens of some requests while batches run. wanted: how many, by request."""

    def __init__(self, wanted: Mapping[int, int]) -> None:
        self._wanted = wanted
        self._tokens: dict[int, list[int]] = defaultdict(list)
        self._parts: dict[int, list[Tensor]] = defaultdict(list)

    def add(self, batch: Batch, hidden: Tensor) -> None:
        """Take what is wanted of a batch, whose states at scored positions are [positions, dim]."""
        slots: dict[int, list[int]] = defaultdict(list)
        for slot, token, request in targets_of(batch) if self._wanted else ():
            if len(self._tokens[request]) < self._wanted.get(request, 0):
                self._tokens[request].append(token)
                slots[request].append(slot)
        if slots:
            every = to_device(torch.tensor([slot for own in slots.values() for slot in own]), hidden.device)
            for request, own in zip(slots, hidden[every].split([len(own) for own in slots.values()]), strict=True):
                self._parts[request].append(own)

    def states(self) -> dict[int, States]:
        """All that was kept, by request."""
        return {request: States(torch.cat(own), self._tokens[request]) for request, own in self._parts.items()}


def _log_softmax(logits: Tensor, rows: Tensor, tokens: Tensor, greedy: bool) -> Tensor:
    """[2, targets]: log-probabilities of tokens at rows of the logits, and whether they are the most likely."""
    if greedy:
        best, likeliest = logits.max(-1)
        is_best = likeliest[rows] == tokens
    else:
        best = logits.amax(-1)  # a seventh of the time of max with its index
        is_best = torch.zeros_like(tokens, dtype=torch.bool)
    spread = best - logits.amin(-1)  # NaN or infinite if any logit of the row is
    chosen = logits[rows, tokens]
    total = best + logits.sub_(best[:, None]).exp_().sum(-1).log_()
    total = torch.where(spread.isfinite(), total, torch.nan)
    return torch.stack([chosen - total[rows], is_best.float()])
