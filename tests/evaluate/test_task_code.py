"""Task files are code: nothing of theirs runs unless it is trusted, and templates never leave their sandbox."""

import importlib.util
import itertools
import json
import py_compile
from pathlib import Path
from typing import Any

import jinja2
import lm_eval.tasks
import lm_eval.utils
import pytest
import yaml
from lm_eval.tasks._yaml_loader import load_yaml

from qbench import cli
from qbench.commands.common import DONE, WRONG
from qbench.evaluate.local_data import TaskError
from qbench.evaluate.task_code import KNOWN, LM_EVAL_TASKS, TaskCodeError
from qbench.evaluate.tasks import load_tasks
from qbench.identity import source_hash

from ..small_recipe import PIQA, write_recipe

ROOT = Path(__file__).parents[2]
MINI = ROOT / "recipes/mini"
TASK = (
    "task: mine\ndataset_path: json\ntest_split: test\noutput_type: multiple_choice\ndoc_to_target: label\n"
    "doc_to_choice: ['{{sol1}}', '{{sol2}}']\nmetric_list: [{metric: acc}]\n"
)
ALIASES = ", ".join(f"{b}: &{b} [{f'*{a}, ' * 10}]" for a, b in itertools.pairwise("abcdefghi"))
ATTACK = "from pathlib import Path\nPath({proof!r}).touch()\ndef text(doc):\n    return doc['goal']\n"
ESCAPES = (
    "{{ cycler.__init__.__globals__.os.system('touch PROOF') }}",
    "{{ lipsum.__globals__['os'].popen('touch PROOF').read() }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ self._TemplateReference__context.cycler.__init__.__globals__ }}",
    "{{ (goal|attr('__class__'))|attr('__mro__') }}",
    "{{ '{0.__class__}'.format(goal) }}",
    "{{ goal['__class__']['__mro__'] }}",
    "{{ (goal.format|attr('__globals__')) }}",
    "{{ namespace.__init__.__globals__ }}",
)


class Attack:
    """A task in a separate folder, and the file that its code would create."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.proof, self.data = folder / "tasks", folder / "proof", folder / "mine.jsonl"
        self.folder.mkdir()
        self.data.write_text("".join(json.dumps(row) + "\n" for row in PIQA))
        self.write("code.py", ATTACK.format(proof=str(self.proof)))

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def load(self, *names: str, trust: bool = False) -> dict[str, Any]:
        data = {"mine": self.data} if names in ((), ("mine",)) else None
        return load_tasks(names or ["mine"], data, [self.folder], trust_code=trust)

    def refused(self, *names: str) -> str:
        with pytest.raises(TaskCodeError, match="trust_task_code") as error:
            self.load(*names)
        assert not self.proof.exists()
        return str(error.value)


@pytest.fixture
def attack(tmp_path: Path) -> Attack:
    return Attack(tmp_path)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))


def test_a_function_runs_only_if_trusted(attack: Attack) -> None:
    attack.write("mine.yaml", TASK + "doc_to_text: !function code.text\n")
    assert str(attack.folder / "code.py") in attack.refused()
    attack.load(trust=True)
    assert attack.proof.exists()


@pytest.mark.parametrize("field", ["process_docs", "class", "custom_dataset", "process_results", "doc_to_image"])
def test_in_any_field(attack: Attack, field: str) -> None:
    attack.write("mine.yaml", TASK + f"doc_to_text: '{{{{goal}}}}'\n{field}: !function code.text\n")
    assert "code.py" in attack.refused()


def test_functions_of_installed_packages_too(attack: Attack) -> None:
    attack.write("mine.yaml", TASK + "doc_to_text: !function os.system\n")
    assert "os.system" in attack.refused()


def test_an_included_file(attack: Attack, tmp_path: Path) -> None:
    attack.write("base.yaml", "doc_to_text: !function code.text\n")
    attack.write("mine.yaml", TASK + "include: base.yaml\n")
    attack.refused()
    away = tmp_path / "away"
    away.mkdir()
    for name in ("base.yaml", "code.py"):
        (attack.folder / name).rename(away / name)
    attack.write("mine.yaml", TASK + f"include: {away}/base.yaml\n")
    assert str(away / "code.py") in attack.refused()


def test_groups_and_tags(attack: Attack) -> None:
    attack.write("mine.yaml", TASK + "tag: all_of_mine\ndoc_to_text: !function code.text\n")
    attack.write("group.yaml", "group: our_group\ntask: [mine]\n")
    attack.write("mean.yaml", "group: our_mean\ntask: [mine]\naggregate_metric_list: [{metric: !function code.text}]\n")
    for name in ("our_group", "our_mean", "all_of_mine", str(attack.folder)):
        attack.refused(name)


@pytest.mark.slow  # tasks that are not in the folder are looked up in lm-eval
def test_tasks_written_in_a_group(attack: Attack) -> None:
    attack.write("inline.yaml", "group: our_group\ntask: [{task: x, doc_to_text: !function code.text}]\n")
    attack.refused("our_group")


def test_symlinks_do_not_make_code_lm_evals_own(attack: Attack, tmp_path: Path) -> None:
    away = tmp_path / "lm_eval" / "tasks" / "piqa"  # lm-eval knows its modules by such a path
    away.mkdir(parents=True)
    (attack.folder / "code.py").rename(away / "code.py")
    (away / "real.yaml").write_text(TASK + "doc_to_text: !function code.text\n")
    (attack.folder / "mine.yaml").symlink_to(away / "real.yaml")
    assert str(away / "code.py") in attack.refused()
    (attack.folder / "mine.yaml").unlink()
    (attack.folder / "code.py").symlink_to(away / "code.py")
    attack.write("mine.yaml", TASK + "doc_to_text: !function code.text\n")
    attack.refused()


def test_lm_evals_own_functions_need_no_trust(attack: Attack) -> None:
    """Directly, and in a file that includes one of lm-eval's."""
    attack.data.write_text('{"page": "= Title = \\n some words here"}\n')
    own = LM_EVAL_TASKS / "wikitext" / "wikitext.yaml"
    attack.write("mine.yaml", f"include: {own}\ntask: mine\n")
    task = attack.load()["mine"]
    assert task.config.doc_to_target.__module__ == "lm_eval.tasks.wikitext.preprocess_wikitext"


def test_minis_own_code_is_known_by_its_hash_and_is_lm_evals(attack: Attack) -> None:
    source = (MINI / "tasks/preprocess_wikitext.py").read_bytes()
    module = importlib.import_module(KNOWN[source_hash(source)])
    assert Path(str(module.__file__)).is_relative_to(LM_EVAL_TASKS)
    task = load_tasks(["mini_wikitext"], {"mini_wikitext": MINI / "tasks/mini_wikitext.jsonl"}, [MINI / "tasks"])
    assert task["mini_wikitext"].config.doc_to_target is module.wikitext_detokenizer
    attack.data.write_text('{"page": "some words"}\n')
    mine = (MINI / "tasks/mini_wikitext.yaml").read_text().replace("mini_wikitext", "mine")
    attack.write("mine.yaml", mine)
    (attack.folder / "preprocess_wikitext.py").write_bytes(source)
    assert attack.load()["mine"].config.process_results is module.process_results
    (attack.folder / "preprocess_wikitext.py").write_bytes(source + b"import os\n")
    attack.refused()
    (attack.folder / "preprocess_wikitext.py").write_bytes(source + b"(" * 10_000)
    attack.refused()


def test_a_compiled_file_next_to_known_code_does_not_run(attack: Attack) -> None:
    """Python runs it without reading the source, if it says that it need not be checked."""
    attack.write("evil.py", ATTACK.format(proof=str(attack.proof)) + "wikitext_detokenizer = process_results = text\n")
    known = attack.folder / "preprocess_wikitext.py"
    known.write_bytes((MINI / "tasks/preprocess_wikitext.py").read_bytes())
    compiled = importlib.util.cache_from_source(str(known))
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(attack.folder / "evil.py"), cfile=compiled, invalidation_mode=mode)
    attack.data.write_text('{"page": "some words", "goal": "x"}\n')
    attack.write("mine.yaml", (MINI / "tasks/mini_wikitext.yaml").read_text().replace("mini_wikitext", "mine"))
    attack.load()
    assert not attack.proof.exists()
    attack.load(trust=True)
    assert attack.proof.exists()  # the attack works against lm-eval's loader


@pytest.mark.parametrize("metric", ["./code", "someone/code", "code/code.py", "code"])
def test_metrics_of_the_package_evaluate_are_code(
    attack: Attack, metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code/code.py").write_text(ATTACK.format(proof=str(attack.proof)))
    listed = f"metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]\n"
    attack.write("mine.yaml", TASK.replace("metric_list: [{metric: acc}]\n", listed) + "doc_to_text: '{{goal}}'\n")
    assert metric in attack.refused()


@pytest.mark.parametrize("template", ESCAPES)
@pytest.mark.parametrize("trust", [False, True])
def test_templates_stay_in_their_sandbox(attack: Attack, template: str, trust: bool) -> None:
    attack.write("mine.yaml", TASK + yaml.safe_dump({"doc_to_text": template.replace("PROOF", str(attack.proof))}))
    with pytest.raises(TaskError, match=r"mine, document 0.*(SecurityError|UndefinedError)"):
        attack.load(trust=trust)
    assert not attack.proof.exists()


@pytest.mark.parametrize("command", ["plan", "run", "fetch"])
@pytest.mark.parametrize(
    "way", ["!function code.text", "\"{{ cycler.__init__.__globals__.os.system('touch proof') }}\""]
)
def test_at_every_command(
    command: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    models = {kind: str(MINI / kind) for kind in ("softmax", "softpick")}
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/mine.yaml").write_text(TASK + f"doc_to_text: {way}\n")
    (tmp_path / "tasks/code.py").write_text(ATTACK.format(proof="proof"))
    data = {"mine": "mine.jsonl"}
    file = write_recipe(tmp_path, checkpoints={"tiny": models}, trust_task_code=None, tasks=["mine"], data=data)
    out = [] if command == "fetch" else ["--out", str(tmp_path / "out")]
    assert cli.main([command, str(file), *out]) == WRONG
    assert not (tmp_path / "proof").exists()
    assert "mine" in (said := capsys.readouterr().err)
    assert "SecurityError" in said or "--trust-task-code" in said
    if command == "plan" and way.startswith("!"):
        assert cli.main(["plan", str(file), "--trust-task-code"]) == DONE
        assert (tmp_path / "proof").exists()
        (tmp_path / "proof").unlink()
        assert cli.main(["plan", str(file)]) == WRONG  # what was trusted once is not remembered
        file.write_text(file.read_text() + "trust_task_code: true\n")
        assert cli.main(["plan", str(file)]) == DONE


class Anything:
    """Stands for any field of any document."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    def __getitem__(self, key: Any) -> "Anything":
        if key == 3:
            raise IndexError
        return Anything(f"{self.name}[{key}]")

    def __getattr__(self, key: str) -> "Anything":
        if key.startswith("__") or key in ("unsafe_callable", "alters_data"):  # jinja2 asks functions for the two
            raise AttributeError(key)
        return Anything(f"{self.name}.{key}")

    def __call__(self, *arguments: Any) -> str:
        return f"{self.name}({', '.join(map(str, arguments))})"

    def __len__(self) -> int:
        return 3


def rendered(env: jinja2.Environment, template: str) -> str:
    """What a template makes of a document with every field it asks for, or the error it ends with."""
    fields = jinja2.meta.find_undeclared_variables(env.parse(template))
    outcomes = []
    for kind in (Anything, str, lambda name: [name, "b"], lambda _: 1, lambda name: {"text": [name], "label": [0]}):
        try:
            outcomes.append(env.from_string(template).render({field: kind(field) for field in fields}))
        except jinja2.sandbox.SecurityError:
            raise
        except Exception as error:
            outcomes.append(type(error).__name__)
    return "\n".join(outcomes)


def plain_environment() -> jinja2.Environment:
    """As in lm-eval's utils.py."""
    env = jinja2.Environment(loader=jinja2.BaseLoader(), undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    env.filters["regex_replace"] = lm_eval.utils.regex_replace
    return env


def templates(files: list[Path]) -> set[str]:
    """All strings of task files that are templates."""

    def strings(value: Any) -> Any:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            for inner in value.values() if isinstance(value, dict) else value:
                yield from strings(inner)

    found = set()
    for file in files:
        try:
            content = load_yaml(file, resolve_func=False, recursive=False)
        except Exception:  # lm-eval skips it too
            continue
        found |= {text for text in strings(content) if "{{" in text or "{%" in text}
    return found


def assert_same(found: set[str]) -> None:
    plain = plain_environment()
    for template in found:
        try:
            plain.parse(template)
        except jinja2.TemplateSyntaxError:
            continue  # a regular expression or text in another language
        assert rendered(lm_eval.utils.env, template) == rendered(plain, template), template


def test_lm_evals_templates_render_the_same_in_the_sandbox() -> None:
    folders = ("arc", "lambada", "piqa", "sciq", "wikitext", "hellaswag", "winogrande", "super_glue", "mmlu/default")
    found = templates([file for folder in folders for file in (LM_EVAL_TASKS / folder).rglob("*.yaml")])
    assert len(found) > 20
    assert_same(found)


@pytest.mark.slow
def test_all_of_lm_evals_templates_render_the_same_in_the_sandbox() -> None:
    found = templates([file for file in Path(lm_eval.tasks.__file__).parent.rglob("*") if "yaml" in file.name])
    assert len(found) > 1500
    print(f"{len(found)} templates")
    assert_same(found)


def test_the_comparison_can_fail() -> None:
    with pytest.raises(jinja2.sandbox.SecurityError):
        assert_same({"{{ a.__class__ }}"})


@pytest.mark.parametrize(
    ("metadata", "fact"),
    [
        (f"{{a: &a [1, 2], {ALIASES}}}", "values"),
        ("&a {version: 1, x: [*a]}", "itself"),
        ("[\n" * 50_000 + "]" * 50_000, "levels"),  # libyaml would end the process
    ],
    ids=["huge", "endless", "deep"],
)
def test_small_files_do_not_become_huge(attack: Attack, metadata: str, fact: str) -> None:
    attack.write("mine.yaml", f"{TASK}metadata: {metadata}\n")
    with pytest.raises(TaskError) as refused:
        attack.load("mine")
    assert "mine.yaml" in str(refused.value)
    assert fact in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_no_memory_for_a_task_file_is_not_a_missing_task(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval skips files that it cannot read, whatever the reason."""

    def no_memory(*_: Any, **__: Any) -> None:
        raise MemoryError

    attack.write("mine.yaml", TASK)
    monkeypatch.setattr("lm_eval.tasks._index.load_yaml", no_memory)
    monkeypatch.setattr("qbench.evaluate.tasks.load_yaml", no_memory)
    with pytest.raises(MemoryError):
        attack.load("mine")
