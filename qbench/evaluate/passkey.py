"""Passkey: find a number that is hidden in filler text; one task per length in tokens. Imports no torch.

The test of LongHeads (arXiv 2402.10685) and of the Softpick paper in our own words. Documents are generated: each
trial draws its key and place from its own seed, so the first trials are the same for any number of trials.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.errors import InputError
from qbench.evaluate.facts import TaskSummary
from qbench.identity import json_hash, source_hash
from qbench.records.metrics import passkey_task

if TYPE_CHECKING:
    from lm_eval.api.task import Task

INTRODUCTION = (
    "Somewhere in the long text below there is one piece of important information. Everything else in it is of no use. "
    "Find the information and memorize it: there will be a question about it at the end."
)
FILLER = (
    "The river runs down to the sea. The wind moves the leaves. A bird sings in the old tree. "
    "Rain falls on the hills. The moon comes up at night. "
)
HIDDEN = "The pass key is {key}. Remember it well: {key} is the pass key."
QUESTION = "What is the pass key that was hidden in the text? The pass key is"

# The paper's ⌊3.75·k⌋·1024 characters, k = 1 … 5, in tokens of its tokenizer of 32,000.
PAPER_LENGTHS = (890, 1983, 3075, 4167, 4986)
LARGEST_KEY = 49_999
# A tokenizer needs at most one token per digit: five, one for the space before them, and some to see that they end.
NEW_TOKENS = 8
MAX_TRIES = 16  # to reach a length; most documents need two or three
CHARACTERS_PER_TOKEN = 4  # for estimates

Count = Callable[[str], int]  # how many tokens a text has, including special tokens that the model reads


class PasskeyError(InputError):
    """Settings from which no document can be made, explained in a sentence."""


@dataclass(frozen=True)
class PasskeySettings:
    """The settings of a recipe; the defaults here are the only ones."""

    lengths: tuple[int, ...] = PAPER_LENGTHS  # of the prompt, in tokens
    trials: int = 200  # of each length
    seed: int = 0

    def number(self, limit: int | None) -> int:
        """How many trials of each length are run."""
        return min(self.trials, limit or self.trials)

    def fingerprint(self, length: int, limit: int | None = None) -> str:
        """A hash of what decides a length's documents and scores, except the tokenizer, which a cell's identity has."""
        code = source_hash(Path(__file__).read_bytes())
        return json_hash([passkey_task(length), self.number(limit), self.seed, code])

    def summaries(self, limit: int | None = None) -> dict[str, TaskSummary]:
        """The identity and size of each task; does not need torch or a tokenizer."""
        return {passkey_task(length): self._summary(length, limit) for length in self.lengths}

    def _summary(self, length: int, limit: int | None) -> TaskSummary:
        trials, characters = self.number(limit), length * CHARACTERS_PER_TOKEN
        return TaskSummary(
            fingerprint=self.fingerprint(length, limit),
            num_fewshot=0,
            documents=trials,
            requests=trials,
            read=trials * characters,
            scored=trials * NEW_TOKENS * CHARACTERS_PER_TOKEN,
            attended=trials * characters**2 // 2,
            pages=False,
            sample=FILLER,
            files=(),
        )


def passkey_tasks(settings: PasskeySettings, count: Count, limit: int | None = None) -> "dict[str, Task]":
    """A task for each length, with documents for the tokenizer that `count` counts with; limit: trials of each."""
    return {passkey_task(length): _task(settings, length, count, limit) for length in settings.lengths}


def passkey_documents(settings: PasskeySettings, length: int, count: Count, trials: int) -> list[dict[str, Any]]:
    """The first trials of a length: the prompt, its key, its length in tokens and where the key is, from 0 to 1.

    A prompt has as many tokens as fit the length; filler is cut at characters, so it may be one or two tokens short.
    """
    bare = count(_prompt(LARGEST_KEY, 0, 0))
    if bare > length:
        raise PasskeyError(
            f"passkey: a length of {length} tokens is too short: without any filler the prompt has {bare} with this "
            f"tokenizer; lengths must be {bare} or more."
        )
    sample = 64 * FILLER
    characters_per_token = len(sample) / count(sample)
    documents = []
    for trial in range(trials):
        draw = random.Random(f"{settings.seed} {length} {trial}")
        key, place = draw.randint(1, LARGEST_KEY), draw.random()
        start = int((length - bare) * characters_per_token)
        prompt, tokens = _fitted(key, place, start, length, count, characters_per_token)
        documents.append({"prompt": prompt, "key": key, "tokens": tokens, "place": place})
    return documents


def is_right(response: str, key: int) -> bool:
    """Whether the first number in a response is exactly the key."""
    found = re.search("[0-9]+", response)
    return found is not None and found[0] == str(key)


def _fitted(
    key: int, place: float, characters: int, length: int, count: Count, characters_per_token: float
) -> tuple[str, int]:
    """The longest prompt found within the length, and its tokens; characters: how much filler to start with."""
    best, most = _prompt(key, 0, 0), 0
    short, long = -1, 4 * characters + 64  # the length is reached between these numbers of characters
    for _ in range(MAX_TRIES):
        before = int(place * (characters + 1))
        prompt = _prompt(key, before, characters - before)
        tokens = count(prompt)
        if most < tokens <= length:
            best, most = prompt, tokens
        short, long = (characters, long) if tokens <= length else (short, characters)
        if tokens == length or long - short <= 1:
            break
        characters += int((length - tokens) * characters_per_token)
        if not short < characters < long:  # a cut word may have more tokens than a whole one
            characters = (short + long) // 2
    return best, most


def _prompt(key: int, before: int, after: int) -> str:
    """The five lines; before, after: characters of filler before and after the key."""
    return "\n".join([INTRODUCTION, _filler(before), HIDDEN.format(key=key), _filler(after), QUESTION])


def _filler(characters: int) -> str:
    return (FILLER * (characters // len(FILLER) + 1))[:characters]


def _score(document: dict[str, Any], responses: list[str]) -> dict[str, float]:
    return {"acc": float(is_right(responses[0], document["key"]))}


def _task(settings: PasskeySettings, length: int, count: Count, limit: int | None) -> "Task":
    import datasets

    from qbench.evaluate.tasks import LocalTask

    config = {
        "task": passkey_task(length),
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{key}}",
        "process_results": _score,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": NEW_TOKENS},
        "num_fewshot": 0,
    }
    documents = passkey_documents(settings, length, count, settings.number(limit))
    return LocalTask(config, datasets.DatasetDict({"test": datasets.Dataset.from_list(documents)}))
