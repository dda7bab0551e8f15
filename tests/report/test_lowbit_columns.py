"""Which quantization a column of the low-bit table shows."""

import pytest

from qbench.report.lowbit import COLUMNS
from qbench.report.results import FamilyQuantization


@pytest.mark.parametrize(
    ("label", "title"),
    [
        ("rtn-8-a8-tensor", "W8A8 per tensor"),
        ("rtn-8-a8", "W8A8 per token"),
        ("rtn-4-a4", "W4A4"),
        ("gptq-4-g128-a4", "W4A4"),
        ("none-16-kv4-g8", "KV4"),
        ("none-16-kv2-token-c16", "KV2"),
        ("none-16-kv2-g8-keep4", None),
        ("none-16-a8-kv4", None),
        ("none-16-mask1e-06-kv4", None),
        ("rtn-8-mask1e-06-a8", None),
        ("rtn-8-a8-kv4", None),
        ("rtn-4-a8", None),
        ("none-16-a8", None),
        ("rtn-4-mxfp4-a4-mxfp4", None),
    ],
)
def test_a_column_shows_nothing_that_its_title_does_not_say(label: str, title: str | None) -> None:
    method, bits = label.split("-")[:2]
    about = FamilyQuantization("mini", method, int(bits), label)
    assert [column.title for column in COLUMNS if column.fits(about)] == ([title] if title else [])
