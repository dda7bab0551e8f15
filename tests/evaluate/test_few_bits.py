"""Scores with low-bit activations and KV cache do not depend on batches, padding or the order of documents."""

from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance

from qbench import Scorer, load_checkpoint, quantize
from qbench.tokenizer import load_tokenizer

MINI = Path(__file__).parents[2] / "recipes" / "mini"


def requests() -> list[Instance]:
    """Pairs that share contexts, which are cached and padded on the left, and others."""
    words = (MINI / "calibration.txt").read_text().split()[:400]
    pairs = []
    for n in range(6):
        context = " ".join(words[40 * n : 40 * n + 9 + 3 * n])
        pairs += [(context, f" {word}") for word in (" ".join(words[7:10]), " ".join(words[30:32]))]
    pairs.append((" ".join(words[300:330]), " " + words[331]))
    return [Instance("loglikelihood", {}, pair, n, ("task", n, 1)) for n, pair in enumerate(pairs)]


@pytest.mark.parametrize("kind", ["softmax", "scaled_softpick"])
def test_scores_do_not_depend_on_batches_padding_or_order(kind: str) -> None:
    # In float64: a product of another shape may differ in its last bit, which rounding to a few bits turns into a step.
    model = load_checkpoint(MINI / kind, dtype=torch.float64)
    few = {"activations": {"bits": 8}, "kv_cache": {"bits": 2, "group_size": 4}}
    model, _ = quantize(model, "rtn", 4, **few)
    found = []
    for batch_tokens, order in ((4096, 1), (4096, -1), (1, 1), (64, 1)):
        lm = Scorer(model, load_tokenizer(str(MINI / kind)), batch_tokens=batch_tokens)
        scores = lm.loglikelihood(requests()[::order], disable_tqdm=True)[::order]
        found.append([value for value, _ in scores])
        assert sum(lm.read.values()) > len(requests()) / 2
    for other in found[1:]:
        assert other == pytest.approx(found[0], abs=1e-5)  # logits are scored in float32
