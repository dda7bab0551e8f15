"""Recipes with passkey tasks and with axes besides the weights: fields, plans, keys, and what is wrong with one."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qbench.evaluate.passkey import PAPER_LENGTHS, PasskeySettings
from qbench.recipe.cells import Recipe, RecipeError, cells, load_recipe, recipe_tasks
from qbench.runner.fetch import fetch
from qbench.runner.hub import needs_hub
from qbench.runner.plan import make_plan
from qbench.runner.plan_table import render_plan

from ..small_recipe import write_recipe

PASSKEY = {"tasks": ["passkey"], "task_folders": None, "data": None}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache for each test."""
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))


def recipe_of(folder: Path, positions: int | None = None, limit: int | None = None, **changes: Any) -> Recipe:
    """A recipe with only passkey, unless changed; positions: those of its models."""
    folder.mkdir(exist_ok=True)
    for kind in ("softmax", "softpick"):
        if positions:
            (folder / kind).mkdir(exist_ok=True)
            config = {"model_type": "llama", "max_position_embeddings": positions}
            (folder / kind / "config.json").write_text(json.dumps(config))
    return load_recipe(write_recipe(folder, **(PASSKEY | changes)), limit=limit)


def settings(**own: Any) -> dict[str, Any]:
    return {"tasks": {"passkey": own}}


def documents(recipe: Recipe) -> dict[str, int]:
    return {name: facts.documents for name, facts in recipe_tasks(recipe).items()}


# Passkey -----------------------------------------------------------------------------------------


def test_a_recipe_that_says_no_more_has_the_papers_lengths_and_trials(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, positions=8192)
    assert recipe.passkey == PasskeySettings()
    assert documents(recipe) == {f"passkey_{length}": 200 for length in PAPER_LENGTHS}


def test_settings_are_those_of_the_recipe_and_a_limit_is_of_trials(tmp_path: Path) -> None:
    own = settings(lengths=[512, 1024], trials=30, seed=7)
    assert recipe_of(tmp_path, 2048, **own).passkey == PasskeySettings((512, 1024), 30, 7)
    assert documents(recipe_of(tmp_path, 2048, **own)) == {"passkey_512": 30, "passkey_1024": 30}
    assert documents(recipe_of(tmp_path, 2048, limit=20, **own)) == {"passkey_512": 20, "passkey_1024": 20}
    assert documents(recipe_of(tmp_path, 2048, limit=99, **own)) == {"passkey_512": 30, "passkey_1024": 30}
    assert recipe_of(tmp_path, 2048, **settings(lengths=512)).passkey == PasskeySettings((512,))


def test_default_lengths_end_at_the_models_positions_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        recipe = recipe_of(tmp_path, positions=4096)
    assert recipe.passkey == PasskeySettings((890, 1983, 3075))
    (said,) = caplog.messages
    for fact in ("4,167", "4,986", "4,096", "max_length: 4994", "paper", "70.5%"):
        assert fact in said


def test_max_length_runs_lengths_beyond_the_positions_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        recipe = recipe_of(tmp_path, positions=4096, max_length=4994)
    assert recipe.passkey == PasskeySettings(PAPER_LENGTHS)
    (said,) = caplog.messages
    for fact in ("4,167", "4,986", "4,096", "paper"):
        assert fact in said


@pytest.mark.parametrize(
    ("positions", "own", "facts"),
    [
        (128, {}, ["tasks.passkey", "890", "128 positions", "tiny-softmax", "120", "paper"]),
        (512, {"lengths": [256, 512]}, ["tasks.passkey.lengths", "512", "512 positions", "504", "max_length: 520"]),
        (4096, {"lengths": [512, 512]}, ["tasks.passkey.lengths", "twice"]),
        (4096, {"lengths": [0]}, ["tasks.passkey.lengths", "0", "1 or more"]),
        (4096, {"lengths": []}, ["tasks.passkey.lengths", "at least one"]),
        (4096, {"lengths": "all"}, ["tasks.passkey.lengths", '"all"', "list"]),
        (4096, {"trials": 0}, ["tasks.passkey.trials", "1 or more"]),
        (4096, {"trails": 5}, ["tasks.passkey.trails", "trials?", "lengths, trials, seed"]),
        (4096, {"limit": 5}, ["tasks.passkey.limit", "trials"]),
        (4096, {"num_fewshot": 1}, ["tasks.passkey.num_fewshot", "lengths, trials, seed"]),
    ],
)
def test_wrong_settings_are_a_sentence(tmp_path: Path, positions: int, own: dict[str, Any], facts: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_of(tmp_path, positions, **settings(**own))
    assert "recipe.yaml, line " in str(caught.value)
    assert all(fact in str(caught.value) for fact in facts)


def test_its_settings_are_of_no_other_task(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"tasks\.piqa\.trials.* passkey"):
        recipe_of(tmp_path, tasks={"piqa": {"trials": 3}}, data={"piqa": "piqa.jsonl"})


def test_keys_follow_settings_and_not_each_other(tmp_path: Path) -> None:
    def tasks(**own: Any) -> dict[str, Any]:
        return cells(recipe_of(tmp_path, 2048, **settings(**own)))[0].identity().what.tasks

    first = tasks(lengths=[512, 1024], trials=30)
    assert tasks(lengths=[512], trials=30)["passkey_512"] == first["passkey_512"]
    for other in ({"trials": 31}, {"trials": 30, "seed": 1}):
        changed = tasks(lengths=[512, 1024], **other)
        assert all(changed[name] != first[name] for name in first)


def test_beside_other_tasks_each_has_its_own_documents_and_shots(tmp_path: Path) -> None:
    recipe = recipe_of(
        tmp_path,
        2048,
        tasks={"passkey": {"lengths": [512], "trials": 10}, "piqa": {"limit": 3}},
        data={"piqa": {"validation": "piqa.jsonl", "train": "train.jsonl"}},
        num_fewshot=1,
    )
    assert documents(recipe) == {"piqa": 3, "passkey_512": 10}
    shots = {name: own.num_fewshot for name, own in cells(recipe)[0].identity().what.tasks.items()}
    assert shots == {"piqa": 1, "passkey_512": 0}


def test_nothing_is_fetched_for_it(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, 8192)
    assert not needs_hub(recipe)
    assert not [line for _, line in fetch(recipe) if line.startswith("task ")]


def test_its_plan_has_its_documents_and_imports_no_torch(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, 2048, **settings(lengths=[512], trials=20))
    assert "passkey_512 20" in render_plan(make_plan(recipe, tmp_path / "out"))
    code = (
        "import sys; from qbench.cli import main; main(sys.argv[1:]); "
        "print([name for name in ('torch', 'lm_eval', 'datasets') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, "plan", str(recipe.file)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    assert "passkey_512 20" in printed
    assert printed.endswith("[]\n")


# Axes --------------------------------------------------------------------------------------------


def masked(folder: Path, **changes: Any) -> Recipe:
    entries = [
        {"method": "none"},
        {"method": "none", "mask_heads": {"epsilon": 1e-6}},
        {"methods": ["bnb"], "bits": [2, 8], "mask_heads": {}},
    ]
    return recipe_of(folder, 2048, **({"quantizations": entries} | settings(lengths=[512]) | changes))


def test_an_axis_shows_in_labels_and_keys(tmp_path: Path) -> None:
    found = {cell.ref.label: cell for cell in cells(masked(tmp_path)) if cell.ref.attention == "softmax"}
    assert list(found) == ["none-16", "none-16-mask1e-06", "bnb-2-mask1e-06", "bnb-8-mask1e-06"]
    plain, with_mask = (found[label].identity().what for label in ("none-16", "none-16-mask1e-06"))
    assert plain.parts is None
    assert with_mask.parts == {"mask1e-06": {"epsilon": 1e-6}}
    assert plain.calibration is None
    assert with_mask.calibration is not None  # other text may have other dead heads
    assert found["bnb-8-mask1e-06"].identity().what.calibration == with_mask.calibration
    states = {entry.cell.ref.label: entry.state for entry in make_plan(masked(tmp_path), tmp_path / "out").entries}
    assert states["bnb-2-mask1e-06"] == "not offered"


def test_each_draw_of_calibration_may_have_other_dead_heads(tmp_path: Path) -> None:
    recipe = masked(tmp_path, calibration={"source": "corpus.txt", "samples": 2, "length": 8, "seeds": 2})
    draws = [cell.ref.draw for cell in cells(recipe) if cell.ref.label == "none-16-mask1e-06"]
    assert len(set(draws)) == 2


@pytest.mark.parametrize(
    ("entry", "facts"),
    [
        ({"mask_heads": {"epsilon": "1e-6"}}, ["[1].mask_heads", "'1e-6'", "1.0e-6"]),
        ({"mask_heads": {"epsilon": 0}}, ["[1].mask_heads", "epsilon", "more than 0"]),
        ({"mask_heads": {"eps": 0.1}}, ["[1].mask_heads", "eps", "epsilon"]),
        ({"mask_heads": True}, ["[1].mask_heads", "True", "mapping"]),
        ({"mask_head": {}}, ["[1].mask_head", "mask_heads?", "options_by_bits, mask_heads"]),
    ],
)
def test_a_wrong_axis_is_a_sentence(tmp_path: Path, entry: dict[str, Any], facts: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        masked(tmp_path, quantizations=[{"method": "none"}, {"method": "none", **entry}])
    assert all(fact in str(caught.value) for fact in facts)


def test_masked_heads_are_calibrated_on_the_default_text_and_nothing_else_is(tmp_path: Path) -> None:
    texts = {cell.ref.label: cell.calibration for cell in cells(masked(tmp_path, calibration=None))}
    assert texts["none-16"] is None
    for label in ("none-16-mask1e-06", "bnb-8-mask1e-06"):
        text = texts[label]
        assert text
        assert text.source == "wikitext2"


def test_the_same_mask_twice_is_refused(tmp_path: Path) -> None:
    twice = [{"method": "none", "mask_heads": {"epsilon": 1e-6}}, {"method": "none", "mask_heads": {}}]
    with pytest.raises(RecipeError, match=r"none-16-mask1e-06.*twice"):
        masked(tmp_path, quantizations=twice)


FEW_BITS = [
    {"method": "none"},
    {"method": "gptq", "bits": 4, "activations": {"bits": 8}, "kv_cache": {"bits": 4}},
    {"method": "none", "kv_cache": {"bits": 2, "keep_first": 4}},
    {"method": "rtn", "bits": [4, 8], "activations": {"format": "nvfp4"}},
]


def test_activations_and_kv_cache_show_in_labels_and_keys(tmp_path: Path) -> None:
    found = {c.ref.label: c for c in cells(masked(tmp_path, quantizations=FEW_BITS)) if c.ref.attention == "softmax"}
    labels = ["none-16", "gptq-4-g128-a8-kv4", "none-16-kv2-keep4", "rtn-4-a4-nvfp4", "rtn-8-a4-nvfp4"]
    assert list(found) == labels
    what = {label: cell.identity().what for label, cell in found.items()}
    assert list(what["gptq-4-g128-a8-kv4"].parts or {}) == ["a8", "kv4"]
    assert what["none-16"].parts is None
    assert what["none-16-kv2-keep4"].calibration is None
    assert what["rtn-4-a4-nvfp4"].calibration is not None  # its scale per tensor is static
    assert len({cell.identity().key for cell in found.values()}) == len(labels)


@pytest.mark.parametrize(
    ("entry", "facts"),
    [
        ({"method": "none", "activations": {"bits": 7}}, ["[1].activations", "bits", "7", "8, 6, 4"]),
        ({"method": "bnb", "bits": 8, "activations": {}}, ["[1].activations", "bnb at 8 bits"]),
        ({"method": "none", "kv_cache": {"bits": 3}}, ["[1].kv_cache", "bits", "3", "8, 4, 2"]),
        ({"method": "none", "kv_cache": {"group_size": 2048}}, ["[1].kv_cache", "group_size", "2048", "2,048 tokens"]),
        ({"method": "none", "activation": {}}, ["[1].activation", "activations?"]),
    ],
)
def test_few_bits_that_cannot_be_are_a_sentence(tmp_path: Path, entry: dict[str, Any], facts: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        masked(tmp_path, quantizations=[{"method": "none"}, entry], max_length=2048)
    assert all(fact in str(caught.value) for fact in facts), str(caught.value)


def test_static_scales_are_calibrated_on_the_default_text_and_others_are_not(tmp_path: Path) -> None:
    entries = [{"method": "none", "activations": activations} for activations in ({"per_tensor": True}, {})]
    static, dynamic = cells(masked(tmp_path, quantizations=entries, calibration=None))[::2]
    assert static.calibration
    assert static.calibration.source == "wikitext2"
    assert dynamic.calibration is None
