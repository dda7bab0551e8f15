"""Mistakes in a folder of records, as a buggy run would make them: values, checksums, keys and run.json follow from the
mistaken documents. What happens to files instead is made by hand, and its name says so.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qbench.records.metrics import KL
from qbench.records.samples import AGGREGATIONS, WEIGHT
from qbench.records.schema import MetricValue, PlannedCell, Record
from qbench.records.store import SAMPLES, StoredRecord, cell_folder, read_results, write_plan, write_record

from ..example_records import stored_samples

NONE, TWO, THREE, FOUR, EIGHT = "none-16", "hqq-2-g64", "hqq-3-g64", "hqq-4-g64", "hqq-8-g64"
DRAWN, DRAWN_4 = "gptq-2-g128", "gptq-4-g128"
PAGES, PIQA, SCIQ, ARC = "mini_wikitext", "mini_piqa", "mini_sciq", "mini_arc_easy"
PERPLEXITIES = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")

Change = Callable[[pd.DataFrame], pd.DataFrame]


class Run:
    """A folder of records, and how a buggy run would have written them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def cells(self) -> list[StoredRecord]:
        return list(read_results(self.folder).current)

    def cell(self, label: str, attention: str = "softmax", draw: int | None = None) -> StoredRecord:
        wanted = attention, label, draw or (1 if label.startswith("gptq") else None)
        return next(s for s in self.cells if (own := s.record.cell) and (own.attention, own.label, own.draw) == wanted)

    def write(self, into: StoredRecord, samples: pd.DataFrame | None = None, **changes: Any) -> None:
        """Replace a cell's record. what: changes to its identity; its key, folder and metrics follow."""
        identity = into.record.identity
        if what := changes.pop("what", None):
            identity = identity.model_copy(update={"what": identity.what.model_copy(update=what)})
        metrics = into.record.metrics if samples is None else recomputed(into.record, samples)
        fields = {"identity": identity, "key": identity.key, "metrics": metrics} | changes
        record = into.record.model_copy(update=fields)
        samples = stored_samples(into) if samples is None else samples
        shutil.rmtree(into.folder)
        write_record(cell_folder(self.folder, record.cell, record.key), record, samples)
        self.plan({into.record.cell.name: PlannedCell(cell=record.cell, key=record.key)})

    def plan(self, new: Mapping[str, PlannedCell | None]) -> None:
        """Other cells in run.json, by name; None: no longer there."""
        plan = read_results(self.folder).plan
        assert plan
        cells = tuple(cell for own in plan.cells if (cell := new.get(own.cell.name, own)))
        write_plan(self.folder, plan.model_copy(update={"cells": cells}))


Make = Callable[[Run, Run], object]


def recomputed(record: Record, samples: pd.DataFrame) -> tuple[MetricValue, ...]:
    """The record's metrics as they follow from other samples; those without values are gone."""
    found = []
    for m in record.metrics:
        rows = samples[(samples["task"] == m.task) & samples.get(m.metric, pd.Series(np.nan, samples.index)).notna()]
        if len(rows):
            values = rows[m.metric].to_numpy()
            weights = rows[m.metric + WEIGHT].to_numpy() if m.metric + WEIGHT in rows else np.ones(len(rows))
            value = AGGREGATIONS[m.aggregation].value(values, weights)
            error = float(values.std(ddof=1)) / len(values) ** 0.5 if m.aggregation == "mean" else m.stderr
            found.append(m.model_copy(update={"value": value, "stderr": error, "documents": len(values)}))
    return tuple(found)


def rescored(samples: pd.DataFrame, factors: np.ndarray) -> pd.DataFrame:
    """The samples with the log-likelihoods of each document multiplied by a factor, and the metrics that follow."""
    scores = [row * factor for row, factor in zip(samples["loglikelihoods"], factors, strict=True)]
    columns = {name: samples[name].to_numpy(copy=True) for name in ("acc", "acc_norm", *PERPLEXITIES)}
    for i, (values, gold, lengths) in enumerate(zip(scores, samples["gold"], samples["characters"], strict=True)):
        if gold is not None:
            columns["acc"][i] = values.argmax() in gold
            columns["acc_norm"][i] = (values / lengths).argmax() in gold
        for name in PERPLEXITIES:
            columns[name][i] = np.nan if np.isnan(columns[name][i]) else values[0]
    return samples.assign(loglikelihoods=scores, **columns)


def rounded(samples: pd.DataFrame) -> pd.DataFrame:
    """As on a machine that rounds differently: nothing is equal to the last bit."""
    return rescored(samples, 1 + 1e-6 * np.random.default_rng(0).normal(size=len(samples)))


def mixed(samples: pd.DataFrame, others: pd.DataFrame, task: str) -> pd.DataFrame:
    """One task's documents of `samples`, and the other tasks' of `others`."""
    return pd.concat([samples[samples["task"] == task], others[others["task"] != task]], ignore_index=True)


# What may go wrong. Each returns a function of the run and its baseline.
def scores(of: str, under: str, attention: str = "softmax", change: Change = lambda own: own, draw: int = 0) -> Make:
    """One cell's samples under the label of another, KL and its figures too."""

    def make(run: Run, _: Run) -> None:
        other = run.cell(of, attention)
        own = run.cell(under, draw=draw or None)
        run.write(own, change(stored_samples(other)), divergences=other.record.divergences)

    return make


def swapped(one: str, two: str, other: str = "softmax", change: Change = lambda own: own) -> Make:
    def make(run: Run, _: Run) -> None:
        a, b = run.cell(one), run.cell(two, other)
        of_a, of_b = stored_samples(a), stored_samples(b)
        run.write(a, change(of_b), divergences=b.record.divergences)
        run.write(b, change(of_a), divergences=a.record.divergences)

    return make


def documents(change: Change, label: str = FOUR, tasks: Sequence[str] = (PAGES, PIQA, SCIQ, ARC)) -> Make:
    """Other documents, or other values of them, in some tasks."""

    def make(run: Run, _: Run) -> None:
        groups = stored_samples(run.cell(label)).groupby("task")
        parts = [change(rows) if task in tasks else rows for task, rows in groups]
        run.write(run.cell(label), pd.concat(parts, ignore_index=True))

    return make


def one_task(of: str, task: str) -> Make:
    return lambda run, _: run.write(
        run.cell(FOUR), mixed(stored_samples(run.cell(of)), stored_samples(run.cell(FOUR)), task)
    )


def kl(of: str = FOUR, attention: str = "softmax", factor: float = 1.0) -> Make:
    """Another cell's KL with its figures, or a multiple of its own."""

    def make(run: Run, _: Run) -> None:
        other, own = run.cell(of, attention), run.cell(FOUR)
        samples = stored_samples(own).assign(**{KL: stored_samples(other)[KL] * factor})
        run.write(own, samples, divergences=other.record.divergences)

    return make


def draws(label: str, others: Sequence[int], task: str = "", audit: bool = True) -> Make:
    """A run that ignores the seed: draws with the weights of the first, and so with its samples and its audit."""

    def make(run: Run, _: Run) -> None:
        first = run.cell(label)
        for own in (run.cell(label, draw=draw) for draw in others):
            samples = mixed(stored_samples(first), stored_samples(own), task) if task else stored_samples(first)
            source = first.record if audit else own.record
            run.write(own, samples, divergences=first.record.divergences, audit=source.audit)

    return make


def identity(label: str = FOUR, only: Sequence[int] = (), baseline: bool = False, **what: Any) -> Make:
    """Another value in the identity of a cell, or of some of its draws."""

    def make(run: Run, base: Run) -> None:
        side = base if baseline else run
        for own in [s for s in side.cells if label in s.record.cell.label and (s.record.cell.draw in only or not only)]:
            side.write(own, what=what)

    return make


def audited(**changes: Any) -> Make:
    def make(run: Run, _: Run) -> None:
        audit = run.cell(FOUR).record.audit
        assert audit
        run.write(run.cell(FOUR), audit=audit.model_copy(update=changes))

    return make


def edited(*place: str | int, value: Any) -> Make:
    """A value of record.json changed by hand."""

    def make(run: Run, _: Run) -> None:
        file = run.cell(FOUR).folder / "record.json"
        content = inner = json.loads(file.read_text())
        for step in place[:-1]:
            inner = inner[step]
        inner[place[-1]] = value
        file.write_text(json.dumps(content))

    return make


def task_gone(from_record: bool, label: str = FOUR) -> Make:
    """The samples have no piqa; from_record: the record and its identity neither."""

    def make(run: Run, _: Run) -> None:
        own = run.cell(label)
        samples, tasks = stored_samples(own), own.record.identity.what.tasks
        changes = {"what": {"tasks": {t: own for t, own in tasks.items() if t != PIQA}}} if from_record else {}
        changes |= {} if from_record else {"metrics": own.record.metrics}
        run.write(own, samples[samples["task"] != PIQA], **changes)

    return make


def tokenizer(factor: float, named: bool = True) -> Make:
    """Pages have more tokens, and another log-likelihood per word. named: the identity has the other tokenizer."""

    def make(run: Run, _: Run) -> None:
        own = run.cell(FOUR)
        samples = stored_samples(own)
        samples["tokens"] = [np.asarray(counts) + 9 for counts in samples["tokens"]]
        changes = {"what": {"tokenizer": "0" * 64}} if named else {}
        run.write(own, rescored(samples, np.where(samples["task"] == PAGES, factor, 1.0)), **changes)

    return make


def other_family(run: Run, _: Run) -> None:
    """Two families in one run, and a cell that was scored with the other one's model."""
    for label in (NONE, FOUR):
        own = run.cell(label, "softpick")
        cell = own.record.cell.model_copy(update={"family": "other", "attention": "softmax"})
        run.write(own, cell=cell, what={"attention": "softmax"})
    other = next(s for s in run.cells if s.record.cell.name == f"other-softmax-{FOUR}")
    mini = next(s for s in run.cells if s.record.cell.name == f"mini-softmax-{FOUR}")
    run.write(mini, stored_samples(other), divergences=other.record.divergences)


def no_softmax_in_the_baseline(_: Run, base: Run) -> None:
    base.plan({s.record.cell.name: None for s in base.cells if s.record.cell.attention == "softmax"})


def wrong_baseline(run: Run, base: Run) -> None:
    scores(EIGHT, FOUR)(base, run)


def copied_by_hand(run: Run, _: Run) -> None:
    shutil.copy(run.cell(EIGHT).folder / SAMPLES, run.cell(FOUR).folder / SAMPLES)


def half(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.iloc[: len(rows) // 2]


def doubled(rows: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([rows, rows.assign(doc_id=rows["doc_id"] + len(rows))])


def without_kl(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.drop(columns=[KL, KL + WEIGHT])


def some_nan(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.assign(acc=rows["acc"].where(rows["doc_id"] % 9 > 0))


def nan_scores(rows: pd.DataFrame) -> pd.DataFrame:
    return rescored(rows, np.where(rows["doc_id"] < 9, np.nan, 1.0))
