"""Recipes as files: lines, duplicates, what is not YAML, and extends."""

from pathlib import Path

import pytest

from qbench.recipe.yaml import RecipeError, read_recipe_file

from ..messages import states


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        (b"tasks: [piqa\nseed: 1\n", ", line 2: not YAML: …expected ',' or ']'"),
        (b"tasks:\n\t- piqa\n", ", line 2: not YAML: …found character '\\t'"),
        (b"seed: 1\n---\nseed: 2\n", ", line 2: not YAML: …but found another document"),
        (b"seed: !!python/object:os.system 1\n", ", line 1: not YAML: …could not determine a constructor"),
        (b"[a]: 1\n", ", line 1: not YAML: …found unhashable key"),
        (b"seed: 1\nname: \xff\xfe\n", ": …UTF-8…byte 14"),
        (b"description: 2024-13-45\n", ": not YAML: …month must be in 1..12"),
        (b"description: \x00\n", ": not YAML: …unacceptable character"),
        (b"tasks: &t [*t]\n", ", line 1: …contains itself"),
        (b"", ": …mapping…'checkpoints:'"),
        (b"- piqa\n", ": …mapping…'checkpoints:'"),
        (b"just words\n", ": …mapping…'checkpoints:'"),
        (b"seed: 1\ntasks: []\nseed: 2\n", ", line 3: seed: …already…line 1"),
        (b"tasks:\n  piqa: {}\n  piqa: {}\n", ", line 3: tasks.piqa: …already…line 2"),
        (b"tasks:\n- {a: 1, a: 2}\n", ", line 2: tasks[0].a: …already…line 2"),
    ],
)
def test_what_cannot_be_read_says_where_and_why(content: bytes, facts: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_bytes(content)
    with pytest.raises(RecipeError) as error:
        read_recipe_file(file)
    assert str(error.value).startswith(str(file))
    assert states(str(error.value), f"{file}{facts}"), error.value


def test_a_folder_and_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"Is a directory"):
        read_recipe_file(tmp_path)
    with pytest.raises(RecipeError, match=r"none\.yaml does not exist"):
        read_recipe_file(tmp_path / "none.yaml")


def test_an_endless_file() -> None:
    with pytest.raises(RecipeError, match=r"/dev/zero: .*10,000,000 bytes"):
        read_recipe_file(Path("/dev/zero"))


def test_a_byte_order_mark_and_utf8_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_bytes("\ufeffdescription: Größe\n".encode())
    assert read_recipe_file(file).content == {"description": "Größe"}


def test_errors_are_at_the_nearest_line_that_is_written(tmp_path: Path) -> None:
    read = read_recipe_file(write(tmp_path / "recipe.yaml", "seed: 1\ntasks:\n  piqa:\n    limit: 3\n"))
    assert str(read.error(("tasks", "piqa", "limit"), "no.")).endswith("recipe.yaml, line 4: tasks.piqa.limit: no.")
    assert str(read.error(("tasks", "piqa", "data"), "no.")).endswith("recipe.yaml, line 3: tasks.piqa.data: no.")
    assert str(read.error(("tasks", "./a.yaml"), "no.")).endswith("recipe.yaml, line 2: tasks[./a.yaml]: no.")
    assert str(read.error(("data",), "no.")).endswith("recipe.yaml: data: no.")


class TestExtends:
    def test_fields_are_merged_and_lists_replaced(self, tmp_path: Path) -> None:
        write(
            tmp_path / "base.yaml",
            "seed: 1\nbits: [2, 3]\ntasks: {piqa: {limit: 1, num_fewshot: 2}, sciq: {}}\nlimit: 7\n",
        )
        own = write(tmp_path / "own.yaml", "extends: base.yaml\nseed: 2\nbits: [4]\ntasks: {piqa: {limit: 9}}\n")
        assert read_recipe_file(own).content == {
            "seed": 2,
            "bits": [4],
            "tasks": {"piqa": {"limit": 9, "num_fewshot": 2}, "sciq": {}},
            "limit": 7,
        }

    def test_null_takes_away(self, tmp_path: Path) -> None:
        write(tmp_path / "base.yaml", "limit: 3\nseed: 1\ncheckpoints: {a: {softmax: x}, b: {softmax: y}}\n")
        own = write(tmp_path / "own.yaml", "extends: base.yaml\nlimit: null\ncheckpoints: {a: , c: }\nworkers: null\n")
        assert read_recipe_file(own).content == {
            "seed": 1,
            "checkpoints": {"b": {"softmax": "y"}, "c": None},
            "workers": None,
        }

    def test_lines_are_those_of_the_file_that_counts(self, tmp_path: Path) -> None:
        base = write(tmp_path / "base.yaml", "seed: 1\nlimit: 2\ntasks: {piqa: {limit: 1}}\ndata: {a: x}\n")
        own = write(tmp_path / "own.yaml", "extends: base.yaml\nseed: 3\n\ntasks: [piqa]\ndata: {b: y}\n")
        lines = read_recipe_file(own).lines
        assert lines["seed",] == (own, 2)
        assert lines["limit",] == (base, 2)
        assert lines["data", "a"] == (base, 4)
        assert lines["data", "b"] == (own, 5)
        assert ("tasks", "piqa") not in lines  # the base's settings of tasks are gone
        assert lines["tasks", 0] == (own, 4)

    def test_of_an_extending_recipe(self, tmp_path: Path) -> None:
        write(tmp_path / "a.yaml", "seed: 1\nlimit: 1\nworkers: 1\n")
        write(tmp_path / "b.yaml", "extends: a.yaml\nlimit: 2\nworkers: 2\n")
        read = read_recipe_file(write(tmp_path / "c.yaml", "extends: b.yaml\nworkers: 3\n"))
        assert read.content == {"seed": 1, "limit": 2, "workers": 3}

    @pytest.mark.parametrize(
        ("base", "facts"),
        [
            ("none.yaml", "line 2: extends: {folder}/none.yaml…file"),
            ("own.yaml", "line 2: extends: own.yaml…extends…itself"),
            ("[a.yaml]", "line 2: extends …path of another recipe"),
            ("", "line 2: extends …path of another recipe"),
            (".", "line 2: extends: {folder}…file"),
        ],
    )
    def test_what_cannot_be_extended(self, base: str, facts: str, tmp_path: Path) -> None:
        own = write(tmp_path / "own.yaml", f"seed: 1\nextends: {base}\n")
        with pytest.raises(RecipeError, match=r"own\.yaml, ") as error:
            read_recipe_file(own)
        assert states(str(error.value), facts.format(folder=tmp_path)), error.value

    def test_a_cycle_of_three_across_folders(self, tmp_path: Path) -> None:
        write(tmp_path / "a.yaml", "extends: sub/b.yaml\n")
        write(tmp_path / "sub" / "b.yaml", "extends: ../sub/c.yaml\n")
        write(tmp_path / "sub" / "c.yaml", "extends: ../a.yaml\n")
        with pytest.raises(RecipeError, match=r"c\.yaml, line 1: extends: \.\./a\.yaml .*extends"):
            read_recipe_file(tmp_path / "a.yaml")

    def test_an_error_in_the_base_names_the_base(self, tmp_path: Path) -> None:
        write(tmp_path / "base.yaml", "seed: 1\nseed: 2\n")
        with pytest.raises(RecipeError, match=r"base\.yaml, line 2: seed: .*line 1"):
            read_recipe_file(write(tmp_path / "own.yaml", "extends: base.yaml\n"))

    def test_paths_move_and_names_do_not(self, tmp_path: Path) -> None:
        base = tmp_path / "base"
        for folder in ("twin", "own/er", "tasks", "piqa"):
            (base / folder).mkdir(parents=True)
        absolute = str(tmp_path / "elsewhere")
        write(
            base / "base.yaml",
            "checkpoints:\n"
            "  a: {softmax: twin, softpick: ./gone}\n"
            f"  b: {{softmax: {{path: own/er, tokenizer: hub/words, revision: twin}}, softpick: {absolute}}}\n"
            "tokenizer: hub/words\n"
            "description: twin\n"
            "quantizations: [{method: twin}]\n"
            "tasks: {piqa: {data: piqa.jsonl}, ./mine.yaml: }\n"
            "task_folders: [tasks]\n"
            "data: {sciq: {test: gone/sciq.jsonl}}\n"
            "calibration: {source: wikitext2}\n"
            "output: runs\n",
        )
        content = read_recipe_file(write(tmp_path / "own" / "own.yaml", "extends: ../base/base.yaml\n")).content
        assert content == {
            "checkpoints": {
                "a": {"softmax": "../base/twin", "softpick": "../base/gone"},
                "b": {
                    "softmax": {"path": "../base/own/er", "tokenizer": "hub/words", "revision": "twin"},
                    "softpick": absolute,
                },
            },
            "tokenizer": "hub/words",
            "description": "twin",
            "quantizations": [{"method": "twin"}],
            "tasks": {"piqa": {"data": "../base/piqa.jsonl"}, "../base/mine.yaml": None},
            "task_folders": ["../base/tasks"],
            "data": {"sciq": {"test": "../base/gone/sciq.jsonl"}},
            "calibration": {"source": "wikitext2"},
            "output": "../base/runs",
        }

    def test_a_list_of_tasks_moves_its_files_only(self, tmp_path: Path) -> None:
        (tmp_path / "base" / "piqa").mkdir(parents=True)
        write(tmp_path / "base" / "base.yaml", "tasks: [piqa, mine.yaml, sub/tasks]\n")
        own = write(tmp_path / "own.yaml", "extends: base/base.yaml\n")
        assert read_recipe_file(own).content == {"tasks": ["piqa", "base/mine.yaml", "base/sub/tasks"]}


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("extends: !!bool x", ("'x'",)),
        ("limit: !!int x", ("'x'",)),
        ('extends: "\\ud800.yaml"', ("line 1", "ud800")),
        ('checkpoints: {"a\\0b": {}}', ("line 1", "x00")),
        (f"checkpoints: {{{'f' * 300}: {{}}}}", ("line 1", "300", "200")),
        (f"extends: {'/x' * 3000}", ("line 1", "6,000", "4,000")),
        ('checkpoints:\n  "a\\n::error::b": {}', ("line 2", "::error::b")),
        ("? |\n  a\n  b\n: 1", ("line 1", "one line")),
        ("a: &a [*a]", ("line 1", "itself")),
        ("description: " + "[" * 5000 + "]" * 5000, ("nested",)),
        (
            "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)),
            ("aliases", "100,000"),
        ),
    ],
)
def test_hostile_recipes_are_refused_with_a_sentence(tmp_path: Path, text: str, facts: tuple[str, ...]) -> None:
    file = tmp_path / "hostile.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError) as refused:
        read_recipe_file(file)
    assert str(file) in str(refused.value)
    for fact in facts:
        assert fact in str(refused.value)
    assert str(refused.value).count("hostile.yaml") == 1


def test_paths_in_errors_have_no_dots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "recipes").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    for extended, shown in (("../gone.yaml", "gone.yaml"), ("../../gone.yaml", f"{tmp_path / 'gone.yaml'}")):
        file = Path("recipes", "recipe.yaml")
        file.write_text(f"extends: {extended}\n")
        with pytest.raises(RecipeError) as error:
            read_recipe_file(file)
        assert str(error.value).startswith(f"{file}, line 1: ")
        assert f" {shown} " in str(error.value)
        assert ".." not in str(error.value)
