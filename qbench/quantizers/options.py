"""What can be asked for: methods, bits, typed options and labels. No torch here: `plan` and `table` read it too."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qbench.errors import InputError, did_you_mean


class QuantizeError(InputError):
    """A wrong call: a method, bits, option, model or calibration that cannot be quantized with."""


class NotOfferedError(QuantizeError):
    """The method has no such width."""


@dataclass(frozen=True)
class NotOffered:
    """A width that a method lacks: a value for plans and tables, not an error."""

    method: str
    bits: int

    @property
    def label(self) -> str:
        """The name in tables; there are no options to tell apart."""
        return f"{self.method}-{self.bits}"

    def __str__(self) -> str:
        return f"not offered by {self.method}"


class Options(BaseModel):
    """Options of a method; the defaults here are the only ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    # How each option shows in a label. `always` shows the value as it is; the rest show only where they differ.
    always: ClassVar[dict[str, str]] = {}
    differing: ClassVar[dict[str, str]] = {}

    def label_parts(self) -> list[str]:
        """The parts of the label that these options add, such as g64."""
        shown = [form.format(getattr(self, name)) for name, form in self.always.items()]
        fields = type(self).model_fields
        return shown + [
            form.format(getattr(self, name))
            for name, form in self.differing.items()
            if getattr(self, name) != fields[name].default
        ]


class NoOptions(Options):
    """The unquantized baseline has nothing to set."""


class LinearOptions(Options):
    """What every quantizing method can be told."""

    include_lm_head: bool = False


class Bnb4Options(LinearOptions):
    """bitsandbytes 4-bit: blocks of 64 weights, each with a scale, on the nf4 or the fp4 grid."""

    quant_type: Literal["nf4", "fp4"] = "nf4"
    double_quant: bool = False  # the scales are quantized too

    always = {"quant_type": "{}"}
    differing = {"double_quant": "dq", "include_lm_head": "head"}


class Bnb8Options(LinearOptions):
    """LLM.int8(): int8 weights and activations; input columns with an outlier above the threshold stay in 16 bits."""

    threshold: float = Field(default=6.0, ge=0, allow_inf_nan=False)

    differing = {"threshold": "t{:g}", "include_lm_head": "head"}


class GptqOptions(LinearOptions):
    """GPTQ; the defaults are auto-gptq's at the time of the paper."""

    group_size: int = Field(default=128, ge=-1)  # -1: one group a row
    sym: bool = True
    act_order: bool = False
    damp: float = Field(default=0.1, gt=0, lt=1)

    always = {"group_size": "g{}"}
    differing = {"sym": "asym", "act_order": "actorder", "damp": "damp{:g}", "include_lm_head": "head"}


class HqqOptions(LinearOptions):
    """HQQ; axis 1 groups weights along a row, axis 0 across rows."""

    group_size: int = Field(default=64, ge=8, multiple_of=8)
    axis: Literal[0, 1] = 1

    always = {"group_size": "g{}"}
    differing = {"axis": "axis{}", "include_lm_head": "head"}


OFFERED: dict[str, dict[int, type[Options]]] = {
    "none": {16: NoOptions},
    "bnb": {4: Bnb4Options, 8: Bnb8Options},
    "gptq": dict.fromkeys((2, 3, 4, 8), GptqOptions),
    "hqq": dict.fromkeys((1, 2, 3, 4, 8), HqqOptions),
}


@dataclass(frozen=True)
class Quantization:
    """A method, its bits and its resolved options. Make one with `quantization`, which validates."""

    method: str
    bits: int
    options: Options

    @cached_property
    def label(self) -> str:
        """The name in tables: `hqq-3-g64`, `bnb-4-nf4`, `none-16`. Two different settings never share one."""
        return "-".join([self.method, str(self.bits), *self.options.label_parts()])


def offered(method: str, bits: int) -> NotOffered | None:
    """None when the method has that width, else the value that says it has not; an unknown method is an error."""
    if not isinstance(method, str) or method not in OFFERED:
        raise QuantizeError(
            f"method is {method!r}; it must be one of {', '.join(OFFERED)}.{did_you_mean(method, OFFERED)}"
        )
    if isinstance(bits, bool) or not isinstance(bits, int):
        raise QuantizeError(f"bits is {bits!r}; it must be a whole number: {_widths(method)} for {method}.")
    return None if bits in OFFERED[method] else NotOffered(method, bits)


def quantization(method: str, bits: int, **options: Any) -> Quantization:
    """A Quantization with every option resolved and checked; the error names the option and what is allowed."""
    if missing := offered(method, bits):
        raise NotOfferedError(f"{bits} bits are {missing}; it has {_widths(method)}.")
    kind = OFFERED[method][bits]
    for name in options:
        if name not in kind.model_fields:
            raise QuantizeError(_unknown_option(method, bits, name))
    try:
        return Quantization(method, bits, kind(**options))
    except ValidationError as error:
        first = error.errors()[0]
        raise QuantizeError(f"{method}'s option {first['loc'][0]} is {first['input']!r}: {first['msg']}.") from None


def _unknown_option(method: str, bits: int, name: str) -> str:
    known = OFFERED[method][bits].model_fields
    elsewhere = [str(b) for b, kind in OFFERED[method].items() if name in kind.model_fields]
    if elsewhere:
        return f"{name} is an option of {method} at {' and '.join(elsewhere)} bits, not at {bits}."
    allowed = f"it has {', '.join(known)}" if known else "it has none"
    return f"{name} is not an option of {method} at {bits} bits; {allowed}.{did_you_mean(name, known)}"


def _widths(method: str) -> str:
    *head, last = map(str, OFFERED[method])
    return f"{', '.join(head)} and {last}" if head else last
