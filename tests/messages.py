"""Messages are tested by the facts that they state, not by their wording."""

import re


def states(message: str, facts: str) -> bool:
    """Whether a message states these facts, separated by "…", in this order."""
    return re.search(".*".join(map(re.escape, facts.split("…"))), message) is not None
