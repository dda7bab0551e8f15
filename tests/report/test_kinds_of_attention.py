"""More than two kinds of attention, kinds besides softmax and softpick, and a reference that is not softmax."""

import json
import random
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from qbench.attention.kinds import ATTENTIONS
from qbench.errors import InputError
from qbench.gate.power import power
from qbench.report.attentions import TWINS, kind_name, kind_title
from qbench.report.compare import compare, comparison_rows, comparison_tables
from qbench.report.delta import Difference, ReportData, read_report
from qbench.report.html import page
from qbench.report.looks import LOOKS, looks
from qbench.report.plots import figures
from qbench.report.remarks import remarks_on_delta
from qbench.report.render import FORMATS, audit, render
from qbench.report.results import Score

from .examples import ALWAYS, cell, samples_of, write_cell, write_mini
from .golden import check

THREE = ("gated", "softpick", "softmax")  # as a recipe may have them
LABELS = ("none-16", "hqq-2-g64", "hqq-3-g64")
TASKS = ("arc_easy", "wikitext")
LONG = ["family", "method", "bits", "label", "task", "metric", "better", "attention", "value", "reference", "delta"]


@pytest.fixture(autouse=True)
def gated_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a kind called gated, whether or not ATTENTIONS has one."""
    monkeypatch.setitem(ATTENTIONS, "gated", SimpleNamespace(title="Gated"))  # type: ignore[misc]


@pytest.fixture(scope="module")
def three_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three kinds."""
    folder = tmp_path_factory.mktemp("runs") / "three"
    return write_mini(folder, labels=LABELS, tasks=TASKS, attentions=THREE, reference="softmax")


@pytest.fixture
def three(three_folder: Path) -> ReportData:
    """The same, as a report."""
    return read_report(three_folder)


@pytest.fixture
def turned(tmp_path: Path) -> ReportData:
    """Softmax against softpick."""
    return read_report(write_mini(tmp_path, labels=LABELS, tasks=TASKS, reference="softpick"))


def test_each_kind_is_compared_with_the_reference(three: ReportData) -> None:
    assert three.deltas
    for row in three.deltas:
        assert list(row.scores) == ["softmax", "gated", "softpick"]
        assert list(row.deltas) == ["gated", "softpick"]
        reference = row.scores["softmax"]
        assert isinstance(reference, Score)
        for attention, delta in row.deltas.items():
            own = row.scores[attention]
            assert isinstance(own, Score)
            assert delta
            assert delta.value == own.value - reference.value
            assert delta.interval
            assert delta.interval.low - 1e-9 <= delta.value <= delta.interval.high + 1e-9
    assert three.damages
    for damages in three.damages:
        first = damages.damages["softmax"].score
        assert isinstance(first, Difference)
        for attention, difference in damages.differences.items():
            second = damages.damages[attention].score
            assert isinstance(second, Difference)
            assert difference
            assert difference.value == pytest.approx(second.value - first.value, rel=1e-12)


def test_a_pair_has_the_numbers_that_it_has_among_three(three: ReportData, tmp_path: Path) -> None:
    twins = read_report(write_mini(tmp_path, labels=LABELS, tasks=TASKS))
    for among, alone in zip(three.deltas, twins.deltas, strict=True):
        assert_alike(among.deltas["softpick"], alone.deltas["softpick"])
    for among_three, alone_too in zip(three.damages, twins.damages, strict=True):
        assert_alike(among_three.differences["softpick"], alone_too.differences["softpick"])


def assert_alike(one: Difference, other: Difference) -> None:
    """Equal but for the rounding of variances, which depends on how many models share an array."""
    assert replace(one, interval=None) == replace(other, interval=None)
    assert (one.interval is None) == (other.interval is None)
    if one.interval and other.interval:
        assert replace(one.interval, estimate=None) == replace(other.interval, estimate=None)
        for left, right in zip(one.interval.estimate.sources, other.interval.estimate.sources, strict=True):
            assert left.freedom == right.freedom
            assert left.variance == pytest.approx(right.variance, rel=1e-12, abs=1e-24)


@pytest.mark.parametrize("kind", ALWAYS)
def test_three_kinds_in_markdown(kind: str, three: ReportData) -> None:
    check(f"three-{kind}.md", render(three, "md", kind))


@pytest.mark.parametrize("kind", ALWAYS)
def test_another_reference_in_markdown(kind: str, turned: ReportData) -> None:
    text = render(turned, "md", kind)
    assert "softpick − softmax" not in text
    assert "Softpick against softmax" not in text
    said = {
        "summary": "softpick / softmax",
        "damage": "The difference is softmax's damage − softpick's",
        "delta": "Δ is softmax − softpick;",
        "baseline": "Softmax against softpick, unquantized: mini.",
        "headline": "less an attention lost than softpick",
    }
    assert said[kind] in text


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        pytest.param(kind, form, marks=pytest.mark.slow if form == "html" and kind else ())
        for form in FORMATS
        for kind in (*ALWAYS, None)  # None: all
    ],
)
def test_every_kind_and_format_of_three_kinds(kind: str | None, form: str, three: ReportData) -> None:
    if kind == "summary" and form in ("csv", "json"):
        return
    text = render(three, form, kind)
    assert all(name in text for name in ("gated", "softmax", "softpick") if form in ("csv", "json"))
    assert all(name in text.title() for name in ("Gated", "Softmax", "Softpick") if form not in ("csv", "json"))


def test_the_long_csv_has_a_row_for_each_kind_other_than_the_reference(three: ReportData) -> None:
    frame = pd.DataFrame(json.loads(render(three, "json", "delta")))
    assert list(frame.columns)[: len(LONG)] == LONG
    assert set(frame.attention) == {"gated", "softpick"}
    assert set(frame.reference_attention) == {"softmax"}
    assert len(frame) == 2 * len(three.deltas)
    assert (frame.value - frame.reference - frame.delta).abs().max() == 0
    damage = pd.DataFrame(json.loads(render(three, "json", "damage")))
    assert (damage.value_damage - damage.reference_damage - damage.difference).abs().max() < 1e-9


@pytest.mark.parametrize("which", ["three", "turned"])
def test_a_long_csv_is_read_as_it_was_written(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    report: ReportData = request.getfixturevalue(which)
    (tmp_path / "long.csv").write_text(render(report, "csv", "delta"))
    published = read_report(tmp_path / "long.csv")
    assert published.results.reference == report.results.reference
    assert [{a: d and d.value for a, d in row.deltas.items()} for row in published.deltas] == [
        {a: d and d.value for a, d in row.deltas.items()} for row in report.deltas
    ]
    rows = comparison_rows(compare(report, published))
    assert rows
    assert all(row["difference"] == 0 for row in rows)
    assert all(row["agrees"] for row in rows if row["metric"] != "bits_per_byte")  # its repeat noise is not known


def test_another_reference_is_not_written_as_softpick_minus_softmax(turned: ReportData) -> None:
    rows = json.loads(render(turned, "json", "delta"))
    assert {(row["attention"], row["reference_attention"]) for row in rows} == {("softmax", "softpick")}


HEADER = "family,method,bits,task,metric,attention,value,reference,delta,reference_attention\n"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("S,hqq,2,t,acc,gated,1,2,-1,softmax\n" * 2, r"line 3 repeats S, hqq-2, t, acc, gated.* line 2"),
        (
            "S,hqq,2,t,acc,gated,1,2,-1,softmax\nS,hqq,2,t,acc,softpick,1,3,-2,softmax\n",
            r"line 3: reference is 3, but 2 in another row",
        ),
        ("S,hqq,2,t,acc,softmax,1,2,-1,softmax\n", r"line 2: attention is 'softmax'; .* other than softmax"),
        ("S,hqq,2,t,acc,,1,2,-1,softmax\n", r"line 2: attention is ''"),
        (
            "S,hqq,2,t,acc,gated,1,2,-1,softmax\nS,hqq,3,t,acc,softmax,1,3,-2,softpick\n",
            r"softmax \(.*line 2\) and softpick \(.*line 3\); all must .* reference",
        ),
    ],
)
def test_a_bad_long_csv_is_a_sentence_with_its_line(rows: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text(HEADER + rows)
    with pytest.raises(InputError, match=message):
        read_report(tmp_path)


def test_a_long_csv_without_a_reference_names_the_column_for_it(tmp_path: Path) -> None:
    header = HEADER.replace(",reference_attention", "")
    (tmp_path / "n.csv").write_text(header + "S,hqq,2,t,acc,softmax,1,2,-1\n")
    with pytest.raises(InputError, match=r"line 2: attention is 'softmax'.*reference_attention"):
        read_report(tmp_path)


def test_a_wrong_published_delta_names_its_kinds(tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text(HEADER + "S,none,16,odd,acc,gated,50,40,12,softmax\n")
    assert [found.message for found in read_report(tmp_path).findings] == [
        "Δ is +12.00, but gated − softmax is +10.00."
    ]


def test_published_numbers_are_compared_with_their_own_reference(turned: ReportData, tmp_path: Path) -> None:
    """Softpick − softmax was published; our recipe's Δ is softmax − softpick."""
    (tmp_path / "p.csv").write_text(
        "family,method,bits,label,task,metric,softmax,softpick,delta\nmini,hqq,2,hqq-2-g64,arc_easy,acc,50,60,10\n"
    )
    rows = {row["number"]: row for row in comparison_rows(compare(turned, read_report(tmp_path / "p.csv")))}
    assert list(rows) == ["softmax", "softpick", "delta"]
    assert rows["delta"]["ours"] == rows["softpick"]["ours"] - rows["softmax"]["ours"] != 0


def test_a_comparison_of_three_kinds_names_each_delta(three: ReportData) -> None:
    (table, *_) = comparison_tables(compare(three, three))
    numbers = dict.fromkeys(line[3].text for line in table.rows)
    assert list(numbers) == ["Softmax", "Gated", "Softpick", "Δ gated", "Δ softpick"]


def test_three_kinds_are_audited_and_have_power(three_folder: Path) -> None:
    text, found = audit(three_folder)
    assert not found
    assert "| mini-gated-hqq-2-g64 " in text
    assert {row.task for row in power(three_folder)} == {*TASKS, "all_tasks"}


def test_without_a_plan_the_reference_is_softmax_or_else_the_first(tmp_path: Path) -> None:
    for attention in ("softpick", "gated"):
        write_cell(tmp_path, cell(attention, "none-16"), samples_of(attention, "none-16"))
    assert read_report(tmp_path).results.all_kinds == ["gated", "softpick"]
    write_cell(tmp_path, cell("softmax", "none-16"), samples_of("softmax", "none-16"))
    assert read_report(tmp_path).results.reference == "softmax"


def test_a_family_without_the_reference_has_no_delta_and_says_so(tmp_path: Path) -> None:
    report = read_report(write_mini(tmp_path, labels=LABELS, attentions=("softpick", "gated"), reference="softmax"))
    assert all(delta is None for row in report.deltas for delta in row.deltas.values())
    (said,) = remarks_on_delta(report)
    assert "mini has no softmax model" in said
    assert "no Δ" in said
    for kind in ("summary", "damage", "delta", "baseline"):
        assert "The family mini has no softmax model" in render(report, "md", kind)
    assert report.headlines == []
    damage = report.damages[0].damages["gated"].score
    assert isinstance(damage, Difference)  # the cost of quantization is still known


def test_families_of_other_kinds_stand_in_one_set(tmp_path: Path) -> None:
    """A family of three, a pair and a single model."""
    for family, attentions in {"A": THREE, "B": ("softmax", "gated"), "C": ("softmax",)}.items():
        for attention in attentions:
            for label in LABELS:
                write_cell(tmp_path, cell(attention, label, family), samples_of(attention, label, seed=ord(family)))
    report = read_report(tmp_path)
    kinds = {family: report.results.compared_kinds(family) for family in "ABC"}
    assert kinds == {
        "A": ["softmax", "gated", "softpick"],
        "B": ["softmax", "gated"],
        "C": ["softmax", "gated"],
    }
    baseline = render(report, "md", "baseline")
    assert "The family B has no softpick model" in baseline
    for kind in ALWAYS:
        assert render(report, "latex", kind)


def test_a_lone_kind_that_is_not_softmax_has_its_damage(tmp_path: Path) -> None:
    report = read_report(write_mini(tmp_path, labels=LABELS, tasks=TASKS, attentions=("gated",), reference="softmax"))
    assert "What quantization costs the mini gated model." in render(report, "md", "summary")
    assert "The family mini has no softmax model" in render(report, "md", "delta")


def test_the_page_says_what_is_compared(three: ReportData, turned: ReportData) -> None:
    assert "<h2>Δ: each attention against softmax</h2>" in page(three)
    assert "<h2>Δ: softmax against softpick</h2>" in page(turned)


def test_kinds_are_called_by_their_titles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTIONS, "relu", SimpleNamespace(title="ReLU Softmax"))  # type: ignore[misc]
    assert [kind_title(kind) for kind in ("softmax", "relu", "unknown_one")] == [
        "Softmax",
        "ReLU Softmax",
        "unknown_one",
    ]
    assert [kind_name(kind) for kind in ("softmax", "relu", "unknown_one")] == [
        "softmax",
        "ReLU softmax",
        "unknown_one",
    ]


def test_a_kind_of_another_package_is_called_as_its_records_call_it(tmp_path: Path) -> None:
    for attention, title in (("softmax", None), ("mine", "My Own Attention")):
        for label in ("none-16", "hqq-3-g64"):
            ref, samples = cell(attention, label), samples_of("softmax", label)
            write_cell(tmp_path, ref, samples, attention_title=title)
    report = read_report(tmp_path)
    assert "My Own Attention" in render(report, "md", "delta")
    assert "my own attention" in [text.get_text() for text in next(figures(report))[1].legends[0].get_texts()]


def test_nine_kinds_have_looks_of_their_own() -> None:
    nine = looks([*TWINS, *"abcdefg"])
    assert len(LOOKS) == 9
    assert len({look.colour for look in LOOKS}) == len({look.marker for look in LOOKS}) == 9
    assert (nine["softmax"].colour, nine["softpick"].colour) == ("#1f4e9c", "#e08214")
    assert nine["a"].colour == LOOKS[2].colour  # the first that no kind of this plot has
    assert looks(["softpick", "softmax"])["softpick"].colour == nine["softpick"].colour


def test_any_nine_kinds_look_different() -> None:
    """Of our table and others, in any order."""
    for seed in range(200):
        kinds = random.Random(seed).sample([*ATTENTIONS, *"abcdefghi"], 9)
        for count in (2, 5, 9):
            found = looks(kinds[:count]).values()
            assert len({(look.colour, look.marker, look.dashes) for look in found}) == count
    assert len(looks([*ATTENTIONS, *"abc"])) == len(ATTENTIONS) + 3


def test_measured_bits_are_drawn_where_they_are(three: ReportData) -> None:
    figure = dict(figures(three))["mini-bits-per-weight"]
    assert figure.axes
    for axes in figure.axes:
        lines = [line for line in axes.lines if line.get_marker() == "o"]
        assert {float(x) for line in lines for x in np.asarray(line.get_xdata())} == {2.5, 3.5}


def test_the_legend_has_each_kind_once_and_the_lines_their_colours(three: ReportData) -> None:
    drawn = dict(figures(three))
    assert list(drawn) == ["mini-score", "mini-damage", "mini-bits-per-weight"]
    styles = looks(three.results.all_kinds)
    for figure in drawn.values():
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == ["softmax", "gated", "softpick", "HQQ"]
        for axes in figure.axes:
            assert {line.get_color() for line in axes.lines if line.get_marker() == "o"} == {
                look.colour for look in styles.values()
            }
    for first, second in combinations(styles.values(), 2):
        assert first.colour != second.colour
        assert first.marker != second.marker


def test_many_kinds_have_one_figure_per_method(tmp_path: Path) -> None:
    """Nine kinds under three methods would be 27 lines in a panel."""
    header = "family,method,bits,task,metric,attention,value,reference\n"
    kinds = [kind for kind in ATTENTIONS if kind != "softmax"][:4]
    rows = [
        f"mini,{method},{bits},sciq,acc,{kind},{50 + bits},{51 + bits}"
        for kind in kinds
        for method, bits in (("none", 16), ("hqq", 2), ("hqq", 3), ("bnb", 4))
    ]
    (tmp_path / "n.csv").write_text(header + "\n".join(rows))
    names = [name for name, _ in figures(read_report(tmp_path))]
    assert sorted(names) == ["mini-damage-BNB", "mini-damage-HQQ", "mini-score-BNB", "mini-score-HQQ"]
