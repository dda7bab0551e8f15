"""Every format against a golden file, LaTeX in a real compiler, and numbers that are the same when read back."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from qbench.numbers import signed
from qbench.records.schema import Failure, PlannedCell
from qbench.report import tidy
from qbench.report.delta import Difference, ReportData, read_report
from qbench.report.drawing import write_drawings
from qbench.report.fitting import pieces
from qbench.report.html import page
from qbench.report.kinds import KINDS
from qbench.report.latex import latex
from qbench.report.layouts import READ_ADDED_DOCUMENTS
from qbench.report.looks import COLUMN
from qbench.report.markdown import markdown
from qbench.report.plots import all_figures
from qbench.report.remarks import remarks, remarks_on_delta
from qbench.report.render import render
from qbench.report.tables import Column, Field, Table

from ..example_records import PROVENANCE, make_record, make_samples
from .examples import ALWAYS, LABELS, cell, samples_of, write_cell, write_mini, write_plan_of, write_troubled
from .golden import check

COLUMNS = ["family", "method", "bits", "label", "task", "metric", "better", "softmax", "softpick", "delta"]
TASKS = ("arc_easy", "wikitext")
# A label that is not method and bits, a direction that must be looked up, an unknown one, and a missing number.
PUBLISHED = """\
size,method,bits,label,task,metric,better,softmax,softpick,delta
340M,none,16,,arc_easy,acc_norm,higher,56.61,56.73,+0.12
340M,none,16,,wikitext,word_perplexity,,23.85,24.32,+0.47
340M,hqq,3,hqq-3-g64,arc_easy,acc_norm,higher,48.65,52.57,+3.91
340M,hqq,3,hqq-3-g64,wikitext,word_perplexity,,35.52,30.24,-5.29
340M,hqq,2,,arc_easy,acc_norm,higher,,24.99,
340M,hqq,2,,odd,oddity,,1,2,
"""


def tables(report: ReportData, kind: str) -> list[Table]:
    """The tables of a kind, for people."""
    return KINDS[kind].tables(report)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ReportData:
    """A run with two tasks."""
    return read_report(
        write_mini(tmp_path_factory.mktemp("runs") / "small", labels=("none-16", "hqq-2-g64"), tasks=TASKS)
    )


@pytest.fixture(scope="module")
def small_troubled(tmp_path_factory: pytest.TempPathFactory) -> ReportData:
    """Everything that can go wrong, with two tasks."""
    return read_report(write_troubled(tmp_path_factory.mktemp("runs") / "troubled", tasks=TASKS))


@pytest.fixture
def published(tmp_path: Path) -> ReportData:
    """Published numbers."""
    (tmp_path / "published.csv").write_text(PUBLISHED)
    return read_report(tmp_path / "published.csv")


@pytest.mark.parametrize("kind", ALWAYS)
def test_markdown(kind: str, small: ReportData) -> None:
    check(f"{kind}.md", markdown(tables(small, kind), remarks(small)))


def unpadded(text: str) -> str:
    return re.sub(" +", " ", text)


def test_columns_stand_straight_on_a_screen(small: ReportData) -> None:
    for table in markdown(tables(small, "damage")).split("\n\n"):
        if table.startswith("|"):
            assert len({tuple(m.start() for m in re.finditer(r"\|", line)) for line in table.splitlines()}) == 1


def test_every_column_has_a_rule_however_narrow_it_is(lone: ReportData) -> None:
    """GitHub does not recognize a table if a column of its second line has no hyphen."""
    rules = [line for line in markdown(tables(lone, "delta")).splitlines() if line.startswith("|:")]
    assert rules
    assert all(re.fullmatch(r"(\|:?-+:?)+\|", rule) for rule in rules)


def test_the_summary_marks_only_differences_that_are_more_than_chance(mini_report: ReportData) -> None:
    (table,) = tables(mini_report, "summary")
    rows = {(row.quantization.label, row.measure.task, row.measure.metric): row for row in mini_report.damages}
    for label, line in zip(("bnb-4-nf4", "hqq-2-g64", "hqq-3-g64"), table.rows[1:], strict=True):
        for task, shown in zip(("arc_easy", "lambada_openai"), line[2:4], strict=True):
            row = rows[label, task, {"arc_easy": "acc_norm", "lambada_openai": "acc"}[task]]
            difference = row.differences["softpick"]
            assert difference is not None
            assert shown.tone == (difference.tone(row.measure) if difference.significant else None)
    perplexities = [line[-1] for line in table.rows[1:]]
    assert [shown.tone for shown in perplexities[1:]] == ["better", "better"]
    assert all(shown.text.count("*") == 2 for shown in perplexities[1:])


@pytest.fixture
def lone(tmp_path: Path) -> ReportData:
    """A family with only one model, which has a failed cell."""
    for label in ("none-16", "hqq-2-g64"):
        samples = samples_of("softmax", label)
        write_cell(tmp_path / "lone", cell("softmax", label), samples[samples["task"].isin(TASKS)])
    write_cell(tmp_path / "lone", cell("softmax", "hqq-3-g64"), None)
    return read_report(tmp_path / "lone")


def test_a_model_without_a_twin_has_its_damage_with_its_interval(lone: ReportData) -> None:
    (table,) = tables(lone, "damage")
    titles = ["Task", "Metric", "Quantization", "Damage", "Recovery", "95% interval", "Flips"]
    assert [column.title for column in table.columns] == titles
    assert table.caption == "What HQQ costs the mini softmax model: quantized − unquantized."
    rows = {(row.quantization.label, row.measure.metric): row.damages["softmax"] for row in lone.damages}
    damage = rows["hqq-2-g64", "acc_norm"].score
    assert isinstance(damage, Difference)
    assert damage.interval
    ends = f"[{signed(damage.interval.low)}, {signed(damage.interval.high)}]"
    left = rows["hqq-2-g64", "acc_norm"].recovery
    assert left is not None
    assert [field.text for field in table.rows[0][3:6]] == [signed(damage.value), f"{left:.1f}%", ends]
    assert [field.text for field in table.rows[1][3:]] == ["failed", "–", "–", "–"]
    assert not any("softpick" in text for text in (*table.footnotes.values(), *table.reading))
    check("lone-damage.md", markdown([table]))


def test_the_summary_of_a_model_without_a_twin_has_single_values(lone: ReportData) -> None:
    (table,) = tables(lone, "summary")
    assert not any("/" in field.text for line in table.rows for field in line)
    assert not any("softpick" in text for text in (table.caption, *table.reading))
    assert any(field.starred for line in table.rows for field in line)
    (damage,) = tables(lone, "damage")
    marked = [
        {(field.text, field.tone) for line in own.rows for field in line if field.tone} for own in (table, damage)
    ]
    assert marked[0] == marked[1] == {("+40.00%", "worse")}
    check("lone-summary.md", markdown([table]))


@pytest.mark.parametrize("kind", ["summary", "headline", "damage"])
def test_tables_of_published_numbers_name_what_is_suspicious(kind: str, paper: ReportData, small: ReportData) -> None:
    (line,) = [line for line in render(paper, "md", kind).splitlines() if line.startswith("Suspicious: ")]
    assert all(fact in line for fact in ("1.8B-softmax-hqq-2", "qbench audit", "claims"))
    cells = line.removeprefix("Suspicious: ").partition(";")[0].replace("\\", "")
    first, more = re.fullmatch(r"(.*) and (\d+) more", cells).groups()  # type: ignore[union-attr]
    named = first.split(", ")
    every = {name for found in paper.findings for name in found.names}
    assert len(set(named)) == len(named) == len(every) - int(more)
    assert set(named) < every == {name for name in every if " " not in name}
    assert "Suspicious: " not in render(small, "md", kind)


@pytest.mark.parametrize("kind", ["delta", "baseline"])
def test_scores_of_a_model_without_a_twin_have_one_column(kind: str, lone: ReportData) -> None:
    text = markdown(tables(lone, kind))
    assert "Scores of the" in text
    assert "oftpick" not in text
    assert "Δ" not in text


def test_the_damage_rows_of_a_model_without_a_twin_say_what_is_significant(lone: ReportData) -> None:
    rows = json.loads(render(lone, "json", "damage"))
    assert {row["softmax_significant"] for row in rows} <= {True, False, None}
    for row in rows:
        if row["softmax_significant"] is not None:
            assert row["softmax_significant"] == (row["softmax_low"] > 0 or row["softmax_high"] < 0)
    assert any(row["softmax_significant"] is not None for row in rows)


def test_the_delta_of_a_model_without_a_twin_says_where_to_look(lone: ReportData, small: ReportData) -> None:
    (said,) = remarks_on_delta(lone)
    for fact in ("softpick", "mini", "--kind damage", "--kind summary"):
        assert fact in said
    assert remarks(lone) == remarks_on_delta(small) == []
    assert said in render(lone, "md", "delta").splitlines()
    assert said not in render(lone, "md", "damage")


def test_the_default_of_a_model_without_a_twin_is_its_damage(
    lone: ReportData, small: ReportData, tmp_path: Path
) -> None:
    """For people; programs get the same columns whatever the folder holds."""
    assert render(lone, "md") == render(lone, "md", "damage")
    assert render(lone, "latex") == render(lone, "latex", "damage")
    assert render(lone, "csv") == render(lone, "csv", "delta")
    assert render(small, "md") == render(small, "md", "delta")
    write_cell(tmp_path / "plain", cell("softmax", "none-16"), samples_of("softmax", "none-16"))
    plain = read_report(tmp_path / "plain")
    assert render(plain, "md") == render(plain, "md", "delta"), "without a quantized cell there are scores only"


def test_what_intervals_add_is_said_where_they_are_shown(small: ReportData, paper: ReportData) -> None:
    said = {kind: any(READ_ADDED_DOCUMENTS in table.reading for table in tables(small, kind)) for kind in ALWAYS}
    assert said == {"delta": True, "damage": True, "baseline": False, "summary": False, "headline": False}
    assert not any(READ_ADDED_DOCUMENTS in table.reading for kind in KINDS for table in tables(paper, kind))


def test_a_family_without_a_task_says_so_in_the_baseline_table(tmp_path: Path) -> None:
    rows = "A,none,16,piqa,acc,70,71\nA,none,16,sciq,acc,80,81\nB,none,16,sciq,acc,90,91\n"
    (tmp_path / "n.csv").write_text("family,method,bits,task,metric,softmax,softpick\n" + rows)
    text = markdown(tables(read_report(tmp_path), "baseline"))
    assert "| Piqa | Acc ↑ | 70.00 | 71.00 | +1.00 | –<sup>a</sup> | –<sup>a</sup> | – |" in unpadded(text)
    assert "<sup>a</sup> B has no acc of piqa." in text


@pytest.mark.parametrize(
    ("run", "facts"),
    [
        ("none-16", ["Planned", "`qbench run`"]),
        ("hqq-2-g64", ["The unquantized model is planned", "`qbench run`"]),
    ],
)
def test_cells_that_were_not_run_share_a_footnote(run: str, facts: list[str], tmp_path: Path) -> None:
    planned = []
    for attention, label in ((attention, label) for attention in ("softmax", "softpick") for label in LABELS):
        about = cell(attention, label)
        done = label == run
        planned.append(
            write_cell(tmp_path, about, samples_of(attention, label))
            if done
            else PlannedCell(cell=about, key=make_record(about).key)
        )
    write_plan_of(tmp_path, planned)
    table = tables(read_report(tmp_path), "damage")[-1]
    rows = [line for line in table.rows if line[2].text == "2-bit g64"]
    assert {field.text for line in rows for field in line[3:]} <= {"missing", "–"}
    used = {mark for line in rows for field in line for mark in field.marks.split(",") if mark}
    (footnote,) = (table.footnotes[mark] for mark in used)
    assert all(fact in footnote for fact in facts)


def test_markdown_of_what_went_wrong(small_troubled: ReportData) -> None:
    check("troubled.md", markdown(tables(small_troubled, "delta"), remarks(small_troubled)))


@pytest.mark.parametrize("kind", ALWAYS)
def test_latex(kind: str, small: ReportData) -> None:
    check(f"{kind}.tex", latex(tables(small, kind), remarks(small)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"limit": 20}, "A trial: only the first 20 documents of each task."),
        ({"tasks": {"piqa": {"limit": 1}, "sciq": {"limit": None}}}, "A trial: only the first 1 document of piqa."),
        (
            {"limit": 20, "tasks": {"piqa": {"limit": 100}}},
            "A trial: only the first 100 documents of piqa, 20 documents of each other task.",
        ),
    ],
)
def test_a_trial_says_so_in_every_format_for_people(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    planned = [write_cell(tmp_path, cell("softmax", "none-16"), make_samples(5))]
    write_plan_of(tmp_path, planned)
    assert remarks(read_report(tmp_path)) == []
    write_plan_of(tmp_path, planned, **changes)
    report = read_report(tmp_path)
    assert remarks(report) == [said]
    made = tables(report, "delta")
    head, _, _ = page(report).partition("<main>")
    assert all(said in text for text in (markdown(made, remarks(report)), latex(made, remarks(report)), head))


def test_a_record_without_its_run_tells_of_a_trial_too(tmp_path: Path) -> None:
    provenance = PROVENANCE.model_copy(update={"resolved_recipe": {"limit": 20}})
    write_cell(tmp_path, cell("softmax", "none-16"), make_samples(5), provenance=provenance)
    assert remarks(read_report(tmp_path)) == ["A trial: only the first 20 documents of each task."]


def test_latex_of_what_went_wrong(small_troubled: ReportData) -> None:
    check("troubled.tex", latex(tables(small_troubled, "delta"), standalone=True))


def test_csv_and_json(published: ReportData) -> None:
    rows = tidy.delta_rows(published)
    check("published.csv", tidy.to_csv(rows))
    check("published.json", tidy.to_json(rows))
    check("published-damage.csv", tidy.to_csv(tidy.damage_rows(published)))


def test_html(small_troubled: ReportData) -> None:
    """The page without plots and without the parts that every page has."""
    text = page(small_troubled)
    main = text[text.index("<main>") : text.index("</main>")]
    main = re.sub(r'<section id="plots">.*?</section>\n', "", main, flags=re.S)
    check("troubled.html", main)


def test_the_tidy_columns_begin_as_agreed_and_are_unrounded(mini_report: ReportData) -> None:
    rows = tidy.delta_rows(mini_report)
    assert list(rows[0])[:10] == COLUMNS
    frame = pd.DataFrame(rows)
    assert set(frame[frame.method == "none"].bits) == {16}
    assert (frame.softpick - frame.softmax - frame.delta).abs().max() == 0
    assert set(frame.metric) >= {"byte_perplexity", "bits_per_byte"}
    assert (frame.low <= frame.delta).all()
    assert (frame.delta <= frame.high).all()
    accuracy = frame[(frame.label == "hqq-3-g64") & (frame.task == "arc_easy") & (frame.metric == "acc")].iloc[0]
    assert accuracy.softmax == pytest.approx(100 * round(accuracy.softmax * 0.4) / 40, abs=1e-9)


def test_csv_and_json_say_the_same_and_csv_is_read_again(mini_report: ReportData, tmp_path: Path) -> None:
    rows = tidy.delta_rows(mini_report)
    file = tmp_path / "mini.csv"
    file.write_text(tidy.to_csv(rows))
    assert json.loads(tidy.to_json(rows)) == [dict(row) for row in rows]
    again = tidy.delta_rows(read_report(file))
    assert [{name: row[name] for name in COLUMNS} for row in again] == [
        {name: row[name] for name in COLUMNS} for row in rows
    ]


def test_labels_and_captions_differ(paper: ReportData) -> None:
    text = latex([table for kind in KINDS for table in tables(paper, kind)])
    labels, captions = (re.findall(rf"\\{name}{{(.*)}}", text) for name in ("label", "caption"))
    assert len(labels) == len(set(labels)) == len(set(captions)) == 23


def test_long_tables_are_cut_where_a_task_begins(tmp_path: Path) -> None:
    samples = make_samples(5)
    for label in (f"hqq-{bits}-g{group}" for bits in (2, 3, 4) for group in (8, 16, 32, 64)):
        write_cell(tmp_path, cell("softmax", label), samples)
    text = latex(tables(read_report(tmp_path), "delta"))
    parts = text.split("\\begin{table*}")[1:]
    assert [part.count("-bit g") for part in parts] == [24, 48, 36]
    assert all(f"(part {i} of 3)" in part for i, part in enumerate(parts, 1))
    assert all("\\midrule\n\\multirow{24}" in part for part in parts)


needs_pdflatex = pytest.mark.skipif(not shutil.which("pdflatex"), reason="needs pdflatex, which is not here")


def compiled(text: str, folder: Path) -> str:
    """pdflatex's log; an error if it fails."""
    (folder / "t.tex").write_text(text, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


@needs_pdflatex
def test_the_papers_tables_compile_and_none_is_too_wide_or_too_long(paper: ReportData, tmp_path: Path) -> None:
    log = compiled(latex([t for kind in KINDS for t in tables(paper, kind)], standalone=True), tmp_path)
    assert "Overfull" not in log
    assert "Float too large" not in log


ACL = r"""\documentclass[11pt,twocolumn]{article}
\usepackage[a4paper,textwidth=16cm,textheight=24.7cm]{geometry}
\setlength{\columnsep}{0.6cm}
\usepackage{times,booktabs,multirow,xcolor}
\begin{document}
%s
\end{document}
"""


@needs_pdflatex
@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("source", ["paper", "mini_report"])
def test_tables_fit_the_columns_of_a_paper_in_readable_type(
    columns: int, source: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    report = request.getfixturevalue(source)
    made = [table for kind in KINDS if KINDS[kind].on_page(report) for table in tables(report, kind)]
    text = latex(made, columns=columns)
    log = compiled(ACL % text, tmp_path)
    assert "Overfull" not in log
    assert "Float too large" not in log
    assert "resizebox" not in text
    assert min(float(size) for size in re.findall(r"\\fontsize{([\d.]+)}", text)) == 7
    assert text.count("\\begin{table*}" if columns == 2 else "\\begin{table}") >= len(made)


def test_a_wide_table_is_cut_by_tasks_and_keeps_all_its_numbers(paper: ReportData) -> None:
    (table, *_) = tables(paper, "summary")
    cut = pieces(table, 219)
    assert len(cut) > 1
    names = [column.title for column in table.columns]
    shown = [column.title for piece in cut for column in piece.columns]
    assert {title for title in shown if title != "Quantization"} == set(names[2:])
    assert all(piece.columns[0].title == "Quantization" for piece in cut)
    assert all([line for line in piece.lines if line] == ["unquantized", "BNB", "GPTQ", "HQQ"] for piece in cut)
    numbers = {field.text for row in table.rows for field in row[2:]}
    assert numbers == {field.text for piece in cut for row in piece.rows for field in row[1:]}


@pytest.mark.parametrize("kind", ["delta", "damage", "headline"])
@pytest.mark.parametrize("width", [219, 160])
@pytest.mark.parametrize("source", ["mini_report", "lone", "paper"])
def test_a_value_and_its_interval_are_in_the_same_part(
    kind: str, width: float, source: str, request: pytest.FixtureRequest
) -> None:
    values = {"Δ", "Damage", "Difference", "Nats", "Points"}
    for table in tables(request.getfixturevalue(source), kind):
        shown = [[column.title for column in piece.columns] for piece in pieces(table, width)]
        for titles in shown:
            for title in {"95% interval", "Flips", "Recovery", "Damage ratio"} & set(titles):
                assert values & set(titles[: titles.index(title)]), titles
        assert {column.title for column in table.columns if column.align != "l"} <= {t for own in shown for t in own}


def test_a_value_is_repeated_in_front_of_what_did_not_fit_beside_it() -> None:
    about = [Column(f"about {n}", about_previous=True) for n in range(3)]
    table = Table("t", "t", "t", [], [Column("Name", "l"), Column("Value"), *about], heads=0)
    table.rows.append([Field("a"), *(Field("123.45") for _ in range(4))])
    cut = pieces(table, 100)
    assert [[column.title for column in piece.columns] for piece in cut] == [
        ["Name", "Value", "about 0", "about 1"],
        ["Name", "Value", "about 2"],
    ]


def test_notes_of_a_split_table_are_once_and_its_number_is_in_the_caption(mini_report: ReportData) -> None:
    (table,) = tables(mini_report, "summary")
    text = latex([table], columns=1)
    parts = text.split("\\begin{table}")[1:]
    assert len(parts) > 1
    captions = [found[1] for part in parts if (found := re.search(r"\\caption{(.*)}", part))]
    assert captions == [
        f"{captions[0].partition(' (part')[0]} (part {i} of {len(parts)})." for i in range(1, len(parts) + 1)
    ]
    assert ["significant after adjustment" in part for part in parts] == [False] * (len(parts) - 1) + [True]


def typeset(text: str) -> str:
    """LaTeX without its comments."""
    return re.sub(r"(?m)(?<!\\)%.*$", "", text)


@pytest.mark.parametrize("standalone", [False, True])
def test_what_to_know_about_results_is_typeset(standalone: bool, paper: ReportData, tmp_path: Path) -> None:
    shown = typeset(render(paper, "latex", "summary", standalone=standalone))
    assert "Suspicious: 1.8B-softmax-hqq-2" in shown
    assert "per-document results" in shown
    planned = [write_cell(tmp_path, cell("softmax", "none-16"), make_samples(5))]
    write_plan_of(tmp_path, planned, limit=20)
    assert "only the first 20 documents" in typeset(
        render(read_report(tmp_path), "latex", "baseline", standalone=standalone)
    )


@needs_pdflatex
@pytest.mark.skipif(not shutil.which("pdffonts"), reason="needs pdffonts, which is not here")
def test_code_in_notes_has_no_backticks_and_no_bitmap_font(paper: ReportData, tmp_path: Path) -> None:
    code = "Give `calibration: {seeds: 5}` or `qbench table --kind damage a/b_c`, and a lone ` too."
    text = latex(tables(paper, "summary"), [code], columns=1)
    assert r"\texttt{calibration: \{seeds: 5\}}" in text
    assert "`" not in typeset(text)
    compiled(ACL % text, tmp_path)
    fonts = subprocess.run(["pdffonts", "t.pdf"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "Type 1" in fonts
    assert "Type 3" not in fonts


@needs_pdflatex
def test_captions_of_figures_compile(small: ReportData, tmp_path: Path) -> None:
    write_drawings(all_figures(small, COLUMN), tmp_path)
    captions = sorted(tmp_path.glob("*.tex"))
    assert all(sign in "".join(file.read_text() for file in captions) for sign in (r"95\%", "$-$"))
    assert [file.stem for file in captions] == sorted(file.stem for file in tmp_path.glob("*.png"))
    floats = (f"\\begin{{figure}}\\caption{{\\protect\\input{{{file.stem}}}}}\\end{{figure}}" for file in captions)
    compiled(ACL % ("\\extrafloats{100}" + "\n".join(floats)), tmp_path)


@needs_pdflatex
def test_no_name_breaks_latex(tmp_path: Path) -> None:
    failure = Failure(kind="error", reason=r"C:\temp\new #1 {50%} of $x_i^2$ & ~ \undefined ‖ŵ − w‖ < ε, 模型 🙂")
    write_cell(tmp_path / "run", cell("softmax", "hqq-3-g64", "a_b & 50% Ünï"), None, failure=failure)
    report = read_report(tmp_path / "run")
    log = compiled(latex(tables(report, "delta"), standalone=True), tmp_path)
    assert "Overfull" not in log
