"""The kinds of attention that qbench runs, one entry each. Imports no torch.

A kind is a normalizer of the scores and, optionally, a factor on the queries and a gate on the output.
docs/attention.md has the formulas, and shows how to add a kind: here, or in another package with an entry point in the
group "qbench.attentions". Recipes, checkpoints, transformers' registry and `qbench doctor` read `attentions()`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from qbench.errors import InputError, did_you_mean
from qbench.plugins import declared

ENTRY_POINTS = "qbench.attentions"
TRANSFORMERS_OWN = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
NORMALIZERS = (
    "softmax",
    "sink_softmax",
    "rectified",
    "softpick",
    "relu_softmax",
)  # softpick has the same list, but importing it imports torch


class AttentionError(InputError):
    """A wrong declaration of a kind of attention."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that determine a network's shapes, by Llama's names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool


# The names that a shape may use.
SIZE_NAMES = tuple(size.name for size in fields(Sizes) if size.type is int)
HEADS = "num_attention_heads"


@dataclass(frozen=True)
class Attention:
    """A kind of attention: its names in configs, its extra tensors, and what computes it."""

    name: str  # in recipes and records; in our configs and in transformers' registry, unless it is softmax
    title: str  # shown to people
    attn_impl: tuple[str, ...] = ()  # what the FLA layout's config calls it
    model_type: str = "transformer"  # the FLA layout's
    fla_flag: str | None = None  # a field of the FLA layout's config that is true only for this kind
    # Values of attn_impl whose models may have been trained with another formula: they load with this warning.
    doubts: Mapping[str, str] = field(default_factory=dict)
    # What computes it: a normalizer of softpick.normalized_attention, or "module:function", the name of a function
    # f(q, k, v, *, scale, causal, key_mask), with the same arguments, and the extra tensors as further keywords.
    normalizer: str | None = None
    function: str | None = None
    scaled: bool = False  # queries times s_h · ln(t + 2), t = the query's position in real tokens, from 0
    gated: bool = False  # q_proj has the gate's rows after the query's; the output times σ(gate) goes to o_proj
    # Parameters of a layer's attention besides the projections: the shape by SIZE_NAMES or as numbers.
    extra_tensors: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    initial: Mapping[str, float] = field(default_factory=dict)  # what extra tensors are before training, if not 0

    def __post_init__(self) -> None:
        """Check that exactly one thing computes it, and that it takes the extra tensors."""
        if (self.normalizer is None) == (self.function is None):
            raise self._error("it must have either a normalizer or a function.")
        if self.normalizer is not None and self.normalizer not in NORMALIZERS:
            near = did_you_mean(self.normalizer, NORMALIZERS)
            raise self._error(f"normalizer is {self.normalizer!r}; it must be one of {', '.join(NORMALIZERS)}.{near}")
        for tensor, shape in self.extra_tensors.items():
            self._check_shape(tensor, shape)
        self._check_taken()
        for tensor in self.initial:
            if tensor not in self.extra_tensors:
                near = did_you_mean(tensor, self.extra_tensors)
                raise self._error(f"initial has {tensor!r}, which is not one of extra_tensors.{near}")

    def _check_shape(self, tensor: str, shape: Any) -> None:
        where = f"extra_tensors[{tensor!r}] is {shape!r}"
        if not isinstance(shape, tuple | list):
            raise self._error(f"{where}; a shape must be a tuple, such as ({HEADS!r},).")
        for part in shape:
            if part not in SIZE_NAMES and (isinstance(part, bool) or not isinstance(part, int) or part < 1):
                near = did_you_mean(part, SIZE_NAMES)
                raise self._error(
                    f"{where}; {part!r} must be a positive integer or one of {', '.join(SIZE_NAMES)}.{near}"
                )

    def _check_taken(self) -> None:
        """The factor on the queries takes s; a normalizer takes sinks or nothing; a function takes anything."""
        taken: dict[str, tuple[str | int, ...]] = {"s": (HEADS, 1)} if self.scaled else {}
        if self.scaled and "s" not in self.extra_tensors:
            raise self._error(f"scaled is True, which needs extra_tensors={{'s': {taken['s']}}}.")
        if self.normalizer == "sink_softmax":
            taken["sinks"] = (HEADS,)
        for tensor, shape in self.extra_tensors.items():
            if tensor in taken and tuple(shape) != taken[tensor]:
                raise self._error(f"extra_tensors[{tensor!r}] is {shape!r}; it must be {taken[tensor]!r}.")
            if self.normalizer and tensor not in taken:
                raise self._error(
                    f"extra_tensors has {tensor!r}, which nothing uses: normalizer 'sink_softmax' takes sinks, "
                    "scaled=True takes s, and a function takes its keyword arguments."
                )

    def _error(self, what: str) -> AttentionError:
        return AttentionError(f"Attention {self.name!r}: {what}")

    def declaration(self) -> dict[str, Any]:
        """The whole declaration, as JSON."""
        values = {own.name: getattr(self, own.name) for own in fields(self)}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}

    def extra_shapes(self, sizes: Any) -> dict[str, tuple[int, ...]]:
        """The shapes of the extra tensors in a model of these sizes: Sizes, or a LlamaConfig."""
        return {
            name: tuple(getattr(sizes, part) if isinstance(part, str) else part for part in shape)
            for name, shape in self.extra_tensors.items()
        }

    @property
    def is_softmax(self) -> bool:
        """Whether it is transformers' built-in attention."""
        return self.name == "softmax"

    @property
    def runs_as(self) -> str:
        """The attn_implementation under which transformers runs it."""
        return "sdpa" if self.is_softmax else self.name

    @property
    def attn_implementation(self) -> tuple[str, ...]:
        """What the Llama layout's config calls it."""
        return TRANSFORMERS_OWN if self.is_softmax else (self.name,)

    @property
    def architecture(self) -> str:
        """What a saved config.json says; vLLM refuses names that it does not know."""
        own = "" if self.is_softmax else "".join(part.capitalize() for part in self.name.split("_"))
        return f"{own}LlamaForCausalLM"

    @property
    def fla_architecture(self) -> str:
        """The same in the FLA layout, shared by all kinds with one model_type."""
        return "".join(part.capitalize() for part in self.model_type.split("_")) + "ForCausalLM"


# The first one is the default for a config that does not mention attention.
ATTENTIONS: dict[str, Attention] = {
    kind.name: kind
    for kind in (
        Attention(
            name="softmax",
            title="Softmax",
            attn_impl=("flash_attn", "parallel_attn", "naive_attn"),
            normalizer="softmax",
        ),
        Attention(
            name="softpick",
            title="Softpick",
            attn_impl=("parallel_softpick_attn", "naive_softpick_attn"),
            normalizer="softpick",
        ),
        Attention(
            name="rectified",
            title="Rectified-Only",
            attn_impl=("parallel_rectified_attn", "naive_rectified_attn"),
            normalizer="rectified",
        ),
        Attention(
            name="relu_softmax",
            title="ReLU Softmax",
            attn_impl=("parallel_relu_softpick_1_attn", "naive_relu_softpick_1_attn"),
            model_type="relu_softpick_1_transformer",
            normalizer="relu_softmax",
        ),
        Attention(
            name="softmax_plus_one",
            title="Softmax Plus One",
            attn_impl=("parallel_softmax_plus_one_attn", "naive_softmax_plus_one_attn"),
            model_type="softmax_plus_one_transformer",
            normalizer="sink_softmax",  # without learned sinks: e^0 = 1
        ),
        Attention(
            name="gpt_oss_sink",
            title="GPT-OSS Sink",
            attn_impl=("gpt_oss_flex_attention_sink", "gpt_oss_naive_sink"),
            model_type="gpt_oss_sink_transformer",
            fla_flag="gpt_oss_sink",
            doubts={
                "gpt_oss_naive_sink": "the training code with this name mixes heads and positions before o_proj, but "
                "here the checkpoint runs by the formula, without that; its scores may differ from those in training."
            },
            normalizer="sink_softmax",
            extra_tensors={"sinks": ("num_attention_heads",)},
        ),
        Attention(
            name="gated",
            title="Gated",
            attn_impl=("parallel_gated_attn", "naive_gated_attn", "gated_attn"),
            model_type="gated_attention_transformer",
            fla_flag="elementwise_gate",
            normalizer="softmax",
            gated=True,
        ),
        Attention(
            name="scaled_softpick",
            title="Scaled Softpick",
            attn_impl=("parallel_scaled_softpick_attn", "naive_scaled_softpick_attn"),
            normalizer="softpick",
            scaled=True,
            extra_tensors={"s": ("num_attention_heads", 1)},
            initial={"s": 0.3},
        ),
        Attention(
            name="scalable_softmax",
            title="Scalable Softmax",
            attn_impl=("parallel_scaled_attn", "naive_scaled_attn"),
            normalizer="softmax",
            scaled=True,
            extra_tensors={"s": ("num_attention_heads", 1)},
            initial={"s": 0.3},
        ),
    )
}


def attentions() -> dict[str, Attention]:
    """Every kind by name: ours, then those of other packages."""
    return ATTENTIONS | _installed()


def declaring_module(name: str) -> str | None:
    """The module of another package that declares a kind; None if it is in our table."""
    points = {kind.name: point for point, kind in declared(ENTRY_POINTS, Attention, AttentionError)}
    return points[name].module if name in points else None


@cache
def _installed() -> dict[str, Attention]:
    found: dict[str, Attention] = {}
    for point, kind in declared(ENTRY_POINTS, Attention, AttentionError):
        for other in (ATTENTIONS | found).values():
            shared = {kind.name, *kind.attn_impl} & {other.name, *other.attn_implementation, *other.attn_impl}
            if shared:
                raise AttentionError(
                    f"The attentions {kind.name} ({point.value}) and {other.name} are both called "
                    f"{min(shared)}; each name must mean one kind, so rename it in {point.value}."
                )
        found[kind.name] = kind
    return found
