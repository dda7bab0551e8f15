"""Problems that would appear after hours appear within the first minutes."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qbench.cli import main
from qbench.recipe.cells import load_recipe
from qbench.runner.local import Slot
from qbench.runner.matrix import make_jobs
from qbench.runner.plan import make_plan
from qbench.runner.plan_table import render_plan
from qbench.runner.preflight import DOCUMENTS, by_checkpoint, is_short, preflight, steps_of, with_few_documents

from .driver import events_of, left_behind, run_here


def test_what_will_fail_is_reported_before_anything_runs(
    change: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = change(
        checkpoints={
            "words": {"softmax": {"path": "./softmax", "tokenizer": "./other"}},
            "../cut": {"softmax": "./cut"},  # a family can be any string
        },
        quantizations=[{"method": "none"}, {"method": "hqq", "bits": 4, "options": {"group_size": 32}}],
    )
    shutil.copytree(recipe.parent / "softmax", recipe.parent / "cut")
    weights = recipe.parent / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    (recipe.parent / "other").mkdir()
    (recipe.parent / "other" / "tokenizer.json").write_text("{}")
    out = tmp_path / "out"
    assert main(["run", str(recipe), "--out", str(out), "--preflight"]) == 2
    head, *problems = capsys.readouterr().err.strip().split("\n- ")
    assert "preflight" in head
    assert "--no-preflight" in head
    assert len(problems) == 2
    assert all(fact in problems[0] for fact in ("./softmax", "tokenizer"))
    assert "model.safetensors" in problems[1]
    logs = sorted(path.name for path in out.iterdir() if path.name != "run.json")
    assert re.fullmatch(r"preflight-\.\._cut-softmax-[0-9a-f]{10}\.log", logs[0])
    assert logs[1:] == ["preflight-words-softmax.log"]
    assert f"(log: {out / logs[0]})" in problems[1]
    assert "Traceback" in (out / logs[0]).read_text()


def test_if_all_is_well_the_run_continues_and_leaves_no_logs(small: Path, tmp_path: Path) -> None:
    code, events = run_here(small, tmp_path, "--only", "*softpick*none*", "--preflight")
    assert code == 0
    assert any(event["text"].startswith("preflight: ") for event in events_of(events, "message"))
    assert not left_behind(tmp_path)


def test_each_step_is_named_as_it_is_tried(small: Path, tmp_path: Path) -> None:
    jobs = make_jobs(make_plan(load_recipe(small), tmp_path).entries)
    seen: list[tuple[int, int, str]] = []
    preflight(jobs, tmp_path, Slot(threads=1), timeout=300, on_step=lambda *step: seen.append(step))
    steps = list(dict.fromkeys(seen))
    total = steps[0][1]
    assert [done for done, _, _ in steps] == sorted(done for done, _, _ in steps)
    assert {own for _, own, _ in steps} == {total}
    assert steps[0][0] == 0
    assert {name.split(":")[0] for _, _, name in steps} == {"tiny-softmax", "tiny-softpick"}
    assert total == sum(len(steps_of(group)) for group in by_checkpoint(jobs).values())
    assert len(seen) > len(steps)  # called while a step lasts, so that a log can say that it does


def test_a_preflight_reads_short_documents_and_of_pages_only_some() -> None:
    lengths = [100_000, 3000, 9000, 50, 4000]
    documents = [{"text": "x" * length} for length in lengths]
    task: Any = SimpleNamespace(eval_docs=documents)
    assert [number for number, _ in with_few_documents(task).doc_iterator()] == [1, 3, 4]
    assert [number for number, _ in with_few_documents(task, limit=1).doc_iterator()] == [0]  # one, however long
    many: Any = SimpleNamespace(eval_docs=[{"text": "x"}] * 100)
    assert len(list(with_few_documents(many).doc_iterator())) == DOCUMENTS


def test_a_plan_counts_a_long_preflight(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = make_plan(load_recipe(small), tmp_path)
    assert "preflight" not in render_plan(planned)
    monkeypatch.setattr("qbench.runner.preflight.SHORT_RUN", 0)
    monkeypatch.setattr("qbench.runner.plan_table.MIN_PREFLIGHT", 0)
    assert re.search(r"time left: .*\(preflight [0-9.]+ s, load", render_plan(planned))


def test_every_method_at_once(matrix: Path, tmp_path: Path) -> None:
    jobs = make_jobs(make_plan(load_recipe(matrix / "recipe.yaml"), tmp_path).entries)
    preflight([job for job in jobs if job.cell.ref.attention == "softpick"], tmp_path, Slot(threads=1), timeout=300)
    assert not list(tmp_path.iterdir())


def test_a_preflight_that_hangs_ends_with_what_it_found(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = make_jobs(make_plan(load_recipe(small), tmp_path).entries)
    monkeypatch.setattr("qbench.runner.child.Child.messages", lambda _: ["a method that does not work"])
    with pytest.raises(ValueError, match=r"(?s)a method that does not work.*timeout_minutes"):
        preflight(jobs[:1], tmp_path, Slot(threads=1), timeout=0.01)


def test_short_runs_have_no_preflight(
    small: Path, undisturbed: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    assert not any("preflight" in event.get("text", "") for event in undisturbed[1])
    planned = make_plan(load_recipe(small), tmp_path)
    jobs = make_jobs(planned.entries)
    assert is_short(planned, jobs, [Slot(threads=1)])
    hours = {name: replace(facts, read=10**9) for name, facts in planned.tasks.items()}
    assert not is_short(replace(planned, tasks=hours), jobs, [Slot(threads=1)])
