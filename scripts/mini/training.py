"""Training of one model: a pure function of the settings that can stop and resume at any step."""

import hashlib
import io
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from mini.muon import Muon
from qbench.attention.kinds import ATTENTIONS
from qbench.attention.register import build_model, set_attention
from qbench.errors import InputError, one_line
from qbench.files import write_atomically

TWINS = ("softmax", "softpick")
SIBLINGS = tuple(kind for kind in ATTENTIONS if kind not in TWINS)


class TrainingError(InputError):
    """Training cannot continue; the message says why."""


@dataclass(frozen=True)
class Settings:
    """Everything that determines a model, apart from its attention and its text."""

    seed: int = 1
    hidden: int = 128
    intermediate: int = 256
    layers: int = 3
    heads: int = 4
    length: int = 128
    batch: int = 16
    steps: int = 3000
    warmup: int = 50
    peak: float = 4e-3  # learning rate
    last: float = 1e-4
    weight_decay: float = 0.01
    clip: float = 1.0

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine from `peak` to `last`."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = (step - self.warmup) / (self.steps - self.warmup)
        return self.last + (self.peak - self.last) * (1 + math.cos(math.pi * done)) / 2


def new_model(kind: str, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> LlamaForCausalLM:
    """An untrained model. Weights that softmax has too start with softmax's values; gates are drawn after them."""
    config = _config(kind, tokenizer, settings)
    torch.manual_seed(settings.seed)
    shared = build_model(_config("softmax", tokenizer, settings)).state_dict()
    queries = {name: weight for name, weight in shared.items() if name.endswith("q_proj.weight")}
    gates = {name: config.initializer_range * torch.randn_like(weight) for name, weight in queries.items()}
    model = build_model(config)
    weights = model.state_dict() | shared
    if ATTENTIONS[kind].gated:
        weights |= {name: torch.cat([weight, gates[name]]) for name, weight in queries.items()}
    model.load_state_dict(weights)
    return model


def _config(kind: str, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> LlamaConfig:
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
    set_attention(config, ATTENTIONS[kind])
    return config


def batch(documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, settings: Settings, step: int) -> Tensor:
    """The token ids of a step, [batch, length]: rows of whole documents, determined by the seed and the step."""
    draw = random.Random(f"{settings.seed} {step}")
    rows: list[list[int]] = []
    for _ in range(settings.batch):
        row: list[int] = []
        while len(row) < settings.length:
            row += [*tokenizer.encode(draw.choice(documents)), tokenizer.bos_token_id]
        rows.append(row[: settings.length])
    return torch.tensor(rows)


@dataclass(frozen=True)
class Step:
    """The log of a step: the loss of its batch, and the gradient norm before clipping."""

    loss: float
    gradient_norm: float


class Training:
    """A model, its optimizers and the steps so far."""

    def __init__(
        self, kind: str, documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, settings: Settings
    ) -> None:
        self.kind, self.documents, self.tokenizer, self.settings = kind, documents, tokenizer, settings
        self.model = model = new_model(kind, tokenizer, settings).train()
        matrices = [weight for name, weight in model.named_parameters() if "_proj." in name]
        others = [weight for name, weight in model.named_parameters() if "_proj." not in name]
        self.optimizers = [
            Muon(matrices, settings.peak, settings.weight_decay),
            torch.optim.AdamW(others, settings.peak, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.steps: list[Step] = []

    @property
    def recipe(self) -> dict[str, Any]:
        """Everything besides the attention that determines the result: the settings, and the SHA-256 of the text."""
        return {**asdict(self.settings), "text": hashlib.sha256("\n".join(self.documents).encode()).hexdigest()}

    @property
    def done(self) -> int:
        """How many steps are done."""
        return len(self.steps)

    def step(self) -> Step:
        """Make one step; the returned loss is from before the weights change."""
        step = self.done
        ids = batch(self.documents, self.tokenizer, self.settings, step)
        logits = self.model(ids, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.transpose(1, 2), ids[:, 1:])
        if not loss.isfinite():
            raise TrainingError(f"The loss at step {step} is {loss.item()}; a lower learning rate is needed.")
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.settings.learning_rate(step)
            optimizer.step()
            optimizer.zero_grad()
        self.steps.append(Step(loss.item(), norm.item()))
        return self.steps[-1]

    def save(self, file: Path) -> None:
        """Write everything that `resume` needs; an interrupted save leaves the previous one intact."""
        file.parent.mkdir(parents=True, exist_ok=True)
        state = {"recipe": self.recipe, "steps": [astuple(step) for step in self.steps]}
        state |= {"model": self.model.state_dict(), "optimizers": [own.state_dict() for own in self.optimizers]}
        content = io.BytesIO()
        torch.save(state, content)
        try:
            write_atomically(file, content.getvalue())
        except OSError as error:
            raise TrainingError(f"{file} cannot be written ({one_line(error)}); is the disk full?") from error

    def resume(self, file: Path) -> None:
        """Continue from a saved state."""
        try:
            state = torch.load(file, weights_only=True)
            same = state["recipe"] == self.recipe
        except Exception as error:  # zip, pickle and torch each raise their own
            raise TrainingError(
                f"{file} cannot be read ({one_line(error)}); delete it to train from the start."
            ) from error
        if not same:
            raise TrainingError(
                f"{file} was saved with other settings or another text; delete it to train from the start."
            )
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.steps = [Step(*step) for step in state["steps"]]
