"""The audit as a record has it: strict when it is read, and no proof if it was made up."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from qbench.records.audit import TOTALS, UNQUANTIZED, Audit, LayerAudit, failures

MINI = Path(__file__).parents[2] / "results" / "mini"


def stored() -> dict[str, dict[str, Any]]:
    """The audits of the committed run by their labels, as they are in the files."""
    records = (json.loads(file.read_text()) for file in MINI.glob("*softmax*/record.json"))
    return {record["audit"]["label"]: record["audit"] for record in records if record["audit"]}


@pytest.fixture
def fields() -> dict[str, Any]:
    return stored()["hqq-3-g64"]


def reasons(fields: dict[str, Any], **changes: Any) -> list[str]:
    return failures(Audit.model_validate(fields | changes))


def test_every_committed_audit_is_read_and_passes() -> None:
    found = stored()
    assert {"gptq-2-g128", "bnb-8", UNQUANTIZED} <= found.keys()
    for label, audit in found.items():
        assert reasons(audit) == [], label


@pytest.mark.parametrize("change", [{"typo": 3}, {"kl": "nonsense"}, {"layers": [{"name": "x"}]}])
def test_an_audit_with_unknown_or_wrong_fields_is_not_read(fields: dict[str, Any], change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(change))):
        Audit.model_validate(fields | change)


def test_a_layer_with_unknown_fields_is_not_read(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="quantized_share"):  # which an audit computes, and a layer does not
        LayerAudit.model_validate(fields["layers"][0] | {"quantized_share": 1.0})


def test_figures_that_follow_from_others_are_computed_not_read(fields: dict[str, Any]) -> None:
    lied = {"code_bits": 1.0, "storage_bits": 1.0, "relative_error": 0.0, "snr_db": 99.0}
    lied |= {"quantized_share": 2.0, "target_share": 0.0}
    assert fields.keys() >= lied.keys()
    audit, lie = Audit.model_validate(fields), Audit.model_validate(fields | lied)
    assert lie == audit
    assert {name: lie.model_dump()[name] for name in lied} == {name: fields[name] for name in lied}


def test_an_audit_of_nothing_proves_no_quantization(fields: dict[str, Any]) -> None:
    nothing = dict.fromkeys(TOTALS, 0) | {"layers": [], "target_weights": 0}
    assert reasons(fields, **nothing) == ["No layer was quantized."]
    assert reasons(fields, **nothing, label=UNQUANTIZED, method="none", bits=16) == []


@pytest.mark.parametrize("name", TOTALS)
def test_totals_are_the_sums_over_the_layers(fields: dict[str, Any], name: str) -> None:
    found = reasons(fields, **{name: type(fields[name])(fields[name] * 1.01)})
    assert any(f"{name} is " in reason for reason in found)
    assert reasons(fields, source_energy=fields["source_energy"] * (1 + 1e-9)) == []


@pytest.mark.parametrize(
    "change",
    [
        {"label": "gptq-3-g64"},
        {"label": "hqq-2-g64"},
        {"label": "hqq-30"},
        {"label": UNQUANTIZED},
        {"label": UNQUANTIZED, "method": "none", "bits": 16},
        {"parts": [{"label": "kv4"}]},
        {"label": "hqq-3-g64-kv4", "parts": [{"label": "kv8"}]},
    ],
)
def test_the_label_is_that_of_what_was_audited(fields: dict[str, Any], change: dict[str, Any]) -> None:
    assert any(f"label is {change.get('label', fields['label'])}" in reason for reason in reasons(fields, **change))


def test_a_part_beside_the_weights_is_proved_too(fields: dict[str, Any]) -> None:
    def found(value: float, **limits: float) -> list[str]:
        measured = [{"what": "the number of levels", "value": value, **limits}]
        return reasons(fields, label="hqq-3-g64-kv4", parts=[{"label": "kv4", "measured": measured}])

    assert found(16, at_most=16) == found(16, at_least=9, at_most=16) == []
    for wrong in (found(17, at_most=16), found(8, at_least=9, at_most=16), found(math.nan, at_most=16)):
        assert len(wrong) == 1
        assert wrong[0].startswith("kv4: the number of levels is ")
    unproved = reasons(fields, label="hqq-3-g64-kv4", parts=[{"label": "kv4"}])
    assert len(unproved) == 1
    assert "kv4: nothing was measured" in unproved[0]
