"""The gate's report as JUnit XML: a test case a hypothesis, and one a finding."""

from xml.etree import ElementTree

from qbench.gate.verdict import Finding, Outcome, Report
from qbench.gate.wording import changed_documents, sentence


def to_junit(report: Report) -> str:
    """The report for whatever shows tests."""
    failed = len(report.worse) + len(report.failures)
    total = len(report.outcomes) + len(report.failures)
    counts = {"tests": str(total), "failures": str(failed), "errors": "0", "skipped": "0"}
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(root, "testsuite", {"name": "qbench check", **counts})
    for outcome in report.outcomes:
        _score(suite, outcome, report)
    for number, failure in enumerate(report.failures):
        _finding(suite, failure, number, report)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _score(suite: ElementTree.Element, outcome: Outcome, report: Report) -> None:
    hypothesis = outcome.hypothesis
    case = _case(suite, hypothesis.cell.name, f"{hypothesis.task} {hypothesis.metric}")
    if outcome.verdict == "worse":
        failure = ElementTree.SubElement(case, "failure", {"type": "scores", "message": sentence(outcome)})
        lines = [f"Documents that lost most: {changed_documents(outcome)}", *_differing(report, hypothesis.cell.name)]
        failure.text = _printable("\n".join(lines))


def _finding(suite: ElementTree.Element, finding: Finding, number: int, report: Report) -> None:
    case = _case(suite, finding.cell.name, f"{finding.found_by} {number + 1}")
    message = {"type": finding.found_by, "message": _printable(finding.message)}
    failure = ElementTree.SubElement(case, "failure", message)
    failure.text = _printable("\n".join(_differing(report, finding.cell.name)))


def _differing(report: Report, cell: str) -> list[str]:
    return [f"differs: {line}" for line in report.differences.get(cell, ())]


def _case(suite: ElementTree.Element, cell: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", {"classname": _printable(cell), "name": _printable(name)})


def _printable(text: str) -> str:
    """Without control characters, which XML cannot hold: a failed cell's reason may have any."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "�" for sign in text)
