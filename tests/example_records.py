"""Records made up for tests of what reads them: the numbers are invented, the format is not."""

import io
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from qbench.attention.kinds import ATTENTIONS
from qbench.identity import Identity, TaskIdentity, What
from qbench.records.audit import Audit, LayerAudit, failures
from qbench.records.metrics import KL
from qbench.records.samples import AGGREGATIONS, WEIGHT, to_frame
from qbench.records.schema import (
    CellRef,
    Cost,
    Failure,
    MetricValue,
    PlannedCell,
    Provenance,
    QuantizerFacts,
    Record,
    RunPlan,
)
from qbench.records.store import StoredRecord, cell_folder, write_plan, write_record

PROVENANCE = Provenance(
    recipe="test.yaml",
    resolved_recipe={"checkpoints": {}},
    packages={"torch": "2.13.0"},
    git_commit="0" * 40,
    machine={"cpu": "a CPU", "cores": 2},
    started="2026-01-01T00:00:00+00:00",
    finished="2026-01-01T00:01:00+00:00",
)
# task: choices, and (metric, aggregation, better)
TASKS: dict[str, tuple[int, Sequence[tuple[str, str, Any]]]] = {
    "arc_easy": (4, [("acc", "mean", "higher"), ("acc_norm", "mean", "higher")]),
    "lambada_openai": (0, [("acc", "mean", "higher"), ("perplexity", "perplexity", "lower")]),
    "piqa": (2, [("acc", "mean", "higher"), ("acc_norm", "mean", "higher")]),
    "sciq": (4, [("acc", "mean", "higher"), ("acc_norm", "mean", "higher")]),
    "wikitext": (
        1,
        [
            ("word_perplexity", "weighted_perplexity", "lower"),
            ("byte_perplexity", "weighted_perplexity", "lower"),
            ("bits_per_byte", "bits_per_byte", "lower"),
        ],
    ),
}
KL_FACTS = (KL, "weighted_mean", "lower")  # of tasks whose samples have it


def stored_samples(stored: StoredRecord) -> pd.DataFrame:
    """All columns of a record's samples, to change and to write again."""
    return pq.read_table(io.BytesIO(stored.samples_content())).to_pandas()


def cell_ref(
    attention: str = "softmax", method: str = "hqq", bits: int = 3, label: str = "hqq-3-g64", family: str = "mini"
) -> CellRef:
    """A cell."""
    checkpoint = f"checkpoints/{family}-{attention}"
    return CellRef(family=family, attention=attention, checkpoint=checkpoint, method=method, bits=bits, label=label)


def make_samples(
    documents: int = 50, loss: float = 0.0, tasks: Sequence[str] = tuple(TASKS), seed: int = 0
) -> pd.DataFrame:
    """Samples of every task; two calls with one seed have the same documents. loss: how much worse the model is."""
    return to_frame([row for task in tasks for row in _rows(task, documents, loss, seed)])


def _rows(task: str, documents: int, loss: float, seed: int) -> list[dict[str, Any]]:
    draw = np.random.default_rng([seed, *task.encode()])
    choices = TASKS[task][0]
    rows = []
    for i in range(documents):
        row: dict[str, Any] = {"task": task, "doc_id": i, "doc_hash": f"{task}-{seed}-{i}", "target": None}
        noise = draw.normal(size=max(choices, 1))
        if task == "wikitext":
            words = int(draw.integers(50, 500))
            score = -words * (4 + 0.1 * noise[0] + loss)
            row |= {"loglikelihoods": [score], "characters": [6 * words], "bytes": [6 * words], "tokens": [2 * words]}
            for metric, divisor in (("word_perplexity", words), ("byte_perplexity", 6 * words)):
                row |= {metric: score, f"{metric}.weight": divisor}
            row |= {"bits_per_byte": score, "bits_per_byte.weight": 6 * words}
        elif choices == 0:
            score = -abs(2 * noise[0]) - loss
            row |= {"target": " word", "loglikelihoods": [score], "is_greedy": [score > -1]}
            row |= {"characters": [5], "bytes": [5], "tokens": [1], "acc": float(score > -1), "perplexity": score}
        else:
            gold = int(draw.integers(choices))
            scores = 2 * noise - 20
            scores[gold] += 2 - 3 * loss
            lengths = draw.integers(5, 30, size=choices)
            right = {"acc": int(scores.argmax()) == gold, "acc_norm": int((scores / lengths).argmax()) == gold}
            row |= {"gold": [gold], "loglikelihoods": scores.tolist(), "is_greedy": [False] * choices}
            row |= {"characters": lengths.tolist(), "bytes": lengths.tolist(), "tokens": (lengths // 3).tolist()}
            row |= {metric: float(value) for metric, value in right.items()}
        rows.append(row)
    return rows


def aggregate(rows: pd.DataFrame, metric: str, aggregation: str) -> float:
    """A metric of the samples of one task."""
    rows = rows[rows[metric].notna()]
    weights = rows[metric + WEIGHT] if metric + WEIGHT in rows else np.ones(len(rows))
    return AGGREGATIONS[aggregation].value(rows[metric].to_numpy(), np.asarray(weights))


def standard_error(rows: pd.DataFrame, metric: str, aggregation: str) -> float | None:
    """As records have it: exact for means, made up for the rest."""
    values = rows[metric].dropna()
    return (values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else None) if aggregation == "mean" else 0.01


def metrics_of(samples: pd.DataFrame) -> tuple[MetricValue, ...]:
    """The metrics that samples amount to."""
    found = []
    for task, rows in samples.groupby("task", sort=False):
        for metric, aggregation, better in (*TASKS[str(task)][1], KL_FACTS):
            if metric == KL and (metric not in rows or rows[metric].isna().all()):
                continue
            value = aggregate(rows, metric, aggregation)
            found.append(
                MetricValue(
                    task=str(task),
                    metric=metric,
                    value=value,
                    stderr=standard_error(rows, metric, aggregation),
                    better=better,
                    aggregation=aggregation,
                    documents=int(rows[metric].notna().sum()),
                )
            )
    return tuple(found)


def audit_of(cell: CellRef, **changes: object) -> Audit:
    """An audit that passes, unless it is changed."""
    weights, codes = 4096, 2**cell.bits
    stored = {"weights": weights, "code_bytes": weights * cell.bits // 8, "metadata_bytes": weights // 16}
    energies = {"source_energy": 100.0, "error_energy": 100.0 * 4.0**-cell.bits}
    layer = LayerAudit(
        **{"name": "model.layers.0.mlp.down_proj", "bits": cell.bits, "group_size": 64, **stored, **energies},
        **{"levels": min(codes, 60), "codes_used": codes, "max_code": codes - 1, "codes_possible": codes},
        **{"one_value_a_code": True, "median_steps": 0.25, "median_bias": 0.0, "cosine": 0.99, "slope": 1.0},
        **{"misplaced": 0.0, "narrow": 0.0, "packed_bytes": stored["code_bytes"], "nearest": True, "finite": True},
    )
    audit = Audit(
        **{"label": cell.label, "method": cell.method, "bits": cell.bits, "activation_bits": None, "dtype": "float32"},
        **{"execution": "dense", "linear_weights": 2 * weights, "target_weights": weights, "layers": (layer,)},
        **{"kl": 4.0**-cell.bits, "top1_agreement": 1 - 4.0**-cell.bits, **stored, **energies},
    )
    assert not failures(audit)
    return audit.model_copy(update=changes)


def of_model(samples: pd.DataFrame, cell: CellRef) -> pd.DataFrame:
    """The samples with log-likelihoods of the cell's own: two models never agree to the last bit."""
    factor = 1 + 1e-12 * (zlib.crc32(cell.name.encode()) % 1000 + 1)
    return samples.assign(loglikelihoods=[factor * np.asarray(row) for row in samples["loglikelihoods"]])


def identity_of(cell: CellRef, limit: int | None = None, **changes: Any) -> Identity:
    """The identity of a cell with its label for options; limit: of documents; changes: its code or packages."""
    what = What(
        checkpoint=f"content of {cell.checkpoint}",
        tokenizer="content of a tokenizer",
        attention=cell.attention,
        method=cell.method,
        bits=cell.bits,
        options={"label": cell.label},
        calibration=None,
        tasks={task: TaskIdentity(f"{limit or 'all'} documents of {task}", 0) for task in TASKS},
        dtype="float32",
        execution="dense",
        device="cpu",
        max_length=None,
        seed=1234,
        batch_tokens=None,
    )
    return Identity(**{"what": what, "code": "c0de", "packages": {"torch": "2.13.0"}} | changes)


def described(cell: CellRef) -> dict[str, Any]:
    """What a run records of a method and of an attention, for people."""
    kind = ATTENTIONS.get(cell.attention)
    quantizer = QuantizerFacts(title=cell.method.upper(), calibrated=cell.method == "gptq")
    return {"quantizer": quantizer, "attention_title": kind.title if kind else cell.attention}


def make_record(cell: CellRef, samples: pd.DataFrame | None = None, **changes: Any) -> Record:
    """A finished record with these samples, or a failed one if there are none."""
    identity = changes.get("identity", identity_of(cell))
    fields: dict[str, Any] = {
        "state": "failed" if samples is None else "done",
        "cell": cell,
        "key": identity.key,
        "identity": identity,
        "provenance": PROVENANCE,
        **described(cell),
    }
    if samples is None:
        fields["failure"] = Failure(kind="error", reason="It broke.", phase="quantize", log_tail="…")
    else:
        fields["metrics"] = changes.get("metrics") or metrics_of(samples)
        fields["audit"] = None if cell.method == "none" else audit_of(cell)
        fields["cost"] = Cost(seconds={"load": 1.0, "quantize": 2.0, "evaluate": 3.0}, weight_bytes=1000)
    return Record(**fields | changes)


def write_run(
    folder: Path, cells: Mapping[CellRef, pd.DataFrame | None], *, planned: bool = True, limit: int | None = None
) -> Path:
    """A folder of records; a cell without samples has failed. planned: also write a run.json."""
    entries = []
    for cell, samples in cells.items():
        record = make_record(cell, samples, identity=identity_of(cell, limit))
        own = None if samples is None else of_model(samples, cell)
        write_record(cell_folder(folder, cell, record.key), record, own)
        entries.append(PlannedCell(cell=cell, key=record.key))
    if planned:
        write_plan(folder, RunPlan(recipe="test.yaml", resolved_recipe={}, cells=tuple(entries)))
    return folder
