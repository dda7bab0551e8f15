"""Golden files: one output of every format, small enough to read. UPDATE_GOLDEN=1 rewrites them."""

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def check(name: str, text: str) -> None:
    """Fail if the text differs from the file."""
    file = FOLDER / name
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")
