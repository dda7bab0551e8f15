"""The gate's report as plain text: the verdict first, legible without colour."""

from tabulate import tabulate

from qbench.gate.verdict import Report
from qbench.gate.wording import HEADER, explanation, headline, sections


def to_text(report: Report) -> str:
    """The report for a terminal."""
    parts = [headline(report), explanation(report)]
    for section in sections(report):
        parts += ["", section.title]
        if section.rows:
            table = tabulate(section.rows, HEADER, tablefmt="simple", disable_numparse=True)
            parts += [f"  {line}" for line in table.splitlines()]
        parts += [f"  {line}" for line in section.lines]
    return "\n".join(parts) + "\n"
