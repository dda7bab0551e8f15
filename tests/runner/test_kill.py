"""kill -9 at random moments: the next run continues as if nothing had happened."""

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from .driver import Driver, finished, left_behind, results, run_here

Undisturbed = tuple[Path, list[dict[str, Any]]]
MOMENTS = 20
WHO = ("driver", "worker", "both")
QUICK = (11,)  # kills both in the middle of the run; the other moments together are slow


def strike(driver: Driver, who: str) -> None:
    workers = driver.workers() if who in ("worker", "both") else []
    for worker in workers[:1]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have just ended
            worker.kill()
    if who in ("driver", "both"):
        driver.process.kill()


def wait_for(driver: Driver, moment: int, events: int) -> None:
    """Wait for a random moment in this twentieth of the run: during the imports, or a little after some event."""
    draw = random.Random(moment)
    if moment < 2:
        time.sleep(draw.uniform(0.1, 3.0))
        return
    wanted = int((moment - 2 + draw.random()) / (MOMENTS - 2) * events)
    for _, _event in zip(range(wanted), driver.follow(), strict=False):
        pass
    time.sleep(draw.uniform(0, 0.2))


@pytest.mark.parametrize(
    "moment", [pytest.param(i, marks=() if i in QUICK else pytest.mark.slow) for i in range(MOMENTS)]
)
def test_a_killed_run_continues_as_if_nothing_had_happened(
    moment: int, small: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    reference, events = undisturbed
    who = WHO[moment % len(WHO)]
    with Driver(small, tmp_path / "out") as driver:
        wait_for(driver, moment, len(events))
        strike(driver, who)
        code, errors = driver.end()
        assert driver.gone(), [process.cmdline() for process in driver.processes()]
    if who == "worker":
        assert code in (0, 1), errors  # 0 if no cell was running
    else:
        assert code == -signal.SIGKILL
    before = finished(tmp_path / "out") if (tmp_path / "out").exists() else {}
    assert run_here(small, tmp_path / "out")[0] == 0
    assert before.items() <= finished(tmp_path / "out").items()
    assert results(tmp_path / "out") == results(reference)
    assert not left_behind(tmp_path / "out")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_stop_cleanly(sent: signal.Signals, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Driver(small, out) as driver:
        if sent == signal.SIGINT:
            # A terminal sends Ctrl-C to every process. During the imports all of them exist, and none is ready.
            driver.until("message")
            time.sleep(1)
            os.killpg(driver.process.pid, sent)
        else:
            driver.until("progress")  # the whole run may end a second later
            driver.process.send_signal(sent)
        lines = driver.process.communicate()
        assert driver.process.returncode == 130
        assert driver.gone()
    assert f"cells are kept in {out}" in lines[1]
    assert all(map(json.loads, lines[0].splitlines()))  # the events that were not read yet
    assert "Traceback" not in lines[1]
    assert "resource_tracker" not in lines[1]
    assert not left_behind(out)
