"""HQQ: half-quadratic quantization, which fits each group's zero point without data. https://mobiusml.github.io/hqq_blog"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from qbench.quantizers.declaration import OUR_METHOD, LinearOptions, Quantizer, is_head_included, skipped_modules

if TYPE_CHECKING:
    from qbench.quantizers.packed import PackedLinear


MULTIPLE = 8  # that the library wants of a group size
ROWS_PACKED = {8: 1, 4: 2, 3: 1, 2: 4, 1: 8}  # by bits: how many groups the library packs together


class HqqOptions(LinearOptions):
    """Axis 1 groups weights along a row, axis 0 across rows.

    The library groups the flattened weight: a group may begin in one row and end in the next.
    """

    group_size: int = Field(default=64, ge=8)
    axis: Literal[0, 1] = 1

    label_always: ClassVar = {"group_size": "g{}"}
    label_if_changed: ClassVar = {"axis": "axis{}"}

    def misfit(self, bits: int, shape: tuple[int, int]) -> str:
        """The group size must be a multiple of 8 that divides the weights, and groups fill the rows that are packed."""
        weights, size = shape[0] * shape[1], self.group_size
        if size % MULTIPLE:
            return f"group_size {size} is not a multiple of {MULTIPLE}, so hqq cannot group the {weights:,} weights"
        if weights % size:
            return f"group_size {size} does not divide the {weights:,} weights"
        rows = weights // size if self.axis == 1 else size
        if rows % ROWS_PACKED[bits]:
            return f"hqq packs {bits}-bit codes of {ROWS_PACKED[bits]} groups together, not the {rows} groups of {size}"
        return ""


class Hqq(Quantizer):
    """HQQ, by the library hqq."""

    name = "hqq"
    title = "HQQ"
    widths: ClassVar = dict.fromkeys((1, 2, 3, 4, 8), HqqOptions)
    library = "hqq"
    passes = 380.0  # 20 rounds of its solver; 79 s on one core for 308 million weights

    def layer_class(self, bits: int) -> "type[PackedLinear]":
        """One class for all widths."""
        from qbench.quantizers.hqq.layer import HqqLinear

        return HqqLinear

    def write_config(self, bits: int, options: HqqOptions, dtype: str) -> dict[str, Any]:
        """In the library's format; transformers cannot load it."""
        from hqq.core.quantize import BaseQuantizeConfig

        settings = BaseQuantizeConfig(nbits=bits, group_size=options.group_size, axis=options.axis)
        return {OUR_METHOD: "hqq", "quant_config": settings, "skip_modules": skipped_modules(options)}

    def read_config(self, settings: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """The inverse of `write_config`."""
        params = settings["quant_config"]["weight_quant_params"]
        head = is_head_included(settings["skip_modules"])
        return params["nbits"], {"group_size": params["group_size"], "axis": params["axis"], "include_lm_head": head}

    def preload(self) -> None:
        """The layer imports its library on first use."""
        super().preload()
        import hqq.core.quantize  # noqa: F401


QUANTIZER = Hqq()
