"""Train the twins: softmax and softpick, alike in everything else, one process and one thread each.

What is interrupted goes on from its last checkpoint when the same command is given again.
"""

import argparse
import csv
import json
import multiprocessing
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
from tqdm import tqdm

from mini.corpus import corpus
from mini.files import MINI, write_sums
from mini.plot import plot_losses
from mini.tokenizer import make_tokenizer
from mini.training import TWINS, Settings, Training, TrainingError
from mini.world import make_world
from qbench import save_checkpoint
from qbench.errors import InputError

CHECKPOINT_STEPS = 50
LOG, SETTINGS = "log.csv", "training.json"


def start(kind: str, settings: Settings) -> Training:
    """A twin before its first step."""
    documents = list(corpus(make_world()))
    return Training(kind, documents, make_tokenizer(documents), settings)


def train_twin(kind: str, settings: Settings, state: Path, out: Path) -> None:
    """Train one twin and write its checkpoint, its log and its settings."""
    torch.set_num_threads(1)  # the order of sums, and with it the result, depends on the number
    training = start(kind, settings)
    if state.exists():
        training.resume(state)
        print(f"{kind}: goes on from step {training.done}, saved in {state}", flush=True)
    line = list(TWINS).index(kind)
    bar = tqdm(total=settings.steps, initial=training.done, desc=kind, position=line, unit="step", dynamic_ncols=True)
    with bar, Interruption() as interruption:
        while training.done < settings.steps and not interruption.asked:
            bar.set_postfix(loss=f"{training.step():.3f}", refresh=False)
            bar.update()
            if training.done % CHECKPOINT_STEPS == 0:
                training.save(state)
        training.save(state)
    if interruption.asked:
        raise KeyboardInterrupt
    write_twin(training, out)


class Interruption:
    """Ctrl-C and SIGTERM, heard of between two steps: in the midst of one there is no state to save."""

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


def write_twin(training: Training, out: Path) -> None:
    """Write the checkpoint with its tokenizer, the loss of each step and what it was trained with."""
    save_checkpoint(training.model, out, training.tokenizer)
    with (out / LOG).open("w", newline="") as file:
        log = csv.writer(file, lineterminator="\n")
        log.writerow(["step", "learning_rate", "loss"])
        for step, loss in enumerate(training.losses):
            log.writerow([step, f"{training.settings.learning_rate(step):.6g}", f"{loss:.6f}"])
    about = {"attention": training.kind, **training.recipe, "torch": torch.__version__}
    (out / SETTINGS).write_text(json.dumps(about, indent=2) + "\n")


def _run(kind: str, settings: Settings, state: Path, out: Path) -> None:
    """A child process: errors are a sentence and an exit code."""
    try:
        train_twin(kind, settings, state, out)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except InputError as error:
        raise SystemExit(f"{kind}: {error}") from None
    except OSError as error:
        raise SystemExit(f"{kind}: {error.filename or out} cannot be written: {error.strerror}.") from None


def train_twins(settings: Settings, states: Path, out: Path) -> None:
    """Train both twins side by side; raises TrainingError if one of them stopped."""
    spawn = multiprocessing.get_context("spawn")  # a forked torch may hang
    processes = {
        kind: spawn.Process(target=_run, args=(kind, settings, states / f"{kind}.pt", out / kind)) for kind in TWINS
    }
    for process in processes.values():
        process.start()
    try:
        for process in processes.values():
            process.join()
    except KeyboardInterrupt:  # the children have it too
        for process in processes.values():
            process.join()
    if stopped := [kind for kind, process in processes.items() if process.exitcode]:
        raise TrainingError(
            f"The training of {' and '.join(stopped)} stopped before its end; give the same command again, and it "
            f"goes on from the checkpoints in {states}."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=MINI, help="the folder that gets a folder a twin")
    parser.add_argument("--state", type=Path, default=Path("build/twins"), help="checkpoints to go on from")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="another number makes other twins")
    args = parser.parse_args()
    begin = time.perf_counter()
    try:
        train_twins(replace(Settings(), steps=args.steps), args.state, args.out)
    except InputError as error:
        raise SystemExit(str(error)) from None
    curve = args.out / "loss.svg"
    plot_losses({kind: args.out / kind / LOG for kind in TWINS}, curve)
    write_sums(args.out, [curve, *(file for kind in TWINS for file in (args.out / kind).iterdir())])
    shutil.rmtree(args.state)  # the next time begins from nothing
    print(f"Both twins are in {args.out}, after {(time.perf_counter() - begin) / 60:.0f} minutes.")


if __name__ == "__main__":
    main()
