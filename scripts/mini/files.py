"""The committed files of the mini benchmark, and their checksums: `sha256sum -c SHA256SUMS` works as well."""

import argparse
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from mini.corpus import CALIBRATION_DOCUMENTS, CALIBRATION_SEED, corpus
from mini.tasks import items
from mini.world import make_world

MINI = Path(__file__).resolve().parents[2] / "recipes" / "mini"
SUMS = "SHA256SUMS"


def write_texts(folder: Path) -> None:
    """Write the items of the tasks and the calibration text; every call writes the same files."""
    world = make_world()
    tasks, calibration = folder / "tasks", folder / "calibration.txt"
    tasks.mkdir(parents=True, exist_ok=True)
    for task, rows in items(world).items():
        (tasks / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Training puts the token <s> between documents, so calibration does too.
    calibration.write_text("<s>".join(corpus(world, CALIBRATION_SEED, CALIBRATION_DOCUMENTS)) + "\n")
    write_sums(folder, [calibration, *tasks.glob("*.jsonl")])


def write_sums(folder: Path, files: Iterable[Path]) -> None:
    """Update the checksums of these files only, so that a damaged file elsewhere is still found."""
    sums = _read_sums(folder) | {file.relative_to(folder).as_posix(): _sha256(file) for file in files}
    (folder / SUMS).write_text("".join(f"{sums[name]}  {name}\n" for name in sorted(sums)))


def damaged(folder: Path) -> list[str]:
    """One sentence per damaged file, with a way to repair it; empty if all are as committed."""
    problems = []
    for name, digest in _read_sums(folder).items():
        file = folder / name
        again = _made_again_by(name)
        if not file.exists():
            problems.append(f"{file} is missing; `git checkout {file}` restores it, and {again}.")
        elif _sha256(file) != digest:
            problems.append(
                f"{file} is damaged or was edited: its SHA-256 is not the one in {SUMS}; "
                f"`git checkout {file}` restores the committed file, and {again}."
            )
    return problems


def _made_again_by(name: str) -> str:
    """The command that makes a file, as part of a sentence."""
    folder = name.split("/")[0]
    if folder in ("calibration.txt", "tasks"):
        return "`make mini-tasks` writes it again"
    if folder in ("softmax", "softpick", "loss.svg"):
        return "`make twins` trains the twins again"
    return f"`make siblings` trains {folder} and the other siblings again"


def _read_sums(folder: Path) -> dict[str, str]:
    file = folder / SUMS
    lines = file.read_text().splitlines() if file.exists() else []
    return {name: digest for digest, name in (line.split("  ", 1) for line in lines)}


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; list damaged and edited files")
    if not parser.parse_args().check:
        write_texts(MINI)
    elif problems := damaged(MINI):
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
