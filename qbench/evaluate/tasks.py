"""Tasks of lm-eval, found without indexing all of them, with local data files for machines without network access."""

import hashlib
import inspect
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
import lm_eval.utils
import yaml
from jinja2 import meta
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Kind
from lm_eval.tasks._yaml_loader import load_yaml

from qbench.errors import did_you_mean, one_line, why_not_downloaded
from qbench.evaluate.facts import files_below, is_task_path
from qbench.evaluate.local_data import TaskError, read_dataset
from qbench.evaluate.requests import seeded
from qbench.evaluate.task_code import LM_EVAL_TASKS, TaskCodeError, trusting
from qbench.evaluate.task_names import names_like

PathLike = str | os.PathLike[str]

# A file for the split that the task evaluates, or one file per split if few-shot examples come from another split.
DataFiles = PathLike | Mapping[str, PathLike]

SPLITS = ("test_split", "validation_split", "training_split", "fewshot_split")
FEWSHOT_SPLITS = (
    "fewshot_split",
    "training_split",
    "validation_split",
    "test_split",
)  # lm-eval uses the first that exists
TEMPLATES = ("doc_to_text", "doc_to_target", "doc_to_choice")
# Fields of a task's config that say where its documents are or what it is called, not what is computed from them.
NOT_CONTENT = {"dataset_path", "dataset_name", "dataset_kwargs", "custom_dataset", *SPLITS}
NOT_CONTENT |= {"task_alias", "tag", "metadata", "should_decontaminate", "doc_to_decontamination_query"}

log = logging.getLogger(__name__)

# Fields of a task file of which one says where its documents come from.
SOURCES = {"dataset_path", "custom_dataset", "class", "task_list", "group"}


class MissingDatasetError(TaskError):
    """A dataset that is not in the Hugging Face cache and could not be downloaded."""


class LocalTask(ConfigurableTask):
    """An lm-eval task whose documents are given."""

    def __init__(self, config: dict[str, Any], dataset: datasets.DatasetDict) -> None:
        self.dataset = dataset
        super().__init__(config=config)

    def download(self, *args: object, **kwargs: object) -> None:
        """Do nothing: the documents are given."""


@seeded()
def load_tasks(
    names: Sequence[str],
    data: Mapping[str, DataFiles] | None = None,
    folders: Sequence[PathLike] = (),
    num_fewshot: int | Mapping[str, int] | None = None,
    trust_code: bool = False,
) -> dict[str, Task]:
    """lm-eval's task objects by name; groups and tags expand to their tasks.

    names: tasks, groups or tags of `folders` or lm-eval, a task's .yaml file, or a folder of such files.
    data: local .jsonl files that replace a task's dataset; the rest of the task is unchanged.
    num_fewshot: for all tasks that take examples, or by name; by default what the task's file says, or 0.
    trust_code: run the functions that task files outside lm-eval's package name (`!function`); an error otherwise.
    """
    if isinstance(names, str):
        raise TaskError(f"names is the string {names!r}; it must be a list of task names.")
    data = data or {}
    tasks: dict[str, Task] = {}
    for name in names:
        manager, members = _find(name, folders)
        for member in members:
            try:
                with trusting(trust_code):
                    loaded = _load(manager, member, data, _shots(num_fewshot, member))
            except TaskCodeError as error:
                raise TaskCodeError(f"The task {member}: {error}") from None
            if twice := sorted(loaded.keys() & tasks.keys()):
                raise TaskError(f"The task {twice[0]} is listed twice; list each once.")
            tasks |= loaded
    shots = num_fewshot if isinstance(num_fewshot, Mapping) else {}
    for field, given in (("data", data), ("num_fewshot", shots)):
        if unused := [name for name in given if name not in tasks]:
            raise TaskError(
                f"{field} names the task {unused[0]}, which is not one of the tasks: {', '.join(tasks)}."
                + did_you_mean(unused[0], tasks)
            )
    for name, task in tasks.items():
        _set_fewshot(task, _shots(num_fewshot, name), explicit=name in shots)
    return tasks


@seeded()
def task_fingerprint(task: Task, limit: int | None = None) -> str:
    """A hash of everything that decides a task's numbers: version, config with its code, and the documents' content.

    Where the documents are does not count, so a local file with the Hub's documents has the same fingerprint.
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
    """A function as its name and a hash of its file, which may have functions that it calls; other values as text."""
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
    """The task manager that has a name, and the names that it expands to."""
    path = Path(name)
    if is_task_path(name):
        manager = _manager(path if path.is_dir() else path.parent)
        known = [entry for entry in manager.all_subtasks if path.is_dir() or _file(manager, entry) == path.resolve()]
        if not known:
            raise TaskError(
                f"{name} contains no task; it must be a .yaml file with 'task:', or a folder of such files."
            )
        return manager, known
    for given in folders:
        if not Path(given).is_dir():
            raise TaskError(f"{given} is not a folder; it must be a folder with task files (.yaml).")
    own = [_manager(folder) for folder in folders]
    # lm-eval keeps most tasks in a folder named after the first part of the task's name; reading all files takes 15 s.
    parts = name.split("_")
    likely = [LM_EVAL_TASKS / "_".join(parts[:end]) for end in range(len(parts), 0, -1)]
    own += [_manager(folder) for folder in likely if (folder / f"{name}.yaml").is_file()]
    for manager in own:
        if _is_whole(manager, name):
            return manager, [name]
    in_text, known = names_like(name, LM_EVAL_TASKS)
    if in_text or any(name in manager.task_index for manager in own):
        log.info("Looking for the task %s in all of lm-eval's files; this takes a while.", name)
        index = all_tasks(*(str(Path(folder).resolve()) for folder in folders))
        if name in index.task_index:
            return index, [name]
    raise TaskError(
        f"there is no task {name!r} in {' or '.join(['lm-eval', *map(str, folders)])}."
        + did_you_mean(name, [*known, *(str(found) for manager in own for found in manager.task_index)])
        + next((f" {problem}" for folder in folders for problem in _unreadable(Path(folder))), "")
    )


def _unreadable(folder: Path) -> Iterator[str]:
    """Why files of a folder were skipped: lm-eval says nothing about files that it cannot read."""
    for file in sorted(folder.rglob("*.yaml")):
        try:
            load_yaml(file, resolve_func=False)
        except MemoryError:
            raise
        except Exception as error:  # anything that YAML raises
            yield f"{file} was skipped: {one_line(error)}"


def _is_whole(manager: TaskManager, name: str) -> bool:
    """Whether the manager has this task, tag or group, and every task of the group."""
    entry = manager.task_index.get(name) if isinstance(name, str) else None
    if entry is None or entry.kind is not Kind.GROUP:
        return entry is not None
    members = (entry.cfg or {}).get("task")
    return isinstance(members, list) and all(own != name and _is_whole(manager, own) for own in members)


def _manager(folder: PathLike) -> TaskManager:
    files_below(Path(folder))
    try:
        return TaskManager(include_path=str(folder), include_defaults=False)
    except TypeError as error:  # it sorts the names
        raise TaskError(f"{folder}: the names of tasks, groups and tags must be strings ({error}).") from None


@cache
def all_tasks(*folders: str) -> TaskManager:
    """An index of all of lm-eval's tasks, and of those in folders."""
    return TaskManager(include_path=list(folders))


def _file(manager: TaskManager, name: str) -> Path | None:
    file = manager.task_index[name].yaml_path
    return file and file.resolve()


def _load(manager: TaskManager, name: str, data: Mapping[str, DataFiles], shots: int | None) -> dict[str, Task]:
    if name in data:
        return {name: _local_task(manager, name, data[name], shots)}
    _check_source(manager, name)
    try:
        tasks = manager.load([name])["tasks"]
    except TaskError:
        raise
    except Exception as error:  # anything that the Hub, the task's file, its functions or its templates raise
        if isinstance(error, OSError | datasets.exceptions.DatasetsError) or "Couldn't find cache" in str(error):
            local = (
                " Paths in a task file are relative to the working folder." if "Unable to find '/" in str(error) else ""
            )
            raise MissingDatasetError(
                f"The dataset of the task {name} is not in the Hugging Face cache and could not be downloaded "
                f"({why_not_downloaded(error)}).{local} Run `qbench fetch` on a machine with network access, or give a "
                f"local file: `data: {{{name}: FILE.jsonl}}`."
            ) from error
        file = _file(manager, name)
        if file and not SOURCES & load_yaml(file, resolve_func=False).keys():
            raise TaskError(
                f"The task {name} has no data: {file} does not name a dataset_path; give a file: "
                f"`data: {{{name}: FILE.jsonl}}`."
            ) from error
        raise TaskError(f"The task {name} ({file}) cannot be loaded: {one_line(error)}") from error
    if given := sorted(tasks.keys() & data.keys()):
        raise TaskError(
            f"data gives a file for {given[0]}, a task of the group {name}; list the task instead of the group."
        )
    return tasks


def _check_source(manager: TaskManager, name: str) -> None:
    """An error if the task's dataset is a huge folder, such as /: datasets would look at all its files."""
    config: dict[str, Any] = {}
    with suppress(yaml.YAMLError, OSError, ValueError):  # reported when the task is loaded
        config = load_yaml(file, resolve_func=False) if (file := _file(manager, name)) else {}
    arguments = config.get("dataset_kwargs")
    places = [config.get("dataset_path"), arguments.get("data_dir") if isinstance(arguments, dict) else None]
    for place in places:
        if isinstance(place, str) and os.path.isdir(place):
            files_below(Path(place))


def _local_task(manager: TaskManager, name: str, data: DataFiles, shots: int | None) -> Task:
    file = _file(manager, name)
    if file is None or name not in manager.all_subtasks:
        raise TaskError(f"data gives a file for {name}, which is a group; list its tasks instead.")
    config = _read_config(file, name)
    if "class" in config:
        raise TaskError(f"data gives a file for {name}, a task that loads its own data (`class` in {file}); remove it.")
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
                f"{name} takes its {shots} few-shot examples from the split {source!r}, which has no file; "
                f"give one per split: `data: {{{name}: {{{', '.join(f'{s}: FILE' for s in (*files, source))}}}}}`."
            )
    elif examples.get("split") not in files:
        examples.pop("split", None)
    # The task does not have splits without a file.
    config |= {key: None for key in SPLITS if config.get(key) not in files}
    config |= {"fewshot_config": examples or None, "metadata": {**(config.get("metadata") or {})}}
    try:
        return LocalTask(config, datasets.DatasetDict(dataset))
    except TaskError:
        raise
    except Exception as error:  # lm-eval tries its templates on the first document
        first = files[_evaluated(config)]
        raise TaskError(f"{name}, document 0 ({first}): {one_line(error)}") from error


def _read_config(file: Path, name: str) -> dict[str, Any]:
    """A task file with its functions; an error if the fields that are used here have other types."""
    try:
        config = load_yaml(file)
    except TaskError:
        raise
    except Exception as error:  # anything that YAML and the modules of its functions raise
        raise TaskError(f"The task {name} ({file}) cannot be loaded: {one_line(error)}") from error
    for fields, kind, what in ((SPLITS, str, "a string"), (("fewshot_config", "metadata"), dict, "a mapping")):
        for field in fields:
            if not isinstance(config.get(field) or kind(), kind):
                raise TaskError(f"{file}: {field} is {config[field]!r}; it must be {what}.")
    if not (config.get("test_split") or config.get("validation_split")):
        raise TaskError(f"{file}: the task has neither test_split nor validation_split; it must have one of them.")
    return config


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
                f"data gives {name} a file for the split {split!r}; its splits are {', '.join(known)}."
                + did_you_mean(split, known)
            )
    if evaluated not in data:
        raise TaskError(f"{name} is evaluated on the split {evaluated!r}, but data has no file for it.")
    return dict(data)


def _template_fields(config: Mapping[str, Any]) -> list[str]:
    """The fields that a task's templates need from every document."""
    env = lm_eval.utils.env
    templates = [config[key] for key in TEMPLATES if isinstance(config.get(key), str)]
    fields = {field for template in templates for field in meta.find_undeclared_variables(env.parse(template))}
    # A bare word is a field's name or, if there is no such field, literal text; only a gold index cannot be text.
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
    """As in lm-eval: a task whose file says 0 keeps it, and one that scores whole pages takes no examples."""
    fixed = task.config.num_fewshot == 0 or task.OUTPUT_TYPE == "loglikelihood_rolling"
    if shots and fixed and explicit:
        raise TaskError(f"num_fewshot of {task.task_name} is {shots}; the task takes no examples, so it must be 0.")
    if task.config.num_fewshot is None or (shots is not None and not fixed):
        task.set_config("num_fewshot", 0 if fixed else shots or 0)
