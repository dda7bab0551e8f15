"""The frozen inputs: results/mini, results/paper, lm-eval's output, and small made-up folders from a fixed seed."""

import copy
import csv
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qbench import table
from qbench.cli import main
from qbench.records.analysis import sums_to_parquet
from qbench.records.audit import TOTALS, Measured, PartAudit
from qbench.records.schema import CellRef, Cost, Divergence, MetricValue, PlannedCell
from qbench.records.store import RECORD, read_record, write_record

from ..example_records import TASKS, audit_of, identity_of, metrics_of
from ..gate.made_up import Population
from ..report.analyzed import analysis_of, write_analyses, write_measured
from ..report.examples import cell, write_cell, write_plan_of

ROOT = Path(__file__).parents[2]
MINI, PAPER = ROOT / "results" / "mini", ROOT / "results" / "paper"
LM_EVAL = ROOT / "tests" / "lm_eval_import" / "output"
TWINS = ("softmax", "softpick")
FEW = ("arc_easy", "lambada_openai", "wikitext")  # one task of each form
# The noise of log-likelihoods, the nats lost and the KL, by label; draws of gptq vary by SPREAD.
QUANTIZED = {
    "none-16": (0.0, 0.0, 1e-13),
    "bnb-8": (0.004, 0.0, 3e-5),
    "hqq-8-g64": (0.004, 0.001, 3e-5),
    "bnb-4-nf4": (0.02, 0.02, 0.004),
    "hqq-4-g64": (0.02, 0.03, 0.005),
    "gptq-4-g128": (0.03, 0.02, 0.006),
    "gptq-3-g128": (0.05, 0.1, 0.05),
    "hqq-3-g64": (0.05, 0.15, 0.06),
    "gptq-2-g128": (0.1, 0.5, 0.4),
    "hqq-2-g64": (0.1, 0.6, 0.5),
    "rtn-8-a8-tensor": (0.01, 0.01, 1e-4),
    "rtn-8-a8": (0.008, 0.01, 1e-4),
    "rtn-4-a4": (0.05, 0.2, 0.05),
    "none-16-kv4-g8": (0.02, 0.02, 0.004),
}
SHARES = {"softmax": 1.0, "softpick": 0.4, "gated": 0.7}  # of the loss, by attention
SPREAD = 0.04
DOCUMENTS = 40
Samples = pd.DataFrame
Change = Callable[[Samples], Samples]


@dataclass(frozen=True)
class Input:
    """Results, and what is asked about them; paths are as the command line takes them."""

    tables: Mapping[str, Path] = field(default_factory=dict)  # folders for `table`, `audit`, `power` and `accept`
    checks: Mapping[str, tuple[Path | str, ...]] = field(default_factory=dict)  # arguments of `qbench check`
    compares: Mapping[str, tuple[Path, Path]] = field(default_factory=dict)  # ours and the published numbers
    powers: Mapping[str, tuple[Path, Path]] = field(default_factory=dict)  # `power --against`


@cache
def population(attention: str, family: str, tasks: tuple[str, ...]) -> Population:
    """One model's scores: those of all models of a family are near each other."""
    found = copy.deepcopy(Population(DOCUMENTS, tasks, seed=len(family)))
    draw = np.random.default_rng([1, *f"{family} {attention}".encode()])
    for own in found.tasks.values():
        own["scores"] += 0.15 * draw.normal(size=own["scores"].shape) * np.sqrt(own["words"])[:, None]
    return found


def scored(ref: CellRef, tasks: tuple[str, ...] = FEW, worse: float = 0.0, seed: int = 2) -> Samples:
    """The documents of a cell; worse: nats that each right answer loses besides the quantization's loss."""
    noise, loss, kl = QUANTIZED[ref.label]
    draw = np.random.default_rng([seed, *ref.name.encode()])
    loss = SHARES[ref.attention] * (loss + (SPREAD * draw.normal() if ref.draw else 0.0))
    own = population(ref.attention, ref.family, tasks)
    has_kl = "wikitext" in tasks
    return own.samples(noise, loss + worse, int(draw.integers(2**30)), kl if has_kl else None, 0.3)


def refs(
    labels: Iterable[str], kinds: Iterable[str] = TWINS, families: Iterable[str] = ("mini",), draws: int = 0
) -> list[CellRef]:
    """The cells of these models; draws: of calibration, if there are several."""
    found = []
    for family, kind, label in ((f, k, own) for f in families for k in kinds for own in labels):
        numbers = range(1, draws + 1) if draws and label.startswith("gptq") else (None,)
        found += [cell(kind, label, family).model_copy(update={"draw": number}) for number in numbers]
    return found


def identity(ref: CellRef, windows: str = "", **what: Any) -> Any:
    """An identity; windows: what a calibrated cell was calibrated on."""
    if ref.method == "gptq":
        what = {"calibration": windows or f"windows {ref.draw}"} | what
    if parts := [part for part in ("a8-tensor", "a8", "a4", "kv4-g8") if ref.label.endswith(f"-{part}")][:1]:
        what = {"parts": {part: {} for part in parts}} | what
    own = identity_of(ref)
    return own.model_copy(update={"what": own.what.model_copy(update=what)})


def store(folder: Path, ref: CellRef, samples: Samples | None, **changes: Any) -> PlannedCell:
    """A record as a run writes it, with its audit and figures over tokens."""
    own = changes.setdefault("identity", identity(ref))
    if own.what.parts and samples is not None:
        proof = Measured(what="the share of rounded values", value=0.9, at_least=0.5)
        pairs = 0.6 if "kv4" in ref.label else None
        parts = tuple(PartAudit(label=part, measured=(proof,), quantized_pairs=pairs) for part in own.what.parts)
        audit = audit_of(cell(ref.attention, "rtn-8"))
        audit = audit.model_copy(update=NOTHING_QUANTIZED) if ref.method == "none" else audit_of(_plain(ref))
        changes.setdefault("audit", audit.model_copy(update={"label": ref.label, "parts": parts}))
    if samples is not None and "kl" in samples:
        changes.setdefault("divergences", (_divergence(ref),))
    return write_cell(folder, ref, samples, **changes)


def _plain(ref: CellRef) -> CellRef:
    """The cell without what is quantized besides weights."""
    return ref.model_copy(update={"label": "-".join(ref.label.split("-")[:2])})


NOTHING_QUANTIZED: dict[str, Any] = dict.fromkeys((*TOTALS, "target_weights"), 0)
NOTHING_QUANTIZED |= {"layers": (), "method": "none", "bits": 16}


def _divergence(ref: CellRef) -> Divergence:
    kl = QUANTIZED.get(ref.label, (0, 0, 0.01))[2]
    about: dict[str, Any] = {"task": "wikitext", "documents": DOCUMENTS, "tokens": 900, "correlation": 0.9}
    figures = {"median": kl / 2, "p99": 5 * kl, "p999": 9 * kl, "same_top": 1 - kl / 2, "rms_change": kl / 3}
    return Divergence(**about, **figures, nats_before=2.5, log_ratio=kl / 4)


def write(
    folder: Path,
    cells: Iterable[CellRef],
    tasks: tuple[str, ...] = FEW,
    worse: Mapping[str, float] | None = None,
    change: Mapping[str, Change] | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    more: Iterable[PlannedCell] = (),
    seed: int = 2,
    **recipe: Any,
) -> Path:
    """A run; by the names of cells, worse: losses, change: of samples, changes: of records; seed: of the noise."""
    planned = []
    for ref in cells:
        samples = scored(ref, tasks, worse=(worse or {}).get(ref.name, 0.0), seed=seed)
        samples = (change or {}).get(ref.name, lambda own: own)(samples)
        planned.append(store(folder, ref, samples, **(changes or {}).get(ref.name, {})))
    write_plan_of(folder, [*planned, *more], **recipe)
    return folder


# --- changes of samples


def of_task(task: str, rows: Callable[[Samples], Samples]) -> Change:
    """A change of one task's rows."""

    def changed(samples: Samples) -> Samples:
        parts = [rows(own) if name == task else own for name, own in samples.groupby("task", sort=False)]
        return pd.concat(parts, ignore_index=True)

    return changed


def reordered(own: Samples) -> Samples:
    """The same documents in the reverse order, with other ids."""
    return own.iloc[::-1].assign(doc_id=own["doc_id"].to_numpy())


def duplicated(own: Samples) -> Samples:
    """The first five documents twice."""
    return pd.concat([own, own.head(5).assign(doc_id=own["doc_id"].head(5) + len(own))])


def replaced(own: Samples) -> Samples:
    """Five documents replaced by others."""
    return own.assign(doc_hash=[f"other {i}" if i < 5 else text for i, text in enumerate(own["doc_hash"])])


def in_turn(*changes: Change) -> Change:
    """Several changes, one after the other."""

    def changed(samples: Samples) -> Samples:
        for change in changes:
            samples = change(samples)
        return samples

    return changed


def edited(metric: str, task: str, row: int, value: float) -> Change:
    """One document with another value."""

    def changed(samples: Samples) -> Samples:
        samples = samples.copy()
        samples.loc[samples.index[samples["task"] == task][row], metric] = value
        return samples

    return changed


def other_choice(samples: Samples) -> Samples:
    """The right answers of three questions changed."""
    gold = [[(own[0] + 1) % 4] if own is not None and i < 3 else own for i, own in enumerate(samples["gold"])]
    return samples.assign(gold=gold)


# --- the folders


def attentions(root: Path) -> Input:
    """Three attentions in one family, with their analyses; the baseline has a better and a worse cell."""
    cells = refs(("none-16", "bnb-4-nf4", "hqq-3-g64", "hqq-2-g64"), SHARES)
    worse = {"mini-softpick-hqq-3-g64": 0.5, "mini-gated-bnb-4-nf4": -0.01}
    run = write_analyses(write(root / "run", cells, worse=worse), tuple(SHARES))
    baseline = write(root / "baseline", cells)
    again = write(root / "again", cells, seed=3)
    checks = {"plain": (run, baseline), "scores only": (run, baseline, "--scores-only", "--alpha", "0.05")}
    checks["other noise"] = (again, baseline)
    return Input({"run": run}, checks, powers={"against": (run, baseline)})


def replicates(root: Path) -> Input:
    """Three trained pairs of one recipe, with three draws each."""
    families = ("one", "two", "three")
    cells = refs(("none-16", "hqq-3-g64", "gptq-3-g128"), families=families, draws=3)
    return Input({"run": write(root / "run", cells, replicates=list(families))})


def draws(root: Path) -> Input:
    """Five draws of one model and three of the other; two draws that saw other documents; windows drawn twice."""
    labels = ("none-16", "gptq-3-g128", "gptq-2-g128")
    cells = refs(labels, ("softmax",), draws=5) + refs(labels, ("softpick",), draws=3)
    cells += refs(("gptq-4-g128",))  # one draw
    calibrated = [ref for ref in cells if ref.draw]
    third = next(ref for ref in calibrated if ref.name == "mini-softpick-gptq-3-g128-draw-3")
    twice = {third.name: {"identity": identity(third, "windows 2")}}
    other = {"mini-softpick-gptq-2-g128-draw-2": of_task("arc_easy", replaced)}
    run = write(root / "run", cells, changes=twice, change=other)
    windows = {ref.name: {"identity": identity(ref, f"baseline {ref.draw}")} for ref in calibrated}
    for ref in calibrated:
        if ref.label == "gptq-3-g128":
            found = audit_of(ref)
            layer = found.layers[0].model_copy(update={"slope": 1.05 + 0.001 * (ref.draw or 0)})
            windows[ref.name]["audit"] = found.model_copy(update={"layers": (layer,)})
    redrawn = {ref.name: 0.03 + 0.02 * (ref.draw or 0) for ref in calibrated if ref.attention == "softmax"}
    better = {name: -own for name, own in redrawn.items()}
    baseline = write(root / "baseline", cells, changes=windows, worse=better, change=other)
    fewer = write(root / "fewer", [ref for ref in cells if ref.draw != 3])
    checks = {"other calibration": (run, baseline), "reversed": (baseline, run), "fewer": (fewer, run)}
    checks["other documents"] = (write(root / "plain", cells), run)
    return Input({"run": run, "fewer": fewer}, checks, powers={"against": (baseline, run), "fewer": (baseline, fewer)})


def gaps(root: Path) -> Input:
    """Cells that failed, are missing, not offered, dropped, new or not audited; and baselines that cannot be used."""
    cells = {ref.name: ref for ref in refs(("none-16", "bnb-4-nf4", "hqq-3-g64", "hqq-2-g64"))}
    bad = audit_of(cells["mini-softpick-hqq-2-g64"], untouched=("model.layers.0.mlp.up_proj",))
    changes = {"mini-softpick-hqq-2-g64": {"audit": bad}, "mini-softmax-bnb-4-nf4": {"audit": None}}
    kept = {n: r for n, r in cells.items() if n not in ("mini-softmax-hqq-3-g64", "mini-softpick-bnb-4-nf4")}
    kept.pop("mini-softmax-hqq-2-g64")
    store(root / "failed", cells["mini-softmax-hqq-3-g64"], None)
    more = [store(root / "run", cells["mini-softmax-hqq-3-g64"], None)]
    more += [PlannedCell(cell=cells["mini-softpick-bnb-4-nf4"], key="f" * 64)]  # missing
    more += [PlannedCell(cell=cell(kind, "bnb-3"), key=None, not_offered=True) for kind in TWINS]
    more += [store(root / "run", ref, scored(ref)) for ref in refs(("hqq-8-g64",))]  # new
    run = write(root / "run", kept.values(), changes=changes, more=more)  # mini-softmax-hqq-2-g64 is dropped
    baseline = write(root / "baseline", cells.values())
    others = write(root / "others", refs(("none-16", "hqq-3-g64"), families=("other",)))
    tasks = write(root / "tasks", cells.values(), FEW[:2])
    (root / "empty").mkdir()
    checks = {
        "run": (run, baseline),
        "incomplete baseline": (baseline, run),
        "failed baseline": (baseline, write(root / "failed", [], more=more[:1])),
        "other family": (baseline, others),
        "other tasks": (baseline, tasks),
        "no baseline": (baseline, root / "new"),
        "similar name": (baseline, root / "othes"),
        "itself": (baseline, baseline),
        "no records": (root / "empty", baseline),
        "part": (write(root / "part", list(cells.values())[:2], gate={"baseline_may_hold_more": True}), baseline),
    }
    return Input({"run": run, "others": others, "empty": root / "empty"}, checks)


def documents(root: Path) -> Input:
    """The same documents in another order, some twice, some replaced; within a run and against a baseline."""
    cells = refs(("none-16", "hqq-3-g64"))
    arc, target, pages = FEW
    names = [ref.name for ref in cells]
    baseline = write(root / "baseline", cells)

    def run(name: str, change: Change, which: Iterable[str] = names) -> Path:
        return write(root / name, cells, change=dict.fromkeys(which, change))

    twice = in_turn(of_task(arc, duplicated), of_task(target, duplicated))
    mixed = in_turn(of_task(arc, reordered), of_task(target, duplicated), of_task(pages, replaced))
    first = of_task(arc, lambda own: own.head(30))
    runs = {
        "reordered": run("reordered", of_task(arc, reordered)),
        "softpick reordered": run("softpick", of_task(arc, reordered), names[2:]),
        "quantized reordered": run("quantized", of_task(arc, reordered), names[1::2]),
        "twice": run("twice", twice),
        "quantized twice": run("quantized-twice", of_task(target, duplicated), names[1::2]),
        "mixed": run("mixed", mixed),
        "removed": run("removed", first),
        "disjoint": run("disjoint", lambda own: own.assign(doc_hash="other " + own["doc_hash"])),
        "other answers": run("answers", other_choice),
    }
    runs["limited"] = write(
        root / "limited",
        cells,
        change=dict.fromkeys(names, first),
        changes={ref.name: {"identity": identity_of(ref, 30)} for ref in cells},
    )
    checks = {name: (folder, baseline) for name, folder in runs.items()}
    again = run("twice-baseline", in_turn(twice, of_task(arc, reordered)))
    worse = write(root / "worse", cells, change=dict.fromkeys(names, twice), worse={names[3]: 0.3})
    checks |= {"both twice": (runs["twice"], again), "both twice and worse": (worse, again)}
    checks["limits"] = (runs["quantized twice"], baseline, "--max-damage", "accuracy=5")
    kept = ("softpick reordered", "quantized reordered", "twice", "quantized twice", "mixed")
    return Input({name: runs[name] for name in kept}, checks)


def gate(root: Path) -> Input:
    """Margins, limits of damage, overrides and numbers of documents; costs, and changed audits and settings."""
    cells = refs(("none-16", "hqq-4-g64", "hqq-2-g64"))
    limits = {"hqq-2-g64": {"perplexity": 30}, "*": {"accuracy": 5, "gold_logprob": 0.3}}
    margins = {"accuracy": 15, "perplexity": 20, "gold_logprob": 0.3, "pooled": 5, "kl": 20}
    overrides = {"arc_easy": {"acc": {"tolerance": 3, "alpha": 0.05}, "gold_logprob": {"noninferiority": 0.1}}}
    settings = {"max_damage": limits, "noninferiority": margins, "overrides": overrides, "min_documents": 41}
    drifted = audit_of(cells[1])
    drifted = drifted.model_copy(update={"layers": (drifted.layers[0].model_copy(update={"slope": 1.05}),)})
    slow = Cost(seconds={"evaluate": 60.0}, weight_bytes=2000)
    own = identity(cells[5], dtype="bfloat16", tokenizer="another", checkpoint="another", options={"label": "x"})
    shots = identity(cells[4])
    shots = shots.model_copy(update={"code": "other", "packages": {"torch": "3.0"}})
    tasks = {task: (about.fingerprint, 5) for task, about in shots.what.tasks.items()}
    shots = shots.model_copy(
        update={"what": type(shots.what).model_validate(shots.what.model_dump() | {"tasks": tasks})}
    )
    changes = {
        cells[1].name: {"audit": drifted, "cost": slow},
        cells[4].name: {"identity": shots},
        cells[5].name: {"identity": own},
    }
    baseline = write(root / "baseline", cells)
    worse = {cells[1].name: 0.2, cells[5].name: -0.2}
    run = write(root / "run", cells, worse=worse, gate=settings)
    changed = write(root / "changed", cells, worse=worse, changes=changes)
    alone, alone_before = (write(root / name, [*cells[1:3], *cells[4:]]) for name in ("alone", "alone-before"))
    without_kl = {ref.name: lambda own: own.drop(columns=["kl", "kl.weight"]) for ref in cells}
    no_kl = write(root / "no-kl", cells, change=without_kl)
    plain = (changed, baseline)
    same = write(root / "unchanged", cells)
    checks: dict[str, tuple[Path | str, ...]] = {
        "recipe": (run, baseline),
        "unchanged": (same, baseline),
        "limits of one": (same, baseline, "--max-damage", "hqq-4-g64:accuracy=1,perplexity=2", "--min-documents", "9"),
        "tolerances": (*plain, "--tolerances", "accuracy=9,gold_logprob=0.5", "--alpha", "0.1"),
        "margins": (run, baseline, "--noninferiority", "accuracy=5,perplexity=2%", "--min-documents", "10"),
        "limits": (run, baseline, "--max-damage", "hqq-4-g64:accuracy=1,perplexity=2", "--tolerances", "accuracy=9"),
        "changed": plain,
        "changed, scores only": (*plain, "--scores-only"),
        "typo in limits": (*plain, "--max-damage", "hqq-5:accuracy=1"),
        "limits without unquantized": (alone, alone_before, "--max-damage", "accuracy=1"),
        "no kl": (no_kl, baseline),
        "kl needed": (no_kl, baseline, "--noninferiority", "kl=5"),
    }
    untested = {"f1": {"arc_easy": {"f1": {"alpha": 0.1}}}, "kl": {"wikitext": {"kl": {"noninferiority": 5}}}}
    for name, overrides in untested.items():
        folder = write(root / name, cells, gate={"overrides": overrides}, change=without_kl if name == "kl" else {})
        checks[f"override of {name}"] = (folder, baseline)
    return Input(
        {"run": run, "no kl": no_kl, "changed": changed, "alone": alone}, checks, powers={"against": (run, baseline)}
    )


def suspects(root: Path) -> Input:
    """Cells that cannot be what they are called: each label of the run has another mistake."""
    labels = ("none-16", "bnb-8", "hqq-8-g64", "bnb-4-nf4", "hqq-4-g64", "hqq-3-g64", "hqq-2-g64", "gptq-3-g128")
    cells = {ref.label: ref for ref in refs(labels, ("softmax",))}
    pairs = refs(("none-16", "hqq-3-g64", "bnb-4-nf4"), ("softpick",))
    own = {label: scored(ref) for label, ref in cells.items()}
    plain = population("softmax", "mini", FEW)
    folder = root / "run"
    wrong = metrics_of(own["hqq-4-g64"])
    edits = {"lambada_openai": {"better": "higher"}, "wikitext": {}, "arc_easy": {"value": 1.25, "stderr": 0.5}}
    wrong = tuple(m.model_copy(update=edits[m.task]) if m.metric in ("acc", "perplexity") else m for m in wrong)
    unlike = own["hqq-3-g64"].assign(acc=1 - own["hqq-3-g64"]["acc"])
    infinite = edited("acc_norm", "arc_easy", 3, float("nan"))(own["gptq-3-g128"])
    planned = [
        store(folder, cells["none-16"], own["none-16"]),
        store(folder, cells["hqq-2-g64"], plain.samples(0.02, seed=3, kl=0.5)),  # vanished damage
        store(folder, cells["bnb-4-nf4"], plain.samples(1e-6, seed=1, kl=0.004)),  # too near
        store(folder, cells["hqq-8-g64"], plain.samples(0.05, -2.5, seed=2, kl=3e-5)),  # too good
        store(folder, cells["hqq-3-g64"], unlike),  # does not follow
        store(folder, cells["hqq-4-g64"], own["hqq-4-g64"], metrics=wrong),  # edited values and directions
        store(folder, cells["gptq-3-g128"], infinite),  # NaN
        store(folder, cells["bnb-8"], own["bnb-8"], audit=audit_of(cells["bnb-8"], changed=("lm_head.weight",))),
        store(folder, pairs[0], scored(pairs[0])),
        store(folder, pairs[1], scored(pairs[1]), key="0" * 64),  # an edited key
        store(folder, pairs[2], scored(pairs[0])),  # equal weights under two labels
    ]
    write_plan_of(folder, planned)
    baseline = write(root / "baseline", [*cells.values(), *pairs])
    checks = {"run": (folder, baseline), "baseline": (baseline, folder)}
    return Input({"run": folder, "baseline": baseline}, checks, powers={"against": (folder, baseline)})


def altered(root: Path) -> Input:
    """Records that do not follow from their documents or identity, or differ from the baseline's: one per label."""
    first, *rest = [cell("softmax", f"hqq-4-g{n}") for n in range(20)]
    own = population("softmax", "mini", FEW)
    samples = {ref.name: own.samples(0.02, 0.03, seed=n) for n, ref in enumerate([first, *rest])}

    def metric(n: int, **update: Any) -> dict[str, Any]:
        acc, *others = metrics_of(samples[rest[n].name])
        return {"metrics": (acc.model_copy(update=update), *others)}

    def audit(n: int, layer: Mapping[str, Any], **update: Any) -> dict[str, Any]:
        found = audit_of(rest[n])
        return {"audit": found.model_copy(update={"layers": (found.layers[0].model_copy(update=layer),)} | update)}

    changes: dict[int, dict[str, Any]] = {
        0: {"identity": identity(rest[0], attention="softpick")},
        1: {"metrics": metrics_of(samples[rest[1].name]) * 2},
        2: metric(2, aggregation="median"),
        3: metric(3, documents=39),
        4: metric(4, stderr=0.5),
        5: metric(5, value=0.5),
        6: {"metrics": metrics_of(samples[rest[6].name])},  # of a column that is empty
        7: audit(7, {}, activation_bits=8),
        8: audit(8, {"name": "another"}),
        9: audit(9, {"group_size": 32}),
        10: audit(10, {"finite": False}),
        11: {"identity": identity_of(rest[11], 7)},
        12: audit(12, {}, label="hqq-4-g1"),
        13: {"identity": identity(rest[13], parts={"a8": {}})},
        14: {"metrics": tuple(m for m in metrics_of(samples[rest[14].name]) if m.metric != "acc_norm")},
    }
    change: dict[int, Change] = {
        6: lambda own: own.assign(acc_norm=np.nan),
        14: lambda own: own.drop(columns="acc_norm"),
        15: lambda own: own.assign(extra=1.0),
        16: lambda own: own.assign(**{"word_perplexity.weight": 2 * own["word_perplexity.weight"]}),
    }
    run, baseline = root / "run", root / "baseline"
    planned = [write_cell(run, first, samples[first.name])]
    for n, ref in enumerate(rest):
        rows = change.get(n, lambda own: own)(samples[ref.name])
        about = changes.get(n) or {"metrics": metrics_of(rows)}
        planned.append(write_cell(run, ref, rows, **about))
    write_plan_of(run, planned)
    write_plan_of(baseline, [write_cell(baseline, ref, samples[ref.name]) for ref in (first, *rest)])
    broken = {name: Path(shutil.copytree(baseline, root / name)) for name in ("missing", "damaged")}
    files = {name: sorted(folder.glob("*/samples.parquet")) for name, folder in broken.items()}
    files["missing"][0].unlink()
    files["damaged"][0].write_bytes(files["damaged"][1].read_bytes())
    return Input({"run": run, **broken}, {"run": (run, baseline)})


def low_bits(root: Path) -> Input:
    """Low-bit activations and KV cache, passkey by length, and analyses with steps and failures."""
    labels = ("none-16", "rtn-8-a8-tensor", "rtn-8-a8", "rtn-4-a4", "none-16-kv4-g8")
    folder, planned = root / "run", []
    for ref in refs(labels):
        samples = scored(ref, ("piqa", "wikitext"))
        right = [passkeys(ref, length) for length in (512, 1024)]
        metrics = metrics_of(samples) + tuple(_passkey_metric(own) for own in right)
        planned.append(store(folder, ref, pd.concat([samples, *right], ignore_index=True), metrics=metrics))
    write_plan_of(folder, planned, tasks={"piqa": {"limit": DOCUMENTS}, "wikitext": None})
    write_analyses(folder)
    step = analysis_of("softmax", seed=1)
    write_measured(folder, "softmax", "analysis", step.facts, sums_to_parquet(step), step=100)
    return Input({"run": folder})


def passkeys(ref: CellRef, length: int) -> Samples:
    """Trials of one length: lm-eval's rows of generated text."""
    draw = np.random.default_rng([length, *ref.name.encode()])
    rows = {"task": f"passkey_{length}", "doc_id": np.arange(20, dtype=np.int32), "target": "1234"}
    hashes = [f"passkey {length} {i}" for i in range(20)]
    right = (draw.random(20) < 400 / length).astype(np.float64)
    return pd.DataFrame(
        rows
        | {
            "doc_hash": hashes,
            "acc": right,
            "loglikelihoods": [[-2.0 * w - 1 - x] for w, x in zip(1 - right, draw.random(20), strict=True)],
        }
    )


def _passkey_metric(own: Samples) -> MetricValue:
    error = float(own["acc"].std(ddof=1)) / 20**0.5
    about = {"task": own["task"].iloc[0], "metric": "acc", "better": "higher", "aggregation": "mean", "documents": 20}
    return MetricValue(**about, value=float(own["acc"].mean()), stderr=error)


def compared(root: Path) -> Input:
    """The paper's family with all its tasks, next to the paper and to numbers with as many documents."""
    tasks = tuple(TASKS)
    cells = refs(("none-16", "bnb-4-nf4", "gptq-3-g128", "hqq-2-g64"), families=("340M",), draws=2)
    ours = write(root / "ours", cells, tasks)
    other = write(root / "other", cells, tasks, worse={ref.name: 0.02 for ref in cells})
    published = root / "published.csv"
    published.write_text(str(table(other, "csv", "delta")), encoding="utf-8")
    return Input({"ours": ours}, compares={"paper": (ours, PAPER), "published": (ours, published)})


def lone(root: Path) -> Input:
    """One attention in two families, without a plan."""
    cells = refs(("none-16", "bnb-4-nf4", "hqq-2-g64"), ("softmax",), ("small", "large"))
    folder = write(root / "run", cells)
    (folder / "run.json").unlink()
    return Input({"run": folder})


def published(root: Path) -> Input:
    """Published numbers that cannot be right, and those of three attentions."""
    files = {name: root / name for name in ("doubtful", "attentions")}
    for own in files.values():
        own.mkdir()
    scores = {"arc_easy": 60.35, "lambada_openai": 36.25, "piqa": 66.97, "sciq": 80.5}
    rows = [["S", "none", 16, task, "acc", value, value + 1, 1.0, ""] for task, value in scores.items()]
    rows += [["S", "hqq", 2, task, "acc", value, value - 9, -9.0, ""] for task, value in scores.items()]
    rows += [["S", "bnb", 4, "odd", "acc", 101, 50, -51, 6], ["S", "bnb", 4, "w", "word_perplexity", 0.9, 30, 3, ""]]
    rows += [
        ["S", "bnb", 4, "w", "byte_perplexity", 2, 2, 0, ""],
        ["S", "bnb", 4, "w", "bits_per_byte", 1, 1.5, 0.5, ""],
    ]
    rows += [["S", "bnb", 4, "lam", "acc", 20, 20, 0, ""], ["S", "bnb", 4, "lam", "perplexity", 1.5, 9, 7.5, ""]]
    _csv(files["doubtful"], "family,method,bits,task,metric,softmax,softpick,delta,documents", rows)
    long = [
        [
            "T",
            "hqq" if q else "none",
            3 if q else 16,
            f"passkey_{n}",
            "acc",
            kind,
            90 - q * n / 50 - i,
            92 - q * n / 40,
            200,
        ]
        for i, kind in enumerate(("softpick", "rectified"))
        for q in (0, 1)
        for n in (890, 1983)
    ]
    _csv(files["attentions"], "family,method,bits,task,metric,attention,value,reference,documents", long)
    return Input(files)


def _csv(folder: Path, header: str, rows: Iterable[Iterable[object]]) -> None:
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header.split(","), *rows])


def lm_eval(root: Path) -> Input:
    """lm-eval's output with a group and generated text: compared directly, and imported."""
    baseline, run = LM_EVAL / "models__softmax", LM_EVAL / "models__softmax-hqq-3"
    cells = ["--cell", "family=mini", "--cell", "family=mini,attention=softmax,method=hqq,bits=3,label=hqq-3-g64"]
    main(["import", "lm-eval", str(baseline), str(run), "--out", str(root / "imported"), *cells])
    main(["import", "lm-eval", str(LM_EVAL), "--out", str(root / "unnamed")])
    shots = Path(shutil.copytree(run, root / "few-shot"))
    for file in shots.glob("results_*.json"):
        content = json.loads(file.read_text())
        content["n-shot"] = dict.fromkeys(content["n-shot"], 5)
        file.write_text(json.dumps(content))
    asked = Path(shutil.copytree(run, root / "asked"))
    for file in asked.glob("samples_mini_sciq_*.jsonl"):
        content = re.sub(r'"doc_hash": "[0-9a-f]{9}', '"doc_hash": "012345678', file.read_text(), count=1)
        file.write_text(content)
    unquantized = next(file for file in root.glob("imported/*none*/record.json"))
    ours = read_record(unquantized).model_copy(update={"imported": None})
    write_record(root / "ours" / unquantized.parent.name, ours, _parquet(unquantized))
    checks = {
        "outputs": (run, baseline),
        "itself": (run, run),
        "models": (LM_EVAL, baseline),
        "questions": (asked, baseline),
        "imported": (root / "imported", root / "unnamed"),
        "few-shot": (shots, baseline),
        "ours": (run, root / "ours"),
        "limits": (run, baseline, "--max-damage", "accuracy=1,perplexity=5%"),
    }
    return Input({"imported": root / "imported", "unnamed": root / "unnamed", "output": run}, checks)


def mini(root: Path) -> Input:
    """results/mini, compared with itself, with its draws in another order, and with 3 bits under the label of 4."""
    rotated, swapped = (Path(shutil.copytree(MINI, root / name)) for name in ("rotated", "swapped"))
    (rotated / "run.json").unlink()
    for file in rotated.glob(f"*/{RECORD}"):
        record = read_record(file)
        if record.cell.draw:
            turned = record.cell.model_copy(update={"draw": record.cell.draw % 5 + 1})
            write_record(file.parent, record.model_copy(update={"cell": turned}), _parquet(file))
    found = {record.cell.name: (record, file) for file in swapped.glob(f"*/{RECORD}") for record in [read_record(file)]}
    three, four = found["mini-softpick-hqq-3-g64"], found["mini-softpick-hqq-4-g64"]
    write_record(four[1].parent, four[0].model_copy(update={"metrics": three[0].metrics}), _parquet(three[1]))
    same = Path(shutil.copytree(MINI, root / "same"))
    checks = {"same": (same, MINI), "rotated": (rotated, MINI), "swapped": (swapped, MINI)}
    return Input({"run": MINI}, checks, {"paper": (MINI, PAPER)})


def _parquet(record: Path) -> bytes:
    return (record.parent / "samples.parquet").read_bytes()


def paper(root: Path) -> Input:
    """The published numbers."""
    return Input({"paper": PAPER})


MAKERS: dict[str, Callable[[Path], Input]] = {
    maker.__name__: maker
    for maker in (
        *(attentions, replicates, draws, gaps, documents, gate, suspects, altered),
        *(low_bits, compared, lone, published, lm_eval, mini, paper),
    )
}
