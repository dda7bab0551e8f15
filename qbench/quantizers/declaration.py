"""What a quantizer declares: its options and a `Quantizer`. Imports no torch, since plans read declarations too.

To add one: a folder `qbench/quantizers/<name>/` whose `__init__.py` imports no torch and has a `QUANTIZER`, or the same
in your own package with an entry point in the group "qbench.quantizers". Nothing else names a method.
"""

import contextlib
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from qbench.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from qbench.quantizers.packed import PackedLinear

# The field of a quantization_config that names the method if transformers cannot load what we write. Without
# "quant_method" it raises an error; with an unknown method, or "hqq", it would only warn and initialize the weights
# at random.
OUR_METHOD = "qbench_quant_method"
# That a message may suggest: others may fit too, but the kernels that read checkpoints want powers of two.
GROUP_SIZES = (-1, 8, 16, 32, 64, 128, 256, 512, 1024)
MAX_SUGGESTED = 4  # besides -1


class QuantizeError(InputError):
    """A wrong call: a method, bits, option, model or calibration that does not work."""


def must_define(owner: type, method: str) -> NotImplementedError:
    """The error of a method that the author of a quantizer must define."""
    return NotImplementedError(f'{owner.__name__} must define {method}(); see "Adding one" in docs/quantizers.md.')


class Options(BaseModel):
    """Options of a method; the defaults here are the only ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    # How each option shows in a label: always, or only if it is not the default. Those of a base class come last.
    label_always: ClassVar[Mapping[str, str]] = {}
    label_if_changed: ClassVar[Mapping[str, str]] = {}
    # If scores depend on what else is in a batch: the batch's token budget on a CPU, unless the recipe gives one.
    fixed_batch_tokens: ClassVar[int | None] = None
    activation_bits: ClassVar[int | None] = None  # if the method itself quantizes activations: their bits

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        shown = cls._forms("label_always") | cls._forms("label_if_changed")
        if unseen := cls.model_fields.keys() - shown.keys():
            raise TypeError(f"{cls.__name__} has options that are not shown in a label: {', '.join(sorted(unseen))}.")

    @classmethod
    def _forms(cls, name: str) -> dict[str, str]:
        """The label formats of this class, then those of its bases."""
        found: dict[str, str] = {}
        for kind in cls.__mro__:
            found = found | {field: form for field, form in vars(kind).get(name, {}).items() if field not in found}
        return found

    def label_parts(self) -> list[str]:
        """What these options add to the label, such as g64."""
        fields = type(self).model_fields
        if_changed = self._forms("label_if_changed").items()
        changed = {name: form for name, form in if_changed if getattr(self, name) != fields[name].default}
        forms = self._forms("label_always") | changed
        return [form.format(getattr(self, name)) for name, form in forms.items()]


class LinearOptions(Options):
    """The options of every method that quantizes linear layers."""

    include_lm_head: bool = False

    label_if_changed: ClassVar = {"include_lm_head": "head"}

    def misfit(self, bits: int, shape: tuple[int, int]) -> str:
        """Why a linear layer with these outputs and inputs cannot be quantized so; empty if it can.

        It is asked for all layers before the first one is replaced, and by `qbench plan`. By default, a `group_size`
        must divide the inputs. `first_misfit` goes on with "of", the layer's name, and the sizes that fit.
        """
        size = getattr(self, "group_size", 0)
        return f"group_size {size} does not divide the {shape[1]:,} inputs" if size > 0 and shape[1] % size else ""

    def first_misfit(self, bits: int, shapes: Mapping[str, tuple[int, int]]) -> str:
        """A sentence on the first layer that cannot be quantized so, with group sizes that fit all; empty if all can.

        shapes: outputs and inputs by name.
        """
        for name, (outputs, inputs) in shapes.items():
            if why := self.misfit(bits, (outputs, inputs)):
                fitting = self._what_fits(bits, shapes.values())
                return f"{why} of {name} ({outputs} × {inputs}, outputs × inputs){fitting}."
        return ""

    def _what_fits(self, bits: int, shapes: Collection[tuple[int, int]]) -> str:
        """The group sizes nearest to the own one that fit all shapes, and how to write one; empty if none fits."""
        own, fitting = self.model_dump(), []
        for size in GROUP_SIZES if "group_size" in own else ():
            with contextlib.suppress(ValidationError):
                other = type(self)(**own | {"group_size": size})
                if not any(other.misfit(bits, shape) for shape in shapes):
                    fitting.append(size)
        if not fitting:
            return ""
        wanted = max(1, own["group_size"])
        nearest = sorted((size for size in fitting if size > 0), key=lambda size: max(size / wanted, wanted / size))
        listed = sorted([*nearest[:MAX_SUGGESTED], *([-1] if -1 in fitting else [])])
        what = "sizes that fit" if len(listed) == len(fitting) else "nearest sizes that fit (powers of two)"
        sizes = ["-1 (one group per row)" if size == -1 else str(size) for size in listed]
        one = (nearest or listed)[0]
        return (
            f"; {what}: {', '.join(sizes)}. Write one in a recipe as `options: {{group_size: {one}}}`, "
            f"for `qbench quantize` as `--group-size {one}`"
        )


class Quantizer:
    """A method: what it offers, and how its layers are made, saved and read back."""

    name: ClassVar[str]  # in recipes and labels
    title: ClassVar[str]  # in tables, spelled as in papers
    widths: ClassVar[Mapping[int, type[Options]]]  # by bits: the options at that width
    library: ClassVar[str | None] = None  # the package that it needs, by its import name
    calibrated: ClassVar[bool] = False  # its weights depend on calibration text
    quant_method: ClassVar[str | None] = None  # its name in quantization_configs; None: `name`
    config_file: ClassVar[str | None] = None  # a file next to config.json that also has the quantization_config
    # For a plan's estimate: how often the weights go through memory, including the audit (bnb: 30 to 40 s on one core
    # for 308 million weights), and the seconds to solve one column.
    passes: ClassVar[float] = 180.0
    column_seconds: ClassVar[float] = 0.0

    def layer_class(self, bits: int) -> "type[PackedLinear]":
        """The class of its layers. Import it inside, so a plan does not wait for torch."""
        raise must_define(type(self), "layer_class")

    def quantize_linears(
        self,
        model: "nn.Module",
        bits: int,
        options: Any,
        *,
        targets: list[str],
        calibration: Any = None,
        progress: bool = False,
        device: "torch.device | str | None" = None,
    ) -> None:
        """Replace each target nn.Linear by a PackedLinear, in place.

        All checks of shapes and calibration come before the first replacement. The audit compares with the source
        weights: a method may drop them but must not write to them. progress: show a bar on a terminal. The model
        stays on its device; one layer at a time moves to `device` (by default the same) and back.
        """
        from qbench.quantizers.packed import replace_linears

        replace_linears(model, targets, self.layer_class(bits), bits, options, progress=progress, device=device)

    def write_config(self, bits: int, options: Any, dtype: str) -> dict[str, Any]:
        """The quantization_config of config.json, in the format of the library that reads it."""
        return {OUR_METHOD: self.config_name, "bits": bits, "options": options.model_dump()}

    def read_config(self, settings: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Bits and options of a quantization_config; the inverse of `write_config`."""
        return settings["bits"], settings["options"]

    def preload(self) -> None:
        """Import what its cells need, before they are forked."""
        for bits in self.widths:
            self.layer_class(bits)

    def cuda_environment(self) -> dict[str, str]:
        """Environment variables for its cells on CUDA: results of checks that each cell would otherwise repeat."""
        return {}

    def check_kernels(self, device: str) -> None:
        """Raise QuantizeError if its library would silently run fallback kernels on the device."""

    @property
    def config_name(self) -> str:
        """Its name in quantization_configs."""
        return self.quant_method or self.name

    @property
    def is_installed(self) -> bool:
        """Whether its library is installed."""
        return self.library is None or find_spec(self.library) is not None


def skipped_modules(options: LinearOptions) -> list[str]:
    """The modules that stay unquantized, as the configs of bitsandbytes and HQQ list them."""
    return [] if options.include_lm_head else ["lm_head"]


def is_head_included(skipped: list[str] | None) -> bool:
    """The inverse of `skipped_modules`."""
    return skipped is not None and "lm_head" not in skipped
