"""Tasks: lm-eval's own, found without indexing all of them, with local data files where a node has no network."""

import hashlib
import inspect
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache, lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
import lm_eval.utils
from jinja2 import meta
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from qbench.errors import did_you_mean, one_line
from qbench.evaluate.facts import is_task_path
from qbench.evaluate.local_data import TaskError, read_dataset
from qbench.evaluate.requests import seeded

PathLike = str | os.PathLike[str]

# A file for the split that the task evaluates, or one file a split where few-shot examples come from another.
DataFiles = PathLike | Mapping[str, PathLike]

SPLITS = ("test_split", "validation_split", "training_split", "fewshot_split")
FEWSHOT_SPLITS = ("fewshot_split", "training_split", "validation_split", "test_split")  # lm-eval takes the first there
TEMPLATES = ("doc_to_text", "doc_to_target", "doc_to_choice")
# Fields of a task's config that say where its documents are or what it is called, not what is computed from them.
NOT_CONTENT = {"dataset_path", "dataset_name", "dataset_kwargs", "custom_dataset", *SPLITS}
NOT_CONTENT |= {"task_alias", "tag", "metadata", "should_decontaminate", "doc_to_decontamination_query"}

log = logging.getLogger(__name__)

# Fields of a task file of which one says where its documents come from.
SOURCES = {"dataset_path", "custom_dataset", "class", "task_list", "group"}
# lm-eval compiles a task's template anew for every document, which takes a hundred times as long as to render it.
lm_eval.utils.env.from_string = lru_cache(maxsize=4096)(lm_eval.utils.env.from_string)


class MissingDatasetError(TaskError):
    """A dataset that is neither in the Hugging Face cache nor to be had."""


class LocalTask(ConfigurableTask):
    """An lm-eval task whose documents are given."""

    def __init__(self, config: dict[str, Any], dataset: datasets.DatasetDict) -> None:
        self.dataset = dataset
        super().__init__(config=config)

    def download(self, *args: object, **kwargs: object) -> None:
        """Nothing: the documents are here."""


@seeded()
def load_tasks(
    names: Sequence[str],
    data: Mapping[str, DataFiles] | None = None,
    folders: Sequence[PathLike] = (),
    num_fewshot: int | Mapping[str, int] | None = None,
) -> dict[str, Task]:
    """lm-eval's task objects by name; groups and tags stand for their tasks.

    names: of tasks, groups or tags in `folders` or of lm-eval, or a task's .yaml file, or a folder of such files.
    data: local .jsonl files that take the place of a task's dataset; the rest of the task stays as it is.
    num_fewshot: for all tasks that take examples, or by name; by default what the task's file says, or 0.
    """
    if isinstance(names, str):
        raise TaskError(f"names is the string {names!r}; it must be a list of task names.")
    data = data or {}
    tasks: dict[str, Task] = {}
    for name in names:
        manager, members = _find(name, folders)
        for member in members:
            loaded = _load(manager, member, data, _shots(num_fewshot, member))
            if twice := sorted(loaded.keys() & tasks.keys()):
                raise TaskError(f"The task {twice[0]} is named twice; each must be named once.")
            tasks |= loaded
    shots = num_fewshot if isinstance(num_fewshot, Mapping) else {}
    for field, given in (("data", data), ("num_fewshot", shots)):
        if unused := [name for name in given if name not in tasks]:
            raise TaskError(
                f"{field} names the task {unused[0]}, which is not loaded; these are: {', '.join(tasks)}."
                + did_you_mean(unused[0], tasks)
            )
    for name, task in tasks.items():
        _set_fewshot(task, _shots(num_fewshot, name), explicit=name in shots)
    return tasks


@seeded()
def task_fingerprint(task: Task, limit: int | None = None) -> str:
    """A hash of all that decides a task's numbers: version, config with its code, and the documents' content.

    Where the documents are does not enter, so a file with the hub's documents has the hub's fingerprint.
    """
    config = {key: value for key, value in asdict(task.config).items() if key not in NOT_CONTENT}
    config["fewshot_config"] = {**(config.get("fewshot_config") or {}), "split": None}
    digest = hashlib.sha256()
    digest.update(_canonical([task.task_name, task.VERSION, config]))
    for doc in islice(task.eval_docs, limit):
        digest.update(_canonical(doc))
    if task.config.num_fewshot:
        digest.update(_canonical(list(task.fewshot_docs())))
    return digest.hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=_code).encode() + b"\n"


def _code(value: Any) -> Any:
    """A function as its name and the file it is from, which has the functions that it calls too; else its text."""
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if not callable(value):
        return str(value)
    named = inspect.unwrap(value) if inspect.isroutine(value) or inspect.isclass(value) else type(value)
    try:
        file = inspect.getsourcefile(named)
    except TypeError:  # a function that is not written in Python
        file = None
    source = Path(file).read_bytes() if file else b""
    return f"{getattr(value, '__qualname__', type(value).__name__)} {hashlib.sha256(source).hexdigest()}"


def _find(name: str, folders: Sequence[PathLike]) -> tuple[TaskManager, list[str]]:
    """The task manager that knows a name, and the names that it stands for."""
    path = Path(name)
    if is_task_path(name):
        manager = _manager(path if path.is_dir() else path.parent)
        known = [entry for entry in manager.all_subtasks if path.is_dir() or _file(manager, entry) == path.resolve()]
        if not known:
            raise TaskError(f"{name}: no task there; it must be a .yaml file with 'task:' in it, or a folder of such.")
        return manager, known
    for given in folders:
        if not Path(given).is_dir():
            raise TaskError(f"{given} is not a folder; it must be one with task files (.yaml).")
    own = [_manager(folder) for folder in folders]
    # lm-eval mostly keeps a task in the folder of the first part of its name; all of its files take 15 s to read.
    root, parts = Path(lm_eval.tasks.__file__).parent, name.split("_")
    likely = [root / "_".join(parts[:end]) for end in range(len(parts), 0, -1)]
    own += [_manager(folder) for folder in likely if (folder / f"{name}.yaml").is_file()]
    for manager in own:
        if name in manager.all_subtasks:
            return manager, [name]
    log.info("Looking for the task %s in all of lm-eval's files, which takes a while.", name)
    index = all_tasks(*(str(Path(folder).resolve()) for folder in folders))
    if name not in index.task_index:
        raise TaskError(
            f"There is no task {name!r}, neither in lm-eval nor in {', '.join(map(str, folders)) or 'a folder given'}."
            + did_you_mean(name, index.all_tasks)
        )
    return index, [name]


def _manager(folder: PathLike) -> TaskManager:
    return TaskManager(include_path=str(folder), include_defaults=False)


@cache
def all_tasks(*folders: str) -> TaskManager:
    """All of lm-eval's tasks, and those in folders."""
    return TaskManager(include_path=list(folders))


def _file(manager: TaskManager, name: str) -> Path | None:
    file = manager.task_index[name].yaml_path
    return file and file.resolve()


def _load(manager: TaskManager, name: str, data: Mapping[str, DataFiles], shots: int | None) -> dict[str, Task]:
    if name in data:
        return {name: _local_task(manager, name, data[name], shots)}
    try:
        tasks = manager.load([name])["tasks"]
    except Exception as error:  # whatever the hub, the task's file, its functions and its templates raise
        if isinstance(error, OSError | datasets.exceptions.DatasetsError) or "Couldn't find cache" in str(error):
            raise MissingDatasetError(
                f"The dataset of the task {name} is not in the Hugging Face cache and could not be downloaded "
                f"({one_line(error)}). Run `qbench fetch` where there is network, or give a file: "
                f"`data: {{{name}: FILE.jsonl}}`."
            ) from error
        file = _file(manager, name)
        if file and not SOURCES & load_yaml(file, resolve_func=False).keys():
            raise TaskError(
                f"The task {name} has no data: {file} names no dataset_path; give it a file: "
                f"`data: {{{name}: FILE.jsonl}}`."
            ) from error
        raise TaskError(f"The task {name} ({file}) cannot be loaded: {one_line(error)}") from error
    if given := sorted(tasks.keys() & data.keys()):
        raise TaskError(f"data gives a file to {given[0]}, a task of the group {name}; name the task instead.")
    return tasks


def _local_task(manager: TaskManager, name: str, data: DataFiles, shots: int | None) -> Task:
    file = _file(manager, name)
    if file is None or name not in manager.all_subtasks:
        raise TaskError(f"data gives a file to {name}, which is a group of tasks; name its tasks one by one instead.")
    config = load_yaml(file)
    if "class" in config:
        raise TaskError(f"data names {name}, a task that loads its own data (`class` in {file}); take it out.")
    config = {key: value for key, value in config.items() if key not in ("tag", "group", "task_list")}
    files = _files_by_split(name, config, data)
    needed = [] if "process_docs" in config else _template_fields(config)
    dataset = {split: read_dataset(Path(path), name, needed) for split, path in files.items()}

    examples = dict(config.get("fewshot_config") or {})
    source = examples.get("split") or next(filter(None, map(config.get, FEWSHOT_SPLITS)))
    shots = config.get("num_fewshot") if shots is None else shots
    if shots and "samples" not in examples and config.get("output_type") != "loglikelihood_rolling":
        if source not in files:
            raise TaskError(
                f"{name} takes its {shots} few-shot examples from the split {source!r}, for which there is no file; "
                f"give one per split: `data: {{{name}: {{{', '.join(f'{s}: FILE' for s in (*files, source))}}}}}`."
            )
    elif examples.get("split") not in files:
        examples.pop("split", None)
    # A split without a file is one the task does not have.
    config |= {key: None for key in SPLITS if config.get(key) not in files}
    config |= {"fewshot_config": examples or None, "metadata": {**(config.get("metadata") or {})}}
    try:
        return LocalTask(config, datasets.DatasetDict(dataset))
    except Exception as error:  # lm-eval tries its templates on the first document
        first = files[_evaluated(config)]
        raise TaskError(f"{name}, document 0 ({first}): {one_line(error)}") from error


def _evaluated(config: Mapping[str, Any]) -> str:
    return config.get("test_split") or config["validation_split"]


def _files_by_split(name: str, config: Mapping[str, Any], data: DataFiles) -> dict[str, PathLike]:
    evaluated = _evaluated(config)
    if not isinstance(data, Mapping):
        return {evaluated: data}
    known = dict.fromkeys(config[key] for key in SPLITS if config.get(key))
    for split in data:
        if split not in known:
            raise TaskError(
                f"data gives {name} a file for the split {split!r}; the task has {', '.join(known)}."
                + did_you_mean(split, known)
            )
    if evaluated not in data:
        raise TaskError(f"data gives {name} no file for the split {evaluated!r}, which is the one it evaluates.")
    return dict(data)


def _template_fields(config: Mapping[str, Any]) -> list[str]:
    """The fields that a task's templates take from every document."""
    env = lm_eval.utils.env
    templates = [config[key] for key in TEMPLATES if isinstance(config.get(key), str)]
    fields = {field for template in templates for field in meta.find_undeclared_variables(env.parse(template))}
    # A bare word is a field's name, or a text of its own where no such field is; only a gold index cannot be that.
    target = config.get("doc_to_target")
    if config.get("output_type") == "multiple_choice" and isinstance(target, str) and target.isidentifier():
        fields.add(target)
    return sorted(fields)


def _shots(num_fewshot: int | Mapping[str, int] | None, name: str) -> int | None:
    shots = num_fewshot.get(name) if isinstance(num_fewshot, Mapping) else num_fewshot
    if shots is not None and (type(shots) is not int or shots < 0):
        raise TaskError(f"num_fewshot of {name} is {shots!r}; it must be 0 or a positive whole number.")
    return shots


def _set_fewshot(task: Task, shots: int | None, explicit: bool) -> None:
    """As lm-eval does: a task whose file says 0 keeps it, and one that scores whole pages has no place for examples."""
    fixed = task.config.num_fewshot == 0 or task.OUTPUT_TYPE == "loglikelihood_rolling"
    if shots and fixed and explicit:
        raise TaskError(f"num_fewshot of {task.task_name} is {shots}; the task takes no examples, so it must be 0.")
    if task.config.num_fewshot is None or (shots is not None and not fixed):
        task.set_config("num_fewshot", 0 if fixed else shots or 0)
