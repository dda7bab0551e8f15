"""`qbench table`, `compare` and `audit` as they are called."""

import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qbench.cli import main
from qbench.records.audit import AuditError
from qbench.records.schema import Failure
from qbench.report.kinds import KINDS, NoRows
from qbench.report.render import FOR_PROGRAMS, FORMATS

from ..example_records import make_samples
from ..messages import states
from .examples import ALWAYS, PAPER, audit_of, cell, samples_of, write_cell, write_plan_of


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture
def two_rows(tmp_path: Path) -> Path:
    """Published numbers of one model, unquantized and at 3 bits."""
    file = tmp_path / "two.csv"
    rows = "S,none,16,sciq,acc,80,81\nS,hqq,3,sciq,acc,70,71\n"
    file.write_text("family,method,bits,task,metric,softmax,softpick\n" + rows)
    return file


# Of each kind of scores; tests/report/test_analysis.py has the others.
SHOWN = {"delta": "71", "damage": "-10", "baseline": "81", "summary": "-10.00 / -10.00", "headline": "S"}


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (kind.name, form)
        for kind in map(KINDS.get, ALWAYS)
        for form in FORMATS
        if kind.name in SHOWN and not (form in FOR_PROGRAMS and isinstance(kind.rows, NoRows))
    ],
)
def test_every_format_of_every_kind(form: str, kind: str, two_rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "table"
    assert run("table", two_rows, "--format", form, "--kind", kind, "--out", out) == 0
    assert SHOWN[kind] in out.read_text().replace("$-$", "-").replace("−", "-")


def test_the_screen_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("table", PAPER) == 0
    shown = re.sub(" +", " ", capsys.readouterr().out)
    assert "| Sciq | Acc ↑ | 3-bit | 80.50 | 80.70 | +0.20 |" in shown


def test_plots_are_written_beside_the_table(two_rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("table", two_rows, "--plots", tmp_path / "plots", "--out", tmp_path / "table.md") == 0
    names = [f"S-{kind}.{form}" for kind in ("damage", "score") for form in ("pdf", "png", "svg", "tex", "txt")]
    assert sorted(file.name for file in (tmp_path / "plots").iterdir()) == names
    assert "2 plots in" in capsys.readouterr().err


@pytest.mark.parametrize(("width", "inches"), [("column", 3.03), ("page", 6.3), ("4.5", 4.5)])
def test_figures_are_as_wide_as_asked(two_rows: Path, tmp_path: Path, width: str, inches: float) -> None:
    assert run("table", two_rows, "--plots", tmp_path, "--figure-width", width, "--out", tmp_path / "t.md") == 0
    with Image.open(tmp_path / "S-score.png") as picture:
        assert picture.size[0] == pytest.approx(300 * inches, abs=2)


def test_a_width_that_is_none_and_one_without_plots(
    two_rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong in ("wide", "nan", "0", "1e9"):
        with pytest.raises(SystemExit):
            run("table", two_rows, "--plots", tmp_path, "--figure-width", wrong)
        assert wrong in (said := capsys.readouterr().err)
        assert "column, page" in said
    assert run("table", two_rows, "--figure-width", "page") == 2
    assert "--plots" in capsys.readouterr().err


def test_compare_and_audit(mini: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare", PAPER, "--with", PAPER, "--format", "json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert sum(row["method"] is not None for row in rows) == 3 * 162 < len(rows)  # the others are of analyses
    assert run("audit", PAPER) == 1
    out = capsys.readouterr().out
    assert "1.8B-softmax-hqq-2 and 1.8B-softmax-hqq-3: the same scores in all 9 metrics" in out
    assert out.endswith(f"6 findings among 324 scores of 36 cells in {PAPER}\n")
    assert "| Cell" not in out
    assert run("audit", mini) == 0
    assert "nothing suspicious among 88 scores of 8 cells" in capsys.readouterr().out


def test_audit_shows_the_proof_before_its_verdict(
    mini: Path, troubled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("audit", mini) == 0
    *table, verdict = capsys.readouterr().out.splitlines()
    lines = [re.sub(" +", " ", line) for line in table if line.startswith("| mini")]
    assert lines[1] == "| mini-softmax-hqq-2-g64 | yes | 100.0% | 2.00 | 2.50 | 0.2500 | 12.0 | 0.0625 | 93.8% |"
    assert len(lines) == 6  # the unquantized have nothing to prove
    assert "pseudo-random tokens" in "\n".join(table)
    assert verdict.startswith("nothing suspicious")
    assert run("audit", troubled) == 1
    out = re.sub(" +", " ", capsys.readouterr().out)
    assert "| mini-softpick-hqq-2-g64 | no<sup>a</sup> | 100.0%" in out
    assert "<sup>a</sup> model.layers.0.mlp.up\\_proj was not quantized." in out


def test_a_cell_that_failed_after_its_audit_passed_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = cell("softmax", "hqq-3-g64")
    write_cell(tmp_path, about, None, audit=audit_of(about))
    assert run("audit", tmp_path) == 0
    assert "| mini-softmax-hqq-3-g64 | yes " in capsys.readouterr().out


def test_a_failed_audit_says_why_in_a_footnote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message of the error, as `failure_of` puts it into the record."""
    reasons = ["model.layers.0.mlp.up_proj was not quantized.", "model.layers.1.mlp.up_proj was not quantized."]
    error = AuditError("hqq-3-g64", reasons, "Load the model again.")
    failure = Failure(kind="audit", reason=str(error), phase="quantize")
    for attention in ("softmax", "softpick"):
        write_cell(tmp_path, cell(attention, "none-16"), samples_of(attention, "none-16", 4))
    write_cell(tmp_path, cell("softmax", "hqq-3-g64"), None, failure=failure)
    assert run("table", tmp_path, "--kind", "damage") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("<sup>a")]
    assert all(fact in line for fact in ("mini-softmax-hqq-3-g64", "quantize", "up\\_proj was not quantized", "1 more"))
    assert "Load the model again" not in line
    assert all(part in str(error) for part in (*reasons, "Load the model again."))


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (("table", "none"), "none does not exist"),
        (("table", PAPER, "--standalone"), "standalone…latex…md"),
        (("table", PAPER, "--columns", "1"), "columns…latex…md"),
        (("table", PAPER, "--out", PAPER / "README.md" / "there.md"), "there.md…cannot be written…File exists"),
        (
            ("table", PAPER, "--kind", "summary", "--format", "csv"),
            "summary…csv…headline",
        ),
        (
            ("table", PAPER, "--out", "x.xlsx"),
            "x.xlsx: .xlsx is not a format; use .md, .tex, .csv, .json, .html, or add --format",
        ),
        (("compare", PAPER, "--with", PAPER, "--out", "x"), "x…no extension….md, .tex, .csv, .json, .html…--format"),
        (("table", PAPER.parent), "results/mini"),
        (("compare", PAPER, "--with", "none"), "none does not exist"),
        (("audit", "none"), "none does not exist"),
    ],
)
def test_a_wrong_call_is_2_and_a_sentence(
    arguments: tuple[object, ...],
    facts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    assert states(capsys.readouterr().err, facts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "begins"), [("table.md", "#"), ("T.MD", "#"), ("t.tex", "%"), ("t.json", "[")])
def test_a_file_in_a_new_folder_is_written_in_its_format_and_confirmed(
    name: str, begins: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / name
    assert run("table", PAPER, "--out", file) == 0
    assert file.read_text().startswith(begins)
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert str(file) in printed.err


def test_nothing_for_a_kind_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "n.csv").write_text("family,method,bits,task,metric,softmax,softpick\nS,hqq,3,sciq,acc,70,71\n")
    assert run("table", tmp_path, "--kind", "baseline") == 2
    assert "--kind baseline" in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("table", "compare", "audit"):
        with pytest.raises(SystemExit):
            run(command, "--help")
        assert f"example:\n  qbench {command} results/" in capsys.readouterr().out


def test_it_is_quick_and_imports_no_torch(mini: Path) -> None:
    code = (
        "import sys; from qbench.cli import main; main(['table', sys.argv[1]]); "
        "sys.exit(', '.join({'torch', 'transformers', 'lm_eval', 'matplotlib'} & set(sys.modules)) or 0)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code, str(mini)], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 2  # of this process; a busy machine takes longer


@pytest.mark.slow
def test_a_hundred_cells_to_all_formats_in_ten_seconds(tmp_path: Path) -> None:
    """100 cells × 2,000 documents × 5 tasks, with intervals, in seconds of one core."""
    base, draw = make_samples(2000), np.random.default_rng(0)
    labels = ["none-16", *(f"hqq-{b}-g{g}" for b in (1, 2, 3, 4, 8) for g in (8, 16, 32, 64, 128))]
    labels += [f"gptq-{b}-g{g}" for b in (2, 3, 4, 8) for g in (32, 64, 128, 256, 512)]
    labels += ["bnb-4-nf4", "bnb-4-fp4", "bnb-4-nf4-dq", "bnb-8"]
    planned = []
    for attention, label in ((attention, label) for attention in ("softmax", "softpick") for label in labels):
        samples = base.copy()
        for metric in ("acc", "acc_norm"):
            samples[metric] = np.where(draw.random(len(samples)) < 0.1, 1 - samples[metric], samples[metric])
        for metric in ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"):
            samples[metric] *= 1 + 0.05 * draw.random(len(samples))
        planned.append(write_cell(tmp_path / "run", cell(attention, label), samples))
    write_plan_of(tmp_path / "run", planned)
    assert len(planned) == 100
    code = (
        "import sys; from qbench.report.delta import read_report; from qbench.report.render import FORMATS, render; "
        "report = read_report(sys.argv[1]); [render(report, form) for form in FORMATS]"
    )
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - started
    assert min(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) < 10
