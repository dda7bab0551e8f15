"""The twins' tokenizer: each word of the corpus is one token, and any other text falls back to its bytes."""

import re
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PIECES = r"\n| ?[A-Za-z]+| ?[^A-Za-z\s]| "  # a line's end, a word or a mark with the space before it
START = " "  # goes before a text, so that its first word is the word that it is elsewhere
SPECIAL = ("<unk>", "<s>")


def make_tokenizer(documents: Iterable[str]) -> PreTrainedTokenizerFast:
    """The tokenizer that knows the words of these documents."""
    pieces = re.compile(PIECES)
    found = {piece for text in documents for piece in pieces.findall(START + text)}
    vocabulary = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(found)]
    # One piece is likelier than two, so a word that is known is never cut.
    model = models.Unigram([(piece, -1.0) for piece in vocabulary], unk_id=0, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Prepend(START)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="<s>")
