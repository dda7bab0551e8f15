"""Which cells lm-eval's models become: those that the caller describes, otherwise cells named after the models."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qbench.arguments import named_values
from qbench.errors import did_you_mean, some
from qbench.limited_yaml import LimitedLoader
from qbench.numbers import counted
from qbench.records.audit import names_weights
from qbench.records.limits import Bits
from qbench.records.lm_eval_import.fields import LmEvalError
from qbench.records.lm_eval_import.output import ModelOutput
from qbench.records.schema import CellRef
from qbench.validation import problem

Name = Annotated[str, Field(min_length=1, max_length=200)]
EXAMPLE = "family=8B,attention=softmax,method=awq,bits=4"


class NamedCell(BaseModel):
    """A cell as described by --cell or a file of cells; the defaults describe an unquantized softmax model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: Name | None = None
    attention: Name = "softmax"
    method: Name = "none"
    bits: Bits | None = None
    label: Name | None = None
    draw: Annotated[int, Field(ge=1)] | None = None


def parse_cell(text: str) -> NamedCell:
    """A cell from the command line: family=8B,attention=softmax,method=awq,bits=4."""
    return _validated(named_values(text, "--cell", EXAMPLE), "--cell", strict=False)


def read_cells(file: Path) -> dict[str, NamedCell]:
    """A YAML file that maps the names of models to cells."""
    try:
        with file.open("rb") as stream:
            content = yaml.load(stream, Loader=LimitedLoader)
    except OSError as error:
        raise LmEvalError(f"{file} cannot be read ({error.strerror or error}).") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LmEvalError(f"{file} is not YAML ({' '.join(str(error).split())}).") from None
    if not isinstance(content, dict) or not all(isinstance(own, dict) for own in content.values()):
        raise LmEvalError(
            f"{file} must map each model to a cell, such as `my/model: {{family: 8B, method: awq, bits: 4}}`."
        )
    return {str(model): _validated(own, f"{file}: {model}", strict=True) for model, own in content.items()}


def cells_of(
    outputs: Sequence[ModelOutput], cells: Sequence[NamedCell] = (), by_model: Mapping[str, NamedCell] | None = None
) -> list[CellRef]:
    """One cell per model; an error if two models would be the same cell. cells: in the order of the models."""
    if cells and len(cells) != len(outputs):
        models = some([output.model for output in outputs])
        raise LmEvalError(
            f"{counted(len(cells), '--cell option')} for {counted(len(outputs), 'model')} ({models}); give one per "
            "model, in this order, or map the models' names to cells in a file (--cells)."
        )
    named: list[NamedCell | None] = [*cells] or [_by_name(output, by_model or {}) for output in outputs]
    _check_all_used(outputs, by_model or {})
    found = [_cell(output, own) for output, own in zip(outputs, named, strict=True)]
    for i, cell in enumerate(found):
        if cell.name in [other.name for other in found[:i]]:
            first = outputs[[other.name for other in found].index(cell.name)]
            raise LmEvalError(
                f"{first.folder} and {outputs[i].folder} would both be the cell {cell.name}; give them different cells "
                f"with --cell, such as --cell {EXAMPLE}."
            )
    return found


def _names(output: ModelOutput) -> tuple[str, ...]:
    """The names that a file of cells may use for a model: the name given to lm-eval, or the name of its folder."""
    return output.model, output.folder.name, str(output.folder)


def _by_name(output: ModelOutput, by_model: Mapping[str, NamedCell]) -> NamedCell | None:
    return next((by_model[name] for name in _names(output) if name in by_model), None)


def _check_all_used(outputs: Sequence[ModelOutput], by_model: Mapping[str, NamedCell]) -> None:
    known = [name for output in outputs for name in _names(output)]
    for name in by_model:
        if name not in known:
            models = some([output.model for output in outputs])
            raise LmEvalError(
                f"The file of --cells describes {name}, but the models are {models}.{did_you_mean(name, known)}"
            )


def _cell(output: ModelOutput, named: NamedCell | None) -> CellRef:
    family = _short(output.model)
    if named is None:
        return CellRef(
            family=family,
            attention="softmax",
            checkpoint=output.model,
            method="none",
            bits=16,
            label="none-16",
            unnamed=True,
        )
    bits = named.bits or (16 if named.method == "none" else None)
    if bits is None:
        raise LmEvalError(
            f"The cell of {output.model} has the method {named.method}, but no bits; add them, such as bits=4."
        )
    label = named.label or f"{named.method}-{bits}"
    if not names_weights(label, named.method, bits):
        raise LmEvalError(
            f"The cell of {output.model} has the label {label}; one of {named.method} at {bits} bits begins with "
            f"{named.method}-{bits}."
        )
    return CellRef(
        family=named.family or family,
        attention=named.attention,
        checkpoint=output.model,
        method=named.method,
        bits=bits,
        label=label,
        draw=named.draw,
    )


def _short(model: str) -> str:
    """A local path by its last part; a Hub id as it is."""
    return Path(model).name if model.startswith((".", "/", "~")) else model


def _validated(fields: Any, where: str, strict: bool) -> NamedCell:
    try:
        return NamedCell.model_validate(fields, strict=strict)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        allowed = list(NamedCell.model_fields)
        hint = f"{did_you_mean(name, allowed)} Allowed: {', '.join(allowed)}." if "extra" in first["type"] else ""
        raise LmEvalError(f"{where}: {name} {problem(first)}{hint}") from None
