"""Labels of quantizations that change more than the weights."""

import pytest

from qbench.files import file_name
from qbench.records.audit import names_weights


@pytest.mark.parametrize(
    ("label", "method", "bits", "named"),
    [
        ("hqq-4-g64", "hqq", 4, True),
        ("none-16-kv8", "none", 16, True),
        ("bnb-8-kv8-mask1e-06", "bnb", 8, True),
        ("bnb-8", "bnb", 8, True),
        ("hqq-40-g64", "hqq", 4, False),
        ("hqq-4-g64", "hqq", 8, False),
        ("gptq-4-g128", "hqq", 4, False),
    ],
)
def test_a_label_names_its_weights(label: str, method: str, bits: int, named: bool) -> None:
    assert names_weights(label, method, bits) is named


def test_parts_may_be_in_names_of_folders() -> None:
    assert file_name("mini-softmax-hqq-4-g64-mask1e-06") == "mini-softmax-hqq-4-g64-mask1e-06"
