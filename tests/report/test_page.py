"""The HTML report in a real browser: it sorts, filters, fits a phone, and asks nobody for anything."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from qbench.report.delta import read_report
from qbench.report.html import page
from qbench.store import Failure

from .examples import PAPER, cell, write_cell

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
  const frame = document.createElement("iframe");
  frame.style.width = "390px";
  frame.srcdoc = document.documentElement.outerHTML.replace(/<script[^]*?<\\/script>/g, "");
  frame.onload = () => {
    const root = frame.contentDocument.documentElement;
    out.push("phone " + (root.scrollWidth <= root.clientWidth));
    document.title = "RESULT " + out.join(" | ");
  };
  document.body.append(frame);
});
window.addEventListener("error", (event) => { document.title = "ERROR " + event.message; });
</script>
"""


def test_it_is_one_file_that_asks_for_nothing(mini_page: str) -> None:
    for attribute in ("src=", "href=", "url("):
        targets = re.findall(re.escape(attribute) + r'["\']?([^"\')\s>]+)', mini_page)
        assert all(target.startswith("#") for target in targets), targets
    assert "@import" not in mini_page
    sections = re.findall(r'<section id="(.+?)">', mini_page)
    assert sections == ["summary", "baseline", "delta", "damage", "plots", "audits", "costs", "provenance", "recipe"]


def test_suspicious_results_stand_first_and_a_kind_alone(tmp_path: Path) -> None:
    lines = (PAPER / "quantization.csv").read_text().splitlines()
    (tmp_path / "hqq.csv").write_text("\n".join([lines[0], *(line for line in lines if line.startswith("1.8B,hqq"))]))
    text = page(read_report(tmp_path), "delta")
    assert re.findall(r'<section id="(.+?)">', text) == ["suspicious", "delta", "plots"]
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
    up, down, filtered, everything, phone = title[1].removeprefix("RESULT ").split(" | ")
    ascending = [float(text) for text in up.split()[1:]]
    assert ascending == sorted(ascending)
    assert [float(text) for text in down.split()[1:]] == ascending[::-1]
    assert len(ascending) == 18
    assert filtered == "filtered mini, HQQ: damage"
    assert everything == "all true"
    assert phone == "phone true"
