"""Our analyses next to published ones, and our scores next to those published with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from qbench.numbers import count, score, signed, signed_interval
from qbench.report.analyses import NOT_SAID, PublishedScore
from qbench.report.analysis_tables import figure_name
from qbench.report.attentions import kind_title
from qbench.report.delta import ReportData
from qbench.report.metrics import Measure, metric_name, task_name
from qbench.report.results import NOTHING, Gap
from qbench.report.tables import Column, Field, Table
from qbench.report.tidy import DataRow

READ_ANALYSES = (
    "Difference: ours − published. Interval: of ours, bootstrap over texts. If the published length is unknown, ours "
    "uses the recipe's length; rates depend on it."
)


@dataclass(frozen=True)
class AnalysisComparison:
    """One of our figures and the published one."""

    family: str
    attention: str
    label: str
    task: str  # empty for an analysis
    metric: str
    setting: str
    length: int
    ours: float
    published: float
    interval: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        """What is compared, for people."""
        if self.task:
            return f"{task_name(self.task)}, {metric_name(Measure(self.task, self.metric, None))}"
        return figure_name(self.metric, self.setting)


def compare_analyses(ours: ReportData, published: ReportData) -> list[AnalysisComparison]:
    """Every published figure that we measured too."""
    found = []
    mine = {(m.cell.family, m.cell.attention, m.cell.label): m for m in ours.analyses.models}
    for model in published.analyses.models:
        cell = model.cell
        own = mine.get((cell.family, cell.attention, cell.label))
        for figure in model.figures if own else ():
            assert own
            length = own.length if figure.length == NOT_SAID else figure.length
            if same := own.find(figure.metric, figure.setting, figure.part, length):
                about = (cell.family, cell.attention, cell.label, "", figure.metric, figure.setting, figure.length)
                found.append(AnalysisComparison(*about, same.value, figure.value, same.interval))
    return found + [score for other in published.analyses.scores if (score := _score(ours, other))]


def _score(ours: ReportData, published: PublishedScore) -> AnalysisComparison | None:
    cell = published.cell
    result = ours.results.get(cell.family, cell.attention, cell.label)
    found = result.score(Measure(published.task, published.metric, None)) if result else None
    if found is None or isinstance(found, Gap):
        return None
    about = (cell.family, cell.attention, cell.label, published.task, published.metric, "", NOT_SAID)
    return AnalysisComparison(*about, found.value, published.value)


def analysis_comparison_tables(found: Sequence[AnalysisComparison]) -> list[Table]:
    """One table per family."""
    return [
        _table(family, list(own)) for family, own in groupby(sorted(found, key=lambda c: c.family), lambda c: c.family)
    ]


def _table(family: str, found: Sequence[AnalysisComparison]) -> Table:
    texts, numbers = (
        ("Model", "Quantization", "Figure"),
        ("Tokens", "Ours", "Published", "Difference", "95% interval of ours"),
    )
    table = Table(
        name=f"compare-analysis-{family}",
        title=f"{family}, analysis: ours and published",
        caption=f"Our analyses of {family} next to the published ones.",
        reading=[READ_ANALYSES],
        columns=[*(Column(title, "l") for title in texts), *map(Column, numbers)],
        heads=2,
    )
    for c in sorted(found, key=lambda c: (c.attention, c.label)):
        difference = c.ours - c.published
        table.rows.append(
            [
                Field(kind_title(c.attention)),
                Field(c.label),
                Field(c.name),
                Field(NOTHING) if c.length == NOT_SAID else Field(count(c.length), c.length),
                Field(score(c.ours), c.ours),
                Field(score(c.published), c.published),
                Field(signed(difference), difference),
                Field(signed_interval(*c.interval) if c.interval else NOTHING),
            ]
        )
    return table


def analysis_comparison_rows(found: Sequence[AnalysisComparison]) -> list[DataRow]:
    """The same for programs."""
    return [
        {
            "family": c.family,
            "label": c.label,
            "task": c.task,
            "metric": c.metric,
            "setting": c.setting,
            "length": c.length or None,
            "number": c.attention,
            "ours": c.ours,
            "published": c.published,
            "difference": c.ours - c.published,
            "low": c.interval and c.interval[0],
            "high": c.interval and c.interval[1],
        }
        for c in found
    ]
