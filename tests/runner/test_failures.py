"""Cells that fail in every way: each has a record with the reason, and all others finish."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from qbench import save_checkpoint
from qbench.errors import died_of_memory
from qbench.identity import Identity
from qbench.recipe.cells import load_recipe
from qbench.records.audit import AuditError
from qbench.records.schema import Failure
from qbench.records.store import read_results
from qbench.runner.cell import failure_of, run_cell, with_log_tail
from qbench.runner.matrix import make_jobs
from qbench.runner.plan import make_plan

from ..example_records import cell_ref, make_record
from .driver import Driver, events_of, finished, left_behind, run_here

WIDE = 100_000  # GPTQ's Hessian of a layer with so many inputs is 37 GiB
MEMORY = 32 * 2**30  # what each process of the run may take


@pytest.fixture(scope="module")
def trouble(matrix: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with a checkpoint too wide for gptq, a truncated one, and an option that fits no layer."""
    folder = tmp_path_factory.mktemp("trouble") / "matrix"
    shutil.copytree(matrix, folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 8,
        hidden_size=32,
        intermediate_size=WIDE,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=256,
    )
    save_checkpoint(LlamaForCausalLM(config), folder / "wide", tokenizer)
    shutil.copytree(folder / "softmax", folder / "cut")
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text()) | {
        "checkpoints": {
            "tiny": {"softmax": "./softmax", "softpick": "./softpick"},
            "wide": {"softmax": "./wide"},
            "cut": {"softmax": "./cut"},
        },
        "quantizations": [
            {"method": "none"},
            {"method": "gptq", "bits": 4, "options": {"group_size": 32}},
            {"method": "hqq", "bits": 4, "options": {"group_size": 48}},
        ],
        "tasks": ["arc_easy"],
        "data": {"arc_easy": "arc_easy.jsonl"},
        "limit": 2,
        "workers": 2,
        "timeout_minutes": 0.3,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    return folder / "recipe.yaml"


def failures(out: Path) -> dict[str, Failure]:
    return {s.record.cell.name: s.record.failure for s in read_results(out).current if s.record.failure}


def test_whatever_fails_leaves_its_reason_and_the_others_finish(trouble: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Driver(trouble, out, memory=MEMORY) as driver:
        driver.until("started")
        driver.until("started")
        hung, killed = driver.workers()
        hung.suspend()
        killed.kill()
        code, errors = driver.end()
        assert driver.gone()
    assert code == 1, errors
    found = failures(out)
    ways = {name: (failure.kind, failure.phase) for name, failure in found.items()}
    struck = {name: way for name, way in ways.items() if name.startswith("tiny") and name.endswith("none-16")}
    assert sorted(kind for kind, _ in struck.values()) == ["killed", "timeout"]
    assert {name: way for name, way in ways.items() if name not in struck} == {
        "tiny-softmax-hqq-4-g48": ("error", None),
        "tiny-softpick-hqq-4-g48": ("error", None),
        "wide-softmax-hqq-4-g48": ("error", None),
        "wide-softmax-gptq-4-g32": ("out-of-memory", "quantize"),
        "cut-softmax-none-16": ("error", "load"),
        "cut-softmax-gptq-4-g32": ("error", "load"),
        "cut-softmax-hqq-4-g48": ("error", None),
    }
    assert "48" in found["tiny-softmax-hqq-4-g48"].reason
    assert "model.safetensors" in found["cut-softmax-none-16"].reason
    assert "Traceback" in found["wide-softmax-gptq-4-g32"].log_tail
    assert not left_behind(out)
    assert driver.events[-3]["text"].startswith("3 of 12 cells done in")
    assert "9 FAILED" in driver.events[-3]["text"]
    _the_next_run_retries_only_the_failed(trouble, out, found)


def _the_next_run_retries_only_the_failed(recipe: Path, out: Path, found: dict[str, Failure]) -> None:
    before = finished(out)
    assert len(before) == 3
    code, events = run_here(recipe, out)
    assert code == 1
    assert {event["cell"] for event in events_of(events, "finished")} == set(found)
    assert before.items() <= finished(out).items()
    assert {name for name in found if "none-16" in name and "tiny" in name}.isdisjoint(failures(out))


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("The checkpoint", lambda recipe, identity: rewrite(recipe.parent / "softmax" / "config.json")),
        ("The tokenizer", lambda recipe, identity: rewrite(recipe.parent / "softmax" / "tokenizer.json")),
        ("The calibration", lambda recipe, identity: rewrite(recipe.parent / "calibration.txt")),
        ("qbench's code", lambda recipe, identity: {"code": "as it was when the run was planned"}),
        ("A package version", lambda recipe, identity: {"packages": identity.packages | {"torch": "0.1"}}),
    ],
)
def test_what_changes_after_the_plan_fails_the_cell(
    what: str, change: Callable[[Path, Identity], dict[str, Any]], small: Path, tmp_path: Path
) -> None:
    shutil.copytree(small.parent, tmp_path / "matrix")
    recipe = tmp_path / "matrix" / "recipe.yaml"
    name = "tiny-softmax-gptq-4-g32" if what == "The calibration" else "tiny-softmax-none-16"
    jobs = make_jobs(make_plan(load_recipe(recipe), tmp_path / "out").entries)
    job = next(job for job in jobs if job.name == name)
    planned = job.identity.model_copy(update=change(recipe, job.identity))
    record, samples = run_cell(replace(job, identity=planned))
    assert record.failure is not None
    assert record.failure.reason.startswith(what)
    assert "start the run again" in record.failure.reason
    assert samples is None


def rewrite(file: Path) -> dict[str, Any]:
    """Add a space to the end of a file; the identity has no other change."""
    file.write_text(file.read_text() + " ")
    return {}


def _beyond_memory(allocate: Callable[[], Any]) -> Exception:
    try:
        allocate()
    except Exception as error:
        return error
    raise AssertionError("the memory was allocated")


def test_out_of_memory_is_distinguished_from_other_errors() -> None:
    torch_says = _beyond_memory(lambda: torch.empty(2**50))
    assert failure_of(torch_says, "load").kind == "out-of-memory"
    assert failure_of(_beyond_memory(lambda: bytearray(2**60)), "load").kind == "out-of-memory"
    assert failure_of(OSError(12, "Cannot allocate memory"), "load").kind == "out-of-memory"
    wrapped = RuntimeError("it did not work")
    wrapped.__cause__ = torch_says
    assert failure_of(wrapped, "load").kind == "out-of-memory"
    assert failure_of(AuditError("hqq-4-g64", ["nothing was quantized"], ""), "quantize").kind == "audit"
    assert failure_of(ValueError("no"), "load") == Failure(kind="error", reason="ValueError: no", phase="load")


@pytest.mark.parametrize(
    "last",
    [
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "memory allocation of 3145728 bytes failed",
        "MemoryError",
        "ImportError: libx.so: failed to map segment from shared object",
    ],
)
def test_last_words_that_mean_out_of_memory(last: str) -> None:
    assert died_of_memory(f"some line\n{last}\n")


def test_threads_that_do_not_start_mean_it_under_a_limit_only(monkeypatch: pytest.MonkeyPatch) -> None:
    says = 'ThreadPoolBuildError { kind: IOError(Os { code: 11, message: "Resource temporarily unavailable" }) }'
    assert not died_of_memory(says)
    monkeypatch.setattr("resource.getrlimit", lambda _: (2**30, 2**30))
    assert died_of_memory(says)
    assert not died_of_memory("Segmentation fault")


def test_the_log_tail_is_what_a_terminal_would_show(tmp_path: Path) -> None:
    record = make_record(cell_ref(), None)
    assert record.failure is not None
    log = tmp_path / "log.txt"
    assert with_log_tail(record, log) == record
    log.write_bytes(b"x" * 100_000 + "\nfirst ✓\n  0%|  \r 50%|▌ \r100%|█".encode() + b"\nbroken \xff\n")
    tail = with_log_tail(record, log).failure
    assert tail is not None
    assert tail.log_tail.endswith("\nfirst ✓\n100%|█\nbroken �\n")
    assert json.loads(tail.model_dump_json())["log_tail"] == tail.log_tail
