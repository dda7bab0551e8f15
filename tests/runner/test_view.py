"""How a run is shown: one line per cell, JSON lines, and live on a terminal."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qbench.recipe.cells import Recipe, load_recipe
from qbench.records.schema import Cost, Record
from qbench.runner.lock import RunError
from qbench.runner.matrix import RunOptions, fetched_plan
from qbench.runner.plan import make_plan
from qbench.runner.view import JsonView, LiveView, PlainView, outcome, view_for, where

from ..example_records import cell_ref, make_record, make_samples


def record(seconds: float) -> Record:
    made = make_record(cell_ref(), make_samples(2))
    return made.model_copy(update={"cost": Cost(seconds={"load": 1.0, "evaluate": seconds - 1.0})})


EXPECTED = {"a": {"load": 1.0, "evaluate": 9.0}, "b": {"evaluate": 10.0}, "c": {"evaluate": 10.0}}
EXPECTED |= {"d": {"load": 10.0, "evaluate": 30.0}, "e": {"evaluate": 10.0}}


def test_one_line_per_cell_with_the_time_left_by_estimated_work(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView(list("abcde"), expected=EXPECTED)
    view.slots = 2
    view.begun -= 3600  # however long the packages took to import
    view.finished("a", record(10))
    view.finished("b", record(30))  # three times the estimate
    view.finished("c", make_record(cell_ref(), None))
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("[1/5] a: done in 10.0 s")
    assert first.endswith("; about 40 s left")  # 70 s of estimated work at this speed, two cells at once
    assert second.endswith("; about 1 min left")  # 60 s at half the speed
    assert third.startswith("[3/5] c: FAILED")
    assert third.endswith("It broke; about 50 s left")  # without the reason's full stop, and no estimate from a failure
    assert view.failed == 1
    view.started("d")
    view.progress("d", "load", 1.0, "")
    assert view.left() == "; about 40 s left"  # a quarter of d is done
    view.progress("d", "evaluate", 1.0, "")
    view.finished("d", record(20))
    view.started("e")
    view.progress("e", "evaluate", 0.99, "")
    assert view.left() == "; a few seconds left"


def test_a_log_has_a_line_a_minute(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    view = PlainView(["a"])
    view.started("a")
    for now in (10.0, 59.0, 61.0, 90.0, 125.0):
        view.progress("a", "evaluate", now / 200, "piqa")
    assert capsys.readouterr().out.splitlines() == ["[0/1] a: evaluate piqa 30%", "[0/1] a: evaluate piqa 62%"]


def test_a_log_names_what_the_preflight_tries_every_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    view = PlainView(["a"])
    view.preflight("preflight: begins")
    for clock[0] in (10.0, 59.0, 61.0, 90.0, 125.0):
        view.trying(1, 4, "S-softmax: scoring")
    first, *later = capsys.readouterr().out.splitlines()
    assert first == "preflight: begins"
    assert len(later) == 2
    assert all("1/4" in line and "S-softmax: scoring" in line for line in later)


def test_a_preflight_has_a_bar_on_a_terminal_and_one_event_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    view = LiveView(["a"])
    view.preflight("preflight: begins")
    view.trying(1, 4, "S-softmax: scoring")
    bar = view.bars.tasks[-1]
    assert (bar.description, bar.completed, bar.total, bar.fields["note"]) == ("S-softmax: scoring", 1, 4, "1/4")
    view.tried()
    assert len(view.bars.tasks) == 1
    capsys.readouterr()
    events = JsonView(["a"])
    for done in (0, 0, 1):
        events.trying(done, 2, f"step {done}")
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(own["event"], own["done"], own["trying"]) for own in said] == [
        ("preflight", 0, "step 0"),
        ("preflight", 1, "step 1"),
    ]


def test_lines_above_the_bars_are_broken_at_spaces(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    view = LiveView(["a"])
    words = "preflight: trying each checkpoint on a few documents"
    view.say(words)
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines) == words
    assert max(map(len, lines)) <= 30
    command = "tables: qbench table some/folder --kind summary"
    view.say_command(command)
    assert capsys.readouterr().out.splitlines() == [command]  # one line when it is copied


def test_the_time_left_counts_down_while_cells_run() -> None:
    view = LiveView(["a", "b"], expected={name: {"evaluate": 400.0} for name in "ab"})
    view.finished("a", record(400))
    view.started("b")
    shown = []
    for share in (0.0, 0.5, 0.9):
        view.progress("b", "evaluate", share, "")
        shown.append(view.bars.tasks[0].fields["note"])
    assert shown == ["1/2; about 7 min left", "1/2; about 3 min left", "1/2; about 40 s left"]


@pytest.mark.parametrize(
    ("doing", "shown"),
    [
        ("piqa", "evaluate piqa"),
        ("piqa, sciq", "evaluate piqa, sciq"),
        ("arc_easy, lambada_openai, piqa and 4 more", "evaluate 7 tasks"),
        ("arc_easy, lambada_openai", "evaluate 2 tasks"),
        ("a_task_with_a_very_long_name", "evaluate a_task_with_a_ve…"),
    ],
)
def test_tasks_that_are_scored_together_are_never_a_cut_list(doing: str, shown: str) -> None:
    assert where("evaluate", doing) == shown


def test_bars_never_run_backwards_nor_stop_their_clocks() -> None:
    view = LiveView(["a", "b"], expected={"a": {"load": 1.0, "kl": 1.0, "quantize": 2.0, "evaluate": 4.0}})
    for name in ("a", "b"):  # b has no estimate
        view.started(name)
        shares = []
        for phase in ("load", "kl", "quantize", "evaluate", "kl"):
            for share in (0.0, 0.5, 1.0):
                view.progress(name, phase, share, "")
                bar = view.bars.tasks[-1]
                shares.append(bar.completed)
                assert not bar.finished
        assert shares == sorted(shares)
        assert shares[:6] == ([0, 1 / 16, 1 / 8, 1 / 8, 3 / 16, 1 / 4] if name == "a" else [0, 0.5] + [0.999] * 4)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_resumed_run_counts_what_was_done_before(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    view = view_for(["a", "b"], before=8, as_json=False)
    view.finished("a", record(10))
    assert capsys.readouterr().out.startswith("[9/10] a: done in 10.0 s")
    assert view.left() == "; about 10 s left"  # from the cells of this run
    if isinstance(view, LiveView):
        (bar,) = view.bars.tasks
        assert (bar.completed, bar.total, bar.fields["note"]) == (9, 10, "9/10; about 10 s left")


def test_cells_that_failed_say_nothing_of_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView(["a", "b"])
    view.finished("a", make_record(cell_ref(), None))
    assert capsys.readouterr().out.endswith("It broke.\n")


def test_a_reason_that_several_cells_share_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView(list("abcde"))
    failed = make_record(cell_ref(), None)
    view.ruled_out("It does not fit.", {"a": failed, "b": failed})
    view.finished("c", failed)
    view.finished("d", failed)
    assert failed.failure is not None
    view.finished("e", failed.model_copy(update={"failure": failed.failure.model_copy(update={"phase": "load"})}))
    first, second, third, last = capsys.readouterr().out.splitlines()
    assert first == "[2/5] a, b cannot run: It does not fit."
    assert second.endswith("It broke.")
    assert third.endswith(": as c")
    assert "It broke" not in third
    assert "FAILED in load" in last
    assert last.endswith("It broke.")  # elsewhere, so perhaps for another cause
    assert view.failed == 5


def test_a_failure_shows_its_first_line_and_where() -> None:
    failed = make_record(cell_ref(), None)
    assert failed.failure is not None
    failure = failed.failure.model_copy(update={"kind": "timeout", "reason": "Too long.\nMore.", "phase": "load"})
    assert outcome(failed.model_copy(update={"failure": failure})) == "FAILED in load (timeout): Too long."


def test_events_are_json_lines_in_order(undisturbed: tuple[Path, list[dict[str, Any]]]) -> None:
    out, events = undisturbed
    assert all(fact in events[0]["text"] for fact in ("small.yaml: 6 cells", "6 to run", "0 already done", str(out)))
    own = [e for e in events if e.get("cell") == "tiny-softpick-hqq-4-g32"]
    assert own[0]["event"] == "started"
    assert list(dict.fromkeys(e["phase"] for e in own[1:-1])) == ["load", "kl", "quantize", "evaluate"]
    assert own[-1]["event"] == "finished"
    assert own[-1]["state"] == "done"
    assert events[-3]["text"].startswith("6 of 6 cells done in ")
    assert [event["text"] for event in events[-2:]] == [
        f"tables: qbench table {out} --kind summary",
        f"as a page: qbench table {out} --format html --out {out}/report.html",
    ]


def test_the_live_view_on_a_terminal(small: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "qbench.cli", "run", str(small), "--out", str(tmp_path), "--only", "none"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # raised once the last process has closed the terminal
                break
        os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert process.returncode == 0, text
    assert re.search("load|kl|quantize|evaluate", text)  # short phases may pass between two refreshes
    for line in ("0/2, importing packages", "[1/2] tiny-", "[2/2] tiny-", "2 of 2 cells done"):
        assert line in text
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h") > 0  # the cursor is shown again


def test_the_view_depends_on_where_the_output_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    view = view_for(["a"], as_json=False)
    assert isinstance(view, LiveView)
    view.finished("a", record(2))  # on a cluster, cells report only when they end
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert type(view_for(["a"], as_json=False)) is PlainView


def test_a_checkpoint_that_cannot_be_fetched_may_be_a_wrong_path(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(small)
    softmax = recipe.checkpoints["tiny"]["softmax"].model_copy(update={"path": f"{small.parent.name}/softmax"})
    recipe = recipe.model_copy(update={"checkpoints": {"tiny": {"softmax": softmax}}})
    monkeypatch.setattr("qbench.runner.fetch.fetch", lambda _, to_analyze: [(False, "checkpoint: not available")])
    with pytest.raises(RunError, match=r"not available\n- \S+/softmax: Did you mean softmax\?$"):
        fetched_plan(recipe, tmp_path, RunOptions(), make_plan)


def test_what_a_download_prints_is_not_an_event(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(recipe: Recipe, *, to_analyze: bool) -> Iterator[tuple[bool, str]]:
        print("task arc_easy: its dataset")
        yield True, "task arc_easy: 6 documents"

    monkeypatch.setattr("qbench.runner.fetch.fetch", fetch)
    recipe = load_recipe(small).model_copy(update={"tokenizer": "owner/gone"})
    capsys.readouterr()
    with pytest.raises(RunError, match="owner/gone"):  # this fetch downloads nothing
        fetched_plan(recipe, tmp_path, RunOptions(as_json=True), make_plan)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "task arc_easy: its dataset" in printed.err
