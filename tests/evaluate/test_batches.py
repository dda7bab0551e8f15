"""Batches: every token that must be scored is, once, within the budget, with little padding, in any order."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from qbench.evaluate.batches import KEYS, Group, Request, group_requests, truncate

tokens = st.lists(st.integers(0, 5), min_size=1, max_size=12).map(tuple)
request_lists = st.lists(st.tuples(tokens, tokens), max_size=30)


def numbered(requests: list[Request]) -> dict[int, Request]:
    return dict(enumerate(requests))


def scored(groups: list[Group]) -> list[tuple[int, tuple[int, ...], int]]:
    """(request, all tokens that are read before the target, target) of every score that the groups ask for."""
    found = []
    for group in groups:
        contexts = [row.tokens for batch in group.first for row in batch]
        for row in group.rows():
            before = contexts[row.context] if row.context >= 0 else ()
            for slot, token, request in row.targets:
                found.append((request, (*before, *row.tokens[: row.positions[slot] + 1]), token))
    return sorted(found)


@given(request_lists, st.integers(1, 60))
@settings(deadline=None)
def test_every_token_of_a_continuation_is_scored_once_after_all_that_comes_before_it(requests, batch_tokens) -> None:
    expected = [
        (index, (*context, *continuation[:n]), token)
        for index, (context, continuation) in enumerate(requests)
        for n, token in enumerate(continuation)
    ]
    assert scored(group_requests(numbered(requests), batch_tokens)) == sorted(expected)


@given(request_lists, st.integers(1, 60))
@settings(deadline=None)
def test_a_batch_fits_the_budget_unless_it_is_a_single_row(requests, batch_tokens) -> None:
    for group in group_requests(numbered(requests), batch_tokens):
        for batch in group.first + group.continuations:
            width = max(len(row.tokens) for row in batch)
            assert width == len(batch[0].tokens)
            keys = max((len(c[0].tokens) for c in group.first), default=0) if batch in group.continuations else 0
            assert len(batch) == 1 or len(batch) * (width + keys // KEYS) <= batch_tokens


@given(request_lists, st.integers(1, 60), st.randoms())
@settings(deadline=None)
def test_the_order_of_requests_leaves_no_trace_in_the_batches(requests, batch_tokens, rng) -> None:
    def shapes(groups: list[Group]) -> list:
        return [[row.tokens for row in batch] for group in groups for batch in group.first + group.continuations]

    shuffled = list(requests)
    rng.shuffle(shuffled)
    assert shapes(group_requests(numbered(requests), batch_tokens)) == shapes(
        group_requests(numbered(shuffled), batch_tokens)
    )


def test_a_shared_context_is_read_once_and_a_last_token_never() -> None:
    context = tuple(range(10))
    groups = group_requests(
        numbered([(context, (11, 12, 13)), (context, (14,)), (context, (15, 16))]), batch_tokens=100
    )
    assert len(groups) == 1
    assert [row.tokens for row in groups[0].rows()] == [context, (11, 12), (15,)]


def test_one_token_continuations_need_no_cache() -> None:
    context = tuple(range(10))
    (group,) = group_requests(numbered([(context, (11,)), (context, (12,))]), batch_tokens=100)
    assert group.continuations == []
    assert [row.tokens for row in group.rows()] == [context]


def test_what_shares_nothing_runs_as_one_sequence() -> None:
    (group,) = group_requests(numbered([((1, 2, 3), (4, 5)), ((6, 7, 8), (9, 1))]), batch_tokens=100)
    assert [list(row.tokens) for row in group.rows()] == [[1, 2, 3, 4], [6, 7, 8, 9]]


def test_truncation_drops_the_start_of_the_context_as_hflm_does() -> None:
    context, continuation = list(range(10)), [20, 21, 22]
    for max_length in range(3, 15):
        short, kept = truncate(context, continuation, max_length)
        assert [*short, *kept] == (context + continuation)[-(max_length + 1) :]
        assert kept == continuation


def padding(groups: list[Group]) -> float:
    """The share of padding in all tokens that run."""
    batches = [batch for group in groups for batch in group.first + group.continuations]
    padded = sum(len(batch) * len(batch[0].tokens) for batch in batches)
    return 1 - sum(len(row.tokens) for batch in batches for row in batch) / max(padded, 1)


@pytest.mark.parametrize("batch_tokens", [512, 1024, 4096, 32768])
def test_padding_stays_below_a_tenth_at_the_lengths_of_real_documents(
    texts: dict[str, Path], tokenizer: PreTrainedTokenizerFast, batch_tokens: int
) -> None:
    def read(name: str, count: int) -> list[dict]:
        lines = texts[name].read_text().splitlines()
        return [json.loads(line) for line in random.Random(0).sample(lines, count)]

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text)

    choices = [
        (encode(f"Question: {doc['question']}\nAnswer:"), encode(f" {choice}"))
        for doc in read("arc_easy", 300)
        for choice in doc["choices"]["text"]
    ]
    words = [doc["text"].rsplit(" ", 1) for doc in read("lambada_openai", 300)]
    for requests in (choices, [(encode(context), encode(f" {word}")) for context, word in words]):
        groups = group_requests(numbered(requests), batch_tokens)
        assert padding(groups) < 0.1
        forwarded = sum(len(row.tokens) for group in groups for row in group.rows())
        naive = sum(len(context) + len(continuation) - 1 for context, continuation in requests)
        assert forwarded < naive / 2 if requests is choices else forwarded == naive


def test_a_gpu_gets_fewer_and_larger_batches_of_the_same_requests() -> None:
    # Contexts of 8 to 57 tokens with two continuations each, and one request alone of each length.
    shared = [(tuple(range(n)), (n, n + k)) for n in range(8, 58) for k in (1, 2)]
    alone = [(tuple(range(1000, 1000 + n)), (1, 2)) for n in range(8, 58)]
    counts, padded = {}, {}
    for device in ("cpu", "cuda"):
        groups = group_requests(numbered(shared + alone), 16384, device)
        batches = [batch for group in groups for batch in group.first + group.continuations]
        counts[device] = len(batches)
        padded[device] = sum(len(batch) * len(batch[0].tokens) for batch in batches)
    # Padding is cheaper than another batch on CUDA, where a batch costs 1,024 tokens instead of 24.
    assert counts["cuda"] < counts["cpu"] / 2
    assert padded["cpu"] < padded["cuda"] <= padded["cpu"] + 1024 * (counts["cpu"] - counts["cuda"])
