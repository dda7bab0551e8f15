"""Variants in recipes: attention kinds, which are checked, and other names, whose attention is in the config."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from qbench.doctor.report import groups_of
from qbench.recipe.cells import Cell, RecipeError, cells, load_recipe
from qbench.recipe.variants import misspelled_kind
from qbench.runner.estimate import estimate
from qbench.runner.plan import make_plan

from ..messages import states
from ..small_recipe import config, write_recipe


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))


def recipe_of(folder: Path, variants: dict[str, str], **changes: Any) -> Path:
    """A recipe with one family, unquantized and with HQQ; no task needs a download."""
    quantizations = [{"method": "none"}, {"method": "hqq", "bits": 3}]
    return write_recipe(folder, checkpoints={"tiny": variants}, quantizations=quantizations, **changes)


def by_variant(file: Path) -> dict[str, Cell]:
    """The unquantized cell of each variant."""
    return {cell.variant: cell for cell in cells(load_recipe(file)) if cell.ref.label == "none-16"}


def test_the_attention_of_a_name_is_the_configs(tmp_path: Path) -> None:
    found = by_variant(recipe_of(tmp_path, {"base": "softmax", "ours-v2": "softpick", "softpick": "softpick"}))
    assert [cell.ref.name for cell in found.values()] == [
        "tiny-base-none-16",
        "tiny-ours-v2-none-16",
        "tiny-softpick-none-16",
    ]
    assert {name: cell.identity().what.attention for name, cell in found.items()} == {
        "base": "softmax",
        "ours-v2": "softpick",
        "softpick": "softpick",
    }
    assert all(estimate(cell, {}) for cell in found.values())
    named = load_recipe(recipe_of(tmp_path, {"base": "softmax", "ours-v2": "softpick"}))
    assert groups_of(named) == ("attention:softpick", "hqq:3")


def test_one_checkpoint_has_one_identity_whatever_the_variant_is_called(tmp_path: Path) -> None:
    shutil.copytree(write_recipe(tmp_path).parent / "softmax", tmp_path / "copy")
    found = by_variant(recipe_of(tmp_path, {"softmax": "softmax", "base": "softmax", "copy": "copy"}))
    (tmp_path / "copy" / "model.safetensors").write_text("other weights")
    keys = {name: cell.identity().key for name, cell in found.items()}
    assert keys["softmax"] == keys["base"] != keys["copy"]


def test_a_kind_with_a_checkpoint_of_another_kind_is_refused_and_a_name_is_not(tmp_path: Path) -> None:
    plan = make_plan(load_recipe(recipe_of(tmp_path, {"base": "softmax", "softpick": "softmax"})), tmp_path / "out")
    states_of = {(entry.cell.variant, entry.state) for entry in plan.entries}
    assert states_of == {("base", "to do"), ("softpick", "cannot run")}
    for entry in plan.entries:
        if entry.state == "cannot run":
            assert len(entry.notes) == 1
            assert states(entry.note, "'softpick'…config.json…softmax")


def test_a_config_that_contradicts_itself_stops_only_its_cells(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    (tmp_path / "wrong").mkdir()
    for file in (tmp_path / "softmax").iterdir():
        shutil.copy(file, tmp_path / "wrong")
    fields = config("softpick") | {"attn_impl": "flash_attn"}
    (tmp_path / "wrong" / "config.json").write_text(json.dumps(fields))
    recipe = load_recipe(recipe_of(tmp_path, {"base": "softmax", "wrong": "wrong"}))
    plan = make_plan(recipe, tmp_path / "out")
    notes = {entry.cell.variant: (entry.state, entry.notes) for entry in plan.entries}
    assert notes["base"] == ("to do", [])
    state, (note,) = notes["wrong"]
    assert state == "cannot run"
    assert states(note, "wrong/config.json…contradict")
    assert groups_of(recipe) == ("hqq:3",)


def test_a_checkpoint_that_is_not_here_is_not_fetched_whatever_it_is_called(tmp_path: Path) -> None:
    recipe = load_recipe(recipe_of(tmp_path, {"base": "softmax", "instruct": "nobody/instruct"}))
    plan = make_plan(recipe, tmp_path / "out")
    assert {(e.cell.variant, e.state) for e in plan.entries} == {("base", "to do"), ("instruct", "not fetched")}
    assert groups_of(recipe) == ("hqq:3",)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("softpik", "softpick"),
        ("soft-max", "softmax"),
        ("Softmax", "softmax"),
        ("sotfmax", "softmax"),
        ("softmax2", "softmax"),
        ("softpick_", "softpick"),
        ("gate", "gated"),
        ("softmax-plus-one", "softmax_plus_one"),
        ("softmax_plus", "softmax_plus_one"),
        ("scaled-softmax", "scalable_softmax"),
    ],
)
def test_a_name_close_to_a_kinds_is_an_error(name: str, kind: str, tmp_path: Path) -> None:
    file = recipe_of(tmp_path, {"base": "softmax", name: "softpick"})
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if text.strip() == f"{name}: softpick")
    with pytest.raises(RecipeError) as error:
        load_recipe(file)
    assert states(str(error.value), f"{file}, line {line}: checkpoints.tiny.{name}: …softmax, softpick"), error.value
    assert str(error.value).endswith(f"Did you mean {kind}?")


def test_other_names_are_not_close_to_a_kinds(tmp_path: Path) -> None:
    names = ["base", "instruct", "qat", "ours-v2", "softpick-v2", "softmax-2", "softmax-base", "gated-qat", "rated"]
    assert [name for name in names if misspelled_kind(name)] == []
    assert list(by_variant(recipe_of(tmp_path, dict.fromkeys(names, "softmax")))) == names


@pytest.mark.parametrize("name", ["a/b", "..", "-x", "=1+1", "a b", "a,b", "*", "", "é", "x" * 65])
def test_a_name_that_does_not_fit_into_files_and_csv_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"line \d+: checkpoints\.tiny.*variant's name.*letters, digits"):
        load_recipe(recipe_of(tmp_path, {"base": "softmax", name: "softmax"}))


@pytest.mark.parametrize(
    "families",
    [
        {"a": {"base": "softmax", "Base": "softpick"}},
        {"a": {"b-c": "softmax"}, "a-b": {"c": "softmax"}},
        {"A": {"b-c": "softmax"}, "a-b": {"C": "softmax"}},
    ],
)
def test_two_variants_never_share_a_folder(families: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"line \d+: checkpoints\..*share folders.*rename"):
        load_recipe(write_recipe(tmp_path, checkpoints=families))


@pytest.mark.parametrize(
    ("families", "reference"),
    [
        ({"a": {"base": "softmax", "instruct": "softpick"}}, "base"),
        ({"a": {"instruct": "softpick", "softmax": "softmax"}}, "softmax"),
        ({"lone": {"qat": "softmax"}, "a": {"base": "softmax", "qat": "softpick"}}, "base"),
        ({"lone": {"softpick": "softpick"}}, "softmax"),  # a lone model keeps its columns
    ],
)
def test_the_reference_is_softmax_or_the_first(families: dict[str, Any], reference: str, tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path, checkpoints=families))
    assert recipe.reference == recipe.content()["reference"] == reference


def test_any_variant_may_be_the_reference_and_a_misspelled_one_is_an_error(tmp_path: Path) -> None:
    variants = {"base": "softmax", "instruct": "softpick"}
    assert load_recipe(recipe_of(tmp_path, variants, reference="instruct")).reference == "instruct"
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe_of(tmp_path, variants, reference="instuct"))
    assert states(str(error.value), "reference is 'instuct'…tiny has base, instruct…Did you mean instruct?")


def test_all_families_with_several_variants_have_the_reference(tmp_path: Path) -> None:
    families = {"one": {"softmax": "softmax", "softpick": "softpick"}, "two": {"base": "softmax", "qat": "softpick"}}
    with pytest.raises(RecipeError, match=r"checkpoints\.two: .*reference is softmax.*two has only base, qat"):
        load_recipe(write_recipe(tmp_path, checkpoints=families))
