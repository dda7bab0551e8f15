"""The rules on records: forged cells of results/mini are found, and correct ones pass."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from qbench.records.audit import Audit, Measured, PartAudit
from qbench.records.documents import Answers, Keys, TaskDocuments, Values
from qbench.records.findings.finding import Finding
from qbench.records.findings.folder import findings
from qbench.records.findings.measured import Evidence, MeasuredCell
from qbench.records.findings.weights import other_weights
from qbench.records.store import RECORD, SAMPLES, Results, StoredRecord, read_record, read_results, write_record

from ..example_records import cell_ref, identity_of, stored_samples

MINI = Path(__file__).parents[2] / "results" / "mini"
ALL = read_results(MINI).current
HONEST = [stored for stored in ALL if stored.record.cell.draw in (None, 1)]  # enough for most tests, and faster
PERPLEXITIES = ["perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"]


def find(label: str, attention: str = "softmax") -> StoredRecord:
    """A cell of mini, of a calibrated one its first draw."""
    found = [s for s in HONEST if (s.record.cell.attention, s.record.cell.label) == (attention, label)]
    return min(found, key=lambda stored: stored.record.cell.draw or 0)


def forged(folder: Path, into: StoredRecord, samples: pd.DataFrame | None = None, **changes: Any) -> StoredRecord:
    """The cell with other samples, or with changes to its record."""
    write_record(folder, into.record.model_copy(update=changes), stored_samples(into) if samples is None else samples)
    return StoredRecord(read_record(folder / RECORD), folder)


def replaced(cell: StoredRecord) -> list[StoredRecord]:
    """Mini, with this cell replacing one of its cells."""
    return [cell if s.record.cell == cell.record.cell else s for s in HONEST]


def rescored(samples: pd.DataFrame) -> pd.DataFrame:
    """The samples with the metrics that lm-eval computes from their log-likelihoods."""
    columns = {name: samples[name].to_numpy(copy=True) for name in ("acc", "acc_norm", *PERPLEXITIES)}
    rows = zip(samples["loglikelihoods"], samples["gold"], samples["characters"], strict=True)
    for i, (values, gold, characters) in enumerate(rows):
        if gold is not None:
            columns["acc"][i] = values.argmax() in gold
            columns["acc_norm"][i] = (values / characters).argmax() in gold
            continue
        for name in PERPLEXITIES:
            if not np.isnan(columns[name][i]):
                columns[name][i] = values[0]
    return samples.assign(**columns)


def jittered(samples: pd.DataFrame, size: float) -> pd.DataFrame:
    """The same samples with random errors of this relative size in all log-likelihoods."""
    draw = np.random.default_rng(0)
    values = [row * (1 + size * draw.normal(size=len(row))) for row in samples["loglikelihoods"]]
    return rescored(samples.assign(loglikelihoods=values)) if size else samples


def improved(samples: pd.DataFrame, nats: float) -> pd.DataFrame:
    """The same samples, with a higher likelihood for the right choice."""
    values = [np.array(row) for row in samples["loglikelihoods"]]
    for row, gold in zip(values, samples["gold"], strict=True):
        if gold is not None:
            row[gold] += nats
    return rescored(samples.assign(loglikelihoods=values))


RULES = ("same_weights", "too_near", "too_good", "recovered", "does_not_follow", "no_audit", "audit_failed")


def found_in(records: Sequence[StoredRecord], references: Sequence[StoredRecord] = ()) -> list[Finding]:
    """The findings by these rules: forged samples also contradict the record's scores and KL."""
    return [found for found in findings(Results(MINI, None, tuple(records)), references) if found.rule in RULES]


def names(found: list[Finding]) -> set[str]:
    return {finding.cell.name for finding in found}


def test_no_cell_of_mini_is_accused() -> None:
    assert found_in(ALL) == []
    assert found_in(ALL, references=ALL) == []


QUANTIZED = ["bnb-8", "gptq-8-g128", "hqq-8-g64", "bnb-4-nf4", "gptq-2-g128"]


JITTERS = [(0.0, "last bit"), (1e-7, "they moved"), (1e-4, "they moved")]


@pytest.mark.parametrize(
    ("size", "fact", "label"),
    [
        pytest.param(*jitter, label, marks=pytest.mark.slow if (i + j) % len(JITTERS) else ())  # each in turn
        for i, jitter in enumerate(JITTERS)
        for j, label in enumerate(QUANTIZED)
    ],
)
@pytest.mark.parametrize("attention", [pytest.param("softmax", marks=pytest.mark.slow), "softpick"])
def test_the_unquantized_model_under_a_quantized_label(
    attention: str, size: float, fact: str, label: str, tmp_path: Path
) -> None:
    unquantized, into = find("none-16", attention), find(label, attention)
    cell = forged(tmp_path, into, jittered(stored_samples(unquantized), size))
    (found,) = found_in(replaced(cell))
    assert (found.cell, found.found_by) == (into.record.cell, "records")
    assert fact in found.message
    # And if the run has only this cell.
    assert names(found_in([cell], references=HONEST)) == {into.record.cell.name}
    assert found_in([cell]) == []


@pytest.mark.parametrize("label", ["hqq-8-g64", "gptq-4-g128"])
def test_wide_samples_under_2_bits(label: str, tmp_path: Path) -> None:
    wide, narrow = find(label), find("gptq-2-g128")
    cell = forged(tmp_path, narrow, stored_samples(wide))
    (found,) = found_in(replaced(cell))
    assert found.cell == narrow.record.cell
    assert wide.record.cell.name in found.message
    # Only the run, compared with a baseline that has both.
    (found,) = found_in([cell], references=HONEST)
    assert f"the baseline's {wide.record.cell.name}" in found.message


def test_softpick_samples_under_softmax(tmp_path: Path) -> None:
    into = find("none-16")
    (found,) = found_in(replaced(forged(tmp_path, into, stored_samples(find("none-16", "softpick")))))
    assert {"mini-softmax-none-16", "mini-softpick-none-16"} == {
        found.cell.name,
        found.message.split("those of ")[1][:21],
    }


def test_documents_in_another_order_are_paired_by_content(tmp_path: Path) -> None:
    samples = stored_samples(find("none-16")).iloc[::-1].reset_index(drop=True)
    (found,) = found_in(replaced(forged(tmp_path, find("hqq-2-g64"), samples)))
    assert "400 documents are equal to the last bit" in found.message


def test_documents_that_are_not_numbers_hide_nothing(tmp_path: Path) -> None:
    samples = stored_samples(find("none-16"))
    values = [
        row if i % 3 else np.append(np.full(len(row), -np.inf), 0.5) for i, row in enumerate(samples["loglikelihoods"])
    ]
    (found,) = found_in(replaced(forged(tmp_path, find("hqq-2-g64"), samples.assign(loglikelihoods=values))))
    assert "equal to the last bit to those of mini-softmax-none-16" in found.message


def test_one_forged_task_is_enough(tmp_path: Path) -> None:
    samples, own = stored_samples(find("none-16")), stored_samples(find("hqq-2-g64"))
    mixed = own.where(own["task"] != "mini_sciq", samples)
    for references in ((), HONEST):
        (found,) = found_in(replaced(forged(tmp_path, find("hqq-2-g64"), mixed)), references)
        assert found.cell.label == "hqq-2-g64"
        assert "in mini_sciq " in found.message


@pytest.mark.parametrize(("nats", "accused"), [(0.01, False), (3.0, True)])
def test_a_quantized_cell_that_is_better_than_its_model(nats: float, accused: bool, tmp_path: Path) -> None:
    into = find("hqq-8-g64")
    found = found_in(replaced(forged(tmp_path, into, improved(stored_samples(into), nats))))
    assert names(found) == ({into.record.cell.name} if accused else set())
    assert all("better than the unquantized model" in f.message for f in found)


@pytest.mark.parametrize(("nats", "accused"), [(0.02, False), (0.2, True)])
def test_pages_that_are_likelier_than_to_the_model(nats: float, accused: bool, tmp_path: Path) -> None:
    into = find("hqq-8-g64")
    samples = stored_samples(into)
    pages = samples["task"] == "mini_wikitext"
    words = samples["word_perplexity.weight"].fillna(0.0)
    values = [row + nats * n for row, n in zip(samples["loglikelihoods"], words, strict=True)]
    likelier = rescored(samples.assign(loglikelihoods=values)).where(pages, samples)
    found = found_in(replaced(forged(tmp_path, into, likelier)))
    assert names(found) == ({into.record.cell.name} if accused else set())
    assert all("nats per decision" in f.message for f in found)


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.6])
def test_a_task_that_is_too_hard_for_the_model_accuses_nobody(kept: float, tmp_path: Path) -> None:
    """If a model is confident and wrong, noise makes it less confident, so it gains nats: not a sign of forgery."""
    draw = np.random.default_rng(0)
    first = stored_samples(find("none-16"))
    wrong = [draw.random() > kept for _ in range(len(first))]
    golds = [
        g if g is None or not w else [int(draw.integers(len(c)))]
        for g, w, c in zip(first["gold"], wrong, first["characters"], strict=True)
    ]
    cells = [
        forged(tmp_path / s.folder.name, s, rescored(stored_samples(s).assign(gold=golds)))
        for s in HONEST
        if s.record.cell.attention == "softmax"
    ]
    assert found_in(cells) == []


@pytest.mark.parametrize("metric", ["acc", "acc_norm", "perplexity", "word_perplexity"])
def test_metrics_must_follow_from_log_likelihoods(metric: str, tmp_path: Path) -> None:
    into = find("hqq-2-g64")
    samples = stored_samples(into)
    samples[metric] = stored_samples(find("none-16"))[metric]
    (found,) = found_in(replaced(forged(tmp_path, into, samples)))
    assert found.cell == into.record.cell
    assert f"{metric} does not follow from the log-likelihoods" in found.message


def test_log_likelihoods_that_are_gone_hide_nothing(tmp_path: Path) -> None:
    into = find("hqq-2-g64")
    samples = stored_samples(into)
    gone = [
        row if task != "mini_wikitext" else np.full(len(row), np.nan)
        for row, task in zip(samples["loglikelihoods"], samples["task"], strict=True)
    ]
    (found,) = found_in(replaced(forged(tmp_path, into, samples.assign(loglikelihoods=gone))))
    assert "word_perplexity does not follow" in found.message


@pytest.mark.parametrize(("measured", "under"), [("gptq-8-g128", "none-16"), ("hqq-2-g64", "hqq-4-g64")])
def test_the_baseline_tells_which_of_two_equal_cells_was_forged(measured: str, under: str, tmp_path: Path) -> None:
    cell = forged(tmp_path, find(under), stored_samples(find(measured)))
    found = found_in(replaced(cell), references=HONEST)
    assert find(under).record.cell.name in names(found)
    assert find(measured).record.cell.name not in names(found)


SIBLINGS = [("gptq-2-g128", "gptq-3-g128"), ("gptq-3-g128", "gptq-4-g128"), ("hqq-2-g64", "hqq-3-g64")]
SIBLINGS += [("hqq-3-g64", "hqq-4-g64"), ("gptq-2-g128", "hqq-2-g64"), ("hqq-3-g64", "gptq-3-g128")]
TWO_BITS_MORE = [("gptq-2-g128", "gptq-4-g128"), ("hqq-2-g64", "hqq-4-g64"), ("hqq-3-g64", "hqq-8-g64")]


@pytest.mark.parametrize("attention", ["softmax", "softpick"])
@pytest.mark.parametrize(
    ("label", "other", "accused"), [(*pair, False) for pair in SIBLINGS] + [(*pair, True) for pair in TWO_BITS_MORE]
)
def test_recovery_from_damage_may_be_worth_one_bit_and_not_two(
    label: str, other: str, accused: bool, attention: str, tmp_path: Path
) -> None:
    """The run's cell has the documents of another one, which its baseline lacks."""
    before, better = find(label, attention), find(other, attention)
    unquantized = find("none-16", attention)
    cell = forged(tmp_path, before, jittered(stored_samples(better), 1e-6))
    found = found_in([unquantized, cell], references=[unquantized, before])
    assert names(found) == ({before.record.cell.name} if accused else set())


def without_a_layer(audit: Audit) -> Audit:
    return audit.model_copy(update={"untouched": ("model.layers.0.mlp.up_proj",)})


def with_layer(audit: Audit, **changes: Any) -> Audit:
    first, *rest = audit.layers
    return audit.model_copy(update={"layers": (first.model_copy(update=changes), *rest)})


FAILING: dict[str, tuple[Callable[[Audit], Audit | None], str]] = {
    "no audit": (lambda _: None, "no audit"),
    "untouched": (without_a_layer, "mlp.up_proj was not quantized"),
    "meta": (lambda a: a.model_copy(update={"on_meta": ("lm_head.weight",)}), "meta device"),
    "not finite": (lambda a: a.model_copy(update={"not_finite": ("lm_head.weight",)}), "NaN"),
    "changed": (lambda a: a.model_copy(update={"changed": ("lm_head.weight",)}), "lm_head.weight changed"),
    "cosine": (lambda a: with_layer(a, cosine=0.0), "cosine is 0.00"),
    "nothing quantized": (lambda a: with_layer(a, error_energy=0.0), "nothing was quantized"),
    "too many levels": (lambda a: with_layer(a, levels=256, max_code=255), "256 levels"),
    "equal logits": (lambda a: a.model_copy(update={"kl": 0.0}), "logits on the probe are equal"),
    "label": (lambda a: a.model_copy(update={"label": "hqq-8-g64"}), "audit of hqq-8-g64"),
    "method": (lambda a: a.model_copy(update={"method": "gptq"}), "audit of gptq at 2 bits"),
    "another cell's": (lambda _: find("hqq-8-g64").record.audit, "audit of hqq-8-g64"),
    "another with this label": (
        lambda a: find("hqq-8-g64").record.audit.model_copy(update={"label": a.label}),  # type: ignore[union-attr]
        "audit of hqq at 8 bits; the cell is hqq at 2",
    ),
}


@pytest.mark.parametrize("kind", FAILING)
def test_failing_audits(kind: str) -> None:
    change, fact = FAILING[kind]
    honest = find("hqq-2-g64")
    assert honest.record.audit is not None
    record = honest.record.model_copy(update={"audit": change(honest.record.audit)})
    found = [f for f in found_in(replaced(StoredRecord(record, honest.folder))) if f.found_by == "audit"]
    assert names(found) == {honest.record.cell.name}
    assert fact in found[0].message


def test_the_unquantized_and_failed_cells_need_no_audit() -> None:
    unquantized = find("none-16").record.model_copy(update={"audit": None})
    failed = find("hqq-2-g64").record.model_copy(update={"audit": None, "state": "failed", "samples_sha256": None})
    folder = find("none-16").folder
    assert found_in([StoredRecord(unquantized, folder), StoredRecord(failed, folder)]) == []


def test_values_of_sure_answers_coincide_by_chance() -> None:
    sure = np.full((400, 1), -1.2e-7)
    cells = [scored(label, {"lambada": (sure, sure[:, 0])}) for label in ("none-16", "hqq-4-g64", "gptq-4-g128")]
    assert other_weights(Evidence(cells)) == []


def test_other_families_are_not_compared(tmp_path: Path) -> None:
    other = find("none-16").record.cell.model_copy(update={"family": "copy"})
    shutil.copy(find("none-16").folder / SAMPLES, tmp_path)
    record = find("none-16").record.model_copy(update={"cell": other})
    assert found_in([*HONEST, StoredRecord(record, tmp_path)]) == []


def scored(label: str, tasks: dict[str, tuple[np.ndarray, np.ndarray]], error: float | None = None) -> MeasuredCell:
    method, bits, *_ = label.split("-")
    documents = {}
    for task, (values, decisions) in tasks.items():
        count, right = len(values), (values.argmax(1) == 0).astype(np.float64)
        gold = np.full((count, 1), np.nan if values.shape[1] == 1 else 0.0)
        answers = Answers(gold, values, np.ones(values.shape), np.ones(values.shape))
        keys = Keys(np.arange(count), np.arange(count).astype(np.bytes_))
        metrics = {"acc": Values(right, np.ones(count))}
        documents[task] = TaskDocuments(task, keys, metrics, lambda answers=answers: answers)
        np.testing.assert_allclose(documents[task].decisions.values, decisions)
    cell = cell_ref("softmax", method, int(bits), label)
    return MeasuredCell(cell, identity_of(cell).what, error, lambda: documents)


# Relative weight errors as in mini.
ERRORS = {"bnb-8": 0.007, "gptq-8-g128": 0.008, "hqq-8-g64": 0.005}
ERRORS |= {"bnb-4-nf4": 0.09, "gptq-4-g128": 0.14, "hqq-4-g64": 0.09}


def honest_cells(seed: int) -> list[MeasuredCell]:
    """A model and its quantized cells: noise of 0.5 to 5 times the weight error in logits of single-token choices.

    Float32, as scores are: 8-bit cells are near the model, and near each other.
    """
    draw = np.random.default_rng(seed)
    logits = {
        f"task{i}": draw.normal(scale=3, size=(int(draw.integers(200, 500)), 12)) for i in range(draw.integers(2, 6))
    }

    def cell(label: str, error: float | None) -> MeasuredCell:
        size = draw.uniform(0.5, 5) * (error or 0.0)
        tasks = {}
        for task, sure in logits.items():
            noisy = sure + size * draw.normal(size=sure.shape)
            values = (noisy - np.logaddexp.reduce(noisy, axis=1, keepdims=True)).astype(np.float32)[:, :4]
            values = values.astype(np.float64)
            tasks[task] = (values, values[:, 0] - np.logaddexp.reduce(values, axis=1))
        return scored(label, tasks, error)

    return [cell("none-16", None), *(cell(label, error) for label, error in ERRORS.items())]


@pytest.mark.slow
def test_of_200_honest_tables_of_documents_at_most_one_is_accused() -> None:
    found = [seed for seed in range(200) if other_weights(Evidence(cells := honest_cells(seed), cells))]
    assert len(found) <= 1


def test_neither_torch_nor_pandas_is_imported() -> None:
    code = (
        "import sys; from qbench.records.store import read_results;"
        "from qbench.records.findings.folder import findings;"
        f"found = read_results({str(MINI)!r}); assert not findings(found, found.current);"
        "print([m for m in ('torch', 'pandas', 'qbench.report', 'qbench.gate') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("weights", ["none-16", "hqq-4-g64"])
@pytest.mark.parametrize("may_change_nothing", [True, False])
def test_a_cell_with_masked_heads_may_be_equal_to_the_one_without(
    weights: str, may_change_nothing: bool, tmp_path: Path
) -> None:
    plain, label = find(weights), f"{weights}-mask1e-06"
    assert plain.record.audit is not None
    measured = Measured(what="the number of heads", value=0, at_most=0)
    part = PartAudit(label="mask1e-06", measured=(measured,), may_change_nothing=may_change_nothing)
    identity = plain.record.identity
    masked = forged(
        tmp_path,
        plain,
        cell=plain.record.cell.model_copy(update={"label": label}),
        audit=plain.record.audit.model_copy(update={"label": label, "parts": (part,)}),
        identity=identity.model_copy(
            update={"what": identity.what.model_copy(update={"parts": {"mask1e-06": {"epsilon": 1e-6}}})}
        ),
    )
    for found in (found_in([*HONEST, masked]), found_in([masked], references=HONEST)):
        assert bool(found) is not may_change_nothing
        assert all("last bit" in finding.message for finding in found)
    # An audit that does not prove the mask proves nothing.
    audit = plain.record.audit.model_copy(update={"label": label})
    unproved = forged(tmp_path, masked, audit=audit)
    assert any("mask1e-06" in finding.message for finding in found_in([unproved]))
