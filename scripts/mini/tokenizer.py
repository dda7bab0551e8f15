"""The twins' tokenizer: each word of the corpus is one token; any other text is split into bytes."""

import re
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PIECES = r"\n| ?[A-Za-z]+| ?[^A-Za-z\s]| "  # a line end; a word or mark with the space before it
START = " "  # put before a text, so that its first word gets the same token as elsewhere
SPECIAL = ("<unk>", "<s>")


def make_tokenizer(documents: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer that has the words of these documents as tokens."""
    pieces = re.compile(PIECES)
    found = {piece for text in documents for piece in pieces.findall(START + text)}
    vocabulary = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(found)]
    # One piece is likelier than two, so a known word is never split.
    model = models.Unigram([(piece, -1.0) for piece in vocabulary], unk_id=0, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Prepend(START)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="<s>")
