"""Analyses made up for tests of what reads them: the sums are invented, the format is not."""

from pathlib import Path
from typing import Any

import numpy as np

from qbench.records.analysis import Analysis, AttentionMap, TextSums, shapes, sums_to_parquet
from qbench.records.analysis_facts import AnalysisFacts, LinearDamage, MapsFacts, Quartiles
from qbench.records.maps import maps_to_parquet
from qbench.records.schema import CellRef, Failure, Measured, PlannedCell, Record, RunPlan
from qbench.records.store import ANALYSES, Samples, cell_folder, write_plan, write_record

from ..example_records import PROVENANCE, described, identity_of
from .examples import cell

LAYERS, HEADS, HIDDEN, TEXTS, TOKENS = 3, 2, 8, 6, 32
# How much of its weight a head puts on the first token, how large the first token's values are, and the share of zeros.
KINDS = {"softmax": (0.6, 50.0, 0.0), "softpick": (0.05, 5.0, 0.7), "gated": (0.2, 9.0, 0.0)}


def analysis_of(attention: str, seed: int = 0) -> Analysis:
    """What a model of this kind might show; the texts are the same for all kinds."""
    sink, large, zeros = KINDS[attention]
    draw = np.random.default_rng([seed, *attention.encode()])
    facts = AnalysisFacts(
        attention=attention,
        dtype="float32",
        layers=LAYERS,
        heads=HEADS,
        hidden_size=HIDDEN,
        length=TOKENS,
        lengths=(8, 16),
        texts=TEXTS,
        tokens=TEXTS * TOKENS,
        quartiles=tuple(
            Quartiles(state=state, part="all", q1=-0.5, median=0.01, q3=0.6, median_abs=0.4)
            for state in range(LAYERS + 2)
        ),
    )
    arrays: dict[str, Any] = {}
    for name, shape in shapes(facts).items():
        arrays[name] = np.round(draw.uniform(0.5, 1.5, (TEXTS, *shape)), 6)
    triangle = TOKENS * (TOKENS + 1) / 2
    arrays |= {
        "number": np.arange(TEXTS),
        "hash": np.array([f"text {n}" for n in range(TEXTS)], dtype=object),
        "tokens": np.full(TEXTS, TOKENS),
        "first": arrays["first"] * sink * TOKENS,
        "first_normalized": arrays["first_normalized"] * sink * TOKENS,
        "row_sums": arrays["row_sums"] * TOKENS,
        "zeros": np.round(arrays["zeros"] * zeros * triangle),
        "near_zeros": np.round(arrays["near_zeros"] * zeros * triangle),
        "empty_tiles": arrays["empty_tiles"] * 0,
        "off": np.round(arrays["off"] * TOKENS * zeros),
        "power_sums": _power_sums(draw, large),
        "minimum": -large * arrays["minimum"],
        "maximum": large * arrays["maximum"],
        "largest": large * np.sort(arrays["largest"])[..., ::-1],
        "largest_token": np.zeros(arrays["largest_token"].shape, dtype=np.int64),
        "largest_channel": np.full(arrays["largest_channel"].shape, 5, dtype=np.int64),
        "massive": np.zeros(arrays["massive"].shape, dtype=np.int64),
        "sweep_sinks": np.round(np.minimum(LAYERS * HEADS, LAYERS * HEADS * 2 * sink * arrays["sweep_sinks"])),
        "sweep_minimum": -large * arrays["sweep_minimum"],
        "sweep_maximum": large * arrays["sweep_maximum"],
    }
    return Analysis(facts, TextSums(**arrays))


def _power_sums(draw: np.random.Generator, large: float) -> np.ndarray:
    """Moments of real values, which have a kurtosis: [texts, states, parts, powers]."""
    x = draw.normal(size=(TEXTS, LAYERS + 2, 2, TOKENS * HIDDEN // 2))
    x[..., 0] = large
    return np.stack([(x**power).sum(-1) for power in (1, 2, 3, 4)], axis=-1)


def write_analyses(
    folder: Path, attentions: tuple[str, ...] = ("softmax", "softpick"), family: str = "mini", **recipe: object
) -> Path:
    """An analysis, maps and a sensitivity of each kind, with their plan."""
    planned = []
    for attention in attentions:
        analysis = analysis_of(attention)
        planned.append(write_measured(folder, attention, "analysis", analysis.facts, sums_to_parquet(analysis), family))
        weights = np.tril(np.full((4, 4), KINDS[attention][0], dtype=np.float32))
        maps = [AttentionMap(1, head, (5, 6, 7, 8), weights) for head in range(HEADS)]
        facts = MapsFacts(tokens=("a", "b", "c", "d"), heads=((1, 0), (1, 1)))
        planned.append(write_measured(folder, attention, "maps", facts, maps_to_parquet(maps), family))
        damages = tuple(
            LinearDamage(label="hqq-3-g64", layer=n, linear=name, nats_per_token=0.01 * n, kl=0.002, tokens=186)
            for n in range(LAYERS)
            for name in ("q_proj", "down_proj")
        )
        planned.append(write_measured(folder, attention, "sensitivity", damages, None, family, "hqq-3-g64"))
    content = {"reference": "softmax", **recipe}
    write_plan(folder, RunPlan(recipe="mini.yaml", resolved_recipe=content, cells=tuple(planned)), ANALYSES)
    return folder


def write_measured(
    folder: Path,
    attention: str,
    measured: Measured,
    found: object,
    content: Samples,
    family: str = "mini",
    label: str = "none-16",
    **changes: Any,
) -> PlannedCell:
    """One record; found: None if it failed."""
    ref = cell(attention, label, family).model_copy(update={"measured": measured} | changes)
    record = record_of(ref, found)
    write_record(cell_folder(folder, ref, record.key), record, content)
    return PlannedCell(cell=ref, key=record.key)


def record_of(ref: CellRef, found: object) -> Record:
    """A record of what was found, or of a failure."""
    identity = identity_of(ref)
    what = identity.what.model_copy(update={"tasks": {}, "analysis": {"measured": ref.measured, "step": ref.step}})
    identity = identity.model_copy(update={"what": what})
    about: dict[str, Any] = {"cell": ref, "key": identity.key, "identity": identity, "provenance": PROVENANCE}
    about |= described(ref)
    if found is None:
        failure = Failure(kind="error", reason="The activations of text 3 are NaN after layer 2.", phase="analysis")
        return Record(state="failed", failure=failure, **about)
    return Record(state="done", **about, **{str(ref.measured): found})
