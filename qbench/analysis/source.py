"""Reads the texts of an analysis: the first ones of a source, each separately and from its first token."""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qbench.numbers import counted
from qbench.quantizers.calibration import Calibration, documents
from qbench.records.analysis import AnalysisError

BLANK_LINE = re.compile(r"\n[ \t]*\n\s*")


def read_texts(source: Calibration, tokenizer: Any) -> tuple[list[Tensor], list[str]]:
    """The token ids [length] of the first source.samples texts, and a note if there are fewer.

    Uses the tokenizer's default settings, and cuts texts at source.length tokens.
    """
    found = list(islice(_texts(source, tokenizer), source.samples))
    if not found:
        raise AnalysisError(f"{source.source} contains no text; an analysis needs at least one text.")
    missing = source.samples - len(found)
    notes = [f"{source.source} has {counted(len(found), 'text')}, but samples is {source.samples}."] if missing else []
    return [token_ids(text, tokenizer, source.length) for text in found], notes


def token_ids(text: str, tokenizer: Any, length: int) -> Tensor:
    """The first token ids of a text, [length] or fewer."""
    ids = tokenizer(text, verbose=False)["input_ids"]  # verbose would warn about texts longer than the model's limit
    return torch.tensor(ids[:length], dtype=torch.int64)


def _texts(source: Calibration, tokenizer: Any) -> Iterator[str]:
    """One text per line of a .jsonl file or row of a dataset. In a .txt file, blank lines separate texts, or, if it
    contains the token that begins or ends a text (`<s>`), that token does."""
    for document in documents(source):
        if source.is_file and Path(source.source).suffix != ".jsonl":
            yield from _parts(document, tokenizer)
        else:
            yield document


def _parts(content: str, tokenizer: Any) -> Iterator[str]:
    between = [token for token in (tokenizer.bos_token, tokenizer.eos_token) if token and token in content]
    parts = re.split("|".join(map(re.escape, between)), content) if between else BLANK_LINE.split(content)
    yield from (part.strip("\n") for part in parts if part.strip())
