"""`qbench init`: recipes that load anywhere, and examples that refer to nothing else."""

import argparse
import re
from pathlib import Path

import pytest

from qbench import cli
from qbench.recipe.cells import cells, load_recipe
from qbench.recipe.starter import STARTER, write_starter
from qbench.recipe.yaml import RecipeError

ROOT = Path(__file__).parents[2]


def test_it_writes_recipes_that_load_outside_the_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("recipes/mine.yaml", "recipes/mini.yaml"))
    files = [file for file in tmp_path.rglob("*") if not file.is_dir()]
    assert not [file for file in files if file.is_symlink()]
    mine, mini = (load_recipe(tmp_path / "recipes" / name) for name in ("mine.yaml", "mini.yaml"))
    assert [cell.ref.label for cell in cells(mine)] == ["none-16", "hqq-4-g64", "hqq-3-g64"]
    assert len(cells(mini)) == 54
    mine_set = mine.model_fields_set & {"calibration", "device", "threads", "analysis", "reference"}
    assert not mine_set, "what is made for the example's models does not suit others"
    for recipe in (mine, mini):
        for own in recipe.checkpoints.values():
            folders = [tmp_path / "recipes" / checkpoint.path for checkpoint in own.values()]
            assert all((folder / "model.safetensors").is_file() for folder in folders)
    for file in (tmp_path / "recipes/mini").rglob("*.*"):
        assert file.read_bytes() == (ROOT / file.relative_to(tmp_path)).read_bytes()


def test_it_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "mini.yaml").write_text("mine")
    with pytest.raises(RecipeError, match=r"mini\.yaml already exists"):
        write_starter(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mini.yaml"]
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="file"):
        write_starter(tmp_path / "file" / "recipes")


def test_a_recipe_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"mini\.yaml does not exist.*`qbench init`"):
        load_recipe(Path("mini.yaml"))
    write_starter(Path("recipes"))
    for wrong in ("mini.yaml", "recipes/mimi.yaml", "mini.yml"):
        with pytest.raises(RecipeError, match=r"Did you mean recipes/mini\.yaml\?"):
            load_recipe(Path(wrong))


def examples() -> dict[str, str]:
    """By command, the examples in its help."""
    (commands,) = [a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return {name: parser.epilog.partition("example:")[2] for name, parser in commands.choices.items()}


def test_examples_name_only_recipes_that_init_writes() -> None:
    found = examples()
    assert found.keys() >= {"init", "run", "table", "check", "runs", "doctor"}
    written = {f"recipes/{file.name}" for file in STARTER.glob("*.yaml")}
    for name, text in found.items():
        assert f"qbench {name}" in text
        assert set(re.findall(r"[\w./-]+\.yaml", text)) <= written, name
        assert set(re.findall(r"results/[\w./-]+", text)) <= {"results/runs/mini", "results/mini", "results/runs/8b"}
