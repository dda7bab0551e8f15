"""Files written whole or not at all, and names that are safe for them."""

import hashlib
import os
import tempfile
from pathlib import Path

HASH_LETTERS = 10


def write_atomically(file: Path, content: str | bytes) -> None:
    """The file with this content, or as it was; never a part."""
    handle, unfinished = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content.encode() if isinstance(content, str) else content)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(unfinished, 0o644)  # mkstemp's files are for their owner alone
        os.replace(unfinished, file)
        _sync_folder(file.parent)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise


def file_name(text: str) -> str:
    """A text that people chose, as a part of a file's name: it cannot lead to another folder.

    If a character had to be replaced, a hash of the text follows, so that 'a b' and 'a/b' stay two names.
    """
    name = "".join(c if c.isalnum() or c in "._-" else "_" for c in text)
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:HASH_LETTERS]}"


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
