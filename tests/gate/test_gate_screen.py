"""`check` and `power` on a terminal: tables that fit its width and contain everything in the plain report."""

import re
import sys

import pytest
from rich.cells import cell_len

from qbench.cli import main

from .made_up import Population, make_audit, make_cells, write_cells

CELLS = make_cells(3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A baseline, and a run in which every cell got worse."""
    root, population = tmp_path_factory.mktemp("screen"), Population(60)
    write_cells(root / "baseline", {cell: population.samples() for cell in CELLS})
    worse = {cell: population.samples(noise=0.02, loss=0.3) for cell in CELLS}
    write_cells(root / "bad", worse, audit=make_audit(layers=27))
    return str(root / "bad"), str(root / "baseline")


def shown(
    arguments: list[str], columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What a command shows on a terminal, without its colours."""
    for name, value in {"TERM": "xterm-256color", "COLUMNS": str(columns)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(arguments)
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)


@pytest.mark.parametrize("columns", [80, 120])
def test_a_check_fits_the_terminal(
    columns: int, folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, baseline = folders
    assert main(["check", bad, baseline]) == 1
    piped = capsys.readouterr().out
    assert max(map(len, piped.splitlines())) > 120  # logs have one line per score
    text = shown(["check", bad, baseline], columns, monkeypatch, capsys)
    assert max(map(cell_len, text.splitlines())) <= columns
    assert set(re.findall(r"[-+][\d.]+ to [-+][\d.]+", text)) == set(re.findall(r"[-+][\d.]+ to [-+][\d.]+", piped))
    joined = " ".join(text.split())
    for fact in ("FAIL: ", "Failures in the audit", "Failures in the scores", "Documents that lost most", "▼"):
        assert fact in joined
    # A block has its cell's name once, in words: not once per score.
    table = text[text.index("Failures in the scores") : text.index("Documents that lost most")]
    assert CELLS[0].name not in table
    assert 0 < table.count("softpick") <= 3  # once in each part of the table


@pytest.mark.parametrize("columns", [80, 120])
def test_powers_fit_the_terminal(
    columns: int, folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, baseline = folders
    text = shown(["power", baseline, "--against", bad], columns, monkeypatch, capsys)
    assert max(map(cell_len, text.splitlines())) <= columns
    assert {"lambada_openai", "word_perplexity", "4×"} <= set(text.split())
    plain = shown(["power", baseline, "--against", bad, "--format", "markdown"], columns, monkeypatch, capsys)
    assert "| lambada_openai" in plain


def test_the_machines_report_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(["doctor", "--no-checks"], 80, monkeypatch, capsys)
    assert max(map(cell_len, text.splitlines())) <= 80
    assert "TRITON_INTERPRET=1" in text or "attention on triton" in text
