"""A small cell on the simulated device: load ▸ quantize ▸ audit ▸ score, and what makes the host wait."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from transformers import LlamaForCausalLM

from qbench import Scorer, load_checkpoint, quantize
from qbench.records.audit import Audit
from qbench.tokenizer import load_tokenizer

from ..evaluate.conftest import SENTENCES
from .device import PretendedCuda

# Three continuations for each of three contexts, and one context with a single one; a document in two windows.
PAIRS = [
    (sentence, ending) for sentence in SENTENCES[:3] for ending in (" the town", " a cow eats only plants", " sugar")
]
PAIRS += [(SENTENCES[3], " a letter")]
DOCUMENTS = [(" ".join(SENTENCES),), (SENTENCES[4],)]
OPTIONS: dict[str, dict[str, Any]] = {"gptq": {"group_size": 32}, "hqq": {"group_size": 32}}


@dataclass
class Cell:
    """The results of a cell, and by phase what made the host wait."""

    model: LlamaForCausalLM
    audit: Audit
    lm: Scorer
    scores: list[Any]
    syncs: dict[str, Counter[str]] = field(default_factory=dict)
    batches: int = 0

    def waits(self, phase: str) -> int:
        """How often the host waited in a phase."""
        return self.syncs[phase].total()


def instances(arguments: list[tuple[Any, ...]], kind: str = "loglikelihood") -> list[Instance]:
    """Requests as lm-eval makes them."""
    return [Instance(kind, {}, a, 0, doc_id=n, task_name="mine", repeats=1) for n, a in enumerate(arguments)]


def calibration(vocabulary: int) -> list[torch.Tensor]:
    """Four samples of token ids [1, 32]."""
    return list(torch.randint(vocabulary, (4, 32), generator=torch.Generator().manual_seed(1)).split(1))


def run(
    device: PretendedCuda | None,
    folder: Path,
    method: str = "none",
    bits: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    execution: str = "dense",
    batch_tokens: int = 512,
) -> Cell:
    """Run the cell; on the CPU if device is None."""
    syncs: dict[str, Counter[str]] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        before = Counter(device.syncs) if device else Counter()
        yield
        syncs[name] = device.syncs - before if device else Counter()

    with phase("load"):
        model, tokenizer = (
            load_checkpoint(folder, device="cuda" if device else "cpu", dtype=dtype),
            load_tokenizer(folder),
        )
    with phase("quantize"):
        samples = calibration(model.config.vocab_size)
        options = OPTIONS.get(method, {})
        model, audit = quantize(model, method, bits, calibration=samples, execution=execution, **options)
    lm = Scorer(model, tokenizer, batch_tokens=batch_tokens)
    batches = 0

    def count(*_: Any) -> None:
        nonlocal batches
        batches += 1

    hook = model.model.register_forward_pre_hook(count)
    with phase("evaluate"):
        scores: list[Any] = lm.loglikelihood(instances(PAIRS))
        scores += lm.loglikelihood_rolling(instances(DOCUMENTS, "loglikelihood_rolling"))
    hook.remove()
    return Cell(model, audit, lm, scores, syncs, batches)
