"""A task's documents as lm-eval's requests, checked before any model runs."""

import io
import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.task import Task
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

from qbench.errors import one_line
from qbench.evaluate.local_data import TaskError


@dataclass(frozen=True)
class Document:
    """One document: what the model is asked, and the right answer."""

    id: int
    content: Any
    requests: list[Instance]
    choices: list[str] | None = None  # None if the task has none
    gold: list[int] | None = None  # the choices that are right


@contextmanager
def seeded() -> Iterator[None]:
    """Set lm-eval's seeds while a task's functions run: some, such as gpqa's, shuffle their choices when called."""
    before = random.getstate(), np.random.get_state()
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def build_documents(task: Task, limit: int | None = None, seed: int = DEFAULT_OTHER_SEED) -> list[Document]:
    """The first `limit` documents of a task with their requests; seed decides the few-shot examples."""
    if limit is not None and (type(limit) is not int or limit < 1):
        raise TaskError(f"limit of {task.task_name} is {limit!r}; it must be a positive whole number of documents.")
    task.set_fewshot_seed(seed)
    try:
        with seeded(), redirect_stderr(io.StringIO()):  # lm-eval's progress bar for every task
            task.build_all_requests(limit=limit)
    except Exception as error:  # whatever a task's functions and templates raise, without the document's number
        raise _blame(task, limit, error) from error
    requests = defaultdict(list)
    for request in task.instances:
        requests[request.doc_id].append(request)
    return [_document(task, number, found) for number, found in requests.items()]


def _document(task: Task, number: int, requests: list[Instance]) -> Document:
    where = f"{task.task_name}, document {number}"
    content = requests[0].doc
    for request in requests:
        # The last argument of a request is scored; the first is what text is generated from.
        generates = request.request_type == "generate_until"
        if not str(request.args[0 if generates else -1]).strip():
            part = f"choice {request.idx} is" if len(requests) > 1 else "it is"
            raise TaskError(f"{where}: {part} empty; there must be text to score.")
    if task.OUTPUT_TYPE != "multiple_choice":
        return Document(number, content, requests)
    choices = task.doc_to_choice(content)
    answer = task.doc_to_text(content) if task.multiple_input else task.doc_to_target(content)
    answers = answer if isinstance(answer, list) else [answer]
    gold = [choices.index(right) if right in choices else right for right in answers]
    if not all(isinstance(index, int | np.integer) and 0 <= index < len(choices) for index in gold):
        raise TaskError(
            f"{where}: the right answer is {answer!r}, not one of the {len(choices)} choices {choices}; lm-eval "
            "would count it as wrong for every model."
        )
    return Document(number, content, requests, choices, gold)


def _blame(task: Task, limit: int | None, error: Exception) -> TaskError:
    """The error with the number of the first document that raises it."""
    shots = task.config.num_fewshot or 0
    number: int | str = "?"
    try:
        for number, doc in task.doc_iterator(limit=limit):
            context = task.fewshot_context(doc, num_fewshot=shots, gen_prefix=task.doc_to_prefix(doc))
            task.construct_requests(doc=doc, ctx=context, metadata=(task.task_name, number, 1))
    except Exception as found:
        error = found
    return TaskError(f"{task.task_name}, document {number}: the prompt could not be built ({one_line(error)}).")
