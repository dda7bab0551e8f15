"""Tasks of lm-eval with local data, found quickly; everything wrong with a task or its data is one sentence."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
from lm_eval.tasks import TaskManager

from qbench.errors import InputError
from qbench.evaluate import tasks
from qbench.evaluate.local_data import TaskError
from qbench.evaluate.requests import build_documents
from qbench.evaluate.task_code import LM_EVAL_TASKS
from qbench.evaluate.task_names import names_like
from qbench.evaluate.tasks import all_tasks, load_tasks, task_fingerprint

from ..made_up_texts import SIZES

ARC = {
    "id": "a",
    "question": "What is wet?",
    "choices": {"text": ["water", "sand"], "label": ["A", "B"]},
    "answerKey": "A",
}
PIQA = {"goal": "Open a jar", "sol1": "turn the lid", "sol2": "turn the jar's page", "label": 0}
SCIQ = {
    "question": "What is H2O?",
    "support": "",
    "distractor1": "salt",
    "distractor2": "gold",
    "distractor3": "air",
    "correct_answer": "water",
}

LM_EVAL = Path(lm_eval.tasks.__file__).parent
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a .jsonl file from objects or lines of text."""

    def _write(*lines: Any, name: str = "data.jsonl") -> Path:
        file = tmp_path / name
        file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
        return file

    return _write


def changed(document: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**document, **fields}


def without(document: dict[str, Any], field: str) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != field}


def test_the_papers_tasks_are_lm_evals_own_and_load_within_a_second(texts: dict[str, Path], write: Write) -> None:
    data = {
        **texts,
        "piqa": write(PIQA, name="piqa.jsonl"),
        "sciq": write(SCIQ, name="sciq.jsonl"),
    }
    start = time.process_time()
    loaded = load_tasks(list(data), data)
    assert time.process_time() - start < 1
    assert list(loaded) == list(data)
    sizes = {name: len(task.eval_docs) for name, task in loaded.items()}
    assert sizes == SIZES | {"piqa": 1, "sciq": 1}
    assert {name: task.VERSION for name, task in loaded.items()} == dict.fromkeys(data, 1.0) | {"wikitext": 2.0}
    assert loaded["wikitext"].config.dataset_path == "EleutherAI/wikitext_document_level"


def test_prompts_are_those_of_lm_evals_json_loader(write: Write, tmp_path: Path) -> None:
    """The same documents, read by lm-eval: every request is the same, including few-shot ones."""
    questions = [changed(ARC, id=str(i), question=f"Question {i}?", answerKey="AB"[i % 2]) for i in range(8)]
    test, train = write(*questions[:3], name="test.jsonl"), write(*questions[3:], name="train.jsonl")
    yaml = LM_EVAL / "arc" / "arc_easy.yaml"
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "theirs.yaml").write_text(
        f"include: {yaml}\ntask: theirs\ndataset_path: json\ndataset_name: null\nvalidation_split: null\n"
        f"dataset_kwargs: {{data_files: {{test: {test}, train: {train}}}, cache_dir: {tmp_path / 'cache'}}}\n"
    )
    both = load_tasks(["theirs"], folders=[tmp_path / "theirs"], num_fewshot=2)
    both |= load_tasks(["arc_easy"], {"arc_easy": {"test": test, "train": train}}, num_fewshot=2)
    theirs, ours = ([[r.args for r in d.requests] for d in build_documents(task)] for task in both.values())
    assert ours == theirs
    assert ours[0][0][0].count("Question: ") == 3


def test_wikitexts_detokenizer_and_word_count_apply(texts: dict[str, Path]) -> None:
    task = load_tasks(["wikitext"], {"wikitext": texts["wikitext"]})["wikitext"]
    page = task.eval_docs[0]["page"]
    (document,) = build_documents(task, limit=1)
    text = document.requests[0].args[0]
    assert " @-@ " in page
    assert " @-@ " not in text
    assert task.process_results(document.content, [-1.0])["word_perplexity"] == (-1.0, len(page.split()) + 2)


def test_a_folder_of_task_files_and_a_single_file(tmp_path: Path, write: Write) -> None:
    file = write({"q": "1+1", "a": " 2"}, {"q": "1+2", "a": " 3"})
    for name in ("sums", "more"):
        (tmp_path / f"{name}.yaml").write_text(
            f"task: {name}_of_mine\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}, "
            f"cache_dir: {tmp_path / 'cache'}}}\n"
            "test_split: test\noutput_type: loglikelihood\ndoc_to_text: q\ndoc_to_target: a\n"
            "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
        )
    assert list(load_tasks([str(tmp_path)])) == ["more_of_mine", "sums_of_mine"]
    assert list(load_tasks([str(tmp_path / "sums.yaml")])) == ["sums_of_mine"]
    task = load_tasks(["more_of_mine"], folders=[tmp_path])["more_of_mine"]
    assert [d.requests[0].args for d in build_documents(task)] == [("1+1", " 2"), ("1+2", " 3")]
    with pytest.raises(TaskError, match=r"nowhere.*folder"):
        load_tasks(["sums_of_mine"], folders=["nowhere"])
    with pytest.raises(TaskError, match=r"none.yaml .*'task:'"):
        load_tasks([str(tmp_path / "none.yaml")])


def test_a_bare_word_is_a_task_even_beside_a_folder_of_that_name(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "piqa").mkdir()
    monkeypatch.chdir(tmp_path)
    assert list(load_tasks(["piqa"], {"piqa": write(PIQA)})) == ["piqa"]


@pytest.fixture(params=["a part", pytest.param("all", marks=pytest.mark.slow)])
def index(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's index: of two of its folders, since all of them take a quarter of a minute."""
    if request.param == "a part":
        part = TaskManager(include_path=[LM_EVAL / "super_glue", LM_EVAL / "arc"], include_defaults=False)
        monkeypatch.setattr(tasks, "all_tasks", lambda *_: part)


@pytest.mark.usefixtures("index")
def test_a_name_outside_its_folder_is_found_in_the_index_and_a_typo_is_not(write: Write) -> None:
    document = {"passage": "Ice floats.", "question": "does ice float", "label": 1, "idx": 0}
    assert list(load_tasks(["boolq"], {"boolq": write(document)})) == ["boolq"]
    with pytest.raises(TaskError, match=r"'arc_eazy'.* Did you mean arc_easy\?"):
        load_tasks(["arc_eazy"])
    with pytest.raises(TaskError, match=r"data.*ai2_arc.*group"):
        load_tasks(["ai2_arc"], {"ai2_arc": write(ARC)})


BAD_FILES = [
    ("arc_easy", [ARC, without(ARC, "question")], r"data.jsonl, line 2: .*'question'.*arc_easy"),
    ("arc_easy", [changed(without(ARC, "question"), qestion="x")], r"line 1: .*'question'.*mean qestion\?"),
    ("arc_easy", [ARC, changed(ARC, question=None)], r"line 2: .*'question'.*arc_easy.*null"),
    ("arc_easy", [ARC, "", changed(ARC, choices={"text": ["a", "b"]})], r"line 3: .*'choices.label'"),
    ("arc_easy", [ARC, changed(ARC, answerKey=1)], r"line 2: .*'answerKey'.*number.*line 1.*text"),
    ("arc_easy", [ARC, changed(ARC, more=1)], r"line 2: .*'more'.*line 1"),
    ("arc_easy", [ARC, '{"id": '], r"line 2: not JSON"),
    ("arc_easy", [[ARC]], r"line 1: .*list.*object"),
    ("arc_easy", ["", " "], r"data.jsonl: .*arc_easy.*empty"),
    ("piqa", [without(PIQA, "label")], r"line 1: .*'label'.*piqa"),
    ("wikitext", [{"text": "a page"}], r"wikitext, document 0 .*data.jsonl.*KeyError: 'page'"),
    ("wikitext", [{"page": "a page"}, {"text": "another"}], r"line 2: .*'page'.*line 1"),
]


@pytest.mark.parametrize(("task", "lines", "message"), BAD_FILES)
def test_a_bad_data_file(task: str, lines: list[Any], message: str, write: Write) -> None:
    with pytest.raises(TaskError, match=message):
        load_tasks([task], {task: write(*lines)})


def test_a_file_that_is_not_there_and_one_that_is_not_text(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"none.jsonl: .*piqa.*No such file"):
        load_tasks(["piqa"], {"piqa": tmp_path / "none.jsonl"})
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(TaskError, match="not UTF-8"):
        load_tasks(["piqa"], {"piqa": tmp_path / "binary.jsonl"})


BAD_DOCUMENTS = [
    ("lambada_openai", {"text": ""}, "lambada_openai, document 1: .*empty"),
    ("wikitext", {"page": " \n"}, "wikitext, document 1: .*empty"),
    ("piqa", changed(PIQA, sol2=""), "piqa, document 1: .*choice 1.*empty"),
    ("piqa", changed(PIQA, label=2), "piqa, document 1: .*answer.* 2.*2 choices"),
    ("arc_easy", changed(ARC, answerKey="C"), "arc_easy, document 1: .*prompt"),
]
GOOD = {"lambada_openai": {"text": "one two"}, "wikitext": {"page": "a page"}, "piqa": PIQA, "arc_easy": ARC}


@pytest.mark.parametrize(("name", "bad", "message"), BAD_DOCUMENTS)
def test_a_bad_document_is_named_before_anything_is_scored(name: str, bad: Any, message: str, write: Write) -> None:
    task = load_tasks([name], {name: write(GOOD[name], bad)})[name]
    assert len(build_documents(task, limit=1)) == 1
    with pytest.raises(TaskError, match=message):
        build_documents(task)


def test_few_shot_examples_need_their_split(write: Write) -> None:
    test, train = write(ARC, name="test.jsonl"), write(ARC, changed(ARC, id="b"), name="train.jsonl")
    with pytest.raises(TaskError, match=r"arc_easy.*2 few-shot examples.*'train'.*FILE"):
        load_tasks(["arc_easy"], {"arc_easy": test}, num_fewshot=2)
    with pytest.raises(TaskError, match=r"'trian'.*test, .* Did you mean train\?"):
        load_tasks(["arc_easy"], {"arc_easy": {"test": test, "trian": train}})
    with pytest.raises(TaskError, match=r"arc_easy.*'test'"):
        load_tasks(["arc_easy"], {"arc_easy": {"train": train}})


def test_few_shot_counts_by_name_and_for_all(write: Write) -> None:
    data = {"piqa": write(PIQA, name="p.jsonl"), "wikitext": write({"page": "a page"}, name="w.jsonl")}
    data = {**data, "piqa": {"validation": data["piqa"], "train": data["piqa"]}}
    loaded = load_tasks(["piqa", "wikitext"], data, num_fewshot=1)  # a page does not take examples
    assert [task.config.num_fewshot for task in loaded.values()] == [1, 0]
    with pytest.raises(TaskError, match=r"num_fewshot of wikitext.*1.*0"):
        load_tasks(["wikitext"], {"wikitext": data["wikitext"]}, num_fewshot={"wikitext": 1})
    with pytest.raises(TaskError, match=r"num_fewshot of piqa.*-1"):
        load_tasks(["piqa"], {"piqa": data["piqa"]}, num_fewshot=-1)


def test_names_that_lead_nowhere(write: Write) -> None:
    file = write(PIQA)
    with pytest.raises(TaskError, match=r"data.*pica.* Did you mean piqa\?"):
        load_tasks(["piqa"], {"piqa": file, "pica": file})
    with pytest.raises(TaskError, match=r"piqa.*twice"):
        load_tasks(["piqa", "piqa"], {"piqa": file})
    with pytest.raises(TaskError, match=r"'piqa'.*list"):
        load_tasks("piqa")
    with pytest.raises(TaskError, match=r"limit of piqa.*0"):
        build_documents(load_tasks(["piqa"], {"piqa": file})["piqa"], limit=0)


def test_a_fingerprint_is_of_content(write: Write) -> None:
    def fingerprint(*lines: Any, name: str = "data.jsonl", limit: int | None = None) -> str:
        return task_fingerprint(load_tasks(["piqa"], {"piqa": write(*lines, name=name)})["piqa"], limit)

    other = changed(PIQA, sol1="break it")
    one = fingerprint(PIQA, other)
    assert one == fingerprint(PIQA, other, name="elsewhere.jsonl")
    assert one != fingerprint(other, PIQA)
    assert one != fingerprint(PIQA)
    assert fingerprint(PIQA, other, limit=1) == fingerprint(PIQA)


def test_a_fingerprint_is_of_code_prompt_and_examples(tmp_path: Path, write: Write) -> None:
    file = write(PIQA)
    task = (
        "task: mine\nvalidation_split: validation\ntraining_split: train\noutput_type: multiple_choice\n"
        "doc_to_text: !function code.text\ndoc_to_target: label\ndoc_to_choice: '{{[sol1, sol2]}}'\n"
    )

    def fingerprint(code: str, config: str = task, shots: int = 0) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "mine.yaml").write_text(config)
        (folder / "code.py").write_text(code)
        data = {"mine": {"validation": file, "train": file}}
        return task_fingerprint(load_tasks(["mine"], data, [folder], shots, trust_code=True)["mine"])

    code = "def text(doc):\n    return helper(doc)\n\n\ndef helper(doc):\n    return doc['goal']\n"
    one = fingerprint(code)
    assert one == fingerprint(code)
    assert one != fingerprint(code.replace("doc['goal']", "doc['goal'] + '?'"))  # not in the function itself
    assert one != fingerprint(code, task + "target_delimiter: ''\n")
    assert one != fingerprint(code, task + "metadata: {version: 2.0}\n")
    assert one != fingerprint(code, shots=1)


def test_a_fingerprint_is_of_a_partial_functions_arguments(tmp_path: Path, write: Write) -> None:
    def fingerprint(number: int, function: str) -> str:
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "code.py").write_text(
            "from functools import partial\n\n\ndef text(doc, end):\n    return doc['goal'] + end\n\n\n"
            "asked = partial(text, end='?')\ntold = partial(text, end='.')\n"
        )
        (folder / "mine.yaml").write_text(
            "task: mine\nvalidation_split: validation\noutput_type: multiple_choice\ndoc_to_target: label\n"
            f"doc_to_text: !function code.{function}\ndoc_to_choice: '{{{{[sol1, sol2]}}}}'\n"
        )
        return task_fingerprint(load_tasks(["mine"], {"mine": write(PIQA)}, [folder], trust_code=True)["mine"])

    assert fingerprint(1, "asked") == fingerprint(2, "asked") != fingerprint(3, "told")


def test_choices_that_a_task_shuffles_are_the_same_each_time(tmp_path: Path, write: Write) -> None:
    (tmp_path / "code.py").write_text(
        "import random\n\nimport numpy\n\n\ndef shuffled(dataset):\n    return dataset.map(one)\n\n\ndef one(doc):\n"
        "    choices = [doc['sol1'], doc['sol2'], *'abcdefgh']\n    random.shuffle(choices)\n"
        "    return {'choices': choices, 'gold': int(numpy.random.randint(10))}\n"
    )
    (tmp_path / "mine.yaml").write_text(
        "task: mine\ntest_split: test\noutput_type: multiple_choice\nprocess_docs: !function code.shuffled\n"
        "doc_to_text: goal\ndoc_to_choice: choices\ndoc_to_target: gold\n"
    )
    file = write(*[PIQA] * 5)
    found = []
    for seed in range(2):
        random.seed(seed)
        task = load_tasks(["mine"], {"mine": file}, [tmp_path], trust_code=True)["mine"]
        documents = [[(d.choices, d.gold) for d in build_documents(task)] for _ in range(2)]
        found += [(task_fingerprint(task), one) for one in documents]
    assert found == [found[0]] * 4
    assert len({tuple(choices) for choices, _ in found[0][1]}) == 5


def test_half_a_character_and_deep_json_name_the_line(write: Write) -> None:
    for line, fact in (('{"goal": "\\ud800"}', "ud800"), ("[" * 100_000, "nested")):
        file = write(PIQA)
        file.write_text(file.read_text() + line + "\n")
        with pytest.raises(TaskError, match=rf"{file.name}, line 2: .*{fact}"):
            load_tasks(["piqa"], {"piqa": file})


def test_both_halves_of_a_character_are_one(write: Write) -> None:
    file = write(PIQA)
    file.write_text(json.dumps(PIQA | {"goal": "\U0001f600"}) + "\n")  # as \\ud83d\\ude00
    assert build_documents(load_tasks(["piqa"], {"piqa": file})["piqa"])[0].content["goal"] == "\U0001f600"


def test_a_huge_folder_is_not_searched(tmp_path: Path) -> None:
    started = time.process_time()
    for ask in (lambda: load_tasks(["mine"], folders=["/"]), lambda: load_tasks(["/"])):
        with pytest.raises(InputError, match="/ has more than"):
            ask()
    (tmp_path / "mine.yaml").write_text("task: mine\ndataset_path: /\ntest_split: test\noutput_type: multiple_choice\n")
    with pytest.raises(InputError, match="/ has more than"):
        load_tasks(["mine"], folders=[tmp_path])
    assert time.process_time() - started < 10


def test_names_must_be_strings(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("task: a\n")
    (tmp_path / "b.yaml").write_text("task: 1\n")
    with pytest.raises(TaskError, match=f"{tmp_path}.*strings"):
        load_tasks(["a"], folders=[tmp_path])


def test_an_unknown_name_is_answered_without_parsing_all_files() -> None:
    started = time.process_time()
    with pytest.raises(TaskError, match=r"arc_eazy.*arc_easy"):
        load_tasks(["arc_eazy"])
    assert time.process_time() - started < 3


@pytest.mark.slow
def test_every_name_that_lm_eval_has_may_exist() -> None:
    names = all_tasks().all_tasks
    assert len(names) > 10_000
    for name in random.Random(0).sample(names, 60):
        assert names_like(name, LM_EVAL_TASKS)[0], name
