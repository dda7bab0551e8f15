"""What people call stays as surface.txt lists it, unless there is a reason."""

from .surface import LIST, surface

# A line of surface.txt that is gone: why.
REMOVED = {"recipe reference = 'softmax'": "a family without softmax has its first variant as the reference"}

LISTED = LIST.read_text(encoding="utf-8").splitlines()


def test_what_people_call_is_still_there() -> None:
    gone = [line for line in LISTED if line not in {*surface(), *REMOVED}]
    assert not gone, "Put these back, or add each to REMOVED with its reason:\n" + "\n".join(gone)


def test_the_list_is_complete() -> None:
    new = [line for line in surface() if line not in LISTED]
    assert not new, "Add these to the list with `python tests/surface.py`:\n" + "\n".join(new)


def test_each_removed_line_is_listed_and_gone() -> None:
    wrong = [line for line in REMOVED if line not in LISTED or line in surface()]
    assert not wrong, "REMOVED must not have these:\n" + "\n".join(wrong)
