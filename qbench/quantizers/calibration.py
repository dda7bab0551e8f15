"""Calibration text: a named source, and windows drawn from it. Imports torch only to make tokens."""

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from qbench.errors import did_you_mean, why_not_downloaded
from qbench.files import parse_json
from qbench.quantizers.declaration import QuantizeError
from qbench.validation import problem

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

# Named sources, as arguments of datasets.load_dataset; a commit pins what is read.
NAMED: dict[str, dict[str, str]] = {
    "wikitext2": {
        "path": "Salesforce/wikitext",
        "name": "wikitext-2-raw-v1",
        "revision": "b08601e04326c79dfdd32d625aee71d232d685c3",
    },
    "c4": {
        "path": "allenai/c4",
        "data_files": "en/c4-train.00000-of-01024.json.gz",  # the shard that GPTQ's original code reads
        "revision": "1588ec454efa1a09f29cd18ddd04fe05fc8653a2",
    },
}

# Documents are read in order up to this many characters, or 64 per requested token if that is more: all of
# wikitext-2's training split (11 million), and only as much of C4's shard as is useful.
READ_CHARACTERS = 2**24


class Calibration(BaseModel):
    """Where calibration text comes from, and how many windows of tokens are drawn from it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    source: str = Field(min_length=1)  # wikitext2, c4, a text or .jsonl file, or owner/name of a dataset on the Hub
    samples: int = Field(128, ge=1)
    length: int = Field(2048, ge=2)  # tokens per sample; cut to what the model takes
    seed: int = 0
    seeds: int = Field(1, ge=1)  # draws of `samples` windows each, no two with a token in common; one cell per draw
    field: str = "text"  # of a line in a .jsonl file, or of a row in a dataset
    split: str = "train"  # this and the next two are for datasets on the Hub
    subset: str | None = None
    revision: str | None = None  # the dataset's commit

    @model_validator(mode="after")
    def _source_is_known(self) -> "Calibration":
        if self.source in NAMED:
            if self.subset or self.revision:
                raise ValueError(
                    f"{self.source} has a fixed subset and revision; give the dataset's Hub id to set them"
                )
        elif not self.is_file and not self.revision:
            raise ValueError(
                f"source {self.source!r} is not a local file, and a dataset on the Hub needs a revision "
                f"(a commit); it must be {' or '.join(NAMED)}, a text or .jsonl file, or owner/name with a revision"
            )
        return self

    @property
    def is_file(self) -> bool:
        """Whether the source means a local file: a path with a suffix, or one that exists."""
        path = Path(self.source)
        return self.source not in NAMED and not self.revision and (path.exists() or path.suffix != "")

    @property
    def draws(self) -> tuple[int | None, ...]:
        """The numbers of the draws, from 1; a single draw has no number."""
        return (None,) if self.seeds == 1 else tuple(range(1, self.seeds + 1))

    def content_hash(self, draw: int | None = None) -> str:
        """A hash of the settings and of the text: the file's bytes, or the commit that pins a dataset on the Hub.

        The number of draws does not count: a draw's windows do not depend on it.
        """
        settings = self.model_dump(exclude={"source", "seeds"}) | ({"draw": draw} if draw else {})
        text = hashlib.sha256(_read_bytes(Path(self.source))).hexdigest() if self.is_file else self.dataset()
        return hashlib.sha256(json.dumps([settings, text], sort_keys=True).encode()).hexdigest()

    def dataset(self) -> dict[str, str]:
        """Arguments of datasets.load_dataset, without the split, for a source on the Hub; a file has none."""
        own = {"path": self.source, "name": self.subset, "revision": self.revision}
        return NAMED.get(self.source) or {key: value for key, value in own.items() if value is not None}


def calibration_batches(
    source: Calibration, tokenizer: Callable[..., Any], max_length: int | None = None, draw: int | None = None
) -> list["Tensor"]:
    """source.samples windows of token ids [1, length], drawn at random from the source's text as one stream.

    max_length: the model's maximum; source.length is cut to it. draw: which of source.draws.
    """
    import torch

    length = min(source.length, max_length or source.length)
    text = "\n\n".join(_up_to(documents(source), max(READ_CHARACTERS, 64 * source.samples * length)))
    if not text.strip():
        raise QuantizeError(f"The calibration source {source.source} is empty; it must contain text.")
    ids = tokenizer(text, verbose=False)["input_ids"]  # verbose: the text is longer than the model takes, as intended
    wanted = f"{source.samples} samples of {length} tokens"
    needed, fewer = source.samples * length, "fewer or shorter samples"
    if draw:
        wanted, needed, fewer = (
            f"{source.seeds} draws of {wanted}",
            source.seeds * needed,
            f"fewer draws (seeds), {fewer}",
        )
    if len(ids) < needed:
        raise QuantizeError(
            f"The calibration source {source.source} has {len(ids):,} tokens; {wanted} need {needed:,}. "
            f"Use {fewer}, or a longer text."
        )
    stream = torch.tensor(ids).unsqueeze(0)  # [1, tokens]
    return [stream[:, start : start + length].clone() for start in _starts(source, len(ids), length, draw)]


def _starts(source: Calibration, tokens: int, length: int, draw: int | None) -> list[int]:
    """Where the windows start: anywhere if there is one draw. With several, the text is cut into consecutive windows,
    these are shuffled, and each draw takes the next source.samples of them, so no two draws share a token."""
    random_of_seed = random.Random(source.seed)
    if draw is None:
        return [random_of_seed.randrange(tokens - length + 1) for _ in range(source.samples)]
    first = random_of_seed.randrange(tokens % length + 1)
    starts = list(range(first, tokens - length + 1, length))
    random_of_seed.shuffle(starts)
    return starts[(draw - 1) * source.samples : draw * source.samples]


def token_ids(calibration: Any, model: "PreTrainedModel") -> "Sequence[Tensor]":
    """Calibration as token ids [1, length] that fit the model.

    calibration: a sequence of such tensors; or a source, read with the model's tokenizer: a Calibration, its fields, or
    just the source's name or path.
    """
    import torch

    if isinstance(calibration, str | Path):
        calibration = {"source": str(calibration)}
    if isinstance(calibration, Mapping):
        calibration = calibration_source(calibration)
    if isinstance(calibration, Calibration):
        calibration = calibration_batches(calibration, _tokenizer(model), model.config.max_position_embeddings)
    wanted = "Calibration is needed: a list of token-id tensors [1, length], or a calibration source"
    if isinstance(calibration, torch.Tensor):
        rows = calibration.ndim == 2 and len(calibration) > 1
        split = "ids.split(1)" if rows else "ids.reshape(1, -1).split(LENGTH, dim=1)"
        raise QuantizeError(f"{wanted}; it is one tensor {list(calibration.shape)}, so split it: {split}.")
    if calibration is None:
        raise QuantizeError(f"{wanted}.")
    if not isinstance(calibration, Sequence):
        raise QuantizeError(f"{wanted}; it is a {type(calibration).__name__}.")
    if not calibration:
        raise QuantizeError(f"{wanted}; it is empty.")
    for i, ids in enumerate(calibration):
        if not isinstance(ids, torch.Tensor):
            raise QuantizeError(f"Calibration sample {i} is a {type(ids).__name__}; it must be a tensor [1, length].")
        whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
        if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] == 0 or not whole:
            raise QuantizeError(
                f"Calibration sample {i} is {ids.dtype} {list(ids.shape)}; it must be whole numbers [1, length]."
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= model.config.vocab_size:
            raise QuantizeError(
                f"Calibration sample {i} has the token id {low if low < 0 else high}; the model's vocabulary is "
                f"0 to {model.config.vocab_size - 1}. Was it made with a different model's tokenizer?"
            )
    return [ids.long() for ids in calibration]


def calibration_source(fields: Mapping[str, Any]) -> Calibration:
    """A source from its fields; an error if one is wrong."""
    try:
        return Calibration(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = "".join(f"'s {name}" for name in first["loc"])
        what = problem(first) if name else f"is wrong: {first['ctx']['error']}."  # a check of several fields
        near = did_you_mean(first["loc"][0], Calibration.model_fields) if first["type"] == "extra_forbidden" else ""
        raise QuantizeError(f"The calibration source{name} {what}{near}") from None
    except TypeError:
        raise QuantizeError(f"The calibration source's fields are {list(fields)}; they must be names.") from None


def _tokenizer(model: "PreTrainedModel") -> Callable[..., Any]:
    from qbench.tokenizer import load_tokenizer

    try:
        return load_tokenizer(model.config.name_or_path or "")
    except (OSError, ValueError) as error:
        raise QuantizeError(
            f"The model's folder {model.config.name_or_path!r} has no tokenizer, which the calibration source needs; "
            f"pass calibration_batches(source, tokenizer) instead. {error}"
        ) from error


def documents(source: Calibration) -> Iterator[str]:
    """The source's documents in order."""
    path = Path(source.source)
    if not source.is_file:
        yield from _hub_documents(source)
    elif path.suffix == ".jsonl":
        for number, line in enumerate(_read_text(path).split("\n"), start=1):
            if line.strip():
                yield _jsonl_field(path, number, line, source.field)
    else:
        yield _read_text(path)


def _hub_documents(source: Calibration) -> Iterator[str]:
    from datasets import load_dataset

    arguments = source.dataset()
    try:
        rows = load_dataset(**arguments, split=source.split)
    except Exception as error:  # offline, not cached, no such dataset: datasets and huggingface_hub raise a dozen types
        what = " ".join(arguments[key] for key in ("path", "name", "data_files") if key in arguments)
        raise QuantizeError(
            f"The calibration dataset {what} ({source.split}, revision {arguments['revision']}) is not in the Hugging "
            f"Face cache and could not be downloaded ({why_not_downloaded(error)}); use a local file, or run "
            "`qbench fetch` on a machine with network access."
        ) from error
    if source.field not in rows.column_names:
        raise QuantizeError(
            f"The calibration dataset {source.source} has no field {source.field!r}; it has "
            f"{', '.join(rows.column_names)}."
        )
    for row in rows:
        yield row[source.field]


def _jsonl_field(path: Path, number: int, line: str, field: str) -> str:
    where = f"{path}, line {number}"
    row = parse_json(line, where, QuantizeError)
    if not isinstance(row, dict) or field not in row:
        found = f"it has {', '.join(row)}" if isinstance(row, dict) else "it is not an object"
        raise QuantizeError(f"{where}: no field {field!r}; {found}.")
    if not isinstance(row[field], str):
        raise QuantizeError(f"{where}: the field {field!r} is {row[field]!r}; it must be a string.")
    return row[field]


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise QuantizeError(f"The calibration file {path} cannot be read: {error.strerror}.") from None


def _read_text(path: Path) -> str:
    try:
        return _read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise QuantizeError(f"The calibration file {path} is not UTF-8 text (byte {error.start}).") from None


def _up_to(documents: Iterable[str], characters: int) -> Iterator[str]:
    """Documents in order until they total that many characters."""
    read = 0
    for document in documents:
        yield document
        read += len(document)
        if read >= characters:
            return
