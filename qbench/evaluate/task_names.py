"""Which names lm-eval's task files may define, by their text: parsing them takes 15 seconds, this half of one."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

# A line of a task file that names a task, a group or a tag.
NAMES = re.compile(rb"""(?m)^(?:task|group|tag):[ \t]*["']?([^\s"'\[]+)""")


def names_like(name: str, folder: Path) -> tuple[bool, list[str]]:
    """Whether a task file has the name as a whole value, so that it may be a task's; and the names of most tasks."""
    whole = re.compile(rb"""(?m)(?:^|[:\-\[,{])\s*["']?""" + re.escape(name).encode() + rb"""["']?\s*(?:$|[,\]}#])""")
    found, known = False, set[bytes]()
    for text in _texts(folder):
        found = found or whole.search(text) is not None
        known.update(NAMES.findall(text))
    return found, sorted(own.decode(errors="replace") for own in known)


def _texts(folder: Path) -> Iterator[bytes]:
    """The content of task files, and of files that they include, which may have names such as _default_yaml."""
    for place, _, names in os.walk(folder):
        for name in names:
            if "yaml" in name:
                yield Path(place, name).read_bytes()
