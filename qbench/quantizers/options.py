"""What can be requested: the available quantizers, and a `Quantization`, typed and checked. Imports no torch."""

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import import_module, metadata
from typing import Any

from pydantic import ValidationError

import qbench.quantizers
from qbench.errors import did_you_mean
from qbench.identity import package_code_hash
from qbench.plugins import declared
from qbench.quantizers.axes import AXES, Part, parts_of
from qbench.quantizers.declaration import Options, QuantizeError, Quantizer
from qbench.records.audit import UNQUANTIZED
from qbench.validation import problem

ENTRY_POINTS = "qbench.quantizers"  # the group in which other packages declare theirs


class NotOfferedError(QuantizeError):
    """The method does not offer this width."""


@dataclass(frozen=True)
class NotOffered:
    """A width that a method does not offer: a value for plans and tables, not an error."""

    method: str
    bits: int
    parts: tuple[Part, ...] = ()

    @property
    def label(self) -> str:
        """The name in tables; there are no options to show."""
        return "-".join([self.method, str(self.bits), *(part.label for part in self.parts)])

    def __str__(self) -> str:
        return f"not offered by {self.method}"


@dataclass(frozen=True)
class Quantization:
    """A method for the weights with its bits and resolved options, and further parts, one per axis.

    Make one with `quantization`, which validates.
    """

    method: str
    bits: int
    options: Options
    parts: tuple[Part, ...] = ()

    @cached_property
    def label(self) -> str:
        """The name in tables: `hqq-3-g64`, `none-16`, `none-16-mask1e-06`. Different settings have different names."""
        return "-".join([self.method, str(self.bits), *self.options.label_parts(), *(p.label for p in self.parts)])

    @property
    def is_unquantized(self) -> bool:
        """Whether this is the baseline: unquantized weights, and no axes."""
        return self.label == UNQUANTIZED

    @property
    def for_weights(self) -> "Quantization":
        """The same quantization without its axes."""
        return replace(self, parts=())

    @property
    def is_calibrated(self) -> bool:
        """Whether its numbers depend on calibration text."""
        return self.quantizer.calibrated or any(part.options.calibrated for part in self.parts)

    @property
    def arguments(self) -> dict[str, Any]:
        """Its options and axes as `quantization` and `quantize` take them."""
        return self.options.model_dump() | {part.axis: part.options.model_dump() for part in self.parts}

    @property
    def quantizer(self) -> Quantizer:
        """The declaration of the method."""
        return quantizer(self.method)

    def identity(self) -> dict[str, Any]:
        """Its part of a cell's identity; without axes, the fields are the same as in older records."""
        weights = {"method": self.method, "bits": self.bits, "options": self.options.model_dump()}
        return weights | ({"parts": {p.label: p.options.model_dump() for p in self.parts}} if self.parts else {})

    def packages(self) -> dict[str, str]:
        """The version of the method's library and, if another package declares it, that one's version and code hash."""
        library = self.quantizer.library
        found = {library: _version(library)} if library else {}
        for point, other in declared(ENTRY_POINTS, Quantizer, QuantizeError):
            if point.dist and other.name == self.method:
                found[point.dist.name] = f"{point.dist.version} ({package_code_hash(point.module)})"
        return found


@cache
def quantizers() -> dict[str, Quantizer]:
    """Every quantizer by name: the baseline, ours in alphabetical order, then those of other packages."""
    found = {own.name: own for own in sorted(_ours(), key=lambda own: (own.name != "none", own.name))}
    for point, other in declared(ENTRY_POINTS, Quantizer, QuantizeError):
        if other.name in found:
            raise QuantizeError(f"Two quantizers are called {other.name}; rename the one in {point.value}.")
        if other.config_name in {own.config_name for own in found.values()}:
            raise QuantizeError(
                f"Two quantizers are called {other.config_name} in a quantization_config; give the one in "
                f"{point.value} another quant_method."
            )
        found[other.name] = other
    return found


def quantizer(method: str) -> Quantizer:
    """The quantizer of that name; the error lists the available ones."""
    known = quantizers()
    if not isinstance(method, str) or method not in known:
        raise QuantizeError(f"method is {method!r}; it must be one of {', '.join(known)}.{did_you_mean(method, known)}")
    return known[method]


def offers(method: str, bits: int) -> bool:
    """Whether the method has that width; an unknown method is an error."""
    widths = quantizer(method).widths
    if isinstance(bits, bool) or not isinstance(bits, int):
        raise QuantizeError(f"bits is {bits!r}; it must be a whole number: {_listed(widths)} for {method}.")
    return bits in widths


def quantization(method: str, bits: int, **options: Any) -> Quantization:
    """A Quantization with every option resolved and checked; the error names the option and what is allowed.

    options: those of the method, and axes by their names: mask_heads={"epsilon": 1e-6}.
    """
    if not offers(method, bits):
        widths = _listed(quantizer(method).widths)
        raise NotOfferedError(f"{bits} bits are {NotOffered(method, bits)}, which offers {widths}.")
    kind = quantizer(method).widths[bits]
    parts = parts_of(options)
    options = {name: value for name, value in options.items() if name not in AXES}
    for name in options:
        if name not in kind.model_fields:
            raise QuantizeError(_unknown_option(method, bits, name))
    if kind.activation_bits and any(part.options.quantizes_activations for part in parts):
        raise QuantizeError(
            f"{method} at {bits} bits already quantizes activations, to {kind.activation_bits} bits; leave "
            "`activations` out, or use another method."
        )
    try:
        return Quantization(method, bits, kind(**options), parts)
    except ValidationError as error:
        first = error.errors()[0]
        raise QuantizeError(f"{method}'s {first['loc'][0]} {problem(first)}") from None


def _ours() -> list[Quantizer]:
    """The declarations in this package, one per folder."""
    folders = [found.name for found in pkgutil.iter_modules(qbench.quantizers.__path__) if found.ispkg]
    return [import_module(f"qbench.quantizers.{name}").QUANTIZER for name in folders]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _unknown_option(method: str, bits: int, name: str) -> str:
    widths = quantizer(method).widths
    known = widths[bits].model_fields
    elsewhere = [str(b) for b, kind in widths.items() if name in kind.model_fields]
    if elsewhere:
        return f"{name} is an option of {method} at {' and '.join(elsewhere)} bits, not at {bits}."
    allowed = f"its options are {', '.join(known)}" if known else "it has none"
    return f"{name} is not an option of {method} at {bits} bits; {allowed}.{did_you_mean(name, [*known, *AXES])}"


def _listed(widths: Mapping[int, object]) -> str:
    *head, last = map(str, widths)
    return f"{', '.join(head)} and {last}" if head else last
