"""Golden files: what every format looks like, small enough to read. UPDATE_GOLDEN=1 writes them anew."""

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def check(name: str, text: str) -> None:
    """Fail where the text is not the file's."""
    file = FOLDER / name
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")
