"""The plan: the state of every cell, what is stale or superseded, and how fast it is made."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from qbench import run
from qbench.cli import main
from qbench.identity import Identity
from qbench.quantizers.calibration import NAMED
from qbench.recipe.cells import Cell, Recipe, RecipeError, cells, load_recipe
from qbench.records.store import SAMPLES, cell_folder, read_results, write_plan, write_record
from qbench.runner.lock import RunError
from qbench.runner.matrix import RunOptions, fetched_plan, make_jobs, opening, run_matrix
from qbench.runner.plan import Plan, PlanEntry, choose, ignored, make_plan
from qbench.runner.plan_table import render_plan

from .. import messages
from ..example_records import PROVENANCE, make_record, make_samples
from ..small_recipe import PIQA, config, write_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate cache for each test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("QBENCH_CACHE", str(folder))
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load_recipe(write_recipe(tmp_path / "recipe"))


def finish(cell: Cell, out: Path, identity: Identity | None = None, *, failed: bool = False, when: int = 0) -> Path:
    """A made-up record of a cell; returns its folder."""
    identity = identity or cell.identity()
    samples = None if failed else make_samples(2)
    finished = PROVENANCE.model_copy(update={"finished": f"2026-01-0{when + 1}T00:00:00+00:00"})
    record = make_record(cell.ref, samples, key=identity.key, identity=identity, provenance=finished)
    folder = cell_folder(out, cell.ref, identity.key)
    write_record(folder, record, samples)
    return folder


def older(identity: Identity) -> Identity:
    """The same work with older code and another torch."""
    return identity.model_copy(update={"code": "old", "packages": identity.packages | {"torch": "0.1"}})


def states(planned: Plan) -> dict[str, str]:
    return {entry.cell.ref.name.removeprefix("tiny-"): entry.state for entry in planned.entries}


def entry(planned: Plan, name: str) -> PlanEntry:
    return next(e for e in planned.entries if e.cell.ref.name == f"tiny-{name}")


def cell(recipe: Recipe, name: str) -> Cell:
    return next(c for c in cells(recipe) if c.ref.name == f"tiny-{name}")


def test_families_that_differ_only_in_what_folders_cannot_have_keep_their_records(tmp_path: Path) -> None:
    """Both have the same checkpoint, so the keys of their cells are equal too."""
    families = {family: {"softmax": "softmax"} for family in ("a b", "a/b")}
    recipe = load_recipe(write_recipe(tmp_path / "recipe", checkpoints=families, quantizations=[{"method": "none"}]))
    for rerun in range(2):
        for cell in cells(recipe):
            finish(cell, tmp_path, when=rerun)
        assert [entry.state for entry in make_plan(recipe, tmp_path).entries] == ["done", "done"]
        found = read_results(tmp_path).current
        assert [stored.record.cell.family for stored in found] == ["a b", "a/b"]


def test_an_executor_that_is_unknown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"executor is 'slurm'.*local, ray"):
        run("recipes/mini.yaml", out=tmp_path, executor="slurm")
    assert not list(tmp_path.iterdir())


def test_states(recipe: Recipe, tmp_path: Path) -> None:
    finish(cell(recipe, "softmax-none-16"), tmp_path)
    finish(cell(recipe, "softmax-hqq-3-g64"), tmp_path, failed=True)
    stale = cell(recipe, "softpick-hqq-3-g64")
    finish(stale, tmp_path, older(stale.identity()))
    planned = make_plan(recipe, tmp_path)
    assert states(planned) == {
        "softmax-none-16": "done",
        "softpick-none-16": "to do",
        "softmax-bnb-2": "not offered",
        "softpick-bnb-2": "not offered",
        "softmax-bnb-8": "to do",
        "softpick-bnb-8": "to do",
        "softmax-gptq-4-g128": "to do",
        "softpick-gptq-4-g128": "to do",
        "softmax-hqq-3-g64": "failed",
        "softpick-hqq-3-g64": "stale",
    }
    assert entry(planned, "softmax-hqq-3-g64").note == "It broke."
    assert "bnb" in entry(planned, "softmax-bnb-2").note
    torch = stale.identity().packages["torch"]
    note = entry(planned, "softpick-hqq-3-g64").note
    assert "qbench code" in note
    assert note.endswith(f"torch 0.1 → {torch}")


def test_a_stale_record_counts_when_asked_for(recipe: Recipe, tmp_path: Path) -> None:
    one = cell(recipe, "softmax-none-16")
    first, second = older(one.identity()), one.identity().model_copy(update={"code": "newer, but not ours"})
    finish(one, tmp_path, second, when=1)
    finish(one, tmp_path, first, when=0)
    fresh, kept = make_plan(recipe, tmp_path), make_plan(recipe, tmp_path, reuse_stale=True)
    assert entry(fresh, "softmax-none-16").record is None
    assert entry(fresh, "softmax-none-16").key == one.identity().key
    assert {stored.record.key for stored in fresh.superseded} == {first.key, second.key}
    assert entry(kept, "softmax-none-16").key == second.key  # the latest of them
    assert [stored.record.key for stored in kept.superseded] == [first.key]
    write_plan(tmp_path, kept.to_run_plan())
    assert [stored.record.key for stored in read_results(tmp_path).current] == [second.key]


def test_a_failure_of_older_code_is_to_do(recipe: Recipe, tmp_path: Path) -> None:
    one = cell(recipe, "softmax-none-16")
    finish(one, tmp_path, older(one.identity()), failed=True)
    assert entry(make_plan(recipe, tmp_path, reuse_stale=True), "softmax-none-16").state == "to do"


def test_new_weights_make_a_new_cell_not_a_stale_record(recipe: Recipe, tmp_path: Path) -> None:
    folder = finish(cell(recipe, "softmax-none-16"), tmp_path)
    (recipe.file.parent / "softmax" / "model.safetensors").write_text("retrained")
    planned = make_plan(recipe, tmp_path, reuse_stale=True)
    assert entry(planned, "softmax-none-16").state == "to do"
    assert [stored.folder for stored in planned.superseded] == [folder]


@pytest.mark.parametrize("damage", ["record", "samples", "no samples"])
def test_what_is_damaged_is_to_do(damage: str, recipe: Recipe, tmp_path: Path) -> None:
    folder = finish(cell(recipe, "softmax-none-16"), tmp_path)
    assert entry(make_plan(recipe, tmp_path), "softmax-none-16").state == "done"
    if damage == "record":
        text = (folder / "record.json").read_text()
        (folder / "record.json").write_text(text[: len(text) // 2])
    elif damage == "samples":
        (folder / SAMPLES).write_bytes((folder / SAMPLES).read_bytes()[:-1])
    else:
        (folder / SAMPLES).unlink()
    assert entry(make_plan(recipe, tmp_path), "softmax-none-16").state == "to do"


def test_a_missing_checkpoint_is_not_fetched_and_the_rest_is_planned(tmp_path: Path) -> None:
    twins = {"softmax": "softmax", "softpick": "nobody/has-this"}
    planned = make_plan(load_recipe(write_recipe(tmp_path, checkpoints={"tiny": twins})), tmp_path / "out")
    assert states(planned)["softmax-none-16"] == "to do"
    missing = entry(planned, "softpick-none-16")
    assert (missing.state, missing.key) == ("not fetched", None)
    assert all(fact in missing.note for fact in ("nobody/has-this", "local folder", "cache", "`qbench fetch`"))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("recipe/softmax", "softmax"),  # from the folder above the recipe's
        ("twins/soft", "models/twins/soft"),  # from a folder next to the recipe
        ("nobody/has-this", None),
    ],
)
def test_a_wrong_relative_path_gets_a_suggestion(
    written: str, meant: str | None, recipe: Recipe, tmp_path: Path
) -> None:
    here = recipe.file.parent
    (here / "models" / "twins" / "soft").mkdir(parents=True)
    changed = load_recipe(write_recipe(here, checkpoints={"tiny": {"softmax": written}}))
    note = entry(make_plan(changed, tmp_path / "out"), "softmax-none-16").note
    assert str(here / written) in note
    wrong = write_recipe(here, checkpoints={"tiny": {"softmax": f"./{written}"}})
    with pytest.raises(RecipeError, match="owner/name") as stopped:
        load_recipe(wrong)  # a path that starts with ./ is not a Hub id
    for text in (note, str(stopped.value)):
        assert text.endswith(f"Did you mean {meant}?") if meant else "Did you mean" not in text


def test_a_path_from_the_working_folder_is_not_taken(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "desk" / "sub" / "twin").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "desk")
    wrong = write_recipe(recipe.file.parent, checkpoints={"tiny": {"softmax": "sub/twin"}})
    with pytest.raises(RecipeError, match=r"Did you mean \.\./desk/sub/twin\?$"):
        load_recipe(wrong)


def test_a_changed_task_file_is_noticed_though_it_is_remembered(recipe: Recipe, tmp_path: Path) -> None:
    finish(cell(recipe, "softmax-none-16"), tmp_path)
    assert make_plan(recipe, tmp_path).tasks["piqa"].documents == 4
    data = recipe.file.parent / "piqa.jsonl"
    data.write_text(data.read_text() + data.read_text())
    planned = make_plan(recipe, tmp_path)
    assert planned.tasks["piqa"].documents == 8
    assert entry(planned, "softmax-none-16").state == "to do"


@pytest.mark.parametrize("named", ["own.jsonl", {"test": "own.jsonl"}, {"test": ["*.jsonl"]}, None])
def test_data_that_a_task_file_names_itself_is_noticed_too(
    named: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    own = tmp_path / "data" / "own.jsonl"
    own.parent.mkdir()
    own.write_text("".join(json.dumps(row) + "\n" for row in PIQA))
    arguments = {"data_files": named, "data_dir": str(own.parent)} if named else {"data_dir": str(own.parent)}
    file = write_recipe(tmp_path, tasks=["mine"], data=None)
    task = tmp_path / "tasks" / "mine.yaml"
    task.write_text(task.read_text().replace("{data_files: {test: nowhere.jsonl}}", json.dumps(arguments)))
    if not isinstance(named, dict):  # then all of it is the split train
        task.write_text(task.read_text().replace(": test\n", ": train\n"))
    recipe = load_recipe(file)
    finish(cell(recipe, "softmax-none-16"), tmp_path / "out")
    assert entry(make_plan(recipe, tmp_path / "out"), "softmax-none-16").state == "done"
    own.write_text(own.read_text().replace("Open", "Close"))
    assert entry(make_plan(recipe, tmp_path / "out"), "softmax-none-16").state == "to do"


def test_ignored_records_are_one_line_with_what_differs(recipe: Recipe, tmp_path: Path) -> None:
    for name in ("softmax-none-16", "softpick-none-16", "softmax-bnb-8", "softmax-hqq-3-g64"):
        finish(cell(recipe, name), tmp_path)
    assert ignored(make_plan(recipe, tmp_path)) == ""
    data = recipe.file.parent / "piqa.jsonl"
    data.write_text(data.read_text().replace('"label": 1', '"label": 0', 1))
    planned = make_plan(recipe, tmp_path)
    line = ignored(planned)
    assert all(fact in line for fact in ("4 ", "tasks (piqa)"))
    assert opening(planned, planned.entries, []).endswith(f" {tmp_path}; {line}")
    (recipe.file.parent / "softpick" / "model.safetensors").write_text("retrained")
    fewer = [{"method": "none"}, {"method": "bnb", "bits": 8}]
    changed = load_recipe(write_recipe(recipe.file.parent, quantizations=fewer, limit=3))
    line = ignored(make_plan(changed, tmp_path))
    assert re.search(r"2 \D+ tasks, 1 \D+not in the recipe, 1 \D+ checkpoint, tasks$", line)
    (recipe.file.parent / "softmax" / "model.safetensors").unlink()
    assert re.search(r"^\D*2 \D+ not fetched", ignored(make_plan(changed, tmp_path)))


def test_a_record_counts_however_the_recipe_spells_its_checkpoint(recipe: Recipe, tmp_path: Path) -> None:
    finish(cell(recipe, "softmax-none-16"), tmp_path)
    twins = {"softmax": "../recipe/softmax"}
    moved = load_recipe(write_recipe(recipe.file.parent, checkpoints={"tiny": twins}))
    assert entry(make_plan(moved, tmp_path), "softmax-none-16").state == "done"


def test_two_families_may_have_the_same_checkpoint(tmp_path: Path) -> None:
    twins = {"a": {"softmax": "softmax"}, "b": {"softmax": "softmax"}}
    recipe = load_recipe(write_recipe(tmp_path / "recipe", checkpoints=twins, quantizations=[{"method": "none"}]))
    out = tmp_path / "out"
    finish(cells(recipe)[0], out)
    assert [e.state for e in make_plan(recipe, out).entries] == ["done", "to do"]
    write_plan(out, make_plan(recipe, out).to_run_plan())
    assert [missing.cell.family for missing in read_results(out).missing] == ["b"]
    finish(cells(recipe)[1], out)
    assert [stored.record.cell.family for stored in read_results(out).current] == ["a", "b"]


def test_facts_of_tasks_are_computed_again_by_other_code(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_plan(recipe, tmp_path)
    monkeypatch.setattr("qbench.evaluate.tasks.task_fingerprint", lambda task, limit: "by another rule")
    assert make_plan(recipe, tmp_path).tasks["piqa"].fingerprint != "by another rule"  # remembered
    monkeypatch.setattr("qbench.evaluate.facts.code_hash", lambda: "other code")
    assert make_plan(recipe, tmp_path).tasks["piqa"].fingerprint == "by another rule"


def calibrated_on_wikitext2(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe that names no calibration text; the cache of datasets is folder/datasets."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "datasets"))
    return load_recipe(write_recipe(folder / "recipe", calibration=None))


def cached(folder: Path, subset: str, commit: str) -> None:
    (folder / "datasets" / "Salesforce___wikitext" / subset / "0.0.0" / commit).mkdir(parents=True)


def test_a_calibration_text_that_is_not_here_is_a_sentence_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = calibrated_on_wikitext2(tmp_path, monkeypatch)
    named = NAMED["wikitext2"]
    cached(tmp_path, "wikitext-103-raw-v1", named["revision"])
    cached(tmp_path, named["name"], 40 * "0")
    finish(cell(recipe, "softpick-gptq-4-g128"), tmp_path / "out")
    planned = make_plan(recipe, tmp_path / "out")
    missing = entry(planned, "softmax-gptq-4-g128")
    assert missing.state == "not fetched"
    for fact in ("wikitext2", f"`qbench fetch {recipe.file}`", "`calibration: {source: FILE}`"):
        assert fact in missing.note
    assert make_jobs([missing]) == []
    others = {name: state for name, state in states(planned).items() if "softmax-gptq" not in name}
    assert others["softpick-gptq-4-g128"] == "done", "what is done needs no text"
    assert others["softmax-hqq-3-g64"] == "to do"
    cached(tmp_path, named["name"], named["revision"])
    assert entry(make_plan(recipe, tmp_path / "out"), "softmax-gptq-4-g128").state == "to do"


def test_a_missing_calibration_text_stops_only_what_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = calibrated_on_wikitext2(tmp_path, monkeypatch)
    monkeypatch.setattr("qbench.runner.fetch.fetch", lambda *_, **__: [(False, "calibration wikitext2: not here")])
    assert fetched_plan(recipe, tmp_path / "out", RunOptions(only="*hqq*"), make_plan).entries
    with pytest.raises(RunError, match="calibration wikitext2: not here"):
        fetched_plan(recipe, tmp_path / "out", RunOptions(), make_plan)


def test_plan_and_run_name_the_device_and_the_calibration_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibration = {"source": "corpus.txt", "samples": 2, "length": 1008, "seeds": 3}
    recipe = load_recipe(write_recipe(tmp_path, calibration=calibration))
    for found in cells(recipe):
        if found.ref.label != "bnb-2":
            finish(found, tmp_path / "out")
    assert main(["plan", str(recipe.file), "--out", str(tmp_path / "out")]) == 0
    assert run_matrix(recipe, tmp_path / "out", RunOptions())
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("device: cpu, float32") == 2
    (text,) = {line for line in lines if line.startswith("calibration text: ")}
    assert messages.states(text, "corpus.txt…3 draws…2 samples…1,008 tokens")
    plain = load_recipe(write_recipe(tmp_path, quantizations=[{"method": "none"}]))
    assert "calibration text" not in render_plan(make_plan(plain, tmp_path / "out"))


def test_choose(recipe: Recipe, tmp_path: Path) -> None:
    entries = make_plan(recipe, tmp_path).entries
    assert [e.cell.ref.name for e in choose(entries, "*softpick*hqq*")] == ["tiny-softpick-hqq-3-g64"]
    assert [e.cell.ref.name for e in choose(entries, "softpick-hqq")] == ["tiny-softpick-hqq-3-g64"]
    assert len(choose(entries, None)) == len(entries)
    with pytest.raises(RecipeError, match=r"nothing.*tiny-softmax-none-16, "):
        choose(entries, "nothing")


def test_the_command_shows_states_estimates_and_the_total(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"model_type": "transformer", "hidden_size": 1024, "num_hidden_layers": 24, "num_heads": 16}
    (recipe.file.parent / "softmax" / "config.json").write_text(json.dumps(sizes))
    finish(cell(recipe, "softmax-none-16"), tmp_path / "out")
    finish(cell(recipe, "softpick-none-16"), tmp_path / "out", older(cell(recipe, "softpick-none-16").identity()))
    assert main(["plan", str(recipe.file), "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if line.startswith("tiny-softmax-none-16")).split()
    assert row[1:4] == ["done", "2.4", "GiB"]  # 374 million parameters in float32, and 1 GiB
    assert any(line.startswith("10 cells: 1 done, 1 stale, 2 not offered, 6 to do (") for line in lines)
    assert any("piqa 4, mine 4" in line for line in lines)
    assert all(fact in lines[-1] for fact in ("ignored", "1 ", "code or packages"))


def test_a_checkpoint_of_another_kind_is_noted_before_anything_is_loaded(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("softmax", "softpick"):
        own = config(kind) | ({"attn_implementation": "rectified"} if kind == "softpick" else {})
        (recipe.file.parent / kind / "config.json").write_text(json.dumps(own))
    assert main(["plan", str(recipe.file), "--out", str(tmp_path / "out")]) == 2
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines() if line.startswith("tiny-")}
    mark = rows["tiny-softpick-none-16"].split()[-1]  # no sizes: they would be another model's
    (note,) = [line for line in out.splitlines() if line.startswith(mark)]
    assert messages.states(note, "'softpick'…config.json…is rectified…'rectified'")
    assert "cannot run" in rows["tiny-softpick-none-16"]
    assert mark in rows["tiny-softpick-hqq-3-g64"]
    assert mark not in rows["tiny-softmax-none-16"]


def test_a_checkpoint_that_may_have_been_trained_otherwise_is_noted_in_plan_and_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "gpt_oss_sink_transformer", "attn_impl": "gpt_oss_naive_sink", "gpt_oss_sink": True}
    twins = {"softmax": "softmax", "gpt_oss_sink": "softpick"}
    file = write_recipe(tmp_path, checkpoints={"tiny": twins}, quantizations=[{"method": "none"}])
    (tmp_path / "softpick" / "config.json").write_text(json.dumps(config))
    recipe = load_recipe(file)
    for planned in cells(recipe):
        finish(planned, tmp_path / "out")
    assert main(["plan", str(file), "--out", str(tmp_path / "out")]) == 0
    assert "gpt_oss_naive_sink" in capsys.readouterr().out
    assert run_matrix(recipe, tmp_path / "out", RunOptions())
    lines = capsys.readouterr().out.splitlines()
    assert sum("gpt_oss_naive_sink" in line and "o_proj" in line for line in lines) == 1
    assert "nothing to do" in lines


@pytest.mark.parametrize("limit", ["0", "-1", "many", "1.5"])
def test_an_invalid_limit(limit: str, recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", str(recipe.file), "--limit", limit])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert all(fact in error for fact in ("--limit", limit, "whole number above 0"))


def test_the_plan_of_a_finished_recipe_is_fast_and_imports_nothing_heavy(recipe: Recipe, tmp_path: Path) -> None:
    """Under 3 s of CPU time in a fresh process; wall time depends on the other load of the machine."""
    for found in cells(recipe):
        if found.ref.label != "bnb-2":
            finish(found, tmp_path)
    make_plan(recipe, tmp_path)
    code = (
        "import sys\n"
        "from qbench.cli import main\n"
        f"code = main(['plan', {str(recipe.file)!r}, '--out', {str(tmp_path)!r}])\n"
        "heavy = {'torch', 'pandas', 'lm_eval', 'transformers', 'datasets'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else code)\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert "10 cells: 8 done, 2 not offered" in done.stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_of_the_project_is_planned(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("huggingface_hub.constants.HF_HUB_OFFLINE", "datasets.config.HF_HUB_OFFLINE"):
        monkeypatch.setattr(name, True)  # as HF_HUB_OFFLINE=1 does, which is read when they are imported
    assert main(["plan", str(file), "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert " cells: " in out
    notes = [line for line in out.splitlines() if line.startswith("[")]
    assert len(notes) == len(set(notes)) <= 3, "a note on many cells is printed once"


@pytest.mark.parametrize(("size", "family"), [("340m", "340M"), ("1.8b", "1.8B")])
def test_the_papers_recipes_have_the_papers_matrix(size: str, family: str) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"paper-{size}.yaml")
    assert [*recipe.checkpoints] == [family]
    labels = ["none-16", "bnb-4-fp4", "bnb-8"]
    labels += [f"gptq-{bits}-g128-draw-{draw}" for bits in (2, 3, 4, 8) for draw in (1, 2, 3)]
    labels += [f"hqq-{bits}-g64" for bits in (2, 3, 4, 8)]
    assert [c.ref.name for c in cells(recipe)] == [f"{family}-{k}-{x}" for x in labels for k in ("softmax", "softpick")]
    assert [*recipe.tasks] == ["arc_easy", "lambada_openai", "piqa", "sciq", "wikitext"]
    assert (recipe.max_length, recipe.dtype, recipe.device) == (4096, "bfloat16", "cuda")
    assert {c.tokenizer for c in cells(recipe)} == {"fla-hub/transformer-1.3B-100B"}


def test_a_recipe_without_unquantized_cells_is_warned_about_in_one_line(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(recipe.file), "--out", str(tmp_path / "out")]) == 0
    assert "warning" not in capsys.readouterr().out
    file = recipe.file.with_name("quantized.yaml")
    file.write_text(f"extends: {recipe.file.name}\nquantizations: [{{method: hqq, bits: 4}}]\n")
    assert main(["plan", str(file), "--out", str(tmp_path / "out")]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert "`method: none`" in line


def test_a_pattern_that_matches_nothing_lists_ten_cells_and_how_to_see_the_rest(recipe: Recipe, tmp_path: Path) -> None:
    entries = make_plan(recipe, tmp_path / "out").entries
    with pytest.raises(RecipeError) as error:
        choose([*entries, *entries], "nothing")
    assert str(error.value).count("tiny-") == 10
    assert f"{2 * len(entries) - 10} more" in str(error.value)
    assert "`qbench plan`" in str(error.value)


def test_the_plan_on_a_terminal_fits(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = render_plan(make_plan(recipe, tmp_path), "terminal").splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[:2] == ["cell", "state"]
    assert "measured" not in lines[0]  # nothing is, before a first run
    assert any("to do" in line for line in lines[2:])
