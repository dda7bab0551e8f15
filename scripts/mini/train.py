"""Train mini models that differ only in their attention: the twins, their siblings, or kinds by name.

Each model has one process with one thread; as many run at a time as there are cores. The same command resumes an
interrupted training from its last checkpoint.
"""

import argparse
import contextlib
import csv
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from tqdm import tqdm

from mini.corpus import corpus
from mini.files import MINI, write_sums
from mini.plot import plot_training
from mini.tokenizer import make_tokenizer
from mini.training import SIBLINGS, TWINS, Settings, Training, TrainingError
from mini.world import make_world
from qbench import save_checkpoint
from qbench.errors import InputError

CHECKPOINT_STEPS = 50
LOG, SETTINGS = "log.csv", "training.json"
GROUPS = {"twins": TWINS, "siblings": SIBLINGS}
KEPT = Path("build/mini-steps")  # checkpoints along the way: <kind>/<step>


def start(kind: str, settings: Settings) -> Training:
    """A model before its first step."""
    documents = list(corpus(make_world()))
    return Training(kind, documents, make_tokenizer(documents), settings)


def train_model(
    kind: str, settings: Settings, state: Path, out: Path, keep: int | None = None, bar_line: int = 0
) -> None:
    """Train one model and write its checkpoint, log and settings; `keep` keeps a checkpoint every that many steps."""
    torch.set_num_threads(1)  # the number of threads changes the order of sums, and so the result
    training = start(kind, settings)
    if state.exists():
        training.resume(state)
        print(f"{kind}: resumes at step {training.done}, saved in {state}", flush=True)
    bar = tqdm(total=settings.steps, initial=training.done, desc=kind, position=bar_line, unit="step", mininterval=1)
    with bar, Interruption() as interruption:
        while training.done < settings.steps and not interruption.asked:
            bar.set_postfix(loss=f"{training.step().loss:.3f}", refresh=False)
            bar.update()
            if training.done % CHECKPOINT_STEPS == 0:
                training.save(state)
            if keep and training.done % keep == 0:
                save_checkpoint(training.model, KEPT / kind / str(training.done), training.tokenizer)
        training.save(state)
    if interruption.asked:
        raise KeyboardInterrupt
    write_model(training, out)


class Interruption:
    """Handles Ctrl-C and SIGTERM between steps: in the middle of a step there is no state to save."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Self:
        heard = (signal.SIGINT, signal.SIGTERM)
        self.before = {number: signal.signal(number, self._ask) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _ask(self, *_: object) -> None:
        self.asked = True


def write_model(training: Training, out: Path) -> None:
    """Write the checkpoint with its tokenizer, the log of its steps and its settings."""
    save_checkpoint(training.model, out, training.tokenizer)
    with (out / LOG).open("w", newline="") as file:
        log = csv.writer(file, lineterminator="\n")
        log.writerow(["step", "learning_rate", "loss", "gradient_norm"])
        for number, step in enumerate(training.steps):
            rate = training.settings.learning_rate(number)
            log.writerow([number, f"{rate:.6g}", f"{step.loss:.6f}", f"{step.gradient_norm:.6f}"])
    about = {"attention": training.kind, **training.recipe, "torch": torch.__version__}
    (out / SETTINGS).write_text(json.dumps(about, indent=2) + "\n")


def _run(kind: str, *arguments: Any) -> None:
    """Run in a child process: an error becomes one sentence and an exit code."""
    try:
        train_model(kind, *arguments)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except InputError as error:
        raise SystemExit(f"{kind}: {error}") from None
    except OSError as error:
        raise SystemExit(f"{kind}: {error.filename} cannot be written: {error.strerror}.") from None


def train_models(kinds: Sequence[str], settings: Settings, states: Path, out: Path, keep: int | None = None) -> None:
    """Train models side by side, one per core; raises TrainingError if one of them stops early."""
    spawn = multiprocessing.get_context("spawn")  # a forked torch may hang
    waiting = {
        kind: spawn.Process(target=_run, args=(kind, settings, _state(states, kind), out / kind, keep, line))
        for line, kind in enumerate(kinds)
    }
    running: dict[int, Any] = {}
    stopped: list[str] = []
    while (waiting and not stopped) or running:
        try:
            while waiting and not stopped and len(running) < (os.cpu_count() or 1):
                kind = next(iter(waiting))
                process = waiting.pop(kind)
                process.start()
                running[process.sentinel] = (kind, process)
            for ended in multiprocessing.connection.wait(list(running)):
                kind, process = running.pop(ended)
                process.join()
                stopped += [kind] if process.exitcode else []
        except KeyboardInterrupt:  # the children get it too, and save their state
            stopped += list(waiting)
            waiting = {}
    if stopped:
        raise TrainingError(
            f"The training of {', '.join(stopped)} stopped early; give the same command again to resume it from the "
            f"checkpoints in {states}."
        )


def forget_states(states: Path, kinds: Sequence[str]) -> None:
    """Delete the states of finished kinds, so that their next training starts from scratch."""
    for kind in kinds:
        _state(states, kind).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty
        states.rmdir()


def _state(states: Path, kind: str) -> Path:
    return states / f"{kind}.pt"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps; give 1 or more.")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", help=f"{', '.join(GROUPS)}, or kinds: {', '.join((*TWINS, *SIBLINGS))}")
    parser.add_argument("--out", type=Path, default=MINI, help="where the models' folders go (%(default)s)")
    parser.add_argument("--state", type=Path, default=Path("build/training"), help="checkpoints to resume from")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="another number gives different models")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="for the initial weights and the order of text")
    parser.add_argument("--keep", type=_positive, metavar="N", help=f"keep a checkpoint every N steps, in {KEPT}")
    args = parser.parse_args()
    kinds = list(dict.fromkeys(kind for name in args.kinds for kind in GROUPS.get(name, (name,))))
    if unknown := [kind for kind in kinds if kind not in (*TWINS, *SIBLINGS)]:
        parser.error(f"unknown kind {unknown[0]!r}; it must be one of {', '.join((*GROUPS, *TWINS, *SIBLINGS))}.")
    begin = time.perf_counter()
    try:
        settings = replace(Settings(), steps=args.steps, seed=args.seed)
        train_models(kinds, settings, args.state, args.out, args.keep)
    except InputError as error:
        raise SystemExit(str(error)) from None
    curves = args.out / "loss.svg"
    trained = [kind for kind in (*TWINS, *SIBLINGS) if (args.out / kind / LOG).exists()]
    plot_training({kind: args.out / kind / LOG for kind in trained}, curves)
    write_sums(args.out, [curves, *(file for kind in kinds for file in (args.out / kind).iterdir())])
    forget_states(args.state, kinds)
    print(f"{', '.join(kinds)}: in {args.out}, after {(time.perf_counter() - begin) / 60:.0f} minutes.")


if __name__ == "__main__":
    main()
