"""Recipes: error messages, the cells of a recipe, and what their keys depend on."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lm_eval.tasks import TaskManager

from qbench.attention.kinds import ATTENTIONS
from qbench.recipe.cells import Recipe, RecipeError, cells, load_recipe
from qbench.runner.plan import make_plan

from ..messages import states
from ..small_recipe import fields, write_recipe


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for each test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("QBENCH_CACHE", str(folder))
    return folder


# Wrong recipes: a line that replaces the field of that name, and the facts that the error must state, in this order.
WRONG = [
    # unknown keys, at each level
    ("seeds: 3", "seeds: …Did you mean seed?…description, checkpoints, tokenizer,"),
    ("seeds: 3", "gate, extends."),
    ("checkpoints: {a: {softmax: {pth: a/b}}}", "softmax.pth: …Did you mean path?…path, rev"),
    ("checkpoints: {a: {softmx: a/b}}", "Did you mean softmax?"),
    ("checkpoints: {a: {softmx: a/b}}", "checkpoints.a.softmx: …softmax, softpick"),
    ("quantizations: [{method: hqq, bit: 3}]", "[0].bit: …Did you mean bits?…method, methods, bits, op"),
    (
        "quantizations: [{method: hqq, bits: 3, options: {groupsize: 8}}]",
        "options.groupsize: …groupsize",
    ),
    ("quantizations: [{method: hqq, bits: 3, options: {groupsize: 8}}]", "Did you mean group_size?"),
    (
        "quantizations: [{method: hqp, bits: 3}]",
        "quantizations[0].method …'hqp'…none, bnb",
    ),
    ("tasks: {piqa: {limt: 3}}", "tasks.piqa.limt: …Did you mean limit?…num_fewshot, limit, data."),
    ("calibration: {source: c4, sample: 3}", "calibration.sample: …Did you mean samples?…source"),
    ("1: 2", "[1]: …1…string"),
    # what is missing
    ("tasks: ", "tasks …null…list…mapping"),
    ("checkpoints: {a: {softmax: {revision: main}}}", "checkpoints.a.softmax…`path`"),
    ("quantizations: [{bits: 3}]", "quantizations[0]…`method`"),
    ("quantizations: [{method: hqq}]", "quantizations[0]: …hqq…`bits: [4, 8]`"),
    ("quantizations: [{method: hqp}]", "quantizations[0].method …'hqp'"),
    # wrong types
    (
        "checkpoints: [a/b]",
        'checkpoints …["a/b"]…mapping…family…`340M: {softmax: FOLDER',
    ),
    ("checkpoints: {a: a/b}", 'checkpoints.a …"a/b"…mapping'),
    ("checkpoints: {a: {softmax: 3}}", "checkpoints.a.softmax …3…folder…Hub id…mapping"),
    ("checkpoints: {340: {softmax: softmax}}", "checkpoints[340]: …340…string"),
    ("quantizations: none", 'quantizations …"none"…list'),
    ("quantizations: [none]", 'quantizations[0] …"none"…mapping…method, methods, bits'),
    ('quantizations: [{method: hqq, bits: "3"}]', 'quantizations[0].bits …"3"…whole number…list'),
    ("quantizations: [{method: hqq, bits: [3, x]}]", 'quantizations[0].bits[1] …"x"…whole number'),
    ("quantizations: [{method: hqq, bits: true}]", "quantizations[0].bits …true…whole number"),
    ("quantizations: [{method: hqq, bits: 3, options: {group_size: big}}]", "options.group_size…'big'…whole number"),
    ("quantizations: [{method: hqq, bits: 3, options: {group_size: -1}}]", "options.group_size …-1…8 or more"),
    ('quantizations: [{method: hqq, bits: 3, options_by_bits: {"3": {}}}]', 'by_bits.3: …"3"…whole number'),
    ("tasks: piqa", 'tasks …"piqa"…list'),
    ("tasks: [{piqa: {limit: 3}}]", "tasks is [{"),
    ("tasks: {piqa: 3}", "tasks.piqa …3…mapping…num_fewshot, limit, data."),
    ("tasks: {piqa: false}", "tasks.piqa …false…mapping"),
    ("data: {piqa: 1}", "data.piqa …1…string or…mapping"),
    ("seed: 1.5", "seed …1.5…whole number"),
    ("limit: true", "limit …true…whole number"),
    ("max_length: 4e3", 'max_length …"4e3"…whole number'),
    ("description: 2024-01-01", 'description …"2024-01-01"…string'),
    ("calibration: wikitext2", 'calibration …"wikitext2"…mapping…source, sam'),
    ('calibration: {source: c4, samples: "3"}', 'calibration.samples …"3"…whole number'),
    ("gate: {alfa: 0.1}", "gate.alfa: …Did you mean alpha?…"),
    ("gate: {tolerances: {acc: 1}}", "gate.tolerances.acc: …accuracy, perplexity, gold_logprob, kl, kl_floor, pooled."),
    (
        "gate: {overrides: {arc_easy: {acc: {alfa: 0.1}}}}",
        "gate.overrides.arc_easy.acc.alfa: …tolerance, alpha, noninferiority.",
    ),
    ("gate: {max_damage: {none-16: {acc: 1}}}", "max_damage.none-16.acc: …Allowed…accuracy, perplexity, gold_log"),
    ("gate: {max_damage: {accuracy: 1}}", "gate.max_damage.accuracy …1…mapping…Allowed…accuracy, perplexity"),
    ("gate: {max_damage: {none-61: {accuracy: 1}}}", "gate.max_damage.none-61: …none-16…Did you mean none-16?"),
    # impossible values
    ("checkpoints: {}", "checkpoints …{}…at least one"),
    ("checkpoints: {a: {}}", "checkpoints.a …empty…at least one of softmax, softpick"),
    ("checkpoints: {Mini: {softmax: a/b}, mini: {softmax: a/b}}", "checkpoints.mini: …'mini'…'Mini'"),
    ("checkpoints: {\u00c5: {softmax: a/b}, \u212b: {softmax: a/b}}", "Unicode…rename"),
    ("checkpoints: {straße: {softmax: a/b}, STRASSE: {softmax: a/b}}", "'STRASSE'…'straße'…folders"),
    ("checkpoints: {a: {softmax: ''}}", 'checkpoints.a.softmax …""…not empty'),
    ("checkpoints: {a: {softmax: ./gone}}", "checkpoints.a.softmax: …/gone…folder"),
    ("checkpoints: {a: {softmax: gone}}", "/gone…folder…'gone'…Hub id…owner/name"),
    ("checkpoints: {a: {softmax: corpus.txt}}", "checkpoints.a.softmax: …/corpus.txt…folder"),
    ("checkpoints: {a: {softmax: {path: a/b, tokenizer: gone}}}", "softmax.tokenizer: …/gone…folder"),
    ("tokenizer: a/b/c", "tokenizer: …/a/b/c…folder"),
    ("tokenizer: a/b--c", "tokenizer: …/a/b--c…folder"),
    ("tokenizer: a/b.", "tokenizer: …/a/b.…folder"),
    ("tokenizer: a/b..c", "/a/b..c…folder…'a/b..c'…Hub id"),
    ("quantizations: []", "quantizations …[]…at least one"),
    ("quantizations: [{method: hqq, bits: [3, 4, 3]}]", "quantizations[0]: hqq-3-g64…twice"),
    ("quantizations: [{method: hqq, bits: 3}, {method: hqq, bits: 3}]", "quantizations[1]: hqq-3-g64…twice"),
    ("quantizations: [{method: bnb, bits: [4, 4]}]", "quantizations[0]: bnb-4-nf4…twice"),
    ("quantizations: [{method: hqq, bits: [4, 5]}]", "quantizations[0].bits: …hqq…5 bits…2, 3, 4, 8"),
    ("quantizations: [{methods: [hqq, bnb], bits: [2, 3]}]", "quantizations[0].bits: …bnb…2, 3 bits…4, 8"),
    ("quantizations: [{methods: [hqq, bmb], bits: 4}]", "quantizations[0].methods …'bmb'…Did you mean bnb?"),
    ("quantizations: [{method: hqq, methods: [bnb], bits: 4}]", "quantizations[0] …`method`…`methods`"),
    ("quantizations: [{method: hqq, bits: 4, group_size: 32}]", "quantizations[0] …`options: {group_size: 32}`"),
    ("quantizations: [{method: hqq, bits: 3, options_by_bits: {4: {}}}]", "options_by_bits[4] …bits…3"),
    (
        "quantizations: [{method: bnb, bits: [4, 8], options: {quant_type: fp4}}]",
        "options.quant_type: …bnb…4…8…options_by_bits",
    ),
    ("tasks: []", "tasks …[]…list"),
    ("tasks: {}", "tasks …{}…at least one"),
    ("tasks: [piqa, piqa]", "piqa…twice"),
    ("tasks: {piqa: {limit: 0}}", "tasks.piqa.limit …0…1 or more"),
    ("tasks: [piqa, ./gone.yaml]", "tasks[./gone.yaml]: …/gone.yaml…exist"),
    ("tasks: {tasks/mine.yaml: {limit: 3}}", "tasks[tasks/mine.yaml]: …task_folders"),
    ("task_folders: [tasks, gone]", "task_folders[1]: …/gone…folder"),
    ("data: {piqa: gone.jsonl}", "data.piqa: …/gone.jsonl…file"),
    ("data: {piqa: {validation: piqa.jsonl, train: gone.jsonl}}", "data.piqa.train: …/gone.jsonl…file"),
    ("data: {pika: piqa.jsonl}", "data.pika …Did you mean piqa?"),
    ("tasks: {piqa: {data: gone.jsonl}, mine: }", "tasks.piqa.data: …/gone.jsonl…file"),
    ("dtype: bfloat", 'dtype …"bfloat"…one of auto, float32, float16, bfloat16. Did you mean bfloat16?'),
    ("reference: 3", "reference …3…string"),
    ("reference: softpik", "reference …'softpik'…tiny has softmax, softpick… Did you mean softpick?"),
    ("device: cuda:0", 'device …"cuda:0"…one of auto, cpu, cuda. Did you mean cuda?'),
    ("execution: fast", 'execution …"fast"…one of dense, packed.'),
    ("max_length: 1", "max_length …1…2 or more"),
    ("workers: 0", "workers …0…1 or more"),
    ("timeout_minutes: 0", "timeout_minutes …0…more than 0"),
    ("calibration: {source: gone.txt}", "calibration.source: …/gone.txt…file"),
    ("calibration: {source: corpus}", "calibration: …'corpus'…file…Hub…revision"),
    ("calibration: {source: c4, seeds: 0}", "calibration.seeds …0…1 or more"),
    ("calibration: {source: c4, length: 1}", "calibration.length …1…2 or more"),
]


@pytest.mark.parametrize(("line", "facts"), WRONG)
def test_a_wrong_recipe_is_a_sentence_with_its_place(line: str, facts: str, tmp_path: Path) -> None:
    field = line.partition(":")[0]
    file = write_recipe(tmp_path, **{field: None})
    number = len(file.read_text().splitlines()) + 1
    file.write_text(f"{file.read_text()}{line}\n")
    with pytest.raises(RecipeError) as error:
        load_recipe(file)
    said = str(error.value)
    assert states(said, facts), said
    assert said.startswith(f"{file}, line {number}: {field if field != '1' else '[1]'}")
    assert said.endswith((".", "?"))


def test_the_line_is_that_of_the_innermost_field(tmp_path: Path) -> None:
    file = write_recipe(tmp_path, quantizations=None)
    start = len(file.read_text().splitlines())
    more = "quantizations:\n  - {method: none}\n  - method: hqq\n    bits: 3\n    options:\n      axis: 2\n"
    file.write_text(file.read_text() + more)
    with pytest.raises(RecipeError, match=rf"line {start + 6}: quantizations\[1\]\.options\.axis .*2.*0, 1"):
        load_recipe(file)


def test_a_required_field_that_is_not_there(tmp_path: Path) -> None:
    for name in ("checkpoints", "quantizations", "tasks"):
        file = write_recipe(tmp_path, **{name: None})
        with pytest.raises(RecipeError, match=rf"recipe\.yaml: .*no `{name}`"):
            load_recipe(file)


def test_an_unknown_task_is_reported_at_the_tasks(tmp_path: Path) -> None:
    file = write_recipe(tmp_path, tasks=["tasks/code.py"], data=None)
    with pytest.raises(RecipeError, match=r"recipe\.yaml, line \d+: tasks: .*code\.py .*'task:'"):
        make_plan(load_recipe(file), tmp_path / "out")


def test_a_misspelt_task_is_reported_where_it_is_and_not_at_the_data_of_what_it_extends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recipe(tmp_path)
    own = tmp_path / "own.yaml"
    own.write_text("extends: recipe.yaml\nquantizations: [{method: none}]\ntasks: [mien]\n")
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    monkeypatch.setattr("qbench.evaluate.tasks.all_tasks", lambda *_: manager)  # lm-eval's take 15 s
    with pytest.raises(RecipeError, match=r"own\.yaml, line 3: tasks: .*'mien'.* Did you mean mine\?"):
        make_plan(load_recipe(own), tmp_path / "out")


@pytest.mark.parametrize("named", ["mine", "tasks/mine.yaml"])
def test_a_task_without_data_names_its_file_and_what_to_add(named: str, tmp_path: Path) -> None:
    write_recipe(tmp_path)
    (tmp_path / "tasks" / "broken.yaml").write_text("task: [")
    task = tmp_path / "tasks" / "mine.yaml"
    task.write_text(re.sub("^dataset_.*\n", "", task.read_text(), flags=re.M))
    own = tmp_path / "own.yaml"
    own.write_text(f"extends: recipe.yaml\ntasks: [{named}]\ndata: null\n")
    with pytest.raises(RecipeError) as error:
        make_plan(load_recipe(own), tmp_path / "out")
    facts = f"{own}, line 2: tasks: …mine…{task}…dataset_path…`data: {{mine: FILE.jsonl}}`."
    assert states(str(error.value), facts), error.value


def test_cells_are_the_matrix_twins_side_by_side(tmp_path: Path) -> None:
    found = [cell.ref.name for cell in cells(load_recipe(write_recipe(tmp_path)))]
    labels = ["none-16", "bnb-2", "bnb-8", "gptq-4-g128", "hqq-3-g64"]
    assert found == [f"tiny-{kind}-{label}" for label in labels for kind in ("softmax", "softpick")]


def test_a_family_may_have_one_twin(tmp_path: Path) -> None:
    file = write_recipe(tmp_path, checkpoints={"alone": {"softpick": "softpick"}}, quantizations=[{"method": "none"}])
    assert [cell.ref.name for cell in cells(load_recipe(file))] == ["alone-softpick-none-16"]


def test_the_reference_is_softmax_unless_the_recipe_names_another(tmp_path: Path) -> None:
    assert load_recipe(write_recipe(tmp_path)).content()["reference"] == "softmax"
    assert load_recipe(write_recipe(tmp_path, reference="softpick")).content()["reference"] == "softpick"


def test_a_reference_that_a_family_does_not_have_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTIONS, "third", ATTENTIONS["softpick"])
    without = {"one": {"softmax": "softmax"}, "two": {"softpick": "./softpick", "third": "./softpick"}}
    for named, place in (({}, "checkpoints.two"), ({"reference": "softmax"}, "reference")):
        file = write_recipe(tmp_path, checkpoints=without, **named)
        lines = [line.strip() for line in file.read_text().splitlines()]
        number = next(i for i, line in enumerate(lines, 1) if line.startswith(place.split(".")[-1] + ":"))
        with pytest.raises(RecipeError) as error:
            load_recipe(file)
        assert states(str(error.value), f"line {number}: {place}: …softmax…two…`reference: softpick`"), error.value
    assert load_recipe(write_recipe(tmp_path, checkpoints=without, reference="third")).reference == "third"


def test_a_reference_that_no_family_has_is_an_error(tmp_path: Path) -> None:
    lone = {"one": {"softmax": "softmax"}}
    with pytest.raises(RecipeError, match=r"line \d+: reference .*softpick.*one has softmax"):
        load_recipe(write_recipe(tmp_path, checkpoints=lone, reference="softpick"))


def test_options_by_bits_win_over_options(tmp_path: Path) -> None:
    entry = {
        "method": "hqq",
        "bits": [3, 4],
        "options": {"group_size": 32, "axis": 0},
        "options_by_bits": {4: {"group_size": 8}},
    }
    found = cells(load_recipe(write_recipe(tmp_path, quantizations=[entry])))
    assert {cell.ref.label for cell in found} == {"hqq-3-g32-axis0", "hqq-4-g8-axis0"}


@pytest.mark.parametrize("text", ["twin", "./twin", "sub/twin", "../{here}/twin", "{absolute}"])
def test_folders_are_found_from_anywhere(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("twin", "sub/twin"):
        shutil.copytree(write_recipe(tmp_path / "files").parent / "softmax", tmp_path / folder)
    text = text.format(here=tmp_path.name, absolute=tmp_path / "twin")
    file = write_recipe(tmp_path, checkpoints={"a": {"softmax": text}})
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "twin").mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    cell = cells(load_recipe(file))[0]
    assert Path(cell.location).samefile(tmp_path / "sub" / "twin" if "sub" in text else tmp_path / "twin")
    assert cell.ref.checkpoint == text


def test_a_task_is_a_name_even_next_to_a_folder_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "piqa").mkdir()
    recipe = load_recipe(write_recipe(tmp_path, tasks=["piqa", "tasks/mine.yaml"], data=None))
    assert recipe.task_names() == ["piqa", str(tmp_path / "tasks/mine.yaml")]


def test_a_limit_on_the_command_line_is_for_all_tasks(tmp_path: Path) -> None:
    file = write_recipe(tmp_path, tasks={"piqa": {"limit": 3}, "mine": None}, limit=2)
    assert load_recipe(file).limits() == {"piqa": 3, "mine": 2}
    assert load_recipe(file, limit=1).limits() == {"piqa": 1, "mine": 1}
    with pytest.raises(RecipeError, match=r"limit.* 0.* 1 or more"):
        load_recipe(write_recipe(tmp_path), limit=0)  # the recipe has no limit


def test_a_recipe_is_a_file() -> None:
    with pytest.raises(RecipeError, match=r"dict.*path"):
        load_recipe({"tasks": ["piqa"]})


def test_limits_reach_the_tasks_of_a_group(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path, tasks=["piqa", "some_group"], data=None, limit=2))
    assert recipe.limits(["piqa", "member"]) == {"piqa": 2, "member": 2}
    recipe = load_recipe(write_recipe(tmp_path, tasks={"some_group": {"limit": 2}}, data=None))
    with pytest.raises(RecipeError, match=r"tasks\.some_group\.limit: .*single task.*member"):
        recipe.limits(["member"])


def test_records_hold_nothing_of_where_the_recipe_lies(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path, output=str(tmp_path / "runs")))
    identities = [cell.identity().model_dump() for cell in cells(recipe) if cell.ref.bits != 2]
    refs = [cell.ref.model_dump() for cell in cells(recipe)]
    assert str(tmp_path) not in json.dumps([recipe.content(), identities, refs])
    assert recipe.out() == tmp_path / "runs"


# --- keys ---


def keys(file: Path, **changes: Any) -> dict[str, str]:
    """The key of each cell that can run."""
    found = cells(load_recipe(file, **changes))
    return {cell.ref.name: cell.identity().key for cell in found if cell.ref.label != "bnb-2"}


def edit(name: str, old: str = "", new: str = " ") -> Callable[[Path], None]:
    """A change of one file: old text for new, or new text at its end."""

    def change(folder: Path) -> None:
        file = folder / name
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1) if old else text + new)

    return change


def field(**changes: Any) -> Callable[[Path], None]:
    """A change of the recipe's fields."""
    return lambda folder: write_recipe(folder, **changes) and None


ALL, SOFTMAX = ["*"], ["tiny-softmax"]
QUANTIZATIONS = fields()["quantizations"]
TOKENIZER = {"softmax": {"path": "softmax", "tokenizer": "words"}, "softpick": "softpick"}

CHANGES_KEYS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "weights": (edit("softmax/model.safetensors"), SOFTMAX),
    "config": (edit("softmax/config.json"), SOFTMAX),
    "tokenizer's file": (edit("softmax/tokenizer.json"), SOFTMAX),
    "another tokenizer": (field(checkpoints={"tiny": TOKENIZER}), SOFTMAX),
    "the recipe's tokenizer": (field(tokenizer="words"), ALL),
    "option": (
        field(quantizations=[*QUANTIZATIONS[:3], {"method": "hqq", "bits": 3, "options": {"axis": 0}}]),
        ["hqq"],
    ),
    "calibration text": (edit("corpus.txt"), ["gptq"]),
    "calibration seed": (field(calibration=fields()["calibration"] | {"seed": 1}), ["gptq"]),
    "calibration samples": (field(calibration=fields()["calibration"] | {"samples": 3}), ["gptq"]),
    "calibration length": (field(calibration=fields()["calibration"] | {"length": 9}), ["gptq"]),
    "task data": (edit("piqa.jsonl", "Open jar 3", "Open jar 5"), ALL),
    "task file": (edit("tasks/mine.yaml", '"{{goal}}"', '"Q: {{goal}}"'), ALL),
    "task version": (edit("tasks/mine.yaml", "version: 1", "version: 2"), ALL),
    "task code": (edit("tasks/code.py", "upper", "lower"), ALL),
    "few-shot from the task": (edit("tasks/mine.yaml", "num_fewshot: 0", "num_fewshot: 1"), ALL),
    "few-shot": (field(num_fewshot=1), ALL),
    "few-shot of one task": (field(tasks={"piqa": {"num_fewshot": 2}, "mine": None}), ALL),
    "limit": (field(limit=2), ALL),
    "limit of one task": (field(tasks={"piqa": {"limit": 2}, "mine": None}), ALL),
    "fewer tasks": (field(tasks=["piqa"], data={"piqa": "piqa.jsonl"}), ALL),
    "dtype": (field(dtype="bfloat16"), ALL),
    "execution": (field(execution="packed"), ALL),
    "device": (field(device="cuda"), ALL),
    "max_length": (field(max_length=64), ALL),
    "seed": (field(seed=1), ALL),
    "batch_tokens of LLM.int8": (field(batch_tokens=512), ["bnb-8"]),
}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The keys of the unchanged recipe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        return keys(write_recipe(tmp_path_factory.mktemp("before")))


@pytest.mark.parametrize("name", CHANGES_KEYS)
def test_what_changes_numbers_changes_keys(name: str, before: dict[str, str], tmp_path: Path) -> None:
    change, affected = CHANGES_KEYS[name]
    write_recipe(tmp_path)
    shutil.copytree(tmp_path / "softmax", tmp_path / "words")
    (tmp_path / "words" / "tokenizer.json").write_text('{"other": 1}')
    change(tmp_path)
    after = keys(tmp_path / "recipe.yaml")
    if name == "option":  # it is in the label, and so in the cell's name
        after = {cell.removesuffix("-axis0"): key for cell, key in after.items()}
    changed = {cell for cell in before if before[cell] != after[cell]}
    assert changed == {cell for cell in before if affected == ALL or any(part in cell for part in affected)}


DOES_NOT: dict[str, Callable[[Path], None]] = {
    "batch_tokens except for LLM.int8": field(
        batch_tokens=512, quantizations=[q for q in QUANTIZATIONS if "bnb" not in q.get("methods", ())]
    ),
    "workers": field(workers=3),
    "threads": field(threads=3),
    "output": field(output="elsewhere"),
    "timeout": field(timeout_minutes=3),
    "description": field(description="new words"),
    "gate": field(gate={"alpha": 0.01}),
    "dtype by its name": field(dtype="float32"),
    "a limit above the number of documents": field(limit=1000),
    "the other spelling of a path": field(checkpoints={"tiny": {"softmax": "./softmax", "softpick": "softpick"}}),
    "the split that is the task's own": field(data=fields()["data"] | {"mine": {"test": "mine.jsonl"}}),
    "one draw of calibration": field(calibration=fields()["calibration"] | {"seeds": 1}),
    "several draws except for gptq": field(calibration=fields()["calibration"] | {"seeds": 3}),
    "a cell more": field(quantizations=[*QUANTIZATIONS, {"method": "hqq", "bits": 2}]),
    "no calibration without gptq": field(
        calibration=None, quantizations=[q for q in QUANTIZATIONS if q.get("method") != "gptq"]
    ),
    "files that no model reads": lambda folder: (folder / "softmax" / "README.md").write_text("words") and None,
    "times of files": lambda folder: [os.utime(file) for file in folder.rglob("*")] and None,
}


@pytest.mark.parametrize("name", DOES_NOT)
def test_what_changes_no_numbers_changes_no_key(name: str, before: dict[str, str], tmp_path: Path) -> None:
    write_recipe(tmp_path)
    DOES_NOT[name](tmp_path)
    after = keys(tmp_path / "recipe.yaml")
    same = before.keys() & after.keys()
    assert len(same) >= 6
    assert {cell: after[cell] for cell in same} == {cell: before[cell] for cell in same}


def test_calibrated_cells_have_one_cell_per_draw_and_twins_have_the_same_draws(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path, calibration=fields()["calibration"] | {"seeds": 3}))
    found = [(cell.ref.attention, cell.ref.draw) for cell in cells(recipe) if cell.ref.method == "gptq"]
    assert found == [(attention, draw) for draw in (1, 2, 3) for attention in ("softmax", "softpick")]
    assert {cell.ref.draw for cell in cells(recipe) if cell.ref.method != "gptq"} == {None}
    names = [cell.ref.name for cell in cells(recipe)]
    assert "tiny-softpick-gptq-4-g128-draw-2" in names
    assert len(set(names)) == len(names)
    of = {cell.ref.name: cell.identity().what.calibration for cell in cells(recipe) if cell.ref.draw}
    draws = [
        [of[f"tiny-{attention}-gptq-4-g128-draw-{draw}"] for draw in (1, 2, 3)]
        for attention in recipe.checkpoints["tiny"]
    ]
    assert draws[0] == draws[1]
    assert len(set(draws[0])) == 3


@pytest.mark.parametrize(("written", "seeds"), [("", 1), ("calibration:", 1), ("calibration: {seeds: 5}", 5)])
def test_what_a_recipe_does_not_set_fits_a_real_model(written: str, seeds: int, tmp_path: Path) -> None:
    """A GPU if there is one, no fixed threads, and the paper recipe's calibration text."""
    file = write_recipe(tmp_path, calibration=None, device=None)
    file.write_text(f"{file.read_text()}{written}\n")
    recipe = load_recipe(file)
    assert (recipe.device, recipe.dtype, recipe.threads) == ("auto", "auto", None)
    own = recipe.calibration
    assert (own.source, own.samples, own.length, own.seeds) == ("wikitext2", 128, 2048, seeds)
    paper = load_recipe(Path(__file__).parents[2] / "recipes" / "paper-340m.yaml").calibration
    assert own.model_copy(update={"seeds": paper.seeds}) == paper


def test_seeds_without_a_calibrated_method_are_an_error_unless_another_recipe_has_them(tmp_path: Path) -> None:
    hqq = [{"method": "none"}, {"method": "hqq", "bits": 3}]
    calibration = fields()["calibration"] | {"seeds": 5}
    file = write_recipe(tmp_path, calibration=calibration, quantizations=hqq)
    with pytest.raises(RecipeError, match=r"recipe\.yaml, line \d+: calibration\.seeds .*5.*gptq"):
        load_recipe(file)
    write_recipe(tmp_path, calibration=calibration)
    (tmp_path / "own.yaml").write_text("extends: recipe.yaml\nquantizations: [{method: hqq, bits: 3}]\n")
    assert {cell.ref.draw for cell in cells(load_recipe(tmp_path / "own.yaml"))} == {None}


def test_a_folder_that_moved_keeps_its_keys(
    before: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recipe(tmp_path / "there")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert keys(Path("there", "recipe.yaml")) == before


def test_a_package_or_our_code_changes_the_key_and_not_what_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = cells(load_recipe(write_recipe(tmp_path)))[0]
    before = cell.identity()
    with monkeypatch.context() as patch:
        patch.setattr("qbench.recipe.cells.package_versions", lambda: before.packages | {"torch": "0.0.1"})
        newer = cell.identity()
    with monkeypatch.context() as patch:
        patch.setattr("qbench.recipe.cells.code_hash", lambda analyzes=False: "other")
        changed = cell.identity()
    assert len({before.key, newer.key, changed.key}) == 3
    assert before.what_key == newer.what_key == changed.what_key


def test_the_auto_dtype_and_device_are_those_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_recipe(tmp_path, device="auto")
    for cuda, device, dtype in ((True, "cuda", "bfloat16"), (False, "cpu", "float32")):
        monkeypatch.setattr("qbench.recipe.schema.has_cuda", lambda cuda=cuda: cuda)
        recipe: Recipe = load_recipe(file)
        assert (recipe.resolved_device, recipe.resolved_dtype) == (device, dtype)


def test_data_of_tasks_that_an_extending_recipe_leaves_out_go_with_them(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    own = tmp_path / "own.yaml"
    own.write_text("extends: recipe.yaml\ntasks: [mine]\n")
    assert [*load_recipe(own).task_data()] == ["mine"]
    own.write_text("extends: recipe.yaml\ntasks: [mine]\ndata: {piqq: piqa.jsonl}\n")
    with pytest.raises(RecipeError, match=r"own\.yaml, line 3: data\.piqq .*not one of the tasks"):
        load_recipe(own)
