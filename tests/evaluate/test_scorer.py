"""Scorer: HFLM's numbers on real documents for any budget and order; bad input is reported in one sentence."""

import copy
import json
import logging
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from qbench import quantize
from qbench.evaluate import forward
from qbench.evaluate.batches import BATCH_TOKENS
from qbench.evaluate.scorer import Scorer, ScoringError

Scores = list[tuple[float, bool]]

SENTENCES = [
    "Question: Which animal eats only plants?\nAnswer: a cow",
    "The river ran over its banks after three days of rain, and nobody in the town had slept.",
    "She put the letter back into its envelope and looked at him across the table.",
    "Photosynthesis turns the energy of sunlight into sugar, which feeds nearly all living things.",
    " = Lobster = \n \n The lobster lives in the Atlantic Ocean and may grow to 60 centimetres .",
]

# Shapes that are rare in real tasks: shared and lone, one-token, empty contexts, trailing spaces, too long ones.
PAIRS = [
    ("Question: Which animal eats only plants?\nAnswer:", " a cow"),
    ("Question: Which animal eats only plants?\nAnswer:", " photosynthesis"),
    ("Question: Which animal eats only plants?\nAnswer:", " a"),
    ("Question: Which animal eats only plants?\nAnswer:", " a"),
    ("The river ran ", "over its banks"),
    ("The river ran ", "dry"),
    ("", "She put the letter back"),
    ("", "The"),
    ("", "The river"),
    ("a", " b"),
    ("a", " b c d e f"),
    (" ".join(SENTENCES * 6), " the"),
    (" ".join(SENTENCES * 6), " a longer continuation, for which more of the context is cut off"),
    (" ".join(SENTENCES * 6), " the river in the town"),
]


def instances(arguments: list[tuple], kind: str = "loglikelihood", task: str = "own") -> list[Instance]:
    return [Instance(kind, {}, args, 0, (task, index, 1)) for index, args in enumerate(arguments)]


def read(texts: dict[str, Path], name: str, count: int) -> list[dict]:
    lines = texts[name].read_text().splitlines()
    return [json.loads(line) for line in random.Random(1).sample(lines, count)]


def arc_easy(texts: dict[str, Path], count: int = 40) -> list[Instance]:
    return instances(
        [
            (f"Question: {doc['question']}\nAnswer:", f" {choice}")
            for doc in read(texts, "arc_easy", count)
            for choice in doc["choices"]["text"]
        ]
    )


def lambada(texts: dict[str, Path], count: int = 40) -> list[Instance]:
    passages = [doc["text"].rsplit(" ", 1) for doc in read(texts, "lambada_openai", count)]
    return instances([(context, f" {word}") for context, word in passages])


def wikitext(texts: dict[str, Path], count: int = 4) -> list[Instance]:
    pages = read(texts, "wikitext", count)
    # Short ones too: real pages are all longer than the tiny models' window.
    return instances([(page["page"][: 20_000 // 4**n],) for n, page in enumerate(pages)], "loglikelihood_rolling")


def hflm(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> HFLM:
    return HFLM(pretrained=model, tokenizer=tokenizer, softmax_dtype=torch.float32, batch_size=16)


def assert_same(ours: Scores, theirs: Scores) -> None:
    assert len(ours) == len(theirs)
    for (value, _), (expected, _) in zip(ours, theirs, strict=True):
        assert value == pytest.approx(expected, abs=1e-4, rel=0)
    # The tiny models' two best tokens always differ by more than 1e-4 where these flags are decided.
    assert [flag for _, flag in ours] == [flag for _, flag in theirs]


# The same numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_tokens", [None, 100])
def test_own_requests_score_as_with_hflm(model, tokenizer, batch_tokens) -> None:
    requests = instances(PAIRS)
    ours = Scorer(model, tokenizer, batch_tokens=batch_tokens).loglikelihood(requests)
    assert_same(ours, hflm(model, tokenizer).loglikelihood(requests, disable_tqdm=True))
    assert all(type(value) is float and type(flag) is bool for value, flag in ours)


@pytest.mark.parametrize("task", [arc_easy, lambada])
def test_documents_of_tasks_score_as_with_hflm(texts, model, tokenizer, task) -> None:
    requests = task(texts)
    theirs = hflm(model, tokenizer).loglikelihood(requests, disable_tqdm=True)
    assert_same(Scorer(model, tokenizer).loglikelihood(requests), theirs)


def test_rolling_documents_score_as_with_hflm(texts, model, tokenizer) -> None:
    requests = wikitext(texts)
    theirs = hflm(model, tokenizer).loglikelihood_rolling(requests, disable_tqdm=True)
    assert Scorer(model, tokenizer).loglikelihood_rolling(requests) == pytest.approx(theirs, rel=1e-5)


def test_what_greedy_decoding_gives_is_flagged(softmax_model, tokenizer) -> None:
    lm = Scorer(softmax_model, tokenizer)
    contexts = [sentence[:30] for sentence in SENTENCES]
    texts = [(context, {"until": [], "max_gen_toks": 4}) for context in contexts]
    generated = lm.generate_until(instances(texts, "generate_until"))
    pairs = [(c, g) for c, g in zip(contexts, generated, strict=True) if _survives(tokenizer, c, g)]
    assert pairs  # random models write bytes that are not text; some must be
    assert all(flag for _, flag in lm.loglikelihood(instances(pairs)))
    assert not any(flag for _, flag in lm.loglikelihood(instances([(c, f"{g} not") for c, g in pairs])))


def _survives(tokenizer: PreTrainedTokenizerFast, context: str, text: str) -> bool:
    """Is the text still the four tokens that were generated, after decoding and encoding?"""
    return len(tokenizer.encode(context + text)) == len(tokenizer.encode(context)) + 4 and "\ufffd" not in text


def test_the_order_of_requests_and_the_budget_do_not_matter(texts, model, tokenizer) -> None:
    requests = arc_easy(texts, 10) + lambada(texts, 10) + instances(PAIRS)
    expected = Scorer(model, tokenizer).loglikelihood(requests)
    order = random.Random(0).sample(range(len(requests)), len(requests))
    for batch_tokens in (1, 300, 10_000):
        lm = Scorer(model, tokenizer, batch_tokens=batch_tokens)
        shuffled = lm.loglikelihood([requests[index] for index in order])
        assert_same(shuffled, [expected[index] for index in order])


def test_half_precision_models_are_scored_in_float32(softmax_model, tokenizer) -> None:
    half = copy.deepcopy(softmax_model).to(torch.bfloat16)
    requests = instances(PAIRS)
    ours = Scorer(half, tokenizer).loglikelihood(requests)
    theirs = hflm(half, tokenizer).loglikelihood(requests, disable_tqdm=True)
    for (value, _), (expected, _) in zip(ours, theirs, strict=True):
        assert value == pytest.approx(expected, rel=0.02)  # batches of another shape round differently
        assert value != torch.tensor(value).bfloat16().item()  # 8 bits cannot hold it


def test_generation_is_that_of_hflm(model, tokenizer) -> None:
    stop = {"until": ["the", "\n\n"], "max_gen_toks": 12, "do_sample": False}
    requests = instances([(sentence, stop) for sentence in SENTENCES], "generate_until")
    requests += instances([(SENTENCES[0], {"until": ["."], "max_gen_toks": 5})], "generate_until")
    theirs = hflm(model, tokenizer).generate_until(requests, disable_tqdm=True)
    for batch_tokens in (10, 10_000):
        assert Scorer(model, tokenizer, batch_tokens=batch_tokens).generate_until(requests) == theirs


def test_token_ids_are_read_from_the_cache(softmax_model, tokenizer, tmp_path, monkeypatch) -> None:
    requests, documents = instances(PAIRS), instances([(s,) for s in SENTENCES], "loglikelihood_rolling")
    expected = Scorer(softmax_model, tokenizer).loglikelihood(requests)
    first = Scorer(softmax_model, tokenizer, token_cache=tmp_path)
    assert first.loglikelihood(requests) == expected
    totals = first.loglikelihood_rolling(documents)
    second = Scorer(softmax_model, tokenizer, token_cache=tmp_path)
    asked = []
    encode = second.tok_encode
    monkeypatch.setattr(second, "tok_encode", lambda text, **kwargs: asked.append(text) or encode(text, **kwargs))
    assert second.loglikelihood(requests) == expected
    assert second.loglikelihood_rolling(documents) == totals
    contexts = {context for context, _ in PAIRS if context}
    assert not contexts & set(asked)


# Quantized models --------------------------------------------------------------------------------


@pytest.mark.parametrize("execution", ["dense", "packed"])
def test_weight_only_quantized_models_score_as_with_hflm(model, tokenizer, execution) -> None:
    quantized, audit = quantize(model, "hqq", 4, group_size=32, execution=execution, copy=True)
    assert audit.execution == execution
    requests = instances(PAIRS)
    ours = Scorer(quantized, tokenizer).loglikelihood(requests)
    assert_same(ours, hflm(quantized, tokenizer).loglikelihood(requests, disable_tqdm=True))
    assert ours != Scorer(model, tokenizer).loglikelihood(requests)


def test_llm_int8_scores_depend_on_the_requests_and_the_budget_alone(softmax_model, tokenizer) -> None:
    quantized, _ = quantize(softmax_model, "bnb", 8, copy=True)
    requests = instances(PAIRS)
    with pytest.raises(ScoringError, match=r"activations.*batch_tokens"):
        Scorer(quantized, tokenizer)
    scores = Scorer(quantized, tokenizer, batch_tokens=200).loglikelihood(requests)
    order = random.Random(0).sample(range(len(requests)), len(requests))
    shuffled = Scorer(quantized, tokenizer, batch_tokens=200).loglikelihood([requests[index] for index in order])
    assert shuffled == [scores[index] for index in order]
    for (value, _), (expected, _) in zip(scores, Scorer(softmax_model, tokenizer).loglikelihood(requests), strict=True):
        assert value == pytest.approx(expected, rel=0.2)


# The work it saves -------------------------------------------------------------------------------


def forwarded(model: LlamaForCausalLM, lm: HFLM, requests: list[Instance]) -> int:
    """How many tokens, padding included, a model reads to score requests."""
    counts: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda _, __, kwargs: counts.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    with hook:
        lm.loglikelihood(requests, disable_tqdm=True)
    return sum(counts)


def test_shared_contexts_run_once(texts, softmax_model, tokenizer) -> None:
    requests = arc_easy(texts)
    ours = forwarded(softmax_model, Scorer(softmax_model, tokenizer), requests)
    assert ours * 2.3 < forwarded(softmax_model, hflm(softmax_model, tokenizer), requests)


def test_a_context_is_tokenized_once_for_all_of_its_choices(softmax_model, tokenizer, monkeypatch) -> None:
    asked: list[str] = []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **options: asked.append(text) or encode(text, **options))
    Scorer(softmax_model, tokenizer).loglikelihood(instances([(s, f" {n}") for s in SENTENCES for n in range(4)]))
    assert sorted(asked) == sorted([*SENTENCES, *(f"{s} {n}" for s in SENTENCES for n in range(4))])


def test_logits_are_made_only_where_a_token_is_scored_and_a_few_at_a_time(
    softmax_model, tokenizer, monkeypatch
) -> None:
    rows: list[int] = []
    hook = softmax_model.lm_head.register_forward_hook(lambda _, __, logits: rows.append(logits.shape[0]))
    monkeypatch.setattr(forward, "LOGITS_BYTES", 10 * 4 * softmax_model.config.vocab_size)
    lm = Scorer(softmax_model, tokenizer)
    document = " ".join(SENTENCES)
    with hook:
        lm.loglikelihood_rolling(instances([(document,)], "loglikelihood_rolling"))
    assert max(rows) == 10
    assert sum(rows) == len(tokenizer.encode(document))


def test_no_cache_is_kept_where_nothing_is_shared(softmax_model, tokenizer, monkeypatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(forward, "ContextCache", lambda *_: made.append(1))
    pairs = [(SENTENCES[0], " yes, it is"), (SENTENCES[1], " one two"), (SENTENCES[2], " a"), (SENTENCES[2], " b")]
    Scorer(softmax_model, tokenizer).loglikelihood(instances(pairs))
    assert not made


# Memory ------------------------------------------------------------------------------------------


def fail_above(model: LlamaForCausalLM, tokens: int, error: Exception, ran: list[int]):
    """Let the model run out of memory on batches of more than this many tokens."""

    def check(_, __, kwargs) -> None:
        count = kwargs["input_ids"].numel()
        if count > tokens:
            raise error
        ran.append(count)

    return model.model.register_forward_pre_hook(check, with_kwargs=True)


CPU_ALLOCATOR = RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), CPU_ALLOCATOR])
def test_out_of_memory_halves_the_budget_and_keeps_what_is_done(softmax_model, tokenizer, caplog, error) -> None:
    # One context per request, all but one of the same length: the long one comes first, and fits by itself.
    pairs = [(f"{letter} {SENTENCES[1]}", " the town") for letter in "abcdefghijkl"]
    requests = instances([*pairs, (SENTENCES[1] + SENTENCES[2], " the town")])
    expected = Scorer(softmax_model, tokenizer).loglikelihood(requests)
    ran: list[int] = []
    lm = Scorer(softmax_model, tokenizer, batch_tokens=800)
    with fail_above(softmax_model, 250, error, ran), caplog.at_level(logging.WARNING):
        assert_same(lm.loglikelihood(requests), expected)
    assert lm.batch_tokens == 200
    assert "batch_tokens=200" in caplog.text
    # Each request ran once, including the first batch, apart from padding.
    tokens = sum(len(lm._encode_pair(*request.args)[0]) + 1 for request in requests)
    assert tokens <= sum(ran) < 1.15 * tokens
    assert ran.count(ran[0]) == 1


def test_a_model_that_does_not_fit_at_all_says_so(softmax_model, tokenizer) -> None:
    with fail_above(softmax_model, 3, MemoryError(), []), pytest.raises(ScoringError, match="one sequence at a time"):
        Scorer(softmax_model, tokenizer).loglikelihood(instances(PAIRS))


def test_other_errors_are_not_taken_for_a_lack_of_memory(softmax_model, tokenizer) -> None:
    with fail_above(softmax_model, 3, RuntimeError("shape"), []), pytest.raises(RuntimeError, match="shape"):
        Scorer(softmax_model, tokenizer).loglikelihood(instances(PAIRS))


def test_models_whose_scores_depend_on_the_batch_keep_their_budget(softmax_model, tokenizer) -> None:
    model = copy.deepcopy(softmax_model)
    model.model.layers[0].mlp.down_proj.ACTIVATION_BITS = 8
    with pytest.raises(ScoringError, match=r"activations.*batch_tokens"):
        Scorer(model, tokenizer)
    lm = Scorer(model, tokenizer, batch_tokens=500)
    with (
        fail_above(model, 100, MemoryError(), []),
        pytest.raises(ScoringError, match="batch_tokens=500"),
    ):
        lm.loglikelihood(instances(PAIRS))
    assert lm.batch_tokens == 500


def test_generation_halves_its_budget_too(softmax_model, tokenizer) -> None:
    settings = {"until": [], "max_gen_toks": 3}
    requests = instances([(sentence, settings) for sentence in SENTENCES], "generate_until")
    expected = Scorer(softmax_model, tokenizer).generate_until(requests)
    lm = Scorer(softmax_model, tokenizer, batch_tokens=400)
    with fail_above(softmax_model, 60, MemoryError(), []):
        assert lm.generate_until(requests) == expected
    assert lm.batch_tokens < 400


# Bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (("A question", ""), r"arc, document 1: .*continuation.*empty"),
        (("", ""), r"arc, document 1: .*continuation.*empty"),
        ((" \n", "a word"), r"arc, document 1: .*context.*white space"),
        ((" ", "a"), r"arc, document 1: .*context.*white space"),
        (("A question", " word" * 300), r"arc, document 1: .*continuation.*\d+ tokens.*max_length.*256"),
    ],
)
def test_a_continuation_that_cannot_be_scored_names_its_document(softmax_model, tokenizer, pair, message) -> None:
    with pytest.raises(ScoringError, match=message):
        Scorer(softmax_model, tokenizer).loglikelihood(instances([PAIRS[0], pair], task="arc"))


def test_an_empty_document_is_named(softmax_model, tokenizer) -> None:
    with pytest.raises(ScoringError, match=r"wikitext, document 1: .*empty"):
        Scorer(softmax_model, tokenizer).loglikelihood_rolling(
            instances([("a page",), ("",)], "loglikelihood_rolling", "wikitext")
        )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling"])
def test_a_logit_that_is_not_finite_names_the_document(softmax_model, tokenizer, bad, kind) -> None:
    token = tokenizer.encode("Photosynthesis")[0]
    model = copy.deepcopy(softmax_model)

    class Spoiled(nn.Module):
        """The head, with one bad logit after one word, for a token that is not scored."""

        def forward(self, hidden):
            logits = softmax_model.lm_head(hidden)
            logits[(hidden @ self.direction).abs() > 0.999, 3] = bad
            return logits

    model.lm_head = Spoiled()
    ids = torch.tensor([[tokenizer.bos_token_id, token]])
    direction = softmax_model.model(ids).last_hidden_state[0, 1].detach()
    model.lm_head.direction = direction / direction.norm() ** 2
    texts = ["The river ran", "Photosynthesis turns"]
    arguments = [("", text) if kind == "loglikelihood" else (text,) for text in texts]
    with pytest.raises(ScoringError, match=r"own, document 1: .*NaN or infinite"):
        getattr(Scorer(model, tokenizer), kind)(instances(arguments, kind))


def test_a_tokenizer_of_another_model_is_refused(softmax_model, tokenizer) -> None:
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens([f"<extra {n}>" for n in range(20)])
    with pytest.raises(ScoringError, match=r"tokenizer.*\d+.*model.*\d+"):
        Scorer(softmax_model, larger)


def test_names_instead_of_a_model_and_a_tokenizer_are_refused(softmax_model, tokenizer) -> None:
    with pytest.raises(ScoringError, match=r"model is a str.*load_checkpoint"):
        Scorer("folder", tokenizer)
    with pytest.raises(ScoringError, match=r"tokenizer is a str.*load_tokenizer"):
        Scorer(softmax_model, "folder")


@pytest.mark.parametrize("name", ["max_length", "batch_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
def test_a_length_that_is_not_a_positive_integer_is_refused(softmax_model, tokenizer, name, value) -> None:
    with pytest.raises(ScoringError, match=rf"{name}.*{value!r}.*positive integer"):
        Scorer(softmax_model, tokenizer, **{name: value})


def test_the_number_of_scored_tokens_can_be_asked_for(softmax_model, tokenizer) -> None:
    lm = Scorer(softmax_model, tokenizer)
    requests = instances([("The river ran ", "over its banks"), ("", "over its banks")])
    documents = instances([(SENTENCES[1],)], "loglikelihood_rolling")
    lm.loglikelihood(requests)
    lm.loglikelihood_rolling(documents)
    expected = [" over its banks", "over its banks", SENTENCES[1]]
    assert lm.count_tokens(requests + documents) == [len(tokenizer.encode(text)) for text in expected]


def test_nothing_is_nothing(softmax_model, tokenizer) -> None:
    lm = Scorer(softmax_model, tokenizer)
    assert lm.loglikelihood([]) == lm.loglikelihood_rolling([]) == lm.generate_until([]) == []


# Progress ----------------------------------------------------------------------------------------


def test_progress_is_silent_without_a_terminal_and_counts_tokens_with_one(
    softmax_model, tokenizer, capsys, monkeypatch
) -> None:
    lm = Scorer(softmax_model, tokenizer)
    lm.loglikelihood(instances(PAIRS))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    lm.loglikelihood(instances(PAIRS))
    assert "token/s" in capsys.readouterr().err


@pytest.mark.parametrize("free", [2**20, 2**34, 2**40])
def test_the_budget_does_not_follow_free_memory(softmax_model, tokenizer, monkeypatch, free) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free, total=free))
    assert Scorer(softmax_model, tokenizer).budgets == [BATCH_TOKENS["cpu"]] == [1024]
