"""One samples_*.jsonl: a line per document and filter, as one row per document."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qbench.errors import shown
from qbench.files import MAX_FILE_BYTES, read_content
from qbench.records.limits import MAX_LOGLIKELIHOOD
from qbench.records.lm_eval_import.fields import LmEvalError, is_number, parse, required
from qbench.records.lm_eval_import.gold import Choices, right_choices
from qbench.records.lm_eval_import.results_file import LmEvalScore, LmEvalTask
from qbench.records.samples import WEIGHT

HASHES = ("doc_hash", "prompt_hash", "target_hash")
HASH_LETTERS = 16  # of a document's hash in records
MAX_ID = 2**31 - 1
MUTUAL_INFORMATION = "acc_mutual_info"  # asks for each choice twice, the second time without a context


@dataclass
class SampledDocument:
    """One document: its row of samples, and what it is known by."""

    row: dict[str, Any]
    hashes: tuple[str, ...]  # of document, prompt and target, by lm-eval
    choices: Choices | None
    filters: dict[str, int] = field(default_factory=dict)  # the lines of the filters that were read


@dataclass(frozen=True)
class SamplesFile:
    """The documents of one task in the order of the file."""

    path: Path
    documents: Sequence[SampledDocument]
    generation: str  # a hash of how text was generated; empty if none was

    def digest(self, name: str) -> str:
        """A hash of one of HASHES of all documents, whatever their order."""
        which = HASHES.index(name)
        return _hash("\n".join(sorted(document.hashes[which] for document in self.documents)))


def read_samples_file(path: Path, task: LmEvalTask) -> SamplesFile:
    """Read the per-document results of a task; an error names the line that is wrong."""
    filters = list(dict.fromkeys(score.filter for score in task.scores))
    found: dict[int, SampledDocument] = {}
    generation = ""
    for number, sample in _lines(path):
        where = f"{path}, line {number}"
        doc_id = required(sample, "doc_id", int, where)
        if not 0 <= doc_id <= MAX_ID:
            raise LmEvalError(f"{where}: doc_id is {doc_id}; it must be the number of a document, 0 or more.")
        if doc_id not in found:
            found[doc_id] = _document(sample, task, where)
            generation = generation or _generation(sample)
        document = found[doc_id]
        filter_name = _filter(sample, filters, document.filters, where)
        document.filters[filter_name] = number
        for score in task.scores:
            if score.filter == filter_name:
                document.row |= _values(score, sample.get(score.metric), where)
    documents = list(found.values())
    if not documents:
        raise LmEvalError(f"{path} is empty; it must have one line per document.")
    with_choices = [(document, document.choices) for document in documents if document.choices]
    for (document, _), gold in zip(with_choices, right_choices([own for _, own in with_choices]), strict=True):
        document.row["gold"] = gold
    return SamplesFile(path, documents, generation)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(read_content(path, LmEvalError, MAX_FILE_BYTES).split(b"\n"), start=1):
        if line.strip():
            yield number, parse(line, f"{path}, line {number}")


def _filter(sample: Mapping[str, Any], filters: Sequence[str], seen: Mapping[str, int], where: str) -> str:
    """The filter of a line. Older releases do not write it, but all documents of one filter after another."""
    name = sample.get("filter")
    if not isinstance(name, str):
        name = next((own for own in filters if own not in seen), filters[-1])
    if name in seen:
        again = "" if name == "none" else f" for the filter {name}"
        raise LmEvalError(
            f"{where}: document {sample['doc_id']} appears a second time (first on line {seen[name]}); it must "
            f"appear once{again}."
        )
    return name


def _values(score: LmEvalScore, value: Any, where: str) -> dict[str, float]:
    """A document's value of a metric, and its weight if it has one; nothing if it has none (a pair of texts)."""
    parts = value if score.is_weighted and isinstance(value, list) and len(value) == 2 else [value]
    if not all(map(is_number, parts)) or (score.may_lack_values and value != value):
        return {}
    if not all(abs(part) <= MAX_LOGLIKELIHOOD for part in parts):
        raise LmEvalError(f"{where}: {score.metric} is {shown(value)}; it must be a finite number below a trillion.")
    if len(parts) == 2 and parts[1] <= 0:
        raise LmEvalError(
            f"{where}: {score.metric} is {shown(value)}; the second number is a divisor, and must be above 0."
        )
    return dict(zip((score.name, score.name + WEIGHT), map(float, parts), strict=False))


def _document(sample: Mapping[str, Any], task: LmEvalTask, where: str) -> SampledDocument:
    """A document without its metrics. Two are the same if their prompts, targets and task versions are the same."""
    hashes = tuple(required(sample, name, str, where) for name in HASHES)
    requests, responses = _requests(required(sample, "arguments", (dict, list), where)), sample.get("resps")
    if not isinstance(responses, list) or len(responses) != len(requests) or not responses:
        raise LmEvalError(f"{where}: resps must be a list with one entry per request ({len(requests)} in arguments).")
    if not all(requests):
        raise LmEvalError(f"{where}: arguments has a request without a text.")
    first = [own[0] if isinstance(own, list) and own else own for own in responses]  # of the repeats
    row: dict[str, Any] = {"task": task.name, "doc_id": sample["doc_id"]}
    row["doc_hash"] = _hash("\n".join([*hashes, task.version]))
    row |= dict.fromkeys(("gold", "target", "response", "loglikelihoods", "is_greedy", "characters", "bytes", "tokens"))
    if any(isinstance(part, dict) for request in requests for part in request):
        row |= {"target": _clean(sample.get("target")), "response": _clean(first[0])}
        return SampledDocument(row, hashes, None)
    is_page = all(len(request) == 1 for request in requests)
    scored = [_scored(own, is_page, where) for own in first]
    row["loglikelihoods"] = scores = [_loglikelihood(own, where) for own, _ in scored]
    texts = [str(request[-1]) for request in requests]
    choices = None
    if not is_page:
        row["is_greedy"] = [str(greedy) == "True" for _, greedy in scored]
    if not is_page and (len(requests) > 1 or task.output_type == "multiple_choice"):
        texts = [text.removeprefix(task.target_delimiter) for text in texts]
        texts = texts[: len(texts) // 2] if MUTUAL_INFORMATION in sample else texts
        choices = Choices(texts, scores[: len(texts)], sample.get("target"), sample.get("acc"))
    elif not is_page:
        row["target"] = _clean(texts[0])
    row["characters"], row["bytes"] = [len(t) for t in texts], [len(t.encode(errors="replace")) for t in texts]
    return SampledDocument(row, hashes, choices)


def _scored(response: Any, is_page: bool, where: str) -> tuple[Any, Any]:
    """The log-likelihood, and whether greedy decoding gives the text; for a page, only the former is known."""
    if is_page:
        return response[0] if isinstance(response, list) and response else response, None
    if isinstance(response, list) and len(response) == 2:
        return response[0], response[1]
    raise LmEvalError(f"{where}: resps has {shown(response)}; it must be a log-likelihood and True or False.")


def _loglikelihood(value: Any, where: str) -> float:
    """lm-eval writes it as text."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isnan(number) or number == math.inf:
        raise LmEvalError(f"{where}: resps has {shown(value)} as a log-likelihood; it must be a number.")
    return number


def _requests(arguments: Any) -> list[list[Any]]:
    """What the model was asked: a list of lists, or in newer releases {gen_args_0: {arg_0: …}}."""
    asked = arguments.values() if isinstance(arguments, dict) else arguments
    return [list(own.values()) if isinstance(own, dict) else own if isinstance(own, list) else [own] for own in asked]


def _generation(sample: Mapping[str, Any]) -> str:
    """A hash of the settings for generated text, which follow the prompt; empty for tasks that score."""
    settings = [own for request in _requests(sample["arguments"]) for own in request[1:2] if isinstance(own, dict)]
    return _hash(json.dumps(settings, sort_keys=True)) if settings else ""


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:HASH_LETTERS]


def _clean(text: Any) -> str | None:
    """A text that a file can hold: a lone surrogate is replaced."""
    return None if text is None else str(text).encode(errors="replace").decode()
