"""The texts of an analysis: checked, cut, and batched by similar length."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from qbench.errors import some
from qbench.numbers import counted
from qbench.quantizers.packed import PackedLinear
from qbench.records.analysis import AnalysisError

MIN_TOKENS = 2  # in a text with one token, all weight is on the first token for any model


@dataclass(frozen=True)
class Text:
    """A text to measure."""

    number: int  # in the source, from 0
    ids: Tensor  # [tokens], on the CPU

    @property
    def hash(self) -> str:
        """A hash of its token ids."""
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class Batch:
    """Texts that run together, padded on the right: causal attention never looks there, so no mask is needed."""

    texts: list[Text]
    ids: Tensor  # [texts, longest]
    tokens: Tensor  # [texts]
    real: Tensor  # [texts, longest] bool, False = padding

    @classmethod
    def of(cls, texts: list[Text], device: torch.device) -> "Batch":
        """Make a batch on a device."""
        tokens = torch.tensor([len(text.ids) for text in texts])
        ids = torch.nn.utils.rnn.pad_sequence([text.ids for text in texts], batch_first=True)
        real = torch.arange(ids.shape[1]) < tokens[:, None]
        return cls(texts, ids.to(device), tokens.to(device), real.to(device))


def checked_texts(model: LlamaForCausalLM, texts: Sequence[Any], length: int | None) -> tuple[list[Text], list[str]]:
    """The texts that can be measured, cut at `length` tokens, and notes on texts that are too short or too long."""
    if not isinstance(model, LlamaForCausalLM):
        raise AnalysisError(
            f"model is a {type(model).__name__}; it must be a LlamaForCausalLM, such as load_checkpoint returns."
        )
    if isinstance(texts, Tensor | str) or not isinstance(texts, Sequence):
        raise AnalysisError(f"texts is a {type(texts).__name__}; it must be a list of token-id tensors [length].")
    if length is not None and length < MIN_TOKENS:
        raise AnalysisError(f"length is {length}; it must be at least {MIN_TOKENS} tokens.")
    found = [Text(n, _checked(n, ids, model.config.vocab_size)[:length]) for n, ids in enumerate(texts)]
    kept = [text for text in found if len(text.ids) >= MIN_TOKENS]
    if not kept:
        given = counted(len(found), "text")
        raise AnalysisError(f"None of {given} has {MIN_TOKENS} tokens or more; an analysis needs one that does.")
    return kept, list(_notes(model, found, kept, length))


def _checked(number: int, ids: Any, vocabulary: int) -> Tensor:
    if not isinstance(ids, Tensor):
        raise AnalysisError(f"Text {number} is a {type(ids).__name__}; it must be a tensor of token ids [length].")
    whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if ids.ndim != 1 or not (whole or ids.numel() == 0):
        raise AnalysisError(f"Text {number} is {ids.dtype} {list(ids.shape)}; it must be integers [length].")
    ids = ids.detach().cpu().long()
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise AnalysisError(
            f"Text {number} has the token id {wrong}; the model's vocabulary is 0 to {vocabulary - 1}. Was it "
            "tokenized with another model's tokenizer?"
        )
    return ids


def _notes(model: LlamaForCausalLM, found: list[Text], kept: list[Text], length: int | None) -> Iterator[str]:
    if left_out := [str(text.number) for text in found if len(text.ids) < MIN_TOKENS]:
        yield (
            f"{counted(len(left_out), 'text')} with fewer than {MIN_TOKENS} tokens left out: "
            f"number {some(left_out)} (counted from 0)."
        )
    sizes = [len(text.ids) for text in kept]
    if length is not None and (short := sum(size < length for size in sizes)):
        yield (
            f"{short} of {counted(len(kept), 'text')} shorter than length {length}, and measured uncut; "
            f"the shortest has {counted(min(sizes), 'token')}."
        )
    positions = model.config.max_position_embeddings
    if (most := max(sizes)) > positions:
        yield (
            f"Texts have up to {most} tokens, but the model was trained on {positions} positions, so figures beyond "
            "them describe untrained positions. The paper stays within them, except for its passkeys."
        )


def checked_lengths(
    lengths: Sequence[int] | None, kept: list[Text], length: int | None, always: int
) -> tuple[tuple[int, ...], list[str]]:
    """The lengths of the sweep, ascending and below the length of the analysis, and a note if no text reaches one.

    By default 16, 32, …; `always` is included if a text is that long.
    """
    longest = max(len(text.ids) for text in kept)
    for wanted in lengths or ():
        if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < MIN_TOKENS:
            raise AnalysisError(f"lengths has {wanted!r}; each must be a whole number, {MIN_TOKENS} or more.")
    asked = {2**n for n in range(4, longest.bit_length())} if lengths is None else set(lengths)
    beyond = [str(wanted) for wanted in sorted(asked) if wanted > longest and wanted != length]
    notes = [f"No text reaches length {', '.join(beyond)}; the longest has {longest} tokens."] if beyond else []
    return tuple(sorted(n for n in asked | {always} if n <= longest and n != (length or longest))), notes


def batches(model: LlamaForCausalLM, texts: list[Text], batch_tokens: int) -> Iterator[Batch]:
    """All texts, longest first, in batches of up to batch_tokens tokens including padding, but at least one text.

    If activations are quantized, texts run one by one: LLM.int8 pools outliers over a batch.
    """
    alone = any(isinstance(module, PackedLinear) and module.ACTIVATION_BITS for module in model.modules())
    device = model.model.embed_tokens.weight.device
    waiting = sorted(texts, key=lambda text: (-len(text.ids), text.number))
    while waiting:
        most = 1 if alone else max(1, batch_tokens // len(waiting[0].ids))
        yield Batch.of(waiting[:most], device)
        waiting = waiting[most:]
