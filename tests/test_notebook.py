"""What notebooks use: typed results that show themselves, and docs/notebook.ipynb, which runs."""

import copy
import io
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import qbench
from qbench.report.notebook import Pictures, Tables

from .example_records import audit_of, cell_ref
from .report.examples import PAPER, write_mini

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


@pytest.fixture(scope="module")
def cells() -> list[dict[str, Any]]:
    """The code of the notebook, with what it printed."""
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == "code"]


def test_the_notebook_was_executed_without_errors_and_warnings(cells: list[dict[str, Any]]) -> None:
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert {output["output_type"] for output in outputs} == {"stream", "execute_result"}
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert "/tmp" not in (text := NOTEBOOK.read_text(encoding="utf-8"))
    assert str(ROOT) not in text


@pytest.mark.slow
def test_the_notebook_runs(cells: list[dict[str, Any]], tmp_path: Path) -> None:
    """As plain Python, in a folder that has what the notebook takes from the clone."""
    (tmp_path / "docs").mkdir()
    for name in ("recipes", "results/mini", "results/paper"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(ROOT / name)
    code = "\n\n".join("".join(cell["source"]) for cell in cells)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "docs", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "6 of 6 cells done" in done.stdout
    assert done.stdout.rstrip().endswith("True")  # the gate passed
    assert done.stderr == ""


def test_a_table_is_text_with_frames_and_figures() -> None:
    table = qbench.table(PAPER, kind="delta")
    assert isinstance(table, str)
    assert table._repr_markdown_() == table
    assert table._repr_html_() is None
    frame = table.to_frame()
    assert len(frame) == 162
    assert list(table.to_frame("damage").columns) != list(frame.columns)
    figures = table.figures(width=3.0)
    assert isinstance(figures, Pictures)
    assert all(figure.get_size_inches()[0] == pytest.approx(3.0) for figure in figures.values())
    shown = figures.only("*-score")
    assert list(shown) == ["340M-1.8B-score"]
    assert shown._repr_html_().count("data:image/png;base64,") == 1
    assert "340M and 1.8B" in shown._repr_html_()


def test_a_page_in_a_notebook_is_a_frame_of_its_own() -> None:
    table = qbench.table(PAPER, "html", "baseline")
    assert table._repr_markdown_() is None
    shown = table._repr_html_()
    assert shown is not None
    assert shown.startswith("<iframe srcdoc=")
    assert "<script" not in shown  # escaped


def test_a_kind_without_rows_says_where_they_are() -> None:
    with pytest.raises(ValueError, match="damage"):
        qbench.table(PAPER, kind="summary").to_frame()


def test_a_check_has_a_frame_and_a_short_repr(tmp_path: Path) -> None:
    gate = qbench.check(write_mini(tmp_path / "now"), write_mini(tmp_path / "then"))
    frame = gate.to_frame()
    assert len(frame) == len(gate.tested)
    assert set(frame.verdict) == {"same"}
    assert "passed" in repr(gate)
    assert len(repr(gate)) < 300
    assert "PASS" in gate._repr_markdown_()


def test_an_audit_has_a_short_repr_and_a_frame() -> None:
    audit = audit_of(cell_ref("softmax", "hqq", 3, "hqq-3-g64"))
    assert "hqq-3-g64" in repr(audit)
    assert str(audit) == repr(audit)
    assert len(repr(audit)) < 200
    assert "<table>" in audit._repr_html_()
    frame = audit.to_frame()
    assert list(frame.name) == [layer.name for layer in audit.layers]
    assert {"storage_bits", "snr_db", "relative_error"} < set(frame.columns)
    unquantized = audit.model_copy(update={"layers": ()}).to_frame()
    assert len(unquantized) == 0
    assert list(unquantized.columns) == list(frame.columns)


def test_an_audit_that_fails_says_so_and_names_are_not_markup() -> None:
    audit = audit_of(cell_ref("softmax", "hqq", 3, "hqq-3-g64"), untouched=("<b>lm_head",))
    assert "failed: <b>lm_head was not quantized" in repr(audit)
    assert "<b>" not in audit._repr_html_()


def test_a_model_says_its_attention_and_quantization() -> None:
    model = qbench.load_checkpoint(ROOT / "recipes" / "mini" / "softpick")
    assert "attention=softpick, quantization=none" in repr(model)
    quantized, _ = qbench.quantize(model, method="hqq", bits=4, copy=True)
    assert "attention=softpick, quantization=hqq-4-g64" in repr(quantized)
    assert "quantization=none" in repr(model)
    assert repr(copy.deepcopy(quantized)).startswith(repr(quantized)[:80])
    assert pickle.loads(pickle.dumps(model.extra_repr))() == model.extra_repr()


@pytest.mark.parametrize(("loaded", "shown"), [("", False), ("import types; sys.modules['ipykernel'] = types", True)])
def test_bars_appear_in_jupyter_and_not_in_a_log(loaded: str, shown: bool) -> None:
    code = f"import sys; {loaded or 'pass'}; from qbench.progress import Bar; list(Bar(range(3), unit='step'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert ("3/3" in done.stderr) == shown


def test_help_shows_the_function_with_its_signature() -> None:
    import pydoc

    text = pydoc.plain(pydoc.render_doc(qbench.quantize))
    assert "quantize(model" in text
    assert "method: str" in text
    assert "audit" in text


def test_a_typed_table_is_what_it_was_made_from() -> None:
    table = Tables.of("text", qbench.table(PAPER).report, "csv", None)
    assert (str(table), repr(table), table._repr_markdown_()) == ("text", "text", None)
    out = io.StringIO()
    out.write(table)
    assert out.getvalue() == "text"
