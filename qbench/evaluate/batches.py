"""Which tokens run together: a pure function of the requests and a token budget.

A context that several continuations share runs once, and its keys and values stay in memory until they have run.
Contexts are batched by length, and so are continuations. Every other request runs as one sequence.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Request = tuple[Sequence[int], Sequence[int]]  # token ids of the context and of the continuation, neither empty

# How many tokens run at a time. It depends on the type of device, not on free memory, so it is the same for all cells
# of a run and on all cards. CPU: limited by caches, more is not faster. CUDA: products of 16k rows fill an H100, and a
# model of 1.8B takes 6 GiB besides its weights, computed from the sizes of its tensors.
BATCH_TOKENS = {"cpu": 1024, "cuda": 16384}
# What a batch costs besides its tokens, in tokens. CPU, measured with 340M on one core: reading the weights. CUDA, an
# estimate: 24 layers of 35 kernels at 6 µs per launch are 5 ms, in which an A100 at half its peak runs 1,100 tokens.
BATCH = {"cpu": 24, "cuda": 1024}
# Contexts in memory at a time, in budgets: with more of them, more continuations have the same length.
KEPT = {"cpu": 4, "cuda": 1}
# Contexts that are continued together, in budgets. CPU: a new token reads all weights, for any number of rows; with
# 340M and prompts of 512 tokens, one row at a time takes 1.14 times as long as four.
GENERATED = {"cpu": 4, "cuda": 1}
KEYS = 4  # this many keys and values of a context, read by one layer at a time, use the memory of one token


@dataclass(frozen=True)
class Row:
    """A sequence that the model reads, and the tokens whose probability is taken at its positions."""

    tokens: Sequence[int]
    positions: list[int]  # in `tokens`, ascending
    targets: list[tuple[int, int, int]]  # (index into positions, token, request), ascending
    context: int = -1  # for a continuation: the index of its context in the group


Batch = list[Row]  # longest first


@dataclass(frozen=True)
class Group:
    """Batches that belong together: contexts or whole requests, then continuations that need their keys and values."""

    first: list[Batch]
    continuations: list[Batch] = field(default_factory=list)

    def rows(self) -> list[Row]:
        """All sequences that run."""
        return [row for batch in self.first + self.continuations for row in batch]


def truncate(context: Sequence[int], continuation: Sequence[int], max_length: int) -> Request:
    """Drop the start of the context if both do not fit; the last token is scored but never read."""
    return context[-(max_length + 1 - len(continuation)) :], continuation


def device_kind(device: str) -> str:
    """The key for a device in the tables above, from torch's name: anything except a CPU is treated as a GPU."""
    return "cpu" if device == "cpu" else "cuda"


def group_requests(requests: Mapping[int, Request], batch_tokens: int, device: str = "cpu") -> list[Group]:
    """All requests in groups of batches, the longest sequences first; the order of the requests does not matter."""
    by_context: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, (context, _) in requests.items():
        by_context[tuple(context)].append(index)
    rows, shared = [], []
    for context, members in by_context.items():
        if max(len(requests[index][1]) for index in members) == 1:
            rows.append(_ends(context, members, requests))
        elif len(members) > 1 and len(context) > 1:  # the prefix token alone is not worth keeping
            shared.append(context)
        else:
            rows += [_whole(index, *requests[index]) for index in members]
    kind = device_kind(device)
    groups = [Group([batch]) for batch in cut(rows, batch_tokens, BATCH[kind])]
    for contexts in _fill(sorted(shared, key=_longest_first), KEPT[kind] * batch_tokens):
        groups.append(_shared(contexts, by_context, requests, batch_tokens, BATCH[kind]))
    return groups


def cut(rows: list[Row], batch_tokens: int, batch_cost: int, keys: int = 0) -> list[Batch]:
    """Batches of rows of similar length: with padding, a batch has at most batch_tokens tokens, or is one row.

    batch_cost: what a batch costs besides its tokens, in tokens. keys: how many keys and values of a context each row
    reads besides its own.
    """
    rows = sorted(rows, key=lambda row: (*_longest_first(row.tokens), row.context))
    batches: list[Batch] = []
    start = 0
    for end in _ends_of_similar([len(row.tokens) for row in rows], batch_tokens, batch_cost, keys):
        while start < end:
            stop = min(end, start + _most_rows(len(rows[start].tokens), batch_tokens, keys))
            batches.append(rows[start:stop])
            start = stop
    return batches


def _most_rows(width: int, batch_tokens: int, keys: int) -> int:
    return max(1, batch_tokens // (width + keys // KEYS))


def _ends_of_similar(lengths: list[int], batch_tokens: int, batch_cost: int, keys: int) -> list[int]:
    """Split descending lengths so padding plus batches cost least, by dynamic programming; return the ends of parts.

    A part may be more than one batch; padding is counted as if all rows were as wide as its first row.
    """
    total = len(lengths)
    steps = [n for n in range(total + 1) if n in (0, total) or lengths[n] < lengths[n - 1]]
    least, begin = {0: 0}, {}  # for the first n rows: the cost, and where their last part begins
    for end in steps[1:]:
        options = []
        for start in steps[: steps.index(end)]:
            count, width = end - start, lengths[start]
            batches = math.ceil(count / _most_rows(width, batch_tokens, keys))
            options.append((least[start] + count * width + batches * batch_cost, start))
        least[end], begin[end] = min(options)
    ends, end = [], total
    while end:
        ends.append(end)
        end = begin[end]
    return ends[::-1]


def _longest_first(tokens: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Sort equal lengths by content, so the batches do not depend on the order of the requests."""
    return -len(tokens), tuple(tokens)


def _ends(context: Sequence[int], members: list[int], requests: Mapping[int, Request]) -> Row:
    """A context; the first token of each of its continuations is scored at its last position."""
    return Row(context, [len(context) - 1], [(0, requests[index][1][0], index) for index in members])


def _whole(index: int, context: Sequence[int], continuation: Sequence[int]) -> Row:
    start = len(context) - 1
    targets = [(slot, token, index) for slot, token in enumerate(continuation)]
    return Row([*context, *continuation[:-1]], list(range(start, start + len(targets))), targets)


def _shared(
    contexts: list[tuple[int, ...]],
    by_context: dict[tuple[int, ...], list[int]],
    requests: Mapping[int, Request],
    batch_tokens: int,
    batch_cost: int,
) -> Group:
    first = cut([_ends(context, by_context[context], requests) for context in contexts], batch_tokens, batch_cost)
    rest = []
    for number, row in enumerate(row for batch in first for row in batch):
        for _, _, index in row.targets:
            # The first token was scored with the context; the last one is never read.
            continuation = requests[index][1]
            targets = [(slot, token, index) for slot, token in enumerate(continuation[1:])]
            if targets:
                rest.append(Row(continuation[:-1], list(range(len(targets))), targets, context=number))
    return Group(first, cut(rest, batch_tokens, batch_cost, keys=max(map(len, contexts))))


def _fill(contexts: list[tuple[int, ...]], tokens: int) -> list[list[tuple[int, ...]]]:
    """Groups of consecutive contexts with up to this many tokens, at least one context each."""
    groups: list[list[tuple[int, ...]]] = []
    used = 0
    for context in contexts:
        if groups and used + len(context) <= tokens:
            groups[-1].append(context)
            used += len(context)
        else:
            groups.append([context])
            used = len(context)
    return groups
