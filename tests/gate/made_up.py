"""Made-up runs: the scores of one model on a population of documents, and the same with noise and with a loss.

Scores of two models on one document are nearly the same, as those of real ones are: of the 400 questions of a task a
few answers flip, log-likelihoods move by a heavy-tailed noise, and long pages move more than short ones.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qbench.records.audit import TOTALS, Audit, LayerAudit
from qbench.records.metrics import KL
from qbench.records.samples import WEIGHT
from qbench.records.schema import CellRef, PlannedCell, RunPlan
from qbench.records.store import cell_folder, write_plan, write_record

from ..example_records import TASKS, cell_ref, make_record, of_model


class Population:
    """Documents of every task, with the log-likelihoods that a model gives their choices."""

    def __init__(self, documents: int, tasks: Sequence[str] = tuple(TASKS), seed: int = 0) -> None:
        self.tasks: dict[str, dict[str, np.ndarray]] = {}
        for task in tasks:
            draw = np.random.default_rng([seed, *task.encode()])
            choices = max(TASKS[task][0], 1)
            words = draw.integers(20, 400, size=documents) if task == "wikitext" else np.full(documents, 3)
            lengths = draw.integers(5, 30, size=(documents, choices))
            scores = -(4 + 0.3 * draw.normal(size=(documents, choices))) * words[:, None]
            gold = draw.integers(choices, size=documents)
            scores[np.arange(documents), gold] += 1.0
            self.tasks[task] = {"words": words, "lengths": lengths, "scores": scores, "gold": gold}

    def samples(
        self, noise: float = 0.0, loss: float = 0.0, seed: int = 0, kl: float | None = None, kl_noise: float = 0.0
    ) -> pd.DataFrame:
        """The scores with noise on all log-likelihoods, and a loss on that of the right answer.

        kl: nats per token of pages, each page's off by kl_noise of it; None for records without KL.
        """
        found = pd.concat([self._task(task, noise, loss, seed) for task in self.tasks], ignore_index=True)
        if kl is not None:
            tokens = np.where(found["task"] == "wikitext", found.get("word_perplexity.weight"), np.nan)
            off = np.random.default_rng([seed, 2]).normal(size=len(found))
            found = found.assign(**{KL: kl * np.exp(kl_noise * off) * tokens, KL + WEIGHT: tokens})
        return found

    def _task(self, task: str, noise: float, loss: float, seed: int) -> pd.DataFrame:
        own = self.tasks[task]
        n, choices = own["scores"].shape
        draw = np.random.default_rng([seed, 1, *task.encode()])
        scores = own["scores"] + noise * draw.standard_t(4, size=(n, choices)) * np.sqrt(own["words"])[:, None]
        scores[np.arange(n), own["gold"]] -= loss * own["words"] / 3
        # A model's scores are sums of the tokens' float32.
        scores = sum((share * scores).astype(np.float32).astype(np.float64) for share in (0.61, 0.27, 0.12))
        columns: dict[str, Any] = {"task": task, "doc_id": np.arange(n, dtype=np.int32)}
        columns["doc_hash"] = [hashlib.sha256(f"{task} {i}".encode()).hexdigest()[:16] for i in range(n)]
        columns |= {"gold": None, "target": None, "response": None, "loglikelihoods": list(scores), "is_greedy": None}
        columns |= {name: list(own["lengths"]) for name in ("characters", "bytes")}
        columns["tokens"] = None  # KL is made up: nobody can compare it with the change of so many tokens
        return pd.DataFrame(columns | self._metrics(task, scores))

    def _metrics(self, task: str, scores: np.ndarray) -> dict[str, Any]:
        own = self.tasks[task]
        if task == "wikitext":
            found = {}
            for metric, size in (("word_perplexity", 1), ("byte_perplexity", 6), ("bits_per_byte", 6)):
                found |= {metric: scores[:, 0], f"{metric}.weight": size * own["words"].astype(np.float64)}
            return found
        if task == "lambada_openai":
            right = (scores[:, 0] > -11).astype(np.float64)
            return {"target": " word", "acc": right, "perplexity": scores[:, 0], "is_greedy": list(right[:, None] > 0)}
        gold = own["gold"]
        return {
            "gold": list(gold[:, None]),
            "is_greedy": list(np.zeros(scores.shape, dtype=bool)),
            "acc": (scores.argmax(1) == gold).astype(np.float64),
            "acc_norm": ((scores / own["lengths"]).argmax(1) == gold).astype(np.float64),
        }


def layer_audit(name: str, **changes: Any) -> LayerAudit:
    """A correct layer at 3 bits."""
    fields: dict[str, Any] = {
        "name": name,
        "weights": 4096 * 16,
        "code_bytes": 4096 * 6,
        "metadata_bytes": 4096,
        "source_energy": 26.123456789,
        "error_energy": 1.123456789,
        "bits": 3,
        "group_size": 64,
        "levels": 8,
        "codes_used": 8,
        "max_code": 7,
        "one_value_a_code": True,
        "median_steps": 0.251234567,
        "median_bias": 0.001234567,
        "cosine": 0.981234567,
        "slope": 0.991234567,
        "misplaced": 0.0,
        "narrow": 0.0,
        "codes_possible": 8,
        "packed_bytes": 4096 * 6,
        "nearest": True,
        "finite": True,
    }
    return LayerAudit(**fields | changes)


def make_audit(layers: int = 28, **changes: Any) -> Audit:
    """An audit of this many layers; changes apply to all of them."""
    own = tuple(layer_audit(f"model.layers.{i // 7}.part{i % 7}", **changes) for i in range(layers))
    return Audit(
        **{name: sum(getattr(layer, name) for layer in own) for name in TOTALS},
        label="hqq-3-g64",
        method="hqq",
        bits=3,
        activation_bits=None,
        execution="dense",
        dtype="float32",
        linear_weights=4096 * 16 * 28 + 1000,
        target_weights=4096 * 16 * layers,
        layers=own,
        probe_tokens=64,
        kl=0.0123,
        top1_agreement=0.9,
    )


def write_cells(
    folder: Path, cells: Mapping[CellRef, pd.DataFrame], gate: Mapping[str, Any] | None = None, **changes: Any
) -> Path:
    """A finished run of these cells with a run.json; gate: its recipe's settings; changes: to every record."""
    for cell, samples in cells.items():
        audit = changes.get("audit", make_audit()).model_copy(update={"label": cell.label})
        record = make_record(cell, samples, **changes | {"audit": audit if cell.label != "none-16" else None})
        write_record(cell_folder(folder, cell, record.key), record, of_model(samples, cell))
    entries = tuple(PlannedCell(cell=cell, key=make_record(cell).key) for cell in cells)
    write_plan(folder, RunPlan(recipe="test.yaml", resolved_recipe={"gate": dict(gate or {})}, cells=entries))
    return folder


def make_cells(count: int) -> list[CellRef]:
    """This many cells of two twins."""
    kinds = ("softmax", "softpick")
    return [cell_ref(kinds[i % 2], bits=3, label=f"hqq-3-g{i // 2}") for i in range(count)]
