"""Files read with limits, files and folders written whole or not at all, and names that are safe for them.

A folder is replaced with the help of three neighbours, whatever fails or is killed in between:
.NAME.accept    marks the two folders next to it as ours; written first, removed last
.NAME.new       the new folder while it is being written
.NAME.old       the old folder until the new one has its place
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qbench.errors import InputError

HASH_LETTERS = 10
MAX_FILE_BYTES = 2**30  # of a file that is read whole; the largest samples.parquet of ours have a few megabytes
MAX_JSON_BYTES = 2**26  # a record of 100 layers has half a megabyte, the index of a model with 1,000 shards ten
MAX_JSON_DEPTH = 64  # objects and lists within each other; ours have ten
MAX_NAME_BYTES = 200  # file systems allow 255, of which hashes and suffixes need some
MARK = "`qbench accept` made the .new and .old folders next to this file; the next `qbench accept` removes them.\n"


def as_path(value: object, what: str, error: type[InputError] = InputError) -> Path:
    """The path that a caller in Python gave. what: what it is the path of, for the error."""
    if not isinstance(value, str | os.PathLike):
        raise error(f"{value!r} is a {type(value).__name__}; it must be the path of {what}.")
    return Path(value)


def read_content(file: Path, error: type[InputError] = InputError, most: int = MAX_FILE_BYTES) -> bytes:
    """The bytes of a file; an error for pipes, which would block, and for files that could fill the memory."""
    try:
        if file.exists() and not file.is_file():
            raise error(f"{file} is not a regular file.")
        if (size := file.stat().st_size) > most:
            raise error(f"{file} has {size:,} bytes; at most {most:,} are read.")
        return file.read_bytes()
    except OSError as problem:
        raise error(f"{file} cannot be read ({problem.strerror or problem}).") from None


def read_json(file: Path, error: type[InputError] = InputError) -> Any:
    """The content of a JSON file; the error names the file and says what is wrong with it."""
    return parse_json(read_content(file, error, MAX_JSON_BYTES), file, error)


def parse_json(content: bytes | str, where: object, error: type[InputError] = InputError) -> Any:
    """The value of a JSON text, as strict as the standard; where: what it is, for errors."""
    try:
        text = content.decode() if isinstance(content, bytes) else content
        value = json.loads(text, parse_constant=_finite, parse_float=_finite, object_pairs_hook=_fields)
        too_deep = _depth(value) > MAX_JSON_DEPTH
    except RecursionError:
        too_deep = True
    except ValueError as problem:  # not UTF-8, not JSON, or a number with thousands of digits
        raise error(f"{where} is not JSON ({' '.join(str(problem).split())}).") from None
    if too_deep:
        raise error(f"{where} is nested more than {MAX_JSON_DEPTH} levels deep; no valid file of this kind is.")
    return value


def not_too_deep(value: Any) -> Any:
    """The value; a ValueError if it is nested more deeply than what reads it can follow."""
    if _depth(value) > MAX_JSON_DEPTH:
        raise ValueError(f"it is more than {MAX_JSON_DEPTH} levels deep")
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The fields of an object. Readers differ in which of two equal names counts."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the field {twice!r} occurs twice in one object")
    return fields


def _depth(value: Any) -> int:
    """How many objects and lists are within each other. A lone surrogate, which no file can hold, is a ValueError."""
    level, depth = [value], 0
    while level:
        inner: list[Any] = []
        for own in level:
            if isinstance(own, str):
                own.encode()
            elif isinstance(own, dict):
                inner += [*own, *own.values()]
            elif isinstance(own, list):
                inner += own
        level, depth = inner, depth + 1
    return depth - 1


def write_atomically(file: Path, content: str | bytes) -> None:
    """Write the file whole, or leave it as it was."""
    unfinished = file.parent / f".{file.name}.{secrets.token_hex(8)}"
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)  # less the umask
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content.encode() if isinstance(content, str) else content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(unfinished, file)
        _sync_folder(file.parent)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def shown_path(path: Path) -> str:
    """A path for a message: without `..` in it, and absolute if it leads out of the working folder."""
    text = os.path.normpath(path)
    return os.path.abspath(text) if text.startswith("..") else text


def file_name(text: str) -> str:
    """A name that a person chose, as part of a file name: it cannot lead to another folder.

    If a character was replaced or the end cut off, a hash of the text follows, so 'a b' and 'a/b' remain two names.
    """
    name = "".join(c if c.isalnum() or c in "._-+" else "_" for c in text)
    name = name.encode()[:MAX_NAME_BYTES].decode(errors="ignore")
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:HASH_LETTERS]}"


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def aside(folder: Path, which: str) -> Path:
    """The hidden path next to a folder for one part of its replacement."""
    return folder.parent / f".{folder.name}.{which}"


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to fill, which then replaces this one. After any error, this one is unchanged."""
    new, old, mark = (aside(folder, which) for which in ("new", "old", "accept"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent):
        if _left_by_a_killed_accept(folder):
            _tidy(folder)
        try:
            mark.write_text(MARK, encoding="utf-8")
            new.mkdir()
            yield new
            os.sync()
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
        finally:
            with contextlib.suppress(
                OSError
            ):  # the mark stays until the rest is removed, so the next accept can finish this
                _tidy(folder)


@contextlib.contextmanager
def _locked(parent: Path) -> Iterator[None]:
    """Allow one accept at a time: another would mistake our folders for those of a killed accept."""
    handle = os.open(parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise InputError(f"Another `qbench accept` is writing to {parent}; wait until it has finished.") from None
    except OSError:  # network file systems may not lock folders
        pass
    try:
        yield
    finally:
        os.close(handle)


def _left_by_a_killed_accept(folder: Path) -> bool:
    """Whether there is something to clean up; an error if the names that we need belong to someone else's files."""
    new, old, mark = (aside(folder, which) for which in ("new", "old", "accept"))
    written = mark.read_bytes() if mark.is_file() else b""
    if written == MARK.encode():
        return True
    killed_while_marking = mark.is_file() and MARK.encode().startswith(written)
    for path in (new, old) if killed_while_marking else (new, old, mark):
        if os.path.lexists(path):
            raise InputError(
                f"{path} was not made by `qbench accept`, which needs that name to replace {folder.name}. "
                "Move it elsewhere, or remove it."
            )
    return False


def _tidy(folder: Path) -> None:
    """Put the old folder back if the new one did not take its place, and remove whichever of the two is left."""
    new, old = aside(folder, "new"), aside(folder, "old")
    if os.path.lexists(old):
        if not os.path.lexists(folder):
            old.rename(folder)
        elif os.path.lexists(new):
            raise InputError(
                f"Something else made {folder} while it was being replaced; the old folder is {old}. "
                "Move one of the two away, then accept again."
            )
    for left in (new, old):
        if os.path.lexists(left):
            shutil.rmtree(left)
    aside(folder, "accept").unlink(missing_ok=True)
