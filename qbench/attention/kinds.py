"""The kinds of attention that qbench runs, one entry each. Imports no torch.

To add a kind:
1. Write its function in kernels/softpick: `f(q, k, v, *, scale=None, causal=True, key_mask=None, backend=None)`,
   as `softpick_attention` does, with the kind's extra tensors as further keywords.
2. Add its entry below. Recipes, checkpoints, transformers' registry and `qbench doctor` read this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Attention:
    """A kind of attention: its names in configs, its extra tensors, and the function that computes it."""

    name: str  # in recipes and records; in our configs and in transformers' registry if the kind has a function
    title: str  # for people
    attn_impl: tuple[str, ...]  # what the FLA layout's config calls it
    attn_implementation: tuple[str, ...]  # what the Llama layout's config calls it
    architecture: str  # what config.json says on saving; vLLM refuses the ones that it does not know
    model_type: str = "transformer"  # the FLA layout's
    function: str | None = None  # "module:function"; None: transformers' own attention
    # Parameters of a layer's attention beside the projections: the shape by names of layout.Sizes or as numbers.
    extra_tensors: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)

    def extra_shapes(self, sizes: Any) -> dict[str, tuple[int, ...]]:
        """The shapes of the extra tensors in a model of these sizes: layout.Sizes, or a LlamaConfig."""
        return {
            name: tuple(getattr(sizes, part) if isinstance(part, str) else part for part in shape)
            for name, shape in self.extra_tensors.items()
        }

    @property
    def runs_as(self) -> str:
        """The attn_implementation under which transformers runs it."""
        return self.name if self.function else "sdpa"


# The first one is what a config means that says nothing of attention.
ATTENTIONS: dict[str, Attention] = {
    kind.name: kind
    for kind in (
        Attention(
            name="softmax",
            title="Softmax",
            attn_impl=("flash_attn", "parallel_attn", "naive_attn"),
            attn_implementation=("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"),
            architecture="LlamaForCausalLM",
        ),
        Attention(
            name="softpick",
            title="Softpick",
            attn_impl=("parallel_softpick_attn", "naive_softpick_attn"),
            attn_implementation=("softpick",),
            architecture="SoftpickLlamaForCausalLM",
            function="softpick:softpick_attention",
        ),
    )
}
