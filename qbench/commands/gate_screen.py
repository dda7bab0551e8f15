"""What `qbench check`, `accept` and `power` show on a terminal: tables at its width, as `qbench table` draws them."""

from collections.abc import Sequence

from qbench.gate.power import Power, header_of_powers, reading, row_of
from qbench.gate.render import HEADER, explanation, headline, row, sections, statement
from qbench.gate.verdict import GateReport, TestedHypothesis
from qbench.records.schema import CellRef
from qbench.report.delta import Tone
from qbench.report.tables import Column, Field, Table
from qbench.report.terminal import NOTE, STYLES, TITLE, Screen

BULLET = "• "
TONES: dict[str, Tone] = {"worse": "worse", "not_excluded": "worse", "better": "better"}
TASK, METRIC, LOSS = (HEADER.index(name) for name in ("task", "metric", "loss"))
# The numbers of a score. What the verdict depends on comes first: a narrow terminal shows the others below.
NUMBERS = tuple(
    HEADER.index(name)
    for name in ("before", "after", "loss", "tolerance", "adjusted p", "95% interval", "at most (95%)", "p")
)


def report_on_screen(report: GateReport) -> str:
    """A check's report, for `qbench.output.print_styled`."""
    screen = Screen()
    screen.paragraph(headline(report), f"{TITLE} {STYLES['better' if report.passed else 'worse']}")
    for text in filter(None, (statement(report), explanation(report))):
        screen.paragraph(text)
    for section in sections(report):
        screen.blank()
        cells = {outcome.hypothesis.cell for outcome in section.outcomes}
        screen.paragraph(section.title, TITLE)
        if len(cells) == 1:  # needs no column
            screen.paragraph(_name(*cells))
        if cells:
            screen.grid(_scores(section.outcomes, with_cells=len(cells) > 1))
        for line in section.lines:
            screen.paragraph(line, first=BULLET)
    return screen.text()


def powers_on_screen(rows: Sequence[Power]) -> str:
    """What the gate can find, for `qbench.output.print_styled`."""
    screen = Screen()
    columns = [
        Column(title, "l" if number < 2 else "r", group) for number, (group, title) in enumerate(header_of_powers())
    ]
    fields = [[Field(text) for text in row_of(own)] for own in rows]
    screen.grid(Table("power", "", "", [], columns, heads=1, rows=fields))
    for line in reading(rows).splitlines():
        screen.paragraph(line, NOTE)
    return screen.text()


def _scores(outcomes: Sequence[TestedHypothesis], with_cells: bool) -> Table:
    """The scores of a section. Task and metric share a column, since there are many others."""
    columns = [Column("score", "l"), *(Column(HEADER[n]) for n in NUMBERS)]
    fields = []
    for outcome in outcomes:
        texts = row(outcome)
        tone = TONES.get(outcome.verdict)
        numbers = [Field(texts[n], tone=tone if n == LOSS else None) for n in NUMBERS]
        own = [Field(f"{texts[TASK]} {texts[METRIC]}"), *numbers]
        fields.append([Field(_name(outcome.hypothesis.cell)), *own] if with_cells else own)
    if with_cells:
        columns.insert(0, Column("cell", "l"))
    return Table("scores", "", "", [], columns, heads=int(with_cells), rows=fields)


def _name(cell: CellRef) -> str:
    """A cell's name in words, between which a line may end."""
    if cell.unnamed:
        return cell.family
    first = f"{cell.family}-{cell.attention}-"
    return f"{cell.family} {cell.attention} {cell.name.removeprefix(first)}"
