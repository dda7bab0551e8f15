"""The gate's report as Markdown, for a pull request or GitHub's step summary."""

from tabulate import tabulate

from qbench.gate.verdict import Report
from qbench.gate.wording import HEADER, explanation, headline, sections


def to_markdown(report: Report) -> str:
    """The report for a page."""
    parts = [f"## {'✅' if report.passed else '❌'} {_escaped(headline(report))}", "", _escaped(explanation(report))]
    for section in sections(report):
        parts += ["", f"### {_escaped(section.title)}", ""]
        if section.rows:
            rows = [[_escaped(cell) for cell in row] for row in section.rows]
            parts.append(tabulate(rows, HEADER, tablefmt="github", disable_numparse=True))
        parts += [f"- {_escaped(line)}" for line in section.lines]
    return "\n".join(parts) + "\n"


def _escaped(text: str) -> str:
    """Text as it is: no column, emphasis or tag of its own, on one line."""
    for sign in "\\`*_|<[":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
