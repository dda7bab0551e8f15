"""KL from the unquantized model, against plain float64 arithmetic on whole logits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from qbench import Scorer, load_checkpoint, quantize
from qbench.evaluate.divergence import (
    DivergenceError,
    Reference,
    TokenDivergences,
    check_moved,
    compare,
    keep_reference,
    measured_tokens,
    pages,
    with_kl,
)
from qbench.evaluate.evaluation import Evaluation
from qbench.evaluate.tasks import load_tasks
from qbench.records.audit import Audit, AuditError
from qbench.records.samples import WEIGHT, to_frame
from qbench.tokenizer import load_tokenizer

from .conftest import SENTENCES

ROOT = Path(__file__).parents[2]
MINI = ROOT / "recipes" / "mini"
PAGES = [" ".join(SENTENCES[n:] + SENTENCES[: n + 1]) for n in range(len(SENTENCES))]
METHODS: dict[str, dict[str, Any]] = {
    "none-16": {"method": "none", "bits": 16},
    "bnb-8": {"method": "bnb", "bits": 8},
    "bnb-4": {"method": "bnb", "bits": 4},
    "hqq-8": {"method": "hqq", "bits": 8, "group_size": 32},
    "hqq-2": {"method": "hqq", "bits": 2, "group_size": 32},
    "hqq-3-head": {"method": "hqq", "bits": 3, "group_size": 32, "include_lm_head": True},
    "gptq-8": {"method": "gptq", "bits": 8, "group_size": 32},
    "gptq-3": {"method": "gptq", "bits": 3, "group_size": 32},
}


def requests_of(texts: list[str], kind: str = "loglikelihood_rolling") -> list[Instance]:
    return [Instance(kind, {}, (text,), 0, ("wikitext", index, 1)) for index, text in enumerate(texts)]


@pytest.fixture
def unquantized(checkpoints: dict[str, Path]) -> LlamaForCausalLM:
    return load_checkpoint(checkpoints["softmax"])


@pytest.fixture
def quantized(
    unquantized: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> Callable[..., tuple[LlamaForCausalLM, Audit]]:
    """A copy of the model, or the model itself, under one of METHODS; with its audit."""

    def make(name: str, copy: bool = True) -> tuple[LlamaForCausalLM, Audit]:
        wanted = dict(METHODS[name])
        if wanted["method"] == "gptq":
            wanted["calibration"] = [tokenizer(page, return_tensors="pt").input_ids for page in PAGES]
        return quantize(unquantized, copy=copy, **wanted)

    return make


def scorer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, batch_tokens: int = 256) -> Scorer:
    return Scorer(model, tokenizer, max_length=48, batch_tokens=batch_tokens)  # several windows for each page


def measured(reference: Reference, lm: Scorer, texts: list[str]) -> dict[Any, TokenDivergences]:
    """As a cell does it: the states come from the pass that scores the pages."""
    lm.wanted = reference.counts
    lm.loglikelihood_rolling(requests_of(texts))
    return compare(reference, lm.states, lm.model.lm_head)


def plain(
    before: LlamaForCausalLM, after: LlamaForCausalLM, lm: Scorer, reference: Reference
) -> dict[Any, dict[str, np.ndarray]]:
    """The same from the whole logits of one window at a time, in float64."""
    windows = lm.rolling_windows(requests_of(PAGES))
    found = {}
    for place, tokens in reference.counts.items():
        context, continuation = windows[place[1]][place[2]]
        ids = torch.tensor([[*context, *continuation]])[:, :-1]
        with torch.no_grad():
            whole = [model(ids, use_cache=False).logits[0, len(context) - 1 :].double() for model in (before, after)]
        p, q = (torch.log_softmax(logits, -1)[:tokens].numpy() for logits in whole)
        right = np.arange(tokens), np.array(continuation[:tokens])
        found[place] = {
            "kl": (np.exp(p) * (p - q)).sum(-1),
            "before": p[right],
            "after": q[right],
            "same_top": (p.argmax(-1) == q.argmax(-1)).astype(float),
        }
    return found


@pytest.mark.parametrize("name", METHODS)
def test_kl_is_that_of_whole_logits_in_float64(
    name: str, unquantized: LlamaForCausalLM, quantized: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    reference = keep_reference(scorer(unquantized, tokenizer), requests_of(PAGES), tokens=250)
    model, audit = quantized(name)
    # LLM.int8's scores depend on the batch, so each window runs alone, as in the plain computation.
    lm = scorer(model, tokenizer, batch_tokens=1 if name == "bnb-8" else 1024)
    found, expected = measured(reference, lm, PAGES), plain(unquantized, model, lm, reference)
    assert found.keys() == expected.keys()
    assert sum(reference.counts.values()) == 250
    assert max(place[2] for place in found) >= 1  # not only first windows
    for place, own in found.items():
        assert own.kl == pytest.approx(expected[place]["kl"], rel=1e-3, abs=1e-10), place
        for field in ("before", "after", "same_top"):
            assert getattr(own, field) == pytest.approx(expected[place][field], abs=1e-4), (place, field)
    everything = {
        field: np.concatenate([own[field] for own in expected.values()]) for field in ("kl", "before", "after")
    }
    _, (figures,) = with_kl(_evaluation(lm), found)
    if name != "none-16":
        quantiles = np.quantile(everything["kl"], (0.5, 0.99, 0.999))
        assert (figures.median, figures.p99, figures.p999) == pytest.approx(tuple(quantiles), rel=1e-3)
        change = np.exp(everything["after"]) - np.exp(everything["before"])
        assert figures.rms_change == pytest.approx(np.sqrt((change**2).mean()), rel=1e-3)
        lost = everything["before"].mean() - everything["after"].mean()
        assert figures.log_ratio == pytest.approx(lost, rel=1e-3, abs=1e-6)
        r = np.corrcoef(everything["before"], everything["after"])[0, 1]
        assert figures.correlation == pytest.approx(r, abs=1e-5)
        assert audit.kl
    if name == "none-16":
        assert figures.same_top == 1
        assert 0 <= abs(everything["kl"].mean()) < 1e-10


def _evaluation(lm: Scorer) -> Evaluation:
    """The pages as samples, without other metrics."""
    return Evaluation([], to_frame([{"task": "wikitext", "doc_id": n, "doc_hash": str(n)} for n in range(len(PAGES))]))


def test_the_value_of_a_document_is_a_sum_over_its_tokens(
    unquantized: LlamaForCausalLM, quantized: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    reference = keep_reference(scorer(unquantized, tokenizer), requests_of(PAGES))
    lm = scorer(quantized("hqq-2")[0], tokenizer)
    found = measured(reference, lm, PAGES)
    evaluation, (figures,) = with_kl(_evaluation(lm), found)
    (metric,) = evaluation.metrics
    samples = evaluation.samples
    tokens = [len(tokenizer(page).input_ids) for page in PAGES]
    assert samples["kl" + WEIGHT].tolist() == tokens  # fewer than 8,000: all of them, each once
    assert samples["kl"].sum() / sum(tokens) == pytest.approx(metric.value)
    assert (metric.name, metric.better, metric.documents, figures.tokens) == ("kl", "lower", len(PAGES), sum(tokens))
    by_document = samples["kl"] - metric.value * samples["kl" + WEIGHT]
    assert metric.stderr == pytest.approx(np.sqrt(5 / 4 * (by_document**2).sum()) / sum(tokens))


@pytest.mark.parametrize("attention", ["softmax", "softpick"])
def test_scores_are_the_same_to_the_last_bit(
    attention: str, checkpoints: dict[str, Path], tokenizer: PreTrainedTokenizerFast
) -> None:
    model = load_checkpoint(checkpoints[attention])
    reference = keep_reference(scorer(model, tokenizer), requests_of(PAGES))
    plain, keeping = scorer(model, tokenizer), scorer(model, tokenizer)
    keeping.wanted = reference.counts
    assert keeping.loglikelihood_rolling(requests_of(PAGES)) == plain.loglikelihood_rolling(requests_of(PAGES))
    assert keeping.states.keys() == reference.states.keys()
    assert not plain.states


def test_running_out_of_memory_changes_nothing(
    unquantized: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that ran before memory ran out are measured once."""
    texts = [*PAGES, PAGES[0], "a"]
    reference = keep_reference(scorer(unquantized, tokenizer), requests_of(texts))
    forward = unquantized.model.forward

    def limited(*args: Any, **options: Any) -> Any:
        if options["input_ids"].numel() > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*args, **options)

    monkeypatch.setattr(unquantized.model, "forward", limited)
    lm = scorer(unquantized, tokenizer, batch_tokens=512)
    found = measured(reference, lm, texts)
    assert len(lm.budgets) > 1
    assert sum(len(own.kl) for own in found.values()) == sum(len(tokenizer(text).input_ids) for text in texts)
    assert max(float(own.kl.max()) for own in found.values()) < 1e-9


@pytest.mark.parametrize(
    ("sizes", "wanted", "expected"),
    [
        ([[5], [3]], 100, [[5], [3]]),  # all, if there are fewer
        ([[50], [3], [50]], 43, [[20], [3], [20]]),  # the longest are cut
        ([[50], [3], [50]], 42, [[20], [3], [19]]),  # 42 in all, not 43
        ([[30, 30, 30], [30]], 45, [[23], [22]]),  # first windows, of all documents
        ([[30, 30, 30], [30]], 73, [[25, 24], [24]]),
        ([[1]], 1, [[1]]),
        ([[50], [50], [50], [50]], 40, [[16], [16], [8]]),  # more documents than tokens: not the first token of each
        ([[5], [5], [5], [5]], 12, [[5], [5], [2]]),
    ],
)
def test_tokens_come_from_all_documents(sizes: list[list[int]], wanted: int, expected: list[list[int]]) -> None:
    def by_place(windows: list[list[int]]) -> dict[Any, int]:
        return {("wikitext", n, k): size for n, own in enumerate(windows) for k, size in enumerate(own)}

    found = measured_tokens(by_place(sizes), wanted)
    assert found == by_place(expected)


def test_more_documents_than_tokens(unquantized: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    reference = keep_reference(scorer(unquantized, tokenizer), requests_of(PAGES), tokens=4)
    found = measured(reference, scorer(unquantized, tokenizer), PAGES)
    assert {place: len(own.kl) for place, own in found.items()} == {("wikitext", 0, 0): 4}


@pytest.mark.parametrize("name", ["hqq-3-head", "gptq-3", "bnb-4"])
def test_quantizing_in_place_leaves_the_reference_as_it_was(
    name: str, unquantized: LlamaForCausalLM, quantized: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    """A cell quantizes the model whose lm_head the reference keeps."""
    reference = keep_reference(scorer(unquantized, tokenizer), requests_of(PAGES), tokens=250)
    before = reference.head.clone()
    expected = measured(reference, scorer(quantized(name)[0], tokenizer), PAGES)
    found = measured(reference, scorer(quantized(name, copy=False)[0], tokenizer), PAGES)
    assert torch.equal(reference.head, before)
    for place, own in found.items():
        np.testing.assert_array_equal(own.kl, expected[place].kl)


@pytest.mark.parametrize("side", ["unquantized", "quantized"])
def test_logits_that_are_not_finite_are_no_kl(
    side: str, unquantized: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    reference = keep_reference(scorer(unquantized, tokenizer), requests_of(PAGES))
    lm = scorer(unquantized, tokenizer)
    measured(reference, lm, PAGES)
    place = list(lm.states)[2]
    states = {"unquantized": dict(reference.states), "quantized": dict(lm.states)}
    broken = states[side][place].hidden.clone()
    broken[0, 0] = np.inf
    states[side][place] = replace(states[side][place], hidden=broken)
    with pytest.raises(DivergenceError, match=f"document {place[1]}, window {place[2]}: .*infinite"):
        compare(replace(reference, states=states["unquantized"]), states["quantized"], lm.model.lm_head)


def test_a_task_without_log_likelihoods_of_pages(
    unquantized: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: dict[str, Path]
) -> None:
    with pytest.raises(DivergenceError, match=r"wikitext.*generate_until.*loglikelihood_rolling"):
        keep_reference(scorer(unquantized, tokenizer), requests_of(["a"], "generate_until"))
    tasks = load_tasks(["arc_easy"], data={"arc_easy": texts["arc_easy"]})
    assert pages(tasks, {}, seed=0) == []


def test_a_vocabulary_that_changed(
    unquantized: LlamaForCausalLM, quantized: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    reference = keep_reference(scorer(unquantized, tokenizer), requests_of(PAGES))
    model, _ = quantized("hqq-8")
    before = model.config.vocab_size
    model.resize_token_embeddings(before + 3)
    with pytest.raises(DivergenceError, match=rf"{before + 3} .*{before}\D.*vocabulary"):
        measured(reference, scorer(model, tokenizer), PAGES)


def test_other_tokens_are_not_compared(unquantized: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Sabotage: states of other tokens or other pages than the reference's."""
    reference = keep_reference(scorer(unquantized, tokenizer), requests_of(PAGES))
    with pytest.raises(DivergenceError, match="wikitext, document 0, window 0"):
        measured(reference, scorer(unquantized, tokenizer), [PAGES[1], PAGES[0], *PAGES[2:]])
    with pytest.raises(DivergenceError, match="wikitext, document 4"):
        measured(reference, scorer(unquantized, tokenizer), PAGES[:-1])
    lm = scorer(unquantized, tokenizer)
    measured(reference, lm, PAGES)
    place = list(lm.states)[-1]
    shifted = lm.states[place]
    lm.states[place] = replace(shifted, tokens=[*shifted.tokens[1:], shifted.tokens[0]])
    with pytest.raises(DivergenceError, match=f"document {place[1]}, window {place[2]}"):
        compare(reference, lm.states, lm.model.lm_head)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "none-16"])
def test_a_model_compared_with_itself_is_caught(
    name: str, unquantized: LlamaForCausalLM, quantized: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Sabotage: the reference is kept after quantization, or the unquantized model is scored."""
    model, audit = quantized(name)
    before = keep_reference(scorer(unquantized, tokenizer), requests_of(PAGES))
    after = keep_reference(scorer(model, tokenizer), requests_of(PAGES))

    def metrics(reference: Reference, scored: LlamaForCausalLM) -> Any:
        lm = scorer(scored, tokenizer)
        return with_kl(_evaluation(lm), measured(reference, lm, PAGES))[0].metrics

    check_moved(metrics(before, model), audit)
    check_moved(metrics(before, unquantized), audit.model_copy(update={"kl": 0.0}))  # nothing was quantized
    with pytest.raises(AuditError, match="KL"):
        check_moved(metrics(before, unquantized), audit)
    if name != "bnb-8":  # its own batches are other models
        with pytest.raises(AuditError, match="KL"):
            check_moved(metrics(after, model), audit)


def test_states_of_another_model_are_caught(
    checkpoints: dict[str, Path], unquantized: LlamaForCausalLM, quantized: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Sabotage: the reference is another model's, as from a cache with a wrong key."""
    _, audit = quantized("none-16")
    other = load_checkpoint(checkpoints["softmax"])
    with torch.no_grad():
        other.lm_head.weight.copy_(other.lm_head.weight.roll(1, 0))
    for model, is_right in ((unquantized, True), (other, False)):
        lm = scorer(unquantized, tokenizer)
        found = measured(keep_reference(scorer(model, tokenizer), requests_of(PAGES)), lm, PAGES)
        metrics = with_kl(_evaluation(lm), found)[0].metrics
        if is_right:
            check_moved(metrics, audit)
        else:
            with pytest.raises(AuditError, match="another model"):
                check_moved(metrics, audit)


def floor_and_eight_bits(model: LlamaForCausalLM, tokenizer: Any, requests: list[Instance], tokens: int) -> list[float]:
    """The mean KL of the unquantized model, and of HQQ at 8 bits."""
    reference = keep_reference(Scorer(model, tokenizer), requests, tokens)
    found = []
    for scored in (model, quantize(model, "hqq", 8, copy=True)[0]):
        lm = Scorer(scored, tokenizer)
        lm.wanted = reference.counts
        lm.loglikelihood_rolling(requests)
        kl = np.concatenate([own.kl for own in compare(reference, lm.states, scored.lm_head).values()])
        assert len(kl) >= tokens
        found.append(float(kl.mean()))
    return found


@pytest.mark.parametrize("attention", ["softmax", "softpick"])
def test_the_floor_is_far_below_eight_bits_on_mini(attention: str) -> None:
    tasks = load_tasks(
        [str(MINI / "tasks" / "mini_wikitext.yaml")], {"mini_wikitext": MINI / "tasks/mini_wikitext.jsonl"}
    )
    folder = MINI / attention
    requests = pages(tasks, {"mini_wikitext": 100}, seed=0)
    floor, kl = floor_and_eight_bits(load_checkpoint(folder), load_tokenizer(folder), requests, 2000)
    assert 0 <= floor < 1e-3 * kl, (floor, kl)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_floor_is_far_below_eight_bits_on_smollm2(smollm2: Path) -> None:
    """On a few thousand tokens of this project's documentation."""
    texts = [file.read_text()[:900] for file in sorted((ROOT / "docs").glob("*.md"))]
    model = load_checkpoint(smollm2)
    floor, kl = floor_and_eight_bits(model, load_tokenizer(smollm2), requests_of(texts), 2000)
    assert 0 <= floor < 1e-3 * kl, (floor, kl)
