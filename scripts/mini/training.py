"""Training of one twin: a pure function of the settings, which can stop at any step and go on from there."""

import math
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

import qbench.attention  # noqa: F401 (registers softpick with transformers)
from qbench.errors import InputError

KINDS = {"softmax": "sdpa", "softpick": "softpick"}  # the attention, and what transformers calls it


class TrainingError(InputError):
    """Training that cannot go on, in a sentence."""


@dataclass(frozen=True)
class Settings:
    """All that decides a twin beside its attention and its text."""

    seed: int = 0
    hidden: int = 128
    intermediate: int = 256
    layers: int = 4
    heads: int = 4
    length: int = 128
    batch: int = 32
    steps: int = 3000
    warmup: int = 100
    peak: float = 3e-3  # learning rate
    last: float = 1e-4
    weight_decay: float = 0.01
    clip: float = 1.0

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine from `peak` to `last`."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.last + (self.peak - self.last) * (1 + math.cos(math.pi * done)) / 2


def new_model(kind: str, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> LlamaForCausalLM:
    """An untrained twin; both kinds start from the same weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        max_position_embeddings=2 * settings.length,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(settings.seed)
    model = LlamaForCausalLM(config)
    model.set_attn_implementation(KINDS[kind])
    return model


def batch(documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, settings: Settings, step: int) -> Tensor:
    """The token ids of a step [batch, length]: rows of whole documents, which the seed and the step decide."""
    draw = random.Random(f"{settings.seed} {step}")
    rows: list[list[int]] = []
    for _ in range(settings.batch):
        row: list[int] = []
        while len(row) < settings.length:
            row += [*tokenizer.encode(draw.choice(documents)), tokenizer.bos_token_id]
        rows.append(row[: settings.length])
    return torch.tensor(rows)


class Training:
    """A twin, its optimizer and the losses so far."""

    def __init__(
        self, kind: str, documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, settings: Settings
    ) -> None:
        self.documents, self.tokenizer, self.settings = documents, tokenizer, settings
        self.model = model = new_model(kind, tokenizer, settings).train()
        matrices = [weight for weight in model.parameters() if weight.ndim > 1]
        gains = [weight for weight in model.parameters() if weight.ndim == 1]
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": gains, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
        self.losses: list[float] = []

    @property
    def done(self) -> int:
        """How many steps have been made."""
        return len(self.losses)

    def step(self) -> float:
        """One step; returns the loss of its batch before the weights change."""
        step = self.done
        ids = batch(self.documents, self.tokenizer, self.settings, step)
        loss = self.model(ids, labels=ids, use_cache=False).loss
        if not loss.isfinite():
            raise TrainingError(f"The loss at step {step} is {loss.item()}; a lower learning rate is needed.")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        return self.losses[-1]

    def save(self, file: Path) -> None:
        """Write all that `resume` needs; a save that is interrupted leaves the one before it."""
        file.parent.mkdir(parents=True, exist_ok=True)
        state = {"settings": asdict(self.settings), "losses": self.losses}
        state |= {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        unfinished = file.with_suffix(".tmp")
        try:
            torch.save(state, unfinished)
        except RuntimeError as error:  # what torch makes of a full disk
            raise TrainingError(
                f"{file} cannot be written ({str(error).splitlines()[0]}); is the disk full?"
            ) from error
        os.replace(unfinished, file)

    def resume(self, file: Path) -> None:
        """Go on from a saved state."""
        try:
            state = torch.load(file, weights_only=True)
            same = state["settings"] == asdict(self.settings)
        except Exception as error:  # zip, pickle and torch each have their own
            raise TrainingError(f"{file} cannot be read ({error}); delete it to train from the start.") from error
        if not same:
            raise TrainingError(f"{file} is of a training with other settings; delete it to train from the start.")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses = state["losses"]
