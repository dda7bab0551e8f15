"""Safe output: names with control characters, closed pipes, full disks and ASCII terminals."""

import io
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qbench import cli
from qbench.output import SafeOutput, encodable, printable, quiet_import, runner_command, safe_output

ROOT = Path(__file__).parents[1]
TABLE = [sys.executable, "-m", "qbench.cli", "table", "results/mini", "--kind", "summary"]


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    quoted = command.replace("TABLE", " ".join(f"'{part}'" for part in TABLE))
    run = ["bash", "-c", f"set -o pipefail; {quoted}"]
    return subprocess.run(run, cwd=ROOT, text=True, capture_output=True, env=os.environ | environment, check=False)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\n::error::b", "a\n: :error::b"),
        ("  ::set-output name=x::y", "  : :set-output name=x::y"),
        ("a ::b", "a ::b"),
        ("a ##[error]b", "a # #[error]b"),
        ("red\x1b[31m", "red\\x1b[31m"),
        ("a\x00b\rc\td\n", "a\\x00b\\x0dc\td\n"),
        ("\x9b31m", "\\x9b31m"),
    ],
)
def test_names_cannot_act(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_command_in_pieces_is_none_either() -> None:
    stream = io.StringIO()
    out = SafeOutput(stream)
    for piece in ("name: ", "::error::x", "\n", "::error::y", "\n"):
        out.write(piece)
    assert stream.getvalue() == "name: ::error::x\n: :error::y\n"


def test_our_own_commands_reach_the_runner(capsys: pytest.CaptureFixture[str]) -> None:
    with safe_output():
        runner_command("::error title=a::b\x1b", sys.stdout)
        print("::error::c")
    assert capsys.readouterr().out == "::error title=a::b\\x1b\n: :error::c\n"


def test_ascii() -> None:
    assert encodable("Δ ▲ − \ud800 é", "ascii") == "delta ^ - \\ud800 \\xe9"
    assert encodable("Δ ▲ é", "utf-8") == "Δ ▲ é"
    assert encodable("\ud800", "utf-8") == "\\ud800"


def test_an_ascii_terminal_gets_the_table() -> None:
    done = shell("TABLE", PYTHONIOENCODING="ascii", LC_ALL="C", TERM="dumb")
    assert done.returncode == 0, done.stderr
    assert "| HQQ" in done.stdout
    assert done.stdout.isascii()


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("TABLE | head -1; exit ${PIPESTATUS[0]}", 0, ""),
        ("TABLE > /dev/full", 2, "No space left"),
        ("TABLE >&-", 0, ""),
        ("TABLE 2>&-", 0, ""),
        ("TABLE >&- 2>&-", 0, ""),
        ("TABLE | true; exit ${PIPESTATUS[0]}", 0, ""),
    ],
)
def test_readers_may_leave(command: str, code: int, said: str) -> None:
    done = shell(command)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_a_crash_is_a_sentence_a_log_and_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("what nobody thought of")

    monkeypatch.setattr("qbench.report.render.audit", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cli.main(["audit", str(ROOT / "results/mini")]) == 3
    (log,) = tmp_path.glob("qbench-crash-*.log")
    shown = capsys.readouterr().err
    assert str(log) in shown
    assert "Traceback" not in shown
    assert "RuntimeError: what nobody thought of" in log.read_text()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    assert cli.main(["audit", str(ROOT / "results/mini")]) == 3
    assert "RuntimeError: what nobody thought of" in capsys.readouterr().err


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("qbench.report.render.audit", stopped)
    assert cli.main(["audit", str(ROOT / "results/mini")]) == 130
    assert "stopped" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", [0.4, 1.2])
def test_ctrl_c_during_imports(seconds: float, tmp_path: Path) -> None:
    def as_in_a_terminal() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored if the tests run in the background

    code = "import runpy, sys; print('started', flush=True); runpy.run_module('qbench.cli', run_name='__main__')"
    command = [sys.executable, "-c", code, "plan", "recipes/mini.yaml"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"QBENCH_CACHE": str(tmp_path)},
        start_new_session=True,
        preexec_fn=as_in_a_terminal,
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "started\n"
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode in (130, -signal.SIGINT), errors  # shells call both 130
    assert "Traceback" not in errors


@pytest.mark.slow
def test_head_does_not_stop_a_run(tmp_path: Path) -> None:
    run = f"'{sys.executable}' -m qbench.cli run recipes/mini.yaml --limit 2 --only '*hqq-3*' --out '{tmp_path}'"
    done = shell(f"{run} | head -1; exit ${{PIPESTATUS[0]}}")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert len(list(tmp_path.glob("*/record.json"))) == 2


def fail_to_import() -> None:
    with quiet_import():
        print("why it failed")
        raise ImportError


def test_what_an_import_prints_and_logs_is_kept_back(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    with quiet_import():
        print("a banner")
        logging.basicConfig(level=logging.INFO, force=True)
        logging.info("speaks")
    assert (root.level, root.handlers[:]) == before
    assert capsys.readouterr() == ("", "")
    with pytest.raises(ImportError):
        fail_to_import()
    assert "why it failed" in capsys.readouterr().err
