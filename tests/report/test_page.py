"""The HTML report in a real browser: it sorts, filters, fits a phone, and loads nothing from the network."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from qbench.records.schema import Failure
from qbench.report.delta import ReportData, read_report
from qbench.report.drawing import new_figure
from qbench.report.html import page
from qbench.report.kinds import KINDS

from ..example_records import PROVENANCE, make_samples
from .examples import PAPER, cell, write_cell

RESULTS = Path(__file__).parents[2] / "results" / "mini"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --virtual-time-budget=2000"
)
SCRIPT = """
<script>
window.addEventListener("load", () => {
  const out = [];
  const table = [...document.querySelectorAll("figure.table")].find((f) => f.dataset.words === "mini, HQQ");
  const softmax = () => [...table.querySelectorAll("tbody tr")].map((row) => parseFloat(row.cells[3].innerText));
  const button = table.querySelectorAll("th button")[3];
  button.click(); out.push("up " + softmax().join(" "));
  button.click(); out.push("down " + softmax().join(" "));
  const input = document.querySelector("input");
  input.value = "mini HQQ: wikitext 3-bit"; input.dispatchEvent(new Event("input"));
  const shown = [...document.querySelectorAll("figure.table")].filter((f) => !f.hidden).map((f) => f.dataset.words);
  out.push("filtered " + shown.join("; "));
  input.value = ""; input.dispatchEvent(new Event("input"));
  out.push("all " + [...document.querySelectorAll("figure.table")].every((f) => !f.hidden));
  const none = document.querySelector("[role=status]");
  const said = [none.checkVisibility()];
  input.value = "no such row"; input.dispatchEvent(new Event("input")); said.push(none.checkVisibility());
  input.value = ""; input.dispatchEvent(new Event("input")); said.push(none.checkVisibility());
  out.push("none " + said.join(" "));
  const sign = (state) => {
    button.parentElement.setAttribute("aria-sort", state);
    return ["::before", "::after"].map((where) => getComputedStyle(button, where).content).join(" ");
  };
  out.push("signs " + ["none", "ascending", "descending"].map(sign).join(" "));
  const summary = document.querySelector("#summary table");
  const firsts = () => [...summary.querySelectorAll("tbody tr")].map((row) => row.cells[0]);
  const merged = () => firsts().map((cell) => cell.rowSpan * !cell.hidden);
  out.push("merged " + merged().join(" "));
  summary.querySelector("th button").click();
  out.push("apart " + merged().join(" "));
  const page = document.documentElement.outerHTML.replace(/<script[^]*?<\\/script>/g, "");
  const framed = (width, look) => {
    const frame = document.createElement("iframe");
    frame.style.width = width + "px";
    frame.srcdoc = page;
    frame.onload = () => look(frame.contentDocument);
    document.body.append(frame);
  };
  const fits = (box) => box.scrollWidth <= box.clientWidth;
  framed(390, (phone) => {
    out.push("phone " + fits(phone.documentElement));
    framed(1280, (screen) => {
      out.push("screen " + [...screen.querySelectorAll(".table .scroll")].every(fits));
      document.title = "RESULT " + out.join(" | ");
    });
  });
});
window.addEventListener("error", (event) => { document.title = "ERROR " + event.message; });
</script>
"""


def test_it_is_one_file_that_asks_for_nothing(mini_page: str) -> None:
    for attribute in ("src=", "href=", "url("):
        targets = re.findall(re.escape(attribute) + r'["\']?([^"\')\s>]+)', mini_page)
        assert all(target.startswith("#") for target in targets), targets
    assert "@import" not in mini_page


def section_names(text: str) -> list[str]:
    return re.findall(r'<section id="(.+?)">', text)


def test_the_answer_and_the_plots_stand_before_the_rows(mini_page: str, paper_page: str) -> None:
    assert section_names(mini_page) == [
        "summary",
        "plots",
        "headline",
        "damage",
        "delta",
        "audits",
        "costs",
        "provenance",
        "recipe",
    ]
    # Several families have a separate table of unquantized models; a single one has it at the top of Δ.
    assert section_names(paper_page) == [
        "suspicious",
        "summary",
        "plots",
        "headline",
        "damage",
        "delta",
        "baseline",
        "analysis",
    ]


def test_no_heading_is_said_twice(mini_page: str) -> None:
    for section in mini_page.split("<section")[1:]:
        headings = re.findall(r"<h[23]>(.*?)</h[23]>", section)
        assert len(headings) == len(set(headings))


def test_the_top_says_how_much_was_measured_on_what_and_when(tmp_path: Path, paper_page: str) -> None:
    for label, documents, finished in (("none-16", 1200, "2026-11-15T23:50"), ("hqq-3-g64", 7, "2026-11-16T00:10")):
        provenance = PROVENANCE.model_copy(update={"finished": f"{finished}:59+00:00"})
        samples = make_samples(documents, tasks=["piqa"])
        write_cell(tmp_path, cell("softmax", label), samples, provenance=provenance)
    text = page(read_report(tmp_path), "delta")
    measured = "2 of 2 cells have scores, 7 to 1,200 documents per task, cpu, float32, 2026-11-15 to 2026-11-16."
    assert f"<p>{measured}</p>" in text
    assert '<td class="l">2026-11-15 23:50</td>' in text
    assert ">Finished (UTC)<" in text
    assert "<p>36 of 36 cells have scores.</p>" in paper_page


def test_what_differs_between_machines_is_named_with_its_cells(tmp_path: Path) -> None:
    for label, threads, package in (
        ("none-16", 1, {}),
        ("hqq-3-g64", 2, {"hqq": '0.2 "rc"'}),
        ("hqq-2-g64", 2, {"hqq": '0.2 "rc"'}),
    ):
        provenance = PROVENANCE.model_copy(
            update={"machine": {"cpu": "<b>", "threads": threads}, "packages": {"torch": "2.13"} | package}
        )
        write_cell(tmp_path, cell("softmax", label), make_samples(3), provenance=provenance)
    text = page(read_report(tmp_path))
    found = dict(
        re.findall(r"<details><summary>([^<]*)</summary><pre>(.*?)</pre>", text[text.index("<h2>Prov") :], re.S)
    )
    shared = found["Machine and packages shared by all 3 cells"]
    assert "threads" not in shared
    assert "&lt;b&gt;" in shared
    assert found["Only 1 cell: threads 1"] == "mini-softmax-none-16"
    assert set(found["Only 2 cells: threads 2, hqq 0.2 &#34;rc&#34;"].split()) == {
        "mini-softmax-hqq-3-g64",
        "mini-softmax-hqq-2-g64",
    }


def test_the_filters_example_is_of_this_report(mini_page: str, paper_page: str) -> None:
    assert 'placeholder="mini hqq acc"' in mini_page
    assert 'placeholder="1.8B hqq acc"' in paper_page


def test_suspicious_results_stand_first_and_a_kind_alone(tmp_path: Path) -> None:
    lines = (PAPER / "quantization.csv").read_text().splitlines()
    (tmp_path / "hqq.csv").write_text("\n".join([lines[0], *(line for line in lines if line.startswith("1.8B,hqq"))]))
    text = page(read_report(tmp_path), "delta")
    assert section_names(text) == ["suspicious", "delta", "plots"]
    assert "<li>1.8B-softmax-hqq-2 and 1.8B-softmax-hqq-3: the same scores in all 9 metrics" in text


def test_nothing_that_was_measured_is_markup(tmp_path: Path) -> None:
    attack = "<script>alert(1)</script>"
    failure = Failure(kind="error", reason=attack)
    write_cell(tmp_path, cell("softmax", "hqq-3-g64", attack), None, failure=failure)
    assert attack not in page(read_report(tmp_path))


@pytest.mark.skipif(BROWSER is None, reason="needs chromium, which is not here")
def test_in_a_browser(mini_page: str, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(mini_page.replace("</body>", SCRIPT + "</body>"), encoding="utf-8")
    command = [str(BROWSER), *QUIET.split(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title, done.stderr[-2000:]
    assert title[1].startswith("RESULT"), title[1]
    found = title[1].removeprefix("RESULT ").split(" | ")
    up, down, filtered, everything, none, signs, merged, apart, phone, screen = found
    ascending = [float(text) for text in up.split()[1:]]
    assert ascending == sorted(ascending)
    assert [float(text) for text in down.split()[1:]] == ascending[::-1]
    assert len(ascending) == 18
    assert filtered == "filtered mini, HQQ: damage"
    assert everything == "all true"
    assert none == "none false true false"  # only a filter that no row matches says so
    shown = signs.removeprefix("signs ").replace("none ", "").replace(" none", "")
    assert len(set(re.findall(r"[^\s\"]", shown))) == 2  # one sign per direction
    assert not re.search("[↑↓]", signs)  # they say whether higher or lower is better
    assert merged == "merged 1 1 2 0"  # unquantized, BNB, and the two widths of HQQ
    assert apart == "apart 1 1 1 1"
    assert phone == "phone true"
    assert screen == "screen true"


def test_the_answer_then_the_table_then_the_notes(mini_page: str) -> None:
    section = mini_page[mini_page.index('<section id="summary">') : mini_page.index('<section id="plots">')]
    assert section.index("<li>At 2 bits") < section.index("<table>") < section.index("Each entry is")
    assert "[−0.00, +0.00]" not in mini_page


@pytest.mark.parametrize(("number", "classes"), [(1, [""]), (3, ['class="column" '] * 3)])
def test_a_lone_figure_of_a_kind_fills_the_page_and_several_are_columns(
    number: int, classes: list[str], paper: ReportData, monkeypatch: pytest.MonkeyPatch
) -> None:
    def figures(_: ReportData, width: float) -> Iterator[tuple[str, Figure]]:
        for name in range(number):
            yield str(name), new_figure(width, 1, "a caption")

    monkeypatch.setitem(KINDS, "baseline", replace(KINDS["baseline"], figures=figures))
    monkeypatch.setattr("qbench.report.plots.figures", lambda *_: iter(()))  # those of the scores take seconds
    (section,) = re.findall(r'<section id="baseline">.*?</section>', page(paper, "baseline"), re.DOTALL)
    assert re.findall(r'<svg (class="column" )?', section) == classes


def test_the_page_of_a_lone_model_speaks_of_no_other(tmp_path: Path) -> None:
    for label in ("none-16", "hqq-2-g64"):
        write_cell(tmp_path, cell("softmax", label), make_samples(20, 0.1 if label == "hqq-2-g64" else 0.0))
    text = page(read_report(tmp_path))
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert "Scores" in titles
    assert not [title for title in titles if "Δ" in title or "softpick" in title]
    assert set(re.findall(r'<a href="#.*?">(.*?)</a>', text)) == set(titles)


def test_long_tables_are_collapsed(paper_page: str) -> None:
    assert "<details><summary><b>340M, GPTQ: damage</b> (36 rows)</summary>" in paper_page
    assert "<h3>340M, BNB: damage</h3>" in paper_page  # 18 rows


@pytest.mark.skipif(BROWSER is None, reason="needs chromium, which is not here")
@pytest.mark.parametrize(("width", "hinted"), [(390, True), (1280, False)])
def test_a_table_or_plot_that_scrolls_says_so(mini_page: str, width: int, hinted: bool, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(mini_page, encoding="utf-8")
    frame = f"""<iframe src="report.html" style="width: {width}px; height: 600px"></iframe><script>
    addEventListener("load", () => {{
      const page = document.querySelector("iframe").contentDocument;
      const shown = (hint) => getComputedStyle(page.querySelector(hint)).display !== "none";
      document.title = "RESULT " + ["#summary .table .hint", "#plots .plot .hint"].map(shown).join(" ");
    }});</script>"""
    file = tmp_path / "frame.html"
    file.write_text(frame)
    flags = [*QUIET.split(), "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [str(BROWSER), *flags, "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert f"<title>RESULT {str(hinted).lower()} {str(hinted).lower()}</title>" in done.stdout


@pytest.mark.skipif(BROWSER is None, reason="needs chromium, which is not here")
def test_the_widest_tables_fit_a_laptop(tmp_path: Path) -> None:
    """Up to the interval of the damage's difference, which is their last column."""
    measure = """<script>addEventListener("load", () => {
      for (const details of document.querySelectorAll("details")) details.open = true;
      const widths = (box) => [box.querySelector("th:last-child button").innerText, box.clientWidth - box.scrollWidth];
      document.title = "RESULT " + [...document.querySelectorAll("#damage .scroll")].flatMap(widths).join(" | ");
    });</script></body>"""
    file = tmp_path / "report.html"
    file.write_text(page(read_report(RESULTS), "damage").replace("</body>", measure), encoding="utf-8")
    command = [str(BROWSER), *QUIET.split(), f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,2000"]
    done = subprocess.run([*command, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120)
    assert "<title>RESULT 95% interval | 0 | 95% interval | 0 | 95% interval | 0</title>" in done.stdout
