"""The options of each axis, with the format of its label. Imports no torch."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from qbench.quantizers.declaration import Options
from qbench.quantizers.number_formats import FORMATS

Spans = Mapping[tuple[int, int], int]  # how often each run of tokens was read, by the position of its first and length


class AxisOptions(Options):
    """The options of an axis, and what the program asks of every axis."""

    quantizes_activations: ClassVar[bool] = False  # then it cannot be combined with a method that does

    @property
    def calibrated(self) -> bool:
        """Whether it needs calibration text."""
        return False

    @property
    def window(self) -> int:
        """How many tokens at the start of a text it leaves as they are."""
        return 0

    @property
    def why_exact(self) -> str:
        """The options that leave them, with their values."""
        return ""

    def quantized_pairs(self, read: Spans) -> float | None:
        """The share of pairs of a query and a key whose key was quantized; None if the axis quantizes no keys."""
        return None


class MaskHeadsOptions(AxisOptions):
    """Which heads are masked: those whose output stays below epsilon at more than 95% of calibration tokens."""

    epsilon: float = Field(1e-6, gt=0)

    label_always: ClassVar = {"epsilon": "mask{}"}

    @property
    def calibrated(self) -> bool:
        """Other text may have other dead heads."""
        return True


class ActivationsOptions(AxisOptions):
    """How the inputs of quantized linear layers are rounded: with a scale per token, or per block if the format has it.

    per_tensor: one static scale per linear layer instead, from calibration text.
    percentile: of |x| on that text, which becomes the range; 100 is the largest.
    """

    format: Literal["int", "fp8", "mxfp4", "nvfp4"] = "int"
    bits: int = 8
    per_tensor: bool = False
    percentile: float = Field(100.0, gt=0, le=100)

    label_always: ClassVar = {"bits": "a{}"}
    label_if_changed: ClassVar = {"format": "{}", "per_tensor": "tensor", "percentile": "p{:g}"}
    quantizes_activations = True

    @model_validator(mode="before")
    @classmethod
    def _bits_of_the_format(cls, given: Any) -> Any:
        if isinstance(given, dict) and "bits" not in given and given.get("format") in FORMATS:
            return given | {"bits": FORMATS[given["format"]].default_bits}
        return given

    @field_validator("bits")
    @classmethod
    def _offered(cls, bits: int, others: ValidationInfo) -> int:
        name = others.data.get("format")
        if name and bits not in FORMATS[name].widths:
            raise ValueError(f"format {name} offers {', '.join(map(str, FORMATS[name].widths))}")
        return bits

    @field_validator("per_tensor")
    @classmethod
    def _without_blocks(cls, per_tensor: bool, others: ValidationInfo) -> bool:
        name = others.data.get("format")
        if per_tensor and name and (block := FORMATS[name].block):
            raise ValueError(f"{name} has a scale per block of {block}; leave per_tensor out")
        return per_tensor

    @field_validator("percentile")
    @classmethod
    def _of_static_scales(cls, percentile: float, others: ValidationInfo) -> float:
        name = others.data.get("format")
        if percentile != 100 and name and not (others.data.get("per_tensor") or FORMATS[name].tensor_scale):
            raise ValueError("it is for static scales only; add per_tensor: true, or leave it out")
        return percentile

    @property
    def calibrated(self) -> bool:
        """Scales per tensor are static, so that no score depends on its neighbours in a batch or on later tokens."""
        return self.per_tensor or FORMATS[self.format].tensor_scale


class KvCacheOptions(AxisOptions):
    """How keys and values are rounded before queries see them, between the smallest and the largest of a group.

    keys: "channel": each channel of the keys in groups of group_size tokens, as in KIVI; a query sees keys and values
    of its own group exactly. "token": keys in groups of channels, as values always are; every token is quantized.
    """

    bits: Literal[8, 4, 2] = 4
    keys: Literal["channel", "token"] = "channel"
    # Two values are their own smallest and largest, so a group of two would stay exact.
    group_size: int = Field(32, ge=4)  # tokens
    channels: int = Field(32, ge=4)  # in a group of values, and of keys if they are rounded per token
    keep_first: int = Field(0, ge=0)  # this many tokens stay exact, as in methods that protect sinks

    label_always: ClassVar = {"bits": "kv{}"}
    label_if_changed: ClassVar = {"keys": "{}", "group_size": "g{}", "channels": "c{}", "keep_first": "keep{}"}

    @field_validator("group_size")
    @classmethod
    def _of_channels(cls, size: int, others: ValidationInfo) -> int:
        if size != 32 and others.data.get("keys") == "token":
            raise ValueError("with keys: token there are no groups of tokens; leave group_size out")
        return size

    @property
    def window(self) -> int:
        """Only queries after a group of tokens see it quantized, and the first tokens may be exact for all."""
        return self.keep_first if self.keys == "token" else (self.keep_first // self.group_size + 1) * self.group_size

    @property
    def why_exact(self) -> str:
        """The options that leave the window exact."""
        names = ["group_size"] if self.keys == "channel" else []
        names += ["keep_first"] if self.keep_first else []
        return ", ".join(f"{name} {getattr(self, name)}" for name in names)

    def without_the_first_group(self) -> "KvCacheOptions":
        """The same, but exact up to the end of a group: the rest of that group may have too few tokens to round."""
        whole = -(-self.keep_first // self.group_size) * self.group_size
        return self if self.keys == "token" else self.model_copy(update={"keep_first": whole})

    def first_exact(self, position: int) -> int:
        """The first key from keep_first on that a query at this position sees exactly."""
        return position + 1 if self.keys == "token" else position // self.group_size * self.group_size

    def quantized_pairs(self, read: Spans) -> float | None:
        """The share of pairs, by counting them: a query at position t sees t + 1 keys."""
        positions = range(max((start + length for start, length in read), default=0))
        # Pairs of all queries before a position.
        all_pairs = [0, *accumulate(position + 1 for position in positions)]
        rounded = [0, *accumulate(max(0, self.first_exact(position) - self.keep_first) for position in positions)]

        def total(before: list[int]) -> int:
            return sum(times * (before[start + length] - before[start]) for (start, length), times in read.items())

        return total(rounded) / total(all_pairs) if read else None
