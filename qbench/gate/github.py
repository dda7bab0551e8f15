"""GitHub's workflow commands: an annotation a failure."""

from collections.abc import Iterator

from qbench.gate.verdict import Report
from qbench.gate.wording import sentence

# GitHub shows ten errors of a step and drops the rest; the last line says how many those are.
SHOWN = 10


def annotations(report: Report) -> Iterator[str]:
    """Lines that a runner shows beside the run, `::error title=…::…` and `::warning …`."""
    errors = [(f"{f.cell.name}: found by the {f.found_by}", f.message) for f in report.failures]
    errors += [(f"{o.hypothesis.name}: found by the scores", sentence(o)) for o in report.worse]
    if len(errors) > SHOWN:
        rest = len(errors) - SHOWN + 1
        errors = [*errors[: SHOWN - 1], ("qbench check", f"{rest} more failures are in the report.")]
    for title, message in errors:
        yield f"::error title={_property(title)}::{_data(message)}"
    for warning in report.warnings[:SHOWN]:
        yield f"::warning title={_property(warning.cell.name)}::{_data(warning.message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
