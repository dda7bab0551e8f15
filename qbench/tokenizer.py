"""A checkpoint's tokenizer, with the rules of its tokenizer.json unchanged.

transformers 5 rebuilds Llama tokenizers from the vocabulary and the merges of tokenizer.json, with its own rules for
spaces: " = Robert" loses its first ▁, which moves every score of a text that begins with a space. What transformers
adds to the file (special tokens, the chat template, truncation) is kept, and is what lm-eval's HFLM would have.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.errors import InputError, one_line, shown
from qbench.files import MAX_FILE_BYTES, parse_json, read_content

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILE = "tokenizer.json"
# What transformers reads besides; on a bad one, it would fail with an unclear KeyError.
JSON_FILES = (TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
TRIED = " Is it 42?\n"  # some files load, and fail at the first text


class TokenizerError(InputError):
    """A tokenizer that cannot be used, explained in a sentence."""


def load_tokenizer(location: str | os.PathLike[str], revision: str | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer in a folder or on the Hub; without a tokenizer.json, the one that transformers builds."""
    if Path(location).is_dir():
        _check_files(Path(location))
    try:
        tokenizer = _load(location, revision)
        tokenizer(TRIED)
        vocabulary = tokenizer.get_vocab()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises plain Exception, and panics of Rust are BaseExceptions
        if isinstance(error, OSError) and not Path(location).is_dir():
            raise  # the Hub's: not there, or no network
        raise TokenizerError(f"{location}: transformers cannot load its tokenizer ({one_line(error)}).") from error
    if not vocabulary:
        raise TokenizerError(f"{location}: its tokenizer has no vocabulary.")
    return tokenizer


def check_tokenizer(tokenizer: "PreTrainedTokenizerBase", vocab_size: int, location: object = "The tokenizer") -> None:
    """An error if the scorer cannot use a tokenizer with a model of this vocabulary."""
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise TokenizerError(
            f"{location} has neither a BOS nor an EOS token; a text without context needs one in front of it. Name "
            "one as bos_token or eos_token in tokenizer_config.json."
        )
    check_vocabulary(tokenizer, vocab_size, location)


def check_vocabulary(tokenizer: "PreTrainedTokenizerBase", vocab_size: int, location: object) -> None:
    """An error if a tokenizer has ids that a model of this vocabulary does not have."""
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= vocab_size:
        raise TokenizerError(
            f"{location} has a vocabulary up to id {largest}, but the model's ends at {vocab_size - 1}; use the "
            "tokenizer that the model was trained with."
        )


def _check_files(folder: Path) -> None:
    """An error that names the file if one of them is not JSON, or does not contain what transformers assumes."""
    for name in JSON_FILES:
        file = folder / name
        if not file.exists():
            continue
        content = parse_json(read_content(file, TokenizerError, MAX_FILE_BYTES), file, TokenizerError)
        if not isinstance(content, dict):
            raise TokenizerError(f"{file} contains {shown(content)}; it must contain a JSON object.")
        if name == TOKENIZER_FILE and not isinstance(content.get("model"), dict):
            raise TokenizerError(f"{file}: model is {shown(content.get('model'))}; it must be an object.")


def _load(location: str | os.PathLike[str], revision: str | None) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import cached_file

    # Code that a folder brings along is never run; without this, transformers asks on the terminal.
    pinned: dict[str, Any] = {"trust_remote_code": False} | ({"revision": revision} if revision else {})
    theirs = AutoTokenizer.from_pretrained(location, **pinned)
    del pinned["trust_remote_code"]
    has_file = cached_file(location, TOKENIZER_FILE, _raise_exceptions_for_missing_entries=False, **pinned)
    if type(theirs) is PreTrainedTokenizerFast or not has_file:
        return theirs
    tokenizer = PreTrainedTokenizerFast.from_pretrained(location, **pinned)
    # What the class of this kind of model gives if tokenizer_config.json does not: Llama's <s>, </s> and <unk>.
    own = tokenizer.special_tokens_map
    tokenizer.add_special_tokens({name: t for name, t in theirs.special_tokens_map.items() if name not in own})
    return tokenizer
