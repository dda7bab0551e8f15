"""The formats of numbers: rounded once, with honest signs and suitable units."""

import pytest

from qbench import numbers


@pytest.mark.parametrize(("value", "text"), [(-0.001, "+0.00"), (0.0, "+0.00"), (2.675, "+2.67"), (-5.17, "-5.17")])
def test_differences_are_rounded_once_and_zero_has_no_minus(value: float, text: str) -> None:
    assert numbers.signed(value) == text


@pytest.mark.parametrize(("value", "decimals"), [(5.0, 2), (0.0, 6), (0.004, 3), (-0.0004, 4), (1e-12, 6)])
def test_what_is_not_zero_gets_the_decimals_to_show_it(value: float, decimals: int) -> None:
    assert numbers.needed_decimals(value) == decimals


@pytest.mark.parametrize(
    ("low", "high", "decimals", "text"),
    [
        (-0.0004, 1.2, 2, "[-0.00, +1.20]"),
        (-1e-15, 0.5, 2, "[+0.00, +0.50]"),  # zero, apart from rounding
        (0.0044, 0.021, 3, "[+0.004, +0.021]"),
        (-0.0004, 0.002, 2, "[-0.000, +0.002]"),  # [-0.00, +0.00] would say nothing
        (-3e-8, 2e-8, 2, "[-3e-08, +2e-08]"),
        (0.0, 0.0, 2, "[0, 0]"),
        (-12345.0, 1.5e7, 2, "[-1.2·10⁴, +1.5·10⁷]"),
    ],
)
def test_an_interval_shows_on_which_side_of_zero_its_ends_are(
    low: float, high: float, decimals: int, text: str
) -> None:
    assert numbers.signed_interval(low, high, decimals) == text


@pytest.mark.parametrize(
    ("value", "plain", "with_sign"),
    [
        (127846.35, "1.3·10⁵", "+1.3·10⁵"),
        (-2.5e12, "-2.5·10¹²", "-2.5·10¹²"),
        (9999.99, "9999.99", "+9999.99"),
        (float("inf"), "inf", "+inf"),
    ],
)
def test_large_numbers_are_powers_of_ten(value: float, plain: str, with_sign: str) -> None:
    assert (numbers.score(value), numbers.signed(value)) == (plain, with_sign)


def test_scores_shares_and_probabilities() -> None:
    assert numbers.score(56.605) == "56.60"
    assert numbers.interval(55.1, 58.204) == "[55.10, 58.20]"
    assert numbers.percent(0.9375) == "93.8%"
    assert numbers.percent(0.5625, 2) == "56.25%"
    assert numbers.p_value(0.01349) == "0.013"
    assert numbers.magnitude(1e-7) == "1e-07"
    assert numbers.significant(123456.0) == "1.23e+05"
    assert numbers.signed_significant(0.01234) == "+0.0123"
    assert numbers.fixed(12.04, 1) == "12.0"


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 documents"), (1, "1 document"), (2, "2 documents"), (1200, "1,200 documents")]
)
def test_counts_have_commas_and_the_plural(number: int, text: str) -> None:
    assert numbers.counted(number, "document") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.21, "3.2 s"), (59.9, "59.9 s"), (61, "1 min"), (3600, "60 min"), (5400, "1.5 h"), (10_000, "2.8 h")],
)
def test_durations_have_the_unit_that_people_would_use(seconds: float, text: str) -> None:
    assert numbers.duration(seconds) == text


@pytest.mark.parametrize(("size", "text"), [(350_000, "0.35 MB"), (999e6, "999.00 MB"), (1.234e9, "1.23 GB")])
def test_sizes_have_the_unit_that_people_would_use(size: float, text: str) -> None:
    assert numbers.byte_size(size) == text
