"""The texts of an analysis from a source: the first ones, each on its own and from its first token."""

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
    """The token ids [length] of the first source.samples texts, and a sentence if there are fewer.

    They are tokenized as the tokenizer does by default, and cut at source.length tokens.
    """
    found = list(islice(_texts(source, tokenizer), source.samples))
    if not found:
        raise AnalysisError(f"{source.source} has no text; an analysis needs one.")
    missing = source.samples - len(found)
    notes = [f"{source.source} has {counted(len(found), 'text')} of the {source.samples} asked for."] if missing else []
    return [token_ids(text, tokenizer, source.length) for text in found], notes


def token_ids(text: str, tokenizer: Any, length: int) -> Tensor:
    """The first token ids of a text, [length] or fewer."""
    ids = tokenizer(text, verbose=False)["input_ids"]  # verbose: it may be longer than the model takes
    return torch.tensor(ids[:length], dtype=torch.int64)


def _texts(source: Calibration, tokenizer: Any) -> Iterator[str]:
    """A line of a .jsonl file and a row of a dataset are a text. A .txt file has them between blank lines, or, if the
    token that begins or ends a text is written in it (`<s>`), between those."""
    for document in documents(source):
        if source.is_file and Path(source.source).suffix != ".jsonl":
            yield from _parts(document, tokenizer)
        else:
            yield document


def _parts(content: str, tokenizer: Any) -> Iterator[str]:
    between = [token for token in (tokenizer.bos_token, tokenizer.eos_token) if token and token in content]
    parts = re.split("|".join(map(re.escape, between)), content) if between else BLANK_LINE.split(content)
    yield from (part.strip("\n") for part in parts if part.strip())
