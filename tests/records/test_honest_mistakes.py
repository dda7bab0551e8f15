"""Mistakes that people and buggy runs make, on copies of results/mini: all are found, for the right reason."""

import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import qbench
from qbench import cli
from qbench.records.store import read_results, write_plan

from .mistakes import (
    ARC,
    DRAWN,
    DRAWN_4,
    EIGHT,
    FOUR,
    NONE,
    PAGES,
    PIQA,
    SCIQ,
    THREE,
    TWO,
    Make,
    Run,
    audited,
    copied_by_hand,
    documents,
    doubled,
    draws,
    edited,
    half,
    identity,
    kl,
    nan_scores,
    no_softmax_in_the_baseline,
    one_task,
    other_family,
    rounded,
    scores,
    some_nan,
    swapped,
    task_gone,
    tokenizer,
    without_kl,
    wrong_baseline,
)

MINI = Path(__file__).parents[2] / "results" / "mini"
OURS = {("softmax", label) for label in (NONE, TWO, THREE, FOUR, EIGHT, DRAWN, DRAWN_4)}
OURS |= {("softpick", label) for label in (NONE, FOUR)}

# What the reason of each rule is about, in any words.
RULES = {
    "same weights": r"equal|same weights|better than the unquantized",
    "equal draws": r"draw.*(equal|same)|(equal|same).*draw",
    "too near": r"too close|too small|moved|bits?\b",
    "worse": r"worse",
    "swapped": r"equal|too small|moved|bits?\b",
    "too good": r"better|follow",
    "kl": r"\bkl\b",
    "documents": r"documents",
    "metric gone": r"lack|missing|but not in|not in the run|no value|in the baseline but",
    "task gone": r"lack|missing|but not in|has no|have no value|not in the samples|no values? for",
    "direction": r"better|direction",
    "value": r"its samples give|follow|impossible",
    "nan": r"NaN|no value|samples have|follow",
    "audit": r"audit|not quantized",
    "settings": r"seed|max_length",
    "tokenizer": r"token",
    "calibration": r"calibration",
    "other cells": r"in common|recipe|does not have",
    "name": r"\bkey|family|mimi|hash",
    "checksum": r"checksum",
    "checkpoint": r"checkpoint",
}


class Mistake(NamedTuple):
    make: Make
    rule: str
    facts: tuple[str, ...] = (FOUR,)  # what the reason names: the cell, and the task if it is about one
    fails: bool = True  # False: it is reported, and the check may pass


Cases = dict[str, tuple[Any, ...]]
Made = Callable[[str], tuple[Path, Path]]
ALL_DRAWS = f"mini-softmax-{DRAWN}"
CASES: Cases = {
    "unquantized under 4 bits": (scores(NONE, FOUR), "same weights"),
    "unquantized under 4 bits, rounded differently": (scores(NONE, FOUR, change=rounded), "too near"),
    "unquantized under 4 bits in one task": (one_task(NONE, SCIQ), "same weights", (FOUR, SCIQ)),
    "8 bits under 2": (scores(EIGHT, TWO), "same weights", (TWO,)),
    "8 bits under 2, rounded differently": (scores(EIGHT, TWO, change=rounded), "too near", (TWO,)),
    "8 bits under 4": (scores(EIGHT, FOUR), "same weights"),
    "8 bits under 4 in one task": (one_task(EIGHT, SCIQ), "same weights", (FOUR, SCIQ)),
    "4 bits under 3": (scores(FOUR, THREE), "same weights", (THREE,)),
    "3 bits under 4": (scores(THREE, FOUR), "same weights", ("hqq-",)),
    "labels 3 and 4 swapped, rounded differently": (swapped(THREE, FOUR, change=rounded), "worse"),
    "the other variant's": (scores(FOUR, FOUR, "softpick"), "same weights"),
    "the other variant's unquantized": (scores(NONE, NONE, "softpick"), "same weights", (NONE,)),
    "variants swapped": (swapped(FOUR, FOUR, "softpick"), "same weights"),
    "another family's": (other_family, "same weights"),
    "a direction reversed": (edited("metrics", 2, "better", value="higher"), "direction", (FOUR, "lambada")),
    "a value edited by hand": (edited("metrics", 0, "value", value=0.9), "value", (FOUR, ARC)),
    "all answers right": (documents(lambda rows: rows.assign(acc=1.0), tasks=(ARC,)), "too good", (FOUR, ARC)),
    "a failed audit": (audited(untouched=("model.layers.0.mlp.up_proj",)), "audit"),
    "another cell's audit": (audited(label=EIGHT, bits=8), "audit"),
    "samples copied by hand": (copied_by_hand, "checksum"),
    "another calibration": (identity(DRAWN, calibration="0"), "calibration", (ALL_DRAWS,), False),
    "another calibration in a draw": (identity(DRAWN, (2,), calibration="0"), "calibration", (ALL_DRAWS,), False),
    "a baseline of other texts": (identity("", baseline=True, max_length=64), "settings"),
    "a baseline of other cells": (no_softmax_in_the_baseline, "other cells"),
    "a task gone from the samples": (task_gone(from_record=False), "task gone", (FOUR, PIQA)),
    "8 bits under 3, rounded differently": (scores(EIGHT, THREE, change=rounded), "too near", (THREE,)),
    "4 bits under 2, rounded differently": (scores(FOUR, TWO, change=rounded), "too near", (TWO,)),
    "labels 3 and 4 swapped": (swapped(THREE, FOUR), "swapped", (THREE,)),
    "half of the documents": (documents(half), "documents", (FOUR, PIQA)),
    "half of the documents of one task": (documents(half, tasks=(SCIQ,)), "documents", (FOUR, SCIQ)),
    "half of the documents in one draw": (documents(half, DRAWN, (SCIQ,)), "documents", (ALL_DRAWS, SCIQ)),
    "doubled documents": (documents(doubled), "documents", (FOUR, PIQA)),
    "doubled documents of one task": (documents(doubled, tasks=(SCIQ,)), "documents", (FOUR, SCIQ)),
    "doubled documents, unquantized": (documents(doubled, NONE, (SCIQ,)), "documents", (SCIQ,)),
    "KL's column gone": (documents(without_kl), "metric gone"),
    "a metric gone": (documents(lambda rows: rows.assign(acc_norm=np.nan), tasks=(ARC,)), "metric gone"),
    "NaN in some answers": (documents(some_nan, tasks=(ARC,)), "nan", (FOUR, ARC)),
    "NaN in log-likelihoods": (documents(nan_scores, tasks=(PAGES,)), "nan", (FOUR, PAGES)),
    "another tokenizer, worse": (tokenizer(1.1), "tokenizer"),
    "another seed in one cell": (identity(seed=1), "settings"),
    "another checkpoint in one cell": (identity(checkpoint="0" * 64), "checkpoint"),
    "NaN in some answers, unquantized": (documents(some_nan, NONE, (ARC,)), "nan", (NONE, ARC)),
    "a task gone from the unquantized model": (task_gone(True, NONE), "task gone", (NONE, PIQA)),
    "KL of 2 bits": (kl(TWO), "kl", (FOUR, PAGES)),
    "8 bits under 4, rounded differently": (scores(EIGHT, FOUR, change=rounded), "too near"),
    "8 bits under 4 in one draw": (scores(EIGHT, DRAWN_4, change=rounded, draw=2), "too near", (DRAWN_4,)),
    "a key edited by hand": (edited("key", value="f" * 64), "name"),
    "a family renamed by hand": (edited("cell", "family", value="mimi"), "name"),
    "a task gone from a cell": (task_gone(from_record=True), "task gone", (FOUR, PIQA)),
    "another tokenizer, better": (tokenizer(0.97), "tokenizer"),
    "another tokenizer with the same name": (tokenizer(0.97, named=False), "tokenizer"),
    "one calibration in two draws": (identity(DRAWN, (1, 2), calibration="0"), "calibration", (ALL_DRAWS, "draw")),
    "a baseline with 8 bits under 4": (wrong_baseline, "same weights"),
    "equal draws": (draws(DRAWN, (2, 3)), "equal draws", (ALL_DRAWS,)),
    "equal draws with their own audits": (draws(DRAWN, (2, 3), audit=False), "equal draws", (ALL_DRAWS,)),
    "equal draws in one task": (draws(DRAWN, (2, 3), PIQA, False), "equal draws", (ALL_DRAWS, PIQA)),
    "two equal draws at 4 bits": (draws(DRAWN_4, (3,), audit=False), "equal draws", (DRAWN_4,)),
    "KL of 0": (kl(factor=0.0), "kl", (FOUR, PAGES)),
    "KL of the unquantized model": (kl(NONE), "kl", (FOUR, PAGES)),
    "KL of 8 bits": (kl(EIGHT), "kl", (FOUR, PAGES)),
    "KL of the other variant": (kl(FOUR, "softpick"), "kl", (FOUR, PAGES)),
}
# What only a comparison with a baseline can show.
COMPARED = ("4 bits under 2", "a baseline", "another calibration", "labels 3 and 4 swapped")


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some cells of mini, without mistakes."""
    folder = tmp_path_factory.mktemp("honest") / "mini"
    results = read_results(MINI)
    kept = [s for s in results.current if ((own := s.record.cell).attention, own.label) in OURS and (own.draw or 1) < 4]
    for stored in kept:
        shutil.copytree(stored.folder, folder / stored.folder.name)
    names = {stored.record.cell.name for stored in kept}
    assert results.plan
    cells = tuple(own for own in results.plan.cells if own.cell.name in names)
    write_plan(folder, results.plan.model_copy(update={"cells": cells}))
    return folder


def outcome(command: str, run: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """The exit code, and each finding in a line with its cell."""
    if command == "audit":
        code = cli.main(["audit", str(run)])
        said = capsys.readouterr()
        lines = (said.out + said.err).splitlines()
        return code, [line for line in lines if line.startswith(("mini-", "mimi-", "other-", "qbench:"))]
    try:
        report = qbench.check(run, base)
    except ValueError as error:
        return 2, [str(error)]
    worse = [f"{t.hypothesis.cell.name}: {t.hypothesis.task} {t.hypothesis.metric} is worse" for t in report.worse]
    found = [f"{own.cell.name}: {own.message}" for own in (*report.failures, *report.warnings)]
    return int(not report.passed), [*found, *worse, *report.changed]


def cases() -> Iterator[Any]:
    for name in CASES:
        for command in ("check",) if name.startswith(COMPARED) else ("check", "audit"):
            yield pytest.param(name, command, id=f"{command}: {name}")


@pytest.fixture(scope="module")
def made(honest: Path) -> Made:
    """A run with a mistake, and its baseline. Each mistake is made once, for all commands."""

    @cache
    def make(name: str) -> tuple[Path, Path]:
        run, base = (shutil.copytree(honest, honest.parent / f"{side} {name}") for side in ("run", "baseline"))
        Mistake(*CASES[name]).make(Run(run), Run(base))
        return run, base

    return make


@pytest.mark.parametrize(("name", "command"), list(cases()))
def test_it_is_found_for_the_right_reason(name: str, command: str, made: Made, capsys) -> None:
    mistake = Mistake(*CASES[name])
    code, lines = outcome(command, *made(name), capsys)
    assert code in (1, 2) or not mistake.fails, lines
    facts = [*map(re.escape, mistake.facts), RULES[mistake.rule]]
    assert any(all(re.search(fact, line, re.IGNORECASE) for fact in facts) for line in lines), lines


@pytest.mark.parametrize("command", ["check", "audit"])
@pytest.mark.parametrize(
    "make",
    [
        lambda run, _: run.write(run.cell(NONE), what={"seed": 1}),
        documents(doubled, NONE, (SCIQ,)),
        task_gone(True, NONE),
        documents(some_nan, NONE, (ARC,)),
    ],
)
def test_a_mistake_in_the_unquantized_model_is_not_one_of_all_its_cells(make, command, honest, tmp_path, capsys):
    run = shutil.copytree(honest, tmp_path / "run")
    make(Run(run), Run(honest))
    code, lines = outcome(command, run, honest, capsys)
    assert code == 1
    assert {line.partition(":")[0] for line in lines} == {f"mini-softmax-{NONE}"}


def test_a_family_that_the_recipe_renamed_is_no_mistake(honest, tmp_path, capsys) -> None:
    """Its cells are to be run again, and the old records stay where they were."""
    folder = shutil.copytree(honest, tmp_path / "run")
    plan = read_results(folder).plan
    new = tuple(p.model_copy(update={"cell": p.cell.model_copy(update={"family": "small"})}) for p in plan.cells)
    write_plan(folder, plan.model_copy(update={"cells": new}))
    assert cli.main(["audit", str(folder)]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("command", ["check", "audit"])
def test_nothing_is_found_without_a_mistake(command, honest, tmp_path, capsys) -> None:
    code, lines = outcome(command, shutil.copytree(honest, tmp_path / "run"), honest, capsys)
    assert (code, lines) == (0, []), lines
