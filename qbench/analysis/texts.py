"""The texts of an analysis: checked, cut, and put into batches of similar length."""

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

MIN_TOKENS = 2  # in a text of one token every weight is on the first token, whatever the model


@dataclass(frozen=True)
class Text:
    """A text as it is measured."""

    number: int  # in the source, from 0
    ids: Tensor  # [tokens], on the CPU

    @property
    def hash(self) -> str:
        """Of its token ids."""
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class Batch:
    """Texts that run together, padded on the right: causal attention never looks there, so that needs no mask."""

    texts: list[Text]
    ids: Tensor  # [texts, longest]
    tokens: Tensor  # [texts]
    real: Tensor  # [texts, longest] bool, False = padding

    @classmethod
    def of(cls, texts: list[Text], device: torch.device) -> "Batch":
        """The batch on a device."""
        tokens = torch.tensor([len(text.ids) for text in texts])
        ids = torch.nn.utils.rnn.pad_sequence([text.ids for text in texts], batch_first=True)
        real = torch.arange(ids.shape[1]) < tokens[:, None]
        return cls(texts, ids.to(device), tokens.to(device), real.to(device))


def checked_texts(model: LlamaForCausalLM, texts: Sequence[Any], length: int | None) -> tuple[list[Text], list[str]]:
    """The texts that can be measured, cut at `length` tokens, and sentences about those that are not as asked."""
    if not isinstance(model, LlamaForCausalLM):
        raise AnalysisError(
            f"model is a {type(model).__name__}; it must be a LlamaForCausalLM, as load_checkpoint gives."
        )
    if isinstance(texts, Tensor | str) or not isinstance(texts, Sequence):
        raise AnalysisError(f"texts is a {type(texts).__name__}; it must be a list of token-id tensors [length].")
    if length is not None and length < MIN_TOKENS:
        raise AnalysisError(f"length is {length}; it must be at least {MIN_TOKENS} tokens.")
    found = [Text(n, _checked(n, ids, model.config.vocab_size)[:length]) for n, ids in enumerate(texts)]
    kept = [text for text in found if len(text.ids) >= MIN_TOKENS]
    if not kept:
        raise AnalysisError(f"There is no text of {MIN_TOKENS} tokens or more among {counted(len(found), 'text')}.")
    return kept, list(_notes(model, found, kept, length))


def _checked(number: int, ids: Any, vocabulary: int) -> Tensor:
    if not isinstance(ids, Tensor):
        raise AnalysisError(f"Text {number} is a {type(ids).__name__}; it must be a tensor of token ids [length].")
    whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if ids.ndim != 1 or not (whole or ids.numel() == 0):
        raise AnalysisError(f"Text {number} is {ids.dtype} {list(ids.shape)}; it must be whole numbers [length].")
    ids = ids.detach().cpu().long()
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise AnalysisError(
            f"Text {number} has the token id {wrong}; the model's vocabulary is 0 to {vocabulary - 1}. Was it made "
            "with another model's tokenizer?"
        )
    return ids


def _notes(model: LlamaForCausalLM, found: list[Text], kept: list[Text], length: int | None) -> Iterator[str]:
    if left_out := [str(text.number) for text in found if len(text.ids) < MIN_TOKENS]:
        yield (
            f"{counted(len(left_out), 'text')} left out, with fewer than {MIN_TOKENS} tokens: "
            f"number {some(left_out)} (from 0)."
        )
    sizes = [len(text.ids) for text in kept]
    if length is not None and (short := sum(size < length for size in sizes)):
        yield (
            f"{counted(short, 'text')} of {len(kept)} shorter than the length of {length} tokens, and measured "
            f"whole; the shortest has {min(sizes)}."
        )
    positions = model.config.max_position_embeddings
    if (most := max(sizes)) > positions:
        yield (
            f"Texts have up to {most} tokens, and the model was trained on {positions} positions: what is measured "
            "beyond them is not what it was trained for. The paper stays within them, except for its passkeys."
        )


def checked_lengths(
    lengths: Sequence[int] | None, kept: list[Text], length: int | None, always: int
) -> tuple[tuple[int, ...], list[str]]:
    """The lengths of the sweep, ascending and below the length of the analysis, and a sentence if no text has one.

    By default 16, 32, …; `always` is among them if a text has so many tokens.
    """
    longest = max(len(text.ids) for text in kept)
    for wanted in lengths or ():
        if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < MIN_TOKENS:
            raise AnalysisError(f"lengths has {wanted!r}; it must be whole numbers from {MIN_TOKENS}.")
    asked = {2**n for n in range(4, longest.bit_length())} if lengths is None else set(lengths)
    beyond = [str(wanted) for wanted in sorted(asked) if wanted > longest and wanted != length]
    notes = [f"No text has the length {', '.join(beyond)}: the longest has {longest} tokens."] if beyond else []
    return tuple(sorted(n for n in asked | {always} if n <= longest and n != (length or longest))), notes


def batches(model: LlamaForCausalLM, texts: list[Text], batch_tokens: int) -> Iterator[Batch]:
    """All texts, the longest first, in batches of up to so many tokens with their padding, or of one text.

    Where activations are quantized, texts run one by one: LLM.int8 pools outliers over a batch.
    """
    alone = any(isinstance(module, PackedLinear) and module.ACTIVATION_BITS for module in model.modules())
    device = model.model.embed_tokens.weight.device
    waiting = sorted(texts, key=lambda text: (-len(text.ids), text.number))
    while waiting:
        most = 1 if alone else max(1, batch_tokens // len(waiting[0].ids))
        yield Batch.of(waiting[:most], device)
        waiting = waiting[most:]
