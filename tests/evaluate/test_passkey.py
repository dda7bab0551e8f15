"""Passkey: documents of the right length with keys and places drawn evenly, and answers that are right or wrong."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from qbench import load_checkpoint
from qbench.evaluate.evaluation import evaluate
from qbench.evaluate.passkey import (
    FILLER,
    LARGEST_KEY,
    NEW_TOKENS,
    PasskeyError,
    PasskeySettings,
    is_right,
    passkey_documents,
    passkey_tasks,
)
from qbench.evaluate.requests import build_documents
from qbench.evaluate.scorer import Scorer

from .test_scorer import hflm

LENGTHS = (150, 200)  # the tiny models have 256 positions


def by_fours(text: str) -> int:
    """A quick tokenizer: four characters per token."""
    return -(-len(text) // 4)


def places(documents: list[dict[str, Any]]) -> np.ndarray:
    """The share of the filler that is before the key, read from the prompts."""
    lines = [document["prompt"].split("\n") for document in documents]
    return np.array([len(before) / (len(before) + len(after)) for _, before, _, after, _ in lines])


def distance_from_uniform(values: np.ndarray) -> float:
    """The Kolmogorov-Smirnov statistic times √n: above 1.63 once in a hundred times."""
    ordered, n = np.sort(values), len(values)
    steps = np.arange(n + 1) / n
    return max(np.abs(ordered - steps[1:]).max(), np.abs(ordered - steps[:-1]).max()) * n**0.5


# Documents ---------------------------------------------------------------------------------------


def test_a_prompt_is_five_lines_with_the_key_twice_in_one_of_them() -> None:
    for document in passkey_documents(PasskeySettings(), 512, by_fours, 20):
        introduction, before, hidden, after, question = document["prompt"].split("\n")
        key = str(document["key"])
        assert "important information" in introduction
        assert re.findall("[0-9]+", document["prompt"]) == re.findall("[0-9]+", hidden) == [key, key]
        assert question.endswith("The pass key is")
        for filler in (before, after):
            assert (FILLER * (len(filler) // len(FILLER) + 1)).startswith(filler)


def test_keys_and_places_are_drawn_evenly() -> None:
    documents = passkey_documents(PasskeySettings(), 2048, by_fours, 1000)
    keys = np.array([document["key"] for document in documents])
    assert keys.min() >= 1
    assert keys.max() <= LARGEST_KEY
    assert distance_from_uniform(keys / LARGEST_KEY) < 1.63
    assert distance_from_uniform(places(documents)) < 1.63
    assert abs(np.corrcoef(keys, places(documents))[0, 1]) < 0.1
    assert len({document["prompt"] for document in documents}) == 1000


@pytest.mark.parametrize("length", [150, 512, 890])
def test_prompts_have_the_length_that_was_asked_for(tokenizer: PreTrainedTokenizerFast, length: int) -> None:
    count = lambda text: len(tokenizer.encode(text))  # noqa: E731
    documents = passkey_documents(PasskeySettings(), length, count, 100)
    tokens = np.array([count(document["prompt"]) for document in documents])
    assert tokens.tolist() == [document["tokens"] for document in documents]
    assert tokens.max() <= length
    assert tokens.min() >= length - 3  # filler is cut at characters
    assert (tokens == length).mean() > 0.9


def test_the_first_trials_do_not_depend_on_how_many_there_are() -> None:
    few, many = (passkey_documents(PasskeySettings(trials=n), 512, by_fours, n) for n in (5, 50))
    assert few == many[:5]
    other = passkey_documents(PasskeySettings(seed=1), 512, by_fours, 5)
    assert not {document["key"] for document in few} & {document["key"] for document in other}


def test_a_length_without_room_for_the_question_is_a_sentence() -> None:
    with pytest.raises(PasskeyError, match=r"60 tokens.*\b83\b"):
        passkey_documents(PasskeySettings(), 60, by_fours, 1)
    assert passkey_documents(PasskeySettings(), 83, by_fours, 1)


def test_fingerprints_follow_settings_and_sizes() -> None:
    settings = PasskeySettings((512, 1024), 20)
    found = settings.summaries()
    assert {name: own.documents for name, own in found.items()} == {"passkey_512": 20, "passkey_1024": 20}
    prints = {own.fingerprint for own in found.values()}
    prints |= {own.fingerprint for own in settings.summaries(limit=5).values()}
    prints |= {own.fingerprint for own in PasskeySettings((512, 1024), 20, seed=1).summaries().values()}
    assert len(prints) == 6
    assert settings.summaries(limit=100) == found
    assert PasskeySettings((1024,), 20).summaries()["passkey_1024"] == found["passkey_1024"]


# Answers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "right"),
    [
        (" 1234.", True),
        ("1234", True),
        (": 1234, 5", True),
        (" 12345", False),
        (" 123", False),
        (" 01234", False),
        (" 99 and 1234", False),
        (" a secret", False),
        ("", False),
    ],
)
def test_an_answer_counts_if_all_of_its_digits_are_right(response: str, right: bool) -> None:
    assert is_right(response, 1234) is right


def rig(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, say: Any) -> None:
    """Let a model generate what `say` makes of each prompt."""

    def generate(input_ids: torch.Tensor, max_length: int, **_: Any) -> torch.Tensor:
        rows = []
        for row in input_ids:
            answer = tokenizer.encode(say(tokenizer.decode(row)), add_special_tokens=False)
            room = max_length - len(row)
            rows.append([*row.tolist(), *answer[:room], *[tokenizer.eos_token_id] * (room - len(answer))])
        return torch.tensor(rows)

    monkeypatch.setattr(model, "generate", generate)


@pytest.mark.parametrize(
    ("say", "accuracy"),
    [
        (lambda prompt: f" {re.findall('[0-9]+', prompt)[0]}. Keep", 1.0),
        (lambda prompt: " hidden in the text.", 0.0),
        (lambda prompt: f" {int(re.findall('[0-9]+', prompt)[0]) + 1}.", 0.0),
    ],
)
def test_a_model_that_knows_the_answer_has_all_right_and_one_that_does_not_none(
    softmax_model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    say: Any,
    accuracy: float,
) -> None:
    rig(softmax_model, tokenizer, monkeypatch, say)
    lm = Scorer(softmax_model, tokenizer)
    tasks = passkey_tasks(PasskeySettings(LENGTHS, 12), lambda text: len(lm.tok_encode(text)))
    found = evaluate(lm, tasks)
    assert [(m.task, m.name, m.value, m.better, m.documents) for m in found.metrics] == [
        (f"passkey_{length}", "acc", accuracy, "higher", 12) for length in LENGTHS
    ]
    assert (found.samples["acc"] == accuracy).all()
    assert found.samples["target"].str.fullmatch("[0-9]+").all()


# Generation --------------------------------------------------------------------------------------


def prompts(tokenizer: PreTrainedTokenizerFast, trials: int = 6) -> list[Any]:
    tasks = passkey_tasks(PasskeySettings(LENGTHS, trials), lambda text: len(tokenizer.encode(text)))
    return [request for task in tasks.values() for own in build_documents(task) for request in own.requests]


def test_answers_are_those_of_hflm(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    requests = prompts(tokenizer)
    theirs = hflm(model, tokenizer).generate_until(requests, disable_tqdm=True)
    assert any(text.strip() for text in theirs)
    for batch_tokens in (None, 100, 700, 5000):
        assert Scorer(model, tokenizer, batch_tokens=batch_tokens).generate_until(requests) == theirs


def test_prompts_run_in_batches_and_once(softmax_model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    shapes: list[tuple[int, ...]] = []
    hook = softmax_model.model.register_forward_pre_hook(
        lambda _, __, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    lm = Scorer(softmax_model, tokenizer, batch_tokens=200 + NEW_TOKENS)  # on a CPU, four budgets generate together
    lm.generate_until(prompts(tokenizer, trials=4))
    hook.remove()
    widest = [shape for shape in shapes if shape[1] > 1]
    assert [rows for rows, _ in widest] == [4, 4]  # rows of one length are together
    # With the cache, a token that was generated runs alone.
    assert len(shapes) <= len(widest) * NEW_TOKENS
    assert sum(rows * width for rows, width in shapes) <= 4 * sum(LENGTHS) + 2 * 4 * (NEW_TOKENS - 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_real_model_finds_keys_as_with_hflm(smollm2: Path) -> None:
    model, tokenizer = load_checkpoint(smollm2), AutoTokenizer.from_pretrained(smollm2)
    lm = Scorer(model, tokenizer)
    tasks = passkey_tasks(PasskeySettings((512,), 20), lambda text: len(lm.tok_encode(text)))
    found = evaluate(lm, tasks)
    (metric,) = found.metrics
    print(f"SmolLM2-135M, 20 trials at 512 tokens: {metric.value:.0%} ± {metric.stderr:.0%}")
    (task,) = tasks.values()
    requests = [request for own in build_documents(task) for request in own.requests]
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4).generate_until(requests, disable_tqdm=True)
    assert found.samples["response"].tolist() == theirs
    assert metric.value >= 0.5  # a model that cannot find it has 0
