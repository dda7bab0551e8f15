"""evaluate(): the numbers of lm-eval's evaluator on the same model, and samples from which they follow."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import lm_eval.evaluator
import numpy as np
import pandas as pd
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from qbench.evaluate.evaluation import EvaluationError, evaluate
from qbench.evaluate.tasks import load_tasks
from qbench.records.samples import write_samples

from ..example_records import aggregate
from ..made_up_texts import SIZES


class Opinionated(LM):
    """A model whose scores are a hash of the request: arbitrary, but always the same."""

    def __init__(self, bad: tuple[str, float] | None = None) -> None:
        super().__init__()
        self.bad = bad  # a text, and the score it gets

    def _score(self, *texts: str) -> float:
        if self.bad and self.bad[0] in "".join(texts):
            return self.bad[1]
        return -len(texts[-1]) * (0.1 + int(hashlib.sha256("\0".join(texts).encode()).hexdigest()[:8], 16) / 2**33)

    def loglikelihood(self, requests: list[Instance], **_: Any) -> list[tuple[float, bool]]:
        return [(self._score(*r.args), self._score("greedy", *r.args) > -len(r.args[1]) / 3) for r in requests]

    def loglikelihood_rolling(self, requests: list[Instance], **_: Any) -> list[float]:
        return [self._score(*r.args) for r in requests]

    def generate_until(self, requests: list[Instance], **_: Any) -> list[str]:
        return [f"It is {len(r.args[0]) % 3}." for r in requests]


class Counting(Opinionated):
    """A model that reports how many tokens it scored."""

    def count_tokens(self, requests: list[Instance]) -> list[int]:
        return [len(r.args[-1].split()) for r in requests]


@pytest.fixture(scope="module")
def tasks(texts: dict[str, Path]) -> dict[str, Task]:
    return load_tasks(list(texts), texts)


@pytest.fixture
def sums(tmp_path: Path) -> dict[str, Task]:
    """A task that generates twice per document and filters the answers in two ways."""
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"q": "x" * i, "a": str(i % 2)}) for i in range(1, 9)))
    (tmp_path / "sums.yaml").write_text(
        "task: sums\ntest_split: test\noutput_type: generate_until\ndoc_to_text: q\ndoc_to_target: a\nrepeats: 2\n"
        "generation_kwargs: {until: ['.'], do_sample: false}\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
        "filter_list:\n"
        "- {name: strict, filter: [{function: take_first}]}\n"
        "- {name: digit, filter: [{function: regex, regex_pattern: '(\\d)'}, {function: take_first}]}\n"
    )
    return load_tasks(["sums"], {"sums": tmp_path / "data.jsonl"}, folders=[tmp_path])


def theirs(tasks: dict[str, Task], limit: int | None = None) -> dict[str, dict[str, Any]]:
    results = lm_eval.evaluator.evaluate(Opinionated(), {"tasks": tasks}, limit=limit, bootstrap_iters=0)
    return results["results"]


def test_metrics_are_those_of_lm_evals_evaluator(tasks: dict[str, Task]) -> None:
    expected = theirs(tasks, limit=400)
    found = evaluate(Opinionated(), tasks, limit=400)
    assert [(m.task, m.name, m.better, m.documents) for m in found.metrics] == [
        ("arc_easy", "acc", "higher", 400),
        ("arc_easy", "acc_norm", "higher", 400),
        ("lambada_openai", "perplexity", "lower", 400),
        ("lambada_openai", "acc", "higher", 400),
        ("wikitext", "word_perplexity", "lower", 60),
        ("wikitext", "byte_perplexity", "lower", 60),
        ("wikitext", "bits_per_byte", "lower", 60),
    ]
    for metric in found.metrics:
        assert metric.value == expected[metric.task][f"{metric.name},none"]
        assert metric.stderr is not None
        assert 0 < metric.stderr < metric.value


def test_every_metric_follows_from_the_parquet_file(tasks: dict[str, Task], tmp_path: Path) -> None:
    found = evaluate(Opinionated(), tasks, limit={"lambada_openai": 500})  # the others whole
    write_samples(found.samples, tmp_path / "samples.parquet")
    assert (tmp_path / "samples.parquet").stat().st_size < 400_000
    samples = pd.read_parquet(tmp_path / "samples.parquet")
    assert samples.groupby("task").size().to_dict() == SIZES | {"lambada_openai": 500}
    for metric in found.metrics:
        rows = samples[samples["task"] == metric.task]
        assert aggregate(rows, metric.name, metric.aggregation) == pytest.approx(metric.value, rel=1e-12)

    arc = samples[samples["task"] == "arc_easy"]
    for column, lengths in (("acc", [1] * len(arc)), ("acc_norm", arc["characters"])):
        answers = [
            int(np.argmax(scores / length)) for scores, length in zip(arc["loglikelihoods"], lengths, strict=True)
        ]
        right = [answer in gold for answer, gold in zip(answers, arc["gold"], strict=True)]
        assert right == list(arc[column] == 1)
    lambada = samples[samples["task"] == "lambada_openai"]
    assert [bool(flags[0]) for flags in lambada["is_greedy"]] == list(lambada["acc"] == 1)
    assert [scores[0] for scores in lambada["loglikelihoods"]] == list(lambada["perplexity"])
    assert samples["doc_hash"].nunique() > 0.99 * len(samples)


def test_filters_and_repeats_are_lm_evals(sums: dict[str, Task]) -> None:
    expected = theirs(sums)["sums"]
    found = evaluate(Opinionated(), sums)
    assert {m.name: m.value for m in found.metrics} == {
        name: expected[name] for name in ("exact_match,strict", "exact_match,digit")
    }
    assert 0 < found.metrics[1].value < 1
    assert all(m.better == "higher" for m in found.metrics)
    assert list(found.samples["response"])[:2] == ["It is 1.", "It is 2."]
    assert list(found.samples["target"])[:2] == ["1", "0"]


def test_the_same_twice(tasks: dict[str, Task]) -> None:
    one, two = (evaluate(Opinionated(), tasks, limit=20) for _ in range(2))
    assert one.metrics == two.metrics
    assert one.samples.equals(two.samples)


def test_few_shot_examples_are_those_of_lm_evals_command(tmp_path: Path) -> None:
    rows = [{"goal": f"do {i}", "sol1": f"a{i}", "sol2": f"b{i}", "label": i % 2} for i in range(12)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {"piqa": {"validation": tmp_path / "data.jsonl", "train": tmp_path / "data.jsonl"}}
    tasks = load_tasks(["piqa"], files, num_fewshot=3)
    for _ in range(2):  # the sampler's state does not carry over
        samples = evaluate(Opinionated(), tasks).samples
    results = lm_eval.evaluator.simple_evaluate(
        Opinionated(),
        tasks=list(tasks.values()),
        bootstrap_iters=0,
        task_manager=TaskManager(include_defaults=False),
    )
    expected = [[answer[0][0] for answer in sample["resps"]] for sample in results["samples"]["piqa"]]
    assert [list(scores) for scores in samples["loglikelihoods"]] == expected


def test_token_counts_if_the_model_reports_them(tasks: dict[str, Task]) -> None:
    samples = evaluate(Counting(), tasks, limit=2).samples
    assert [len(counts) for counts in samples["tokens"]] == [4, 4, 1, 1, 1, 1]
    assert samples["tokens"][2][0] == 1  # lambada's last word
    assert evaluate(Opinionated(), tasks, limit=2).samples["tokens"].isna().all()


@pytest.mark.parametrize("score", [math.nan, -math.inf])
def test_a_score_must_be_finite(score: float, tasks: dict[str, Task]) -> None:
    question = tasks["arc_easy"].eval_docs[3]["question"]
    with pytest.raises(EvaluationError, match=r"arc_easy, document 3: .*(nan|-inf)"):
        evaluate(Opinionated(bad=(question, score)), tasks, limit=5)


def test_a_perplexity_beyond_numbers(tasks: dict[str, Task]) -> None:
    with pytest.raises(EvaluationError, match="lambada_openai: perplexity"):
        evaluate(Opinionated(bad=("", -1e6)), {"lambada_openai": tasks["lambada_openai"]}, limit=5)


def test_a_perplexity_whose_spread_is_beyond_numbers_is_still_a_number(tasks: dict[str, Task]) -> None:
    lambada = tasks["lambada_openai"]
    text = lambada.eval_docs[3]["text"].rsplit(" ", 1)[0]
    metrics = evaluate(Opinionated(bad=(text, -3000.0)), {"lambada_openai": lambada}, limit=5).metrics
    (perplexity,) = (metric for metric in metrics if metric.name == "perplexity")
    assert 1e200 < perplexity.value < math.inf
    assert perplexity.stderr is None


def test_a_single_document_has_no_standard_error(tasks: dict[str, Task]) -> None:
    assert [metric.stderr for metric in evaluate(Opinionated(), tasks, limit=1).metrics] == [None] * 7
