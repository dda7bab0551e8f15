"""The twins' scores: far above chance but not perfect, unchanged by 8 bits and clearly worse with 2."""

import json
import math
from collections import Counter
from functools import cache

import pytest
from mini.files import MINI
from mini.tasks import BUILDERS
from mini.training import TWINS
from transformers import AutoTokenizer

from qbench import Scorer, load_checkpoint, quantize
from qbench.evaluate.evaluation import evaluate
from qbench.evaluate.tasks import load_tasks
from qbench.quantizers.calibration import Calibration

LEAST = {"mini_arc_easy": 0.7, "mini_lambada": 0.5, "mini_piqa": 0.8, "mini_sciq": 0.7}
CALIBRATION = Calibration(source=str(MINI / "calibration.txt"), samples=128, length=128)

pytestmark = pytest.mark.slow


@cache
def scores(kind: str, method: str = "none", bits: int = 16) -> dict[tuple[str, str], float]:
    """A twin's metrics by task and name."""
    folder = MINI / "tasks"
    tasks = load_tasks(list(BUILDERS), data={task: folder / f"{task}.jsonl" for task in BUILDERS}, folders=[folder])
    model = load_checkpoint(MINI / kind, attention=kind)
    if method != "none":
        model, _ = quantize(model, method, bits, calibration=CALIBRATION)
    lm = Scorer(model, AutoTokenizer.from_pretrained(MINI / kind))
    return {(metric.task, metric.name): metric.value for metric in evaluate(lm, tasks).metrics}


def unigram_word_perplexity(documents: list[str]) -> float:
    """Perplexity of the test pages under the token frequencies of the training text."""
    tokenizer = AutoTokenizer.from_pretrained(MINI / "softmax")
    counts = Counter(token for text in documents[:10_000] for token in tokenizer.encode(text))
    pages = [json.loads(line)["page"] for line in (MINI / "tasks/mini_wikitext.jsonl").read_text().splitlines()]
    total = sum(counts.values())
    # Add one to each count, so that unseen tokens have a probability too.
    logs = [
        math.log((counts[token] + 1) / (total + len(tokenizer))) for page in pages for token in tokenizer.encode(page)
    ]
    return math.exp(-sum(logs) / sum(len(page.split()) for page in pages))


@pytest.mark.parametrize("kind", TWINS)
def test_a_twin_knows_its_world_but_not_all_of_it(kind: str, documents: list[str]) -> None:
    found = scores(kind)
    for task, least in LEAST.items():
        assert least <= found[task, "acc"] < 1, task
    assert found["mini_wikitext", "word_perplexity"] < unigram_word_perplexity(documents) / 2


@pytest.mark.parametrize("method", ["gptq", "hqq"])
@pytest.mark.parametrize("kind", TWINS)
def test_damage_grows_as_bits_fall(kind: str, method: str) -> None:
    whole = scores(kind)
    by_bits = {bits: scores(kind, method, bits) for bits in (8, 3, 2)}
    perplexity = {bits: found["mini_wikitext", "word_perplexity"] for bits, found in by_bits.items()}
    assert perplexity[8] == pytest.approx(whole["mini_wikitext", "word_perplexity"], rel=0.005)
    assert perplexity[8] < perplexity[3] < perplexity[2]
    falls = [whole[task, "acc"] - by_bits[2][task, "acc"] for task in LEAST]
    assert sum(fall >= 0.05 for fall in falls) >= 3, falls
