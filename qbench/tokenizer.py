"""A checkpoint's tokenizer, with the rules of its tokenizer.json unchanged.

transformers 5 rebuilds Llama tokenizers from the vocabulary and the merges of tokenizer.json, with its own rules for
spaces: " = Robert" loses its first ▁, which moves every score of a text that begins with a space. What transformers
adds to the file (special tokens, the chat template, truncation) is kept, and is what lm-eval's HFLM would have.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILE = "tokenizer.json"


def load_tokenizer(location: str | os.PathLike[str], revision: str | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer in a folder or on the Hub; without a tokenizer.json, the one that transformers builds."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import cached_file

    pinned: dict[str, Any] = {"revision": revision} if revision else {}
    theirs = AutoTokenizer.from_pretrained(location, **pinned)
    has_file = cached_file(location, TOKENIZER_FILE, _raise_exceptions_for_missing_entries=False, **pinned)
    if type(theirs) is PreTrainedTokenizerFast or not has_file:
        return theirs
    tokenizer = PreTrainedTokenizerFast.from_pretrained(location, **pinned)
    # What the class of this kind of model gives if tokenizer_config.json does not: Llama's <s>, </s> and <unk>.
    own = tokenizer.special_tokens_map
    tokenizer.add_special_tokens({name: t for name, t in theirs.special_tokens_map.items() if name not in own})
    return tokenizer
