"""`qbench quantize`: what it saves loads again with the same logits, and a wrong call is a sentence."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from qbench import cli, load_checkpoint, quantize
from qbench.quantizers import quantize as quantize_module
from qbench.quantizers.packed import packed_form
from qbench.records.audit import AuditError
from qbench.tokenizer import load_tokenizer

from ..messages import states
from ..pseudo_terminal import on_terminal
from .conftest import logits

MINI = Path(__file__).parents[2] / "recipes" / "mini"
MODEL, TEXT = MINI / "softpick", MINI / "calibration.txt"
SMALL = ["--calibration", str(TEXT), "--samples", "8", "--length", "64"]


def call(out: Path, *options: str, model: Path | str = MODEL) -> int:
    return cli.main(["quantize", str(model), "--out", str(out), *options])


@pytest.mark.parametrize(
    ("method", "label", "options", "calibration"),
    [
        ("gptq", "gptq-4-g64", {"group_size": 64}, {"source": str(TEXT), "samples": 8, "length": 64}),
        ("hqq", "hqq-4-g64", {}, None),
    ],
)
def test_what_is_saved_loads_with_the_logits_of_the_python_function(
    method: str,
    label: str,
    options: dict[str, int],
    calibration: dict[str, str | int] | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--group-size", "64"] if options else []
    assert call(tmp_path / "out", "--method", method, "--bits", "4", *given, *(SMALL if calibration else [])) == 0
    model, audit = quantize(load_checkpoint(MODEL), method, 4, calibration=calibration, **options)
    loaded = load_checkpoint(tmp_path / "out", attention="softpick")
    probe = torch.arange(64).reshape(1, -1)
    assert (logits(loaded, probe) - logits(model, probe)).abs().max() <= 1e-5
    assert (logits(loaded, probe) - logits(load_checkpoint(MODEL), probe)).abs().max() > 1e-2
    form = packed_form(loaded)
    assert form is not None
    assert form.quantization.label == label
    assert load_tokenizer(tmp_path / "out").get_vocab() == load_tokenizer(MODEL).get_vocab()
    printed = capsys.readouterr()
    said = printed.out
    device, *text = said.splitlines()[: 2 if calibration else 1]
    used = f"{TEXT}, 1 draw of 8 samples of up to 64 tokens"
    assert device == "device: cpu, float32"
    assert text == ([f"calibration text: {used}"] if calibration else [])
    assert states(said.splitlines()[-1], "device: cpu, float32…calibration text: " + used if calibration else device)
    shares = re.findall(r"of \d+ linear layers quantized \((\d+)%\)", printed.err)  # no terminal, so no bar
    assert shares[-1] == "100"
    assert 4 <= len(shares) <= 10
    assert states(said, f"{label}…{tmp_path / 'out'}…{audit.weights:,} weights…{audit.storage_bits:.2f} bits")
    assert states(said, f"error…{audit.relative_error:.3g}")


def test_options_of_the_method(tmp_path: Path) -> None:
    assert call(tmp_path / "out", "--method", "bnb", "--bits", "4", "--option", "quant_type=fp4,double_quant=true") == 0
    form = packed_form(load_checkpoint(tmp_path / "out"))
    assert form is not None
    assert form.quantization.arguments == {"include_lm_head": False, "quant_type": "fp4", "double_quant": True}


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("--method gtpq --bits 4", "'gtpq'…Did you mean gptq?"),
        ("--method gptq --bits 5", "5 bits…gptq…2, 3, 4 and 8"),
        ("--method gptq --bits 4", "gptq…--calibration"),
        ("--method gptq --bits 4 --calibration none.txt", "none.txt does not exist"),
        ("--method gptq --bits 4 --calibration wikitext3", "'wikitext3'…wikitext2"),
        ("--method hqq --bits 4 --calibration corpus.txt", "hqq…--calibration"),
        ("--method hqq --bits 4 --samples 3", "hqq…--samples"),
        ("--method hqq --bits 4 --group-size 100", "group_size…100…8"),
        ("--method hqq --bits 4 --group-size 80", "group_size 80…weights of model.layers.0…--group-size 64"),
        (
            f"--method gptq --bits 4 --group-size 80 --calibration {shlex.quote(str(TEXT))}",
            "group_size 80…-1 (one group per row), 16, 32",
        ),
        ("--method bnb --bits 4 --group-size 64", "group_size…bnb…quant_type"),
        ("--method hqq --bits 4 --option axs=0", "axs…Did you mean axis?"),
        ("--method hqq --bits 4 --option axis", "--option…'axis'…sym=false"),
        ("--method none --bits 16", "none…nothing"),
    ],
)
def test_a_wrong_call_is_a_sentence_before_anything_is_loaded(
    line: str, facts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qbench.checkpoint.load.load_checkpoint", lambda *_, **__: pytest.fail("it was loaded"))
    assert call(tmp_path / "out", *shlex.split(line)) == 2
    message = capsys.readouterr().err
    assert states(message, facts), message
    assert not (tmp_path / "out").exists()


def test_an_unsupported_architecture_is_a_sentence_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qbench.checkpoint.load.load_checkpoint", lambda *_, **__: pytest.fail("it was loaded"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert call(tmp_path / "out", "--method", "hqq", "--bits", "4", model=tmp_path) == 2
    assert states(capsys.readouterr().err, "'gpt2'…lm-eval…`qbench check RUN BASELINE`")


def test_on_a_terminal_there_is_a_bar_and_no_log(tmp_path: Path) -> None:
    code, shown = on_terminal(
        "quantize", MODEL, "--method", "hqq", "--bits", "4", "--out", tmp_path / "out", columns=100
    )
    assert code == 0, shown
    assert "linear/s" in shown
    assert "linear layers quantized" not in shown


def test_wrong_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hqq = ["--method", "hqq", "--bits", "4"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for out, model, facts in (
        ("full", MODEL, f"{tmp_path / 'full'}…not empty"),
        ("file", MODEL, f"{tmp_path / 'file'} is a file"),
        ("out", tmp_path / "gone", f"{tmp_path / 'gone'} does not exist…owner/name"),
        ("out", tmp_path / "full", f"{tmp_path / 'full' / 'config.json'} does not exist"),
    ):
        assert call(tmp_path / out, *hqq, model=model) == 2
        message = capsys.readouterr().err
        assert states(message, facts), message
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["notes.txt"]
    assert not (tmp_path / "out").exists()


def test_a_failed_audit_is_1_and_saves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise AuditError("hqq-4-g64", ["layers were left out."], "Load the model again.")

    monkeypatch.setattr(quantize_module, "quantize", failing)
    assert call(tmp_path / "out", "--method", "hqq", "--bits", "4") == 1
    assert states(capsys.readouterr().err, "audit of hqq-4-g64…layers were left out")
    assert not (tmp_path / "out").exists()


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["quantize", "--help"])
    assert stopped.value.code == 0
    assert states(capsys.readouterr().out, "  qbench quantize recipes/mini/softmax --method")
